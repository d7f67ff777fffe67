"""What a server holds at a moment, for tests that nothing is leaked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient, NodeInfo

SETTLE_TIMEOUT_S = 15.0


def gauges(server: ServerProcess, shard: int = 0) -> dict[str, int]:
    """What is there now, of one shard."""
    return server.status()["shards"][shard]["gauges"]


def is_conserved(server: ServerProcess) -> bool:
    """Whether every byte of the pools is accounted for, once."""
    accounts: list[dict[str, int]] = [shard["bytes"] for shard in server.status()["shards"]]
    return all(a["free"] + a["reserved"] + a["committed"] == a["capacity"] for a in accounts)


def hello(server: ServerProcess) -> NodeInfo:
    """What the node tells its clients: sockets, ports, a token."""
    with ControlClient(server.address, timeout_s=5.0) as control:
        return control.hello("test")


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Holdings:
    """Sessions, and descriptors of shards and workers, at the time of making this."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._settled()

    def are_back(self) -> None:
        """Wait until the server holds no more than it did, in the same processes."""
        last: list[Any] = []

        def same() -> bool:
            last[:] = [self._now()]
            return last[0] == self._before

        try:
            until(same, SETTLE_TIMEOUT_S)
        except TimeoutError:
            raise AssertionError(f"held before: {self._before}, still held: {last[0]}") from None

    def _now(self) -> dict[str, object]:
        server = self._server
        status: dict[str, Any] = server.status()
        processes = [*(server.shard_pid(shard["shard"]) for shard in status["shards"]), *server.worker_pids()]
        return {
            "sessions": [shard["gauges"]["sessions"] for shard in status["shards"]],
            "reserved": [shard["bytes"]["reserved"] for shard in status["shards"]],
            "leases": [shard["gauges"]["leases_now"] for shard in status["shards"]],
            "descriptors": {pid: descriptors(pid) for pid in processes},
        }

    def _settled(self) -> dict[str, object]:
        """What it holds when nothing changes any more."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        before, now = self._now(), self._now()
        while before != now and time.monotonic() < deadline_s:
            before, now = now, self._now()
        return now
