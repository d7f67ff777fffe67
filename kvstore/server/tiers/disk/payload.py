"""Payload between pool and slabs: what the I/O threads do. The GIL is free while they wait, copy, and sum large slices.

With O_DIRECT, bytes go by way of the thread's own scratch memory. It lies in huge pages, and the kernel pins one of
those for 2 MiB where it would pin 512 pages of the pool; and it stays in the processor's cache, where sums and copies
cost little (docs/adr/0007-ssd-tier.md). Through the page cache the kernel copies anyway: straight into the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.server.tiers.disk.files import ALIGN_BYTES, File, read_fully, write_fully
from kvstore.server.tiers.disk.slabs import padded
from kvstore.server.tiers.disk.workers import Scratch
from kvstore.transport.trailer import SUM_BYTES, slot_payload_bytes, sums_of, write_trailers

Pool = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Blocks of one namespace."""

    layers: int
    layer_bytes: int

    @property
    def size(self) -> int:
        """Payload bytes."""
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """A whole block to read, and where to."""

    geometry: Geometry
    pool_offset: int
    generation: int
    sums: bytes


def sums_bytes(payload: memoryview, layer_bytes: int) -> bytes:
    """The xxh3-64 of each layer slice, as the catalog keeps them."""
    return np.array(sums_of(payload, layer_bytes), dtype="<u8").tobytes()


class LayerSums:
    """xxh3-64 of each layer slice of a block that comes in pieces of any size."""

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes
        self._begun = xxhash.xxh3_64()
        self._begun_bytes = 0
        self._sums: list[int] = []

    def add(self, piece: memoryview) -> None:
        """The bytes that come next."""
        rest = piece
        if self._begun_bytes:
            rest = rest[self._begin(rest[: self._layer_bytes - self._begun_bytes]) :]
        whole = len(rest) // self._layer_bytes * self._layer_bytes
        self._sums += sums_of(rest[:whole], self._layer_bytes)
        self._begin(rest[whole:])

    def digest(self) -> bytes:
        """As the catalog keeps them."""
        return np.array(self._sums, dtype="<u8").tobytes()

    def _begin(self, part: memoryview) -> int:
        self._begun.update(part)
        self._begun_bytes += len(part)
        if self._begun_bytes == self._layer_bytes:
            self._sums.append(self._begun.intdigest())
            self._begun.reset()
            self._begun_bytes = 0
        return len(part)


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of one block: where in the file, and where in the pool."""

    at: int
    pool_offset: int
    size: int
    sums: LayerSums

    def within(self, low: int, high: int) -> tuple[int, int, int]:
        """What of it lies from `low` to `high` in the file: offset from `low`, offset in the pool, length (0: none)."""
        start, stop = max(low, self.at), min(high, self.at + self.size)
        return start - low, self.pool_offset + start - self.at, max(0, stop - start)


def write_run(
    file: File, offset: int, pool: Pool, pool_offsets: Sequence[int], geometry: Geometry, scratch: Scratch
) -> list[bytes]:
    """Write neighbouring blocks of one namespace; their sums.

    Raises:
        OSError: the disk's own.
    """
    size, length = geometry.size, padded(geometry.size)
    if not file.direct:
        write_fully(file, [memoryview(pool[at : at + length]) for at in pool_offsets], offset)
        return [sums_bytes(memoryview(pool[at : at + size]), geometry.layer_bytes) for at in pool_offsets]
    spans = _spans(offset, [(at, geometry) for at in pool_offsets])
    for low, high in _chunks(offset, offset + length * len(spans), scratch):
        for span in spans:
            at, pool_offset, count = span.within(low, high)
            np.copyto(scratch[at : at + count], pool[pool_offset : pool_offset + count])
            span.sums.add(memoryview(scratch[at : at + count]))
        write_fully(file, [memoryview(scratch[: high - low])], low)
    return [span.sums.digest() for span in spans]


def read_run(file: File, offset: int, pool: Pool, targets: Sequence[Target], scratch: Scratch) -> list[bool]:
    """Read neighbouring blocks, check them, write their trailers; which are right. One that the disk can't read costs
    the others nothing.
    """
    spans = _spans(offset, [(target.pool_offset, target.geometry) for target in targets])
    try:
        if file.direct:
            _read_spans(file, offset, padded(spans[-1].at + spans[-1].size), pool, spans, scratch)
        else:
            pieces = [pool[span.pool_offset :][: padded(span.size)] for span in spans]
            read_fully(file, [memoryview(piece) for piece in pieces], offset)
            for span, piece in zip(spans, pieces, strict=True):
                span.sums.add(memoryview(piece[: span.size]))
    except OSError:
        if len(targets) == 1:
            return [False]
        return [
            read_run(file, span.at, pool, [target], scratch)[0] for span, target in zip(spans, targets, strict=True)
        ]
    right = [target.sums == span.sums.digest() for span, target in zip(spans, targets, strict=True)]
    for target in compress(targets, right):
        _write_trailer(pool, target)
    return right


def read_layers(file: File, offset: int, pool: Pool, target: Target, first: int, end: int, scratch: Scratch) -> bool:
    """Read layers first to end of the block at `offset`, and check them; with the last one the trailer is written. No
    other layer is touched: those on the same pages may be in use already, so this goes by way of the scratch memory
    without O_DIRECT too.
    """
    layer_bytes = target.geometry.layer_bytes
    start, stop = first * layer_bytes, end * layer_bytes
    span = _Span(offset + start, target.pool_offset + start, stop - start, LayerSums(layer_bytes))
    try:
        _read_spans(file, span.at // ALIGN_BYTES * ALIGN_BYTES, offset + padded(stop), pool, [span], scratch)
    except OSError:
        return False
    right = span.sums.digest() == target.sums[first * SUM_BYTES : end * SUM_BYTES]
    if right and end == target.geometry.layers:
        _write_trailer(pool, target)
    return right


def _spans(offset: int, blocks: Sequence[tuple[int, Geometry]]) -> list[_Span]:
    """Whole blocks (where in the pool, of which geometry), one behind the other in the file."""
    spans: list[_Span] = []
    for pool_offset, geometry in blocks:
        spans.append(_Span(offset, pool_offset, geometry.size, LayerSums(geometry.layer_bytes)))
        offset += padded(geometry.size)
    return spans


def _read_spans(file: File, offset: int, end: int, pool: Pool, spans: Sequence[_Span], scratch: Scratch) -> None:
    """Read from `offset` to `end`, and copy the spans to the pool.

    Raises:
        OSError: the disk's own.
    """
    for low, high in _chunks(offset, end, scratch):
        read_fully(file, [memoryview(scratch[: high - low])], low)
        for span in spans:
            at, pool_offset, count = span.within(low, high)
            span.sums.add(memoryview(scratch[at : at + count]))
            np.copyto(pool[pool_offset : pool_offset + count], scratch[at : at + count])


def _chunks(offset: int, end: int, scratch: Scratch) -> list[tuple[int, int]]:
    """That stretch of a file in parts that fit into the scratch memory."""
    return [(low, min(low + len(scratch), end)) for low in range(offset, end, len(scratch))]


def _write_trailer(pool: Pool, target: Target) -> None:
    """The sums behind a block in the pool, whose slot has those of an older one."""
    layers, size = target.geometry.layers, target.geometry.size
    if target.pool_offset + slot_payload_bytes(size, layers) <= len(pool):
        sums = np.frombuffer(target.sums, dtype="<u8").reshape(1, layers)
        write_trailers(pool, np.array([target.pool_offset]), size, np.array([target.generation], dtype=np.uint64), sums)
