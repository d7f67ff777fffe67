"""Payload from a socket into the caller's memory, each piece verified while it is still in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.base import Mask
from kvstore.transport.buffers import Blocks, Region
from kvstore.transport.channel import RECEIVE_BYTES_MAX
from kvstore.transport.trailer import sums_of


def receive_verified(
    receive: Callable[[Sequence[memoryview]], None],
    rows: NDArray[np.int64],
    into: Blocks,
    size: int,
    slice_bytes: int,
    sums: NDArray[np.uint64],
) -> Mask:
    """Receive `size` bytes for each of these rows of `into`; which of them match their sums.

    Args:
        receive: fills pieces of memory from the socket.
        rows: of `into`, in the order in which they come, shape (n,).
        into: the caller's memory.
        size: bytes of each row, a multiple of `slice_bytes`.
        slice_bytes: what one sum is over.
        sums: expected, shape (n, size / slice_bytes).
    """
    received: list[int] = []
    if isinstance(into, Region) and size * 2 <= RECEIVE_BYTES_MAX:
        batch = RECEIVE_BYTES_MAX // size
        memory, offsets = memoryview(into.memory), into.offsets[rows]
        for first in range(0, len(rows), batch):
            pieces = list(_spans(memory, offsets[first : first + batch], size))
            receive(pieces)
            for piece in pieces:
                received += sums_of(piece, slice_bytes)
    else:
        step = max(1, RECEIVE_BYTES_MAX // slice_bytes) * slice_bytes
        for row in rows.tolist():
            block = into.piece(row, size)
            for start in range(0, size, step):
                piece = block[start : start + step]
                receive([piece])
                received += sums_of(piece, slice_bytes)
    return (np.array(received, dtype=np.uint64).reshape(sums.shape) == sums).all(axis=1)


def _spans(memory: memoryview, offsets: NDArray[np.int64], size: int) -> Iterator[memoryview]:
    """Memory of blocks in as few pieces as possible: what lies side by side is one."""
    breaks = np.flatnonzero(np.diff(offsets) != size)
    firsts = [0, *(breaks + 1).tolist()]
    starts = offsets[firsts].tolist()
    for start, first, end in zip(starts, firsts, [*firsts[1:], len(offsets)], strict=True):
        yield memory[start : start + (end - first) * size]
