"""A stand-in for the shard: a pool, a worker process and the link to it."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.server.tiers.disk.client import start_disk_worker
from kvstore.server.tiers.disk.messages import LOAD_ROW, STORE_ROW, Answer, Loaded, LoadStatus, Namespace, Scanned
from kvstore.transport.memory import create_pool, map_pool
from tests.server.tiers.disk.rig import DIGEST, content_of, keys_of

A = TypeVar("A")
TIMEOUT_S = 30.0


class ShardEnd:
    """Starts workers on one folder, one after the other; the pool and the boot stay, as when only the worker dies."""

    def __init__(self, folder: Path, *, slots: int = 256, layers: int = 4, layer_bytes: int = 4096) -> None:
        self._folder = folder
        self.layers, self.layer_bytes = layers, layer_bytes
        self.space = Namespace(DIGEST, layers, layer_bytes, DEFAULT_TENANT, "model@1")
        self.size = layers * layer_bytes
        self.slot = -(-(self.size + 8 * (1 + layers)) // 4096) * 4096
        self.pool_fd = create_pool("test-pool", slots * self.slot)
        self.pool = map_pool(self.pool_fd, writable=True)

    def start(self, capacity: int = 64 << 20) -> None:
        """A worker; what it found is in `scanned` after `wait_scanned`."""
        self.child, self.link = start_disk_worker(0, self._folder, capacity, self.pool_fd, len(self.pool), "0b" * 16)
        self._scan = self.link.submit_scan()
        self.scanned: list[bytes] = []
        self.complete = False
        self.answers: list[Answer] = []

    def wait_scanned(self) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not self.complete:
            self.receive()
            assert time.monotonic() < until_s, "the scan is not complete"

    def receive(self, timeout_s: float = 0.1) -> None:
        """Wait for something to come, or not, and put it into `answers`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, self.link.events)
            if not selector.select(timeout_s):
                return
        for answer in self.link.drain():
            if isinstance(answer, Scanned):
                raw = np.ascontiguousarray(answer.blocks["key"]).tobytes()
                self.scanned += [raw[at : at + 24] for at in range(0, len(raw), 24)]
                self.complete |= answer.complete
            else:
                self.answers.append(answer)

    def wait_for_the_end(self) -> None:
        """Until the link breaks, which is `Unavailable`."""
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            self.receive()

    def wait(self, request: int, kind: type[A]) -> A:
        assert request
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            for answer in self.answers:
                if answer.request == request:
                    self.answers.remove(answer)
                    assert isinstance(answer, kind)
                    return answer
            self.receive()
            assert time.monotonic() < until_s, f"no answer to request {request}"

    def begin_store(self, numbers: Sequence[int], generation: int, base: int = 0) -> int:
        rows = np.zeros(len(numbers), STORE_ROW)
        rows["key"], rows["generation"] = keys_of(numbers), generation
        rows["offset"] = (base + np.arange(len(numbers))) * self.slot
        for place, number in enumerate(numbers, start=base):
            self.pool[place * self.slot :][: self.size] = content_of(number, self.size)
        return self.link.submit_store(self.space, rows)

    def begin_load(self, numbers: Sequence[int], base: int = 0) -> int:
        rows = np.zeros(len(numbers), LOAD_ROW)
        rows["key"], rows["generation"] = keys_of(numbers), 1
        rows["offset"] = (base + np.arange(len(numbers))) * self.slot
        return self.link.submit_load(rows)

    def check(self, base: int, numbers: Sequence[int], loaded: Loaded) -> list[int]:
        """The blocks that were there; their content is compared."""
        there: list[int] = []
        for place, (number, status) in enumerate(zip(numbers, loaded.statuses.tolist(), strict=True), start=base):
            if status == LoadStatus.OK:
                assert (self.pool[place * self.slot :][: self.size] == content_of(number, self.size)).all(), (
                    f"wrong bytes in block {number}"
                )
                there.append(number)
        return there

    def kill(self) -> None:
        """SIGKILL, and reap."""
        os.kill(self.child.pid, signal.SIGKILL)
        self.hang_up()

    def hang_up(self) -> None:
        """In order: the worker finishes and ends."""
        self.link.close()
        self.child.stop()

    def close(self) -> None:
        self.hang_up()
        os.close(self.pool_fd)
