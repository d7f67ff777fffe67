"""The processes of `kvbench engine`: an engine to talk to, a peer's server to have around.

Each has a deadline for all it does, a process group of its own, and ends with its context.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from kvbench.engine_worker import cpu_s, tree
from kvbench.errors import BenchError
from kvstore.testing.waiting import until

START_TIMEOUT_S: Final = 600.0  # half a minute on a quiet machine
ANSWER_TIMEOUT_S: Final = 300.0
SERVER_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 60.0
_KILL_TIMEOUT_S: Final = 10.0
_QUIET_TIMEOUT_S: Final = 20.0
_QUIET_LOOK_S: Final = 0.5
_QUIET_CPU_S: Final = 0.05  # of such a look: what a server does that has nothing to do
_SHARED_MEMORY: Final = re.compile(r"(/dev/shm/psm_\w+)$", re.MULTILINE)
_RECENT_BYTES: Final = 64 << 10

# A server lives as long as its input, so that it goes whatever ends kvbench.
_GUARD: Final = """
import subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), server.terminate()), daemon=True).start()
sys.exit(server.wait())
"""
_CAUSE: Final = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): \S.*")


class EngineProcess:
    """A `kvbench.engine_worker` under another Python.

    Args:
        python: the interpreter of the engine's environment.
        environment: variables besides this process's own.
        log: a file that the engine's messages go to.
    """

    def __init__(self, python: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        script = Path(__file__).with_name("engine_worker.py")
        with log.open("wb") as errors:
            # -P: the script's folder holds modules named like some of Python's own.
            self._process = _start([str(python), "-P", str(script)], environment, errors, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """Of the process that holds the engine's front; the engine is in its children."""
        return self._process.pid

    def ask(self, do: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: object) -> dict[str, Any]:
        """Run a command there.

        Raises:
            BenchError: it failed, the engine died, or there was no answer in time.
        """
        command = json.dumps({"do": do, **arguments}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command)
            self._process.stdin.flush()
        except OSError as cause:
            raise BenchError(_with_cause("the engine has ended", self._log)) from cause
        answer: dict[str, Any] = json.loads(self._line(do, timeout_s))
        if "error" in answer:
            raise BenchError(_with_cause(answer["error"], self._log))
        return answer["reply"]

    def _line(self, do: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not self._selector.select(max(0.0, deadline_s - time.monotonic())):
                raise BenchError(_with_cause(f"the engine did not {do} within {timeout_s:g} s", self._log))
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise BenchError(_with_cause("the engine has ended", self._log))
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        left = shared_memory_of([self.pid])
        _end(self._process, END_TIMEOUT_S)
        for path in left:  # of an engine that had to be killed, or that never started; others remove it themselves
            path.unlink(missing_ok=True)


@contextmanager
def server_process(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A server that listens on the port of 127.0.0.1; its process id.

    Raises:
        BenchError: there is no such program, it ended at its start, or it did not listen in time.
    """
    name = Path(command[0]).name
    if not Path(command[0]).is_file():
        raise BenchError(f"there is no program {command[0]}")
    with log.open("wb") as errors:
        process = _start([sys.executable, "-c", _GUARD, *command], environment or {}, errors, stdout=errors)
    try:
        _wait_listening(process, name, port, log)
        yield process.pid
    finally:
        _end(process, _KILL_TIMEOUT_S)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def shared_memory_of(roots: Sequence[int]) -> set[Path]:
    """Shared memory that Python made, as it lies in /dev/shm, of these processes and their descendants."""
    found: set[Path] = set()
    for pid in tree(roots)[0]:
        with suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            found.update(Path(name) for name in _SHARED_MEMORY.findall(maps))
    return found


def wait_quiet(pids: Sequence[int]) -> None:
    """Until these processes have nothing left to do: what an engine gave them to keep is kept. After 20 s anyway."""
    with suppress(TimeoutError):
        until(lambda: _used_cpu_s(pids) < _QUIET_CPU_S, _QUIET_TIMEOUT_S, "quiet servers")


def _with_cause(message: str, log: Path) -> str:
    """The message, and the first line of the log's end that names another error."""
    with suppress(OSError):
        text = log.read_bytes()[-_RECENT_BYTES:].decode(errors="replace")
        causes = [found.group().strip() for found in _CAUSE.finditer(text)]
        if other := [cause for cause in causes if cause not in message]:
            return f"{message} ({other[0]})"
    return message


def _used_cpu_s(pids: Sequence[int]) -> float:
    before = cpu_s(pids)
    time.sleep(_QUIET_LOOK_S)
    return cpu_s(pids) - before


def _start(
    command: Sequence[str], environment: Mapping[str, str], errors: IO[bytes], *, stdout: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=errors,
        env={**os.environ, **environment},
        start_new_session=True,  # a group of its own; and Ctrl-C is kvbench's to handle
    )


def _wait_listening(process: subprocess.Popen[bytes], name: str, port: int, log: Path) -> None:
    def listening() -> bool:
        if process.poll() is not None:
            raise BenchError(_with_cause(f"{name} ended at its start", log))
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
        return False

    try:
        until(listening, SERVER_TIMEOUT_S)
    except TimeoutError as cause:
        raise BenchError(_with_cause(f"{name} did not listen within {SERVER_TIMEOUT_S:g} s", log)) from cause


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """By the end of its input, then by force; with all of its group."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unsent bytes of a process that is gone
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_KILL_TIMEOUT_S)
    with suppress(TimeoutError):  # all are killed; whose parent has not asked for their end are still listed
        until(lambda: not _group_lives(process.pid), _KILL_TIMEOUT_S)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
