"""Payload from a socket into the caller's memory, each piece verified while it is still in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.transport.base import Mask
from kvstore.transport.buffers import Blocks, Region
from kvstore.transport.channel import RECEIVE_BYTES_MAX
from kvstore.transport.trailer import sums_of

Receive = Callable[[Sequence[memoryview]], None]  # fills pieces of memory from the socket


def receive_verified(
    receive: Receive,
    rows: NDArray[np.int64],
    into: Blocks,
    size: int,
    slice_bytes: int,
    sums: NDArray[np.uint64],
) -> Mask:
    """Receive `size` bytes for each of these rows of `into`; which of them match their sums.

    Args:
        receive: see `Receive`.
        rows: of `into`, in the order in which they come, shape (n,).
        into: the caller's memory.
        size: bytes of each row, a multiple of `slice_bytes`.
        slice_bytes: what one sum is over.
        sums: expected, shape (n, size / slice_bytes).
    """
    if isinstance(into, Region):
        received = ReceivePlan(into.offsets[rows], size, slice_bytes).receive(receive, memoryview(into.memory), 0)
    else:
        received: list[int] = []
        for row in rows.tolist():
            received += ReceivePlan(_ONE, size, slice_bytes).receive(receive, into.piece(row, size), 0)
    return (np.array(received, dtype=np.uint64).reshape(sums.shape) == sums).all(axis=1)


class ReceivePlan:
    """Where blocks go that come one behind the other: system calls for pieces of the cache's size. Made once for all
    layers of a request, which differ by a shift.

    Args:
        offsets: of the blocks in the caller's memory, in the order in which they come, shape (n,).
        size, slice_bytes: bytes of each block, and of what one sum is over.
    """

    def __init__(self, offsets: NDArray[np.int64], size: int, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._single = False  # each piece is one slice
        self._calls: list[list[tuple[int, int]]] = []  # start and end of each piece
        if size * 2 <= RECEIVE_BYTES_MAX:
            batch = RECEIVE_BYTES_MAX // size
            for first in range(0, len(offsets), batch):
                self._calls.append(_joined(offsets[first : first + batch], size))
            self._single = size == slice_bytes and sum(map(len, self._calls)) == len(offsets)
            return
        step = max(1, RECEIVE_BYTES_MAX // slice_bytes) * slice_bytes
        for offset in offsets.tolist():
            cuts = [*range(offset, offset + size, step), offset + size]
            self._calls += [[cut] for cut in pairwise(cuts)]

    def receive(self, receive: Receive, memory: memoryview, shift: int) -> list[int]:
        """Receive all blocks, each `shift` bytes further on; the sums of what has come."""
        sums: list[int] = []
        for call in self._calls:
            pieces = [memory[start + shift : end + shift] for start, end in call]
            receive(pieces)
            if len(pieces) > 1 and self._single:
                sums += map(xxhash.xxh3_64_intdigest, pieces)
                continue
            for piece in pieces:
                sums += sums_of(piece, self._slice_bytes)
        return sums


def _joined(offsets: NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """Blocks in as few pieces as possible: what lies side by side is one."""
    breaks = np.flatnonzero(np.diff(offsets) != size)
    starts = offsets[np.append(0, breaks + 1)]
    ends = offsets[np.append(breaks, len(offsets) - 1)] + size
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


_ONE = np.zeros(1, dtype=np.int64)
