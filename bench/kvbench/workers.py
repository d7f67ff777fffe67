"""Helper processes: a fresh interpreter that opens a session and answers one command at a time over a pipe.

    parent                                   child
    Worker("reader", Setup(...))   ----->    session = setup.open()
    worker.ask(Command(...))       ----->    answer = command.run(session)
                                   <-----    answer, or the error as one line

Spawned, never forked: a fork would share the parent's sockets, threads and arenas: the processes would not be separate.
"""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from kvbench.errors import BenchError
from kvstore.core.errors import KvStoreError

_ANSWER_TIMEOUT_S: Final = 300.0
_EXIT_TIMEOUT_S: Final = 10.0

SessionT = TypeVar("SessionT")
SessionT_co = TypeVar("SessionT_co", covariant=True)
SessionT_contra = TypeVar("SessionT_contra", contravariant=True)
AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)


class Setup(Protocol[SessionT_co]):
    """Picklable; opens in the child what its commands work on."""

    def open(self) -> AbstractContextManager[SessionT_co]: ...


class Command(Protocol[SessionT_contra, AnswerT_co]):
    """Picklable; runs in the child, and its answer is pickled back."""

    def run(self, session: SessionT_contra, /) -> AnswerT_co: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


class Worker(Generic[SessionT]):
    """A child process, ended with the context.

    Args:
        name: its role, for messages.
        setup: what the child opens first.
    """

    def __init__(self, name: str, setup: Setup[SessionT]) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, setup), name=f"kvbench-{name}", daemon=True)
        self._process.start()
        far.close()  # so that the child's death reads as an end of file here

    @property
    def pid(self) -> int:
        """The child's process id."""
        return cast(int, self._process.pid)

    def ready(self) -> None:
        """Wait until the session is open. Children started together open theirs at the same time."""
        self._receive()

    def ask(self, command: Command[SessionT, AnswerT]) -> AnswerT:
        """Run the command in the child.

        Raises:
            BenchError: it failed there, or the child died or stopped answering.
        """
        try:
            self._pipe.send(command)
        except OSError as cause:
            raise self._died() from cause
        return cast(AnswerT, self._receive())

    def _receive(self) -> object:
        try:
            if not self._pipe.poll(_ANSWER_TIMEOUT_S):
                raise BenchError(f"the {self._name} process gave no answer within {_ANSWER_TIMEOUT_S:.0f} s")
            answer: Any = self._pipe.recv()
        except (EOFError, OSError) as cause:
            raise self._died() from cause
        if isinstance(answer, _Failure):
            raise BenchError(f"{self._name}: {answer.text}")
        return cast(_Answer, answer).value

    def _died(self) -> BenchError:
        self._process.join(_EXIT_TIMEOUT_S)
        return BenchError(f"the {self._name} process ended unexpectedly (exit status {self._process.exitcode})")

    def __enter__(self) -> Worker[SessionT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # the child's next receive fails, and it closes its session
        self._process.join(_EXIT_TIMEOUT_S if kind is None else 1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, setup: Setup[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    try:
        with setup.open() as session:
            pipe.send(_Answer(None))
            while True:
                command: Any = pipe.recv()
                pipe.send(_run(command, session))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed its end
    except (KvStoreError, BenchError) as error:
        pipe.send(_Failure(str(error)))


def _run(command: Command[Any, object], session: object) -> _Answer | _Failure:
    try:
        return _Answer(command.run(session))
    except (KvStoreError, BenchError) as error:
        return _Failure(str(error))
