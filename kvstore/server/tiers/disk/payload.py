"""Payload between pool and slabs: what the I/O threads do. The GIL is free while they wait and while they sum.

A range that doesn't begin or end on a page shares those pages of the pool with layers that may be in use already, so
these two pages are read beside and only the range's bytes are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.server.tiers.disk.files import ALIGN_BYTES, File, read_fully, write_fully
from kvstore.server.tiers.disk.slabs import padded
from kvstore.server.tiers.disk.workers import Scratch
from kvstore.transport.trailer import SUM_BYTES, sums_of, trailer_offset

_GENERATION = struct.Struct("<Q")


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


def write_run(
    file: File, offset: int, pool: memoryview, pool_offsets: Sequence[int], geometry: Geometry
) -> list[bytes]:
    """Write neighbouring blocks of one namespace; their sums.

    Raises:
        OSError: the disk's own.
    """
    size, length = geometry.size, padded(geometry.size)
    sums = [sums_bytes(pool[at : at + size], geometry.layer_bytes) for at in pool_offsets]
    write_fully(file, [pool[at : at + length] for at in pool_offsets], offset)
    return sums


def read_run(file: File, offset: int, pool: memoryview, targets: Sequence[Target]) -> list[bool]:
    """Read neighbouring blocks, check them, write their trailers; which are right. One that the disk can't read costs
    the others nothing.
    """
    pieces = [pool[target.pool_offset :][: padded(target.geometry.size)] for target in targets]
    try:
        read_fully(file, pieces, offset)
    except OSError:
        if len(targets) == 1:
            return [False]
        right: list[bool] = []
        for target, piece in zip(targets, pieces, strict=True):
            right += read_run(file, offset, pool, [target])
            offset += len(piece)
        return right
    return [_finish(pool, target) for target in targets]


def read_layers(
    file: File, offset: int, pool: memoryview, target: Target, first: int, end: int, scratch: Scratch
) -> bool:
    """Read layers first to end of the block at `offset`, and check them. Nothing else in the pool is touched."""
    layer_bytes = target.geometry.layer_bytes
    start, stop = first * layer_bytes, end * layer_bytes
    low, high = start // ALIGN_BYTES * ALIGN_BYTES, padded(stop)
    inner_low, inner_high = padded(start), stop // ALIGN_BYTES * ALIGN_BYTES
    edges = memoryview(scratch)
    slot = pool[target.pool_offset :]
    try:
        if inner_low >= inner_high:  # no whole page: at most two edge pages
            read_fully(file, [edges[: high - low]], offset + low)
            slot[start:stop] = edges[start - low : stop - low]
        else:
            head = [edges[:ALIGN_BYTES]] if low < inner_low else []
            tail = [edges[ALIGN_BYTES : 2 * ALIGN_BYTES]] if inner_high < high else []
            read_fully(file, [*head, slot[inner_low:inner_high], *tail], offset + low)
            slot[start:inner_low] = edges[start - low : start - low + inner_low - start]
            slot[inner_high:stop] = edges[ALIGN_BYTES : ALIGN_BYTES + stop - inner_high]
    except OSError:
        return False
    return sums_bytes(slot[start:stop], layer_bytes) == target.sums[first * SUM_BYTES : end * SUM_BYTES]


def _finish(pool: memoryview, target: Target) -> bool:
    """Check a block in the pool, and write its trailer: what was read behind the payload is an older one."""
    geometry, start = target.geometry, target.pool_offset
    if sums_bytes(pool[start : start + geometry.size], geometry.layer_bytes) != target.sums:
        return False
    trailer = start + trailer_offset(geometry.size)
    if trailer + SUM_BYTES * (1 + geometry.layers) <= len(pool):
        pool[trailer : trailer + SUM_BYTES] = bytes(SUM_BYTES)
        pool[trailer + SUM_BYTES : trailer + SUM_BYTES * (1 + geometry.layers)] = target.sums
        pool[trailer : trailer + SUM_BYTES] = _GENERATION.pack(target.generation)
    return True
