"""Helper processes: separate, obedient, and never silently gone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvbench.errors import BenchError
from kvbench.workers import Worker
from kvstore.core.errors import Unavailable


@dataclass(frozen=True)
class Opening:
    fails: bool = False

    @contextmanager
    def open(self) -> Iterator[list[int]]:
        if self.fails:
            raise Unavailable("nobody there")
        yield []


@dataclass(frozen=True)
class Add:
    number: int

    def run(self, session: list[int], /) -> tuple[int, list[int]]:
        session.append(self.number)
        return os.getpid(), session


@dataclass(frozen=True)
class Refuse:
    def run(self, session: list[int], /) -> None:
        raise BenchError("no such block")


@dataclass(frozen=True)
class Die:
    def run(self, session: list[int], /) -> None:
        os._exit(7)


def test_commands_run_in_another_process_on_one_session() -> None:
    with Worker("helper", Opening()) as worker:
        worker.ready()
        worker.ask(Add(1))
        pid, session = worker.ask(Add(2))
    assert pid == worker.pid != os.getpid()
    assert session == [1, 2]


def test_a_refusal_names_the_process_and_leaves_it_usable() -> None:
    with Worker("helper", Opening()) as worker:
        worker.ready()
        with pytest.raises(BenchError, match=r"^helper: no such block$"):
            worker.ask(Refuse())
        assert worker.ask(Add(3))[1] == [3]


def test_a_dead_process_is_an_error_with_its_exit_status() -> None:
    with Worker("helper", Opening()) as worker:
        worker.ready()
        with pytest.raises(BenchError, match=r"the helper process ended unexpectedly \(exit status 7\)"):
            worker.ask(Die())


def test_a_session_that_cannot_open_says_why() -> None:
    with Worker("helper", Opening(fails=True)) as worker, pytest.raises(BenchError, match="helper: nobody there"):
        worker.ready()


def test_the_process_ends_with_its_context() -> None:
    with Worker("helper", Opening()) as worker:
        worker.ready()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
