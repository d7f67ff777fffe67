"""An engine's own HTTP server in a process of its own, as its guide starts it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.testing.waiting import until

ANSWER_S = 120.0


@contextlib.contextmanager
def served(command: Callable[[int], list[str]], environment: Mapping[str, str], start_s: float) -> Iterator[str]:
    """The server that `command(port)` starts, once it is healthy; its address."""
    port = free_port()
    process = subprocess.Popen(command(port), env=os.environ | environment, start_new_session=True)

    def is_up() -> bool:
        assert process.poll() is None, f"the engine ended with code {process.returncode}"
        with contextlib.suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        return False

    try:
        until(is_up, start_s, "the engine")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the engine's processes, all of them ours
        process.wait()


def free_port() -> int:
    """One that nobody listens on, and that no outgoing connection is given while the engine starts."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, low)
        with socket.socket() as tried, contextlib.suppress(OSError):  # taken: try another one
            tried.bind(("127.0.0.1", port))
            return port


def asked(url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer to a GET, or to a POST of this JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
        return json.loads(reply.read())
