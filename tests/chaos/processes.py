"""A client in a process of its own, which a test can kill or freeze where it likes, and talks to by lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.testing.waiting import until

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 30.0


class Puppet:
    """One of the roles in `tests.chaos.roles`, run with these JSON-able arguments. A context manager.

    The process writes a JSON line whenever it has come to a point that the test waits for, and goes on when it is told.
    """

    def __init__(self, role: str, **arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.roles", role, json.dumps(arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, f"the process said nothing and ended with code {self._process.wait()}"
        return json.loads(line)

    def tell(self, word: str = "go") -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has closed its connections."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", what="a stop")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def hear_all(puppets: Sequence[Puppet]) -> list[Any]:
    """The next thing that each of them says."""
    return [puppet.hear() for puppet in puppets]


class Stopwatch:
    """Seconds that something took, as a context manager."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._started_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started_s
