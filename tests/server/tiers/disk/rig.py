"""A disk tier on a real folder, driven step by step, and content that names itself."""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KEY_DTYPE
from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.server.tiers.disk.engine import DiskTier
from kvstore.server.tiers.disk.files import Files
from kvstore.server.tiers.disk.messages import (
    LOAD_ROW,
    STORE_ROW,
    Answer,
    Flush,
    Flushed,
    Gone,
    Load,
    Loaded,
    LoadStatus,
    Namespace,
    Remove,
    Removed,
    Request,
    Scan,
    Scanned,
    Stats,
    StatsAnswer,
    Store,
    Stored,
    StoreStatus,
)
from kvstore.transport.memory import private_arena
from kvstore.transport.trailer import slot_payload_bytes

A = TypeVar("A")
TIMEOUT_S = 20.0
DIGEST = bytes(range(16))
OTHER_DIGEST = bytes(range(16, 32))
BOOT = b"b" * 16
POOL_BYTES = 16 << 20


def key_of(number: int) -> bytes:
    """A key that looks like one: uniform bits."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[: KEY_DTYPE.itemsize]


def keys_of(numbers: Sequence[int]) -> NDArray[np.void]:
    """Keys of blocks, KEY_DTYPE (n,)."""
    return np.frombuffer(b"".join(key_of(number) for number in numbers), KEY_DTYPE)


def content_of(number: int, size: int) -> NDArray[np.uint8]:
    """The bytes of a block: they depend on its number and on the place."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


