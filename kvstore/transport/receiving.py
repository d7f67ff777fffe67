"""Payload from a socket into the caller's memory, each piece verified while it is still in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.base import Mask
from kvstore.transport.buffers import Blocks, Region
from kvstore.transport.channel import RECEIVE_BYTES_MAX
from kvstore.transport.trailer import sums_of


def receive_verified(
    receive_into: Callable[[memoryview], None],
    rows: NDArray[np.int64],
    into: Blocks,
    size: int,
    slice_bytes: int,
    sums: NDArray[np.uint64],
) -> Mask:
    """Receive `size` bytes for each of these rows of `into`; which of them match their sums.

    Args:
        receive_into: fills a piece of memory from the socket.
        rows: of `into`, in the order in which they come, shape (n,).
        into: the caller's memory.
        size: bytes of each row, a multiple of `slice_bytes`.
        slice_bytes: what one sum is over.
        sums: expected, shape (n, size / slice_bytes).
    """
    matching = np.ones(len(rows), dtype=np.bool_)
    step = max(1, RECEIVE_BYTES_MAX // slice_bytes)
    for first, end, memory in _spans(rows, into, size):
        if end - first > 1:
            receive_into(memory)
            expected = sums[first:end]
            received = np.array(sums_of(memory, slice_bytes), dtype=np.uint64).reshape(expected.shape)
            matching[first:end] = (received == expected).all(axis=1)
            continue
        expected_sums = sums[first].tolist()
        for start in range(0, len(expected_sums), step):
            piece = memory[start * slice_bytes : (start + step) * slice_bytes]
            receive_into(piece)
            if sums_of(piece, slice_bytes) != expected_sums[start : start + step]:
                matching[first] = False
    return matching


def _spans(rows: NDArray[np.int64], into: Blocks, size: int) -> Iterator[tuple[int, int, memoryview]]:
    """Stretches of target memory that can be received in one go: `(first, end, memory)`, indices into `rows`.

    Small blocks that lie next to each other in the caller's memory form one stretch of up to RECEIVE_BYTES_MAX.
    """
    if not isinstance(into, Region) or size * 2 > RECEIVE_BYTES_MAX:
        for place, row in enumerate(rows.tolist()):
            yield place, place + 1, into.piece(row, size)
        return
    memory = memoryview(into.memory)
    offsets = into.offsets[rows].tolist()
    first = 0
    for place in range(1, len(offsets) + 1):
        whole = (place - first) * size
        if place < len(offsets) and offsets[place] == offsets[first] + whole and whole + size <= RECEIVE_BYTES_MAX:
            continue
        yield first, place, memory[offsets[first] : offsets[first] + whole]
        first = place
