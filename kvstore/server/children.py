"""The processes of a node: how they are started, how they learn that the node is gone, how the node learns that they
are.

A child gets its configuration as one JSON line on standard input, answers `ready` on standard output, and lives until
its standard input ends. So whatever kills the node, its children follow, and need no signal for it.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvstore.core.errors import Unavailable

STOP_TIMEOUT_S = 5.0
# Tables that have grown out of their memory give it back to the system. By default glibc would keep pieces of up to
# 32 MiB for itself once it has seen such sizes, and a shard with a million blocks would take half as much again.
LARGE_BYTES = 1 << 20


def read_configuration() -> dict[str, Any]:
    """In a child: the configuration that the node wrote. Ctrl-C is the node's to handle from here on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    # Byte by byte from the descriptor: a buffered reader could swallow the end of input that we wait for later.
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit("this process is started by kvstore-server")
        line += piece
    return json.loads(line)


def raise_descriptor_limit() -> None:
    """As many open files as the system allows: every client is a few, and the usual limit of 1,024 is for other
    times.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def say_ready() -> None:
    """In a child: ready to serve."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


class Child:
    """A process of this node.

    Args:
        module: what to run with `python -m`.
        configuration: JSON-able.
        pass_fds: descriptors that the child inherits under their own numbers.
    """

    def __init__(self, name: str, module: str, configuration: dict[str, Any], pass_fds: Sequence[int] = ()) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            bufsize=0,
            env={"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), **os.environ},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(configuration).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it says that it is ready.

        Raises:
            Unavailable: it ended, or took too long.
        """
        out = self._process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise Unavailable(f"{self.name} was not ready within {timeout_s:g} s")
        if not out.readline():
            raise Unavailable(f"{self.name} ended at its start with code {self._process.wait()}")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it: by the end of its input, and by force if that does not help in time."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