class Rig:
    """A tier and a pool whose slots are as large as a block needs."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity: int = 64 << 20,
        layers: int = 4,
        layer_bytes: int = 16 << 10,
        files: Files | None = None,
        boot: bytes = BOOT,
        scan: bool = True,
    ) -> None:
        self.boot = boot
        self.pool = private_arena(POOL_BYTES)
        self.layers, self.layer_bytes = layers, layer_bytes
        self.size = layers * layer_bytes
        self.slot = -(-(self.size + 8 * (1 + layers)) // 4096) * 4096
        self.tier = DiskTier(folder, capacity, self.pool, boot, files)
        self.gone: list[bytes] = []
        self.scanned: list[bytes] = []
        self.generation = 1
        self._request = 0
        self._answers: dict[int, Answer] = {}
        if scan:
            self.scan()

    def scan(self) -> None:
        """Until everything is known."""
        self.submit(Scan())
        until_s = time.monotonic() + TIMEOUT_S
        while not self.tier.complete:
            if self.tier.scanning:
                self.tier.scan_step()
                self._take()
            else:
                self.step()
            assert time.monotonic() < until_s
        self._take()

    def submit(self, message: Request) -> int:
        self._request += 1
        self.tier.handle(self._request, message)
        self._take()
        return self._request

    def step(self, timeout_s: float = 0.02) -> None:
        """Let threads finish something, if they do."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.tier.fd, selectors.EVENT_READ)
            selector.select(timeout_s)
        self.tier.poll()
        self._take()

    def answered(self, request: int) -> bool:
        return request in self._answers

    def wait(self, request: int, kind: type[A]) -> A:
        until_s = time.monotonic() + TIMEOUT_S
        while request not in self._answers:
            self.step()
            assert time.monotonic() < until_s, f"no answer to request {request}"
        answer = self._answers.pop(request)
        assert isinstance(answer, kind)
        return answer

    def settle(self) -> None:
        """Until nothing is on its way to the disk."""
        until_s = time.monotonic() + TIMEOUT_S
        while not self.tier.idle:
            self.step()
            assert time.monotonic() < until_s

    # --- whole requests -------------------------------------------------------------------------------------------

    def begin_store(
        self,
        numbers: Sequence[int],
        *,
        digest: bytes = DIGEST,
        generation: int = 0,
        base: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> int:
        """Fill slots of the pool from number `base` on and submit them."""
        rows = np.zeros(len(numbers), STORE_ROW)
        rows["key"] = keys_of(numbers)
        rows["generation"] = generation or self.generation
        rows["offset"] = (base + np.arange(len(numbers))) * self.slot
        for place, number in enumerate(numbers, start=base):
            self.pool[place * self.slot :][: self.size] = content_of(number, self.size)
        self.generation += 1
        self.submit(Namespace(digest, self.layers, self.layer_bytes, tenant, "model@1"))
        return self.submit(Store(digest, self.layers, self.layer_bytes, rows))

    def store(
        self,
        numbers: Sequence[int],
        *,
        digest: bytes = DIGEST,
        generation: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[StoreStatus]:
        answer = self.wait(self.begin_store(numbers, digest=digest, generation=generation, tenant=tenant), Stored)
        return [StoreStatus(status) for status in answer.statuses.tolist()]

    def begin_load(
        self, numbers: Sequence[int], layers: tuple[int, int] = (0, 0), *, generation: int = 77, base: int = 0
    ) -> int:
        """Into slots from number `base` on, which are filled with a pattern before."""
        self.pool[base * self.slot : (base + len(numbers)) * self.slot] = 0xAB
        rows = np.zeros(len(numbers), LOAD_ROW)
        rows["key"] = keys_of(numbers)
        rows["generation"] = generation
        rows["offset"] = (base + np.arange(len(numbers))) * self.slot
        rows["first"], rows["end"] = layers
        return self.submit(Load(rows))

    def load(self, numbers: Sequence[int], layers: tuple[int, int] = (0, 0)) -> list[LoadStatus]:
        """Load, and check every byte of what is said to be OK, and that nothing beside a range has changed."""
        answer = self.wait(self.begin_load(numbers, layers), Loaded)
        for place, (number, status) in enumerate(zip(numbers, answer.statuses.tolist(), strict=True)):
            if status == LoadStatus.OK:
                self.check(place, number, layers)
        return [LoadStatus(status) for status in answer.statuses.tolist()]

    def check(self, place: int, number: int, layers: tuple[int, int] = (0, 0)) -> None:
        slot = self.pool[place * self.slot :][: self.slot]
        first, end = layers[0] * self.layer_bytes, (layers[1] or self.layers) * self.layer_bytes
        assert (slot[first:end] == content_of(number, self.size)[first:end]).all(), f"wrong bytes in block {number}"
        if layers not in {(0, 0), (0, self.layers)}:
            trailed = slot_payload_bytes(self.size, self.layers) if end == self.size else end
            assert (slot[:first] == 0xAB).all()
            assert (slot[trailed:] == 0xAB).all()

    def begin_remove(self, numbers: Sequence[int]) -> int:
        return self.submit(Remove(self.generation, keys_of(numbers)))

    def remove(self, numbers: Sequence[int]) -> int:
        return self.wait(self.begin_remove(numbers), Removed).blocks

    def flush(self, digest: bytes = b"") -> int:
        return self.wait(self.submit(Flush(self.generation, digest)), Flushed).blocks

    def stats(self) -> dict[str, Any]:
        return self.wait(self.submit(Stats()), StatsAnswer).values

    def close(self) -> None:
        self.settle()
        self.tier.close()

    def _take(self) -> None:
        for answer in self.tier.answers():
            match answer:
                case Gone(keys):
                    self.gone += _each(keys)
                case Scanned():
                    self.scanned += _each(np.ascontiguousarray(answer.blocks["key"]))
                case _:
                    self._answers[answer.request] = answer


def _each(keys: NDArray[np.void]) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[at : at + KEY_DTYPE.itemsize] for at in range(0, len(raw), KEY_DTYPE.itemsize)]


def disk_usage(folder: Path) -> int:
    """Bytes of the slab files, as `du` counts them."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("slab-*.kv"))


def copy_as_it_is(folder: Path, copy: Path) -> None:
    """What a crash at this moment would leave, with nothing under way: the tier has the folder open."""
    copy.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            copy_as_it_is(path, copy / path.name)
        else:
            with contextlib.suppress(FileNotFoundError):  # RocksDB tidies up in the background
                shutil.copy(path, copy / path.name)
