"""Copies of many equal-sized blocks between two memories, in few steps.

Blocks that were stored together mostly lie in neighbouring slots. Wherever both sides advance by a constant stride
the whole run is one strided copy; what is scattered is copied block by block, or, where blocks are so small that the
steps would cost more than the bytes, through a gather that stays in the processor's cache.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SMALL_BYTES = 32 << 10
_CACHED_BYTES = 512 << 10


def copy_blocks(target: Bytes, target_offsets: I64, source: Bytes, source_offsets: I64, size_bytes: int) -> None:
    """`target[t : t + size] = source[s : s + size]` for each pair of offsets. Target blocks must not overlap.

    Raises:
        IndexError: a block would reach outside its memory.
    """
    count = len(target_offsets)
    if not count:
        return
    _check(target, target_offsets, size_bytes)
    _check(source, source_offsets, size_bytes)
    if count == 1:
        to, start = int(target_offsets[0]), int(source_offsets[0])
        np.copyto(target[to : to + size_bytes], source[start : start + size_bytes])
        return
    starts = _run_starts(target_offsets, source_offsets)
    if size_bytes <= _SMALL_BYTES and len(starts) * 4 > count:
        _copy_small(target, target_offsets, source, source_offsets, size_bytes)
        return
    ends = np.append(starts[1:], count)
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        rows = end - first
        to, start = int(target_offsets[first]), int(source_offsets[first])
        if rows == 1:
            np.copyto(target[to : to + size_bytes], source[start : start + size_bytes])
            continue
        to_step = int(target_offsets[first + 1]) - to
        step = int(source_offsets[first + 1]) - start
        np.copyto(
            _strided(target, to, rows, to_step, size_bytes, writeable=True),
            _strided(source, start, rows, step, size_bytes, writeable=False),
        )


def _run_starts(first: I64, second: I64) -> I64:
    """Rows where a new run begins: where either side's step differs from the step before it."""
    steps = np.stack([np.diff(first), np.diff(second)])
    turns = (steps[:, 1:] != steps[:, :-1]).any(axis=0)
    starts = [0]
    row, total = 0, len(first)
    changes = np.flatnonzero(turns) + 1  # steps[change] differs from the one before
    if not len(changes):
        return np.zeros(1, dtype=np.int64)
    if len(changes) > total // 4:
        return np.arange(total)  # scattered: a run of two would gain nothing
    for change in changes.tolist():
        if change <= row:  # the jump into this run, already counted
            continue
        row = change + 1
        starts.append(row)
    return np.array(starts, dtype=np.int64)


def _copy_small(target: Bytes, target_offsets: I64, source: Bytes, source_offsets: I64, size_bytes: int) -> None:
    # Each memory is seen as one item per place where a block could begin, so numpy moves whole blocks by index. What is
    # read of one batch is still in the processor's cache when it is written.
    to, places = _windows(target, target_offsets, size_bytes)
    start, sources = _windows(source, source_offsets, size_bytes)
    batch = max(1, _CACHED_BYTES // size_bytes)
    for first in range(0, len(places), batch):
        to[places[first : first + batch]] = start[sources[first : first + batch]]


def _windows(memory: Bytes, offsets: I64, size_bytes: int) -> tuple[NDArray[np.void], I64]:
    """Items of that many bytes that overlap, one at each multiple of the offsets' common divisor; which are meant."""
    unit = max(1, int(np.gcd.reduce(offsets)))
    count = (len(memory) - size_bytes) // unit + 1
    return np.ndarray((count,), dtype=f"V{size_bytes}", buffer=memory.data, strides=(unit,)), offsets // unit


def _strided(memory: Bytes, start: int, rows: int, step: int, size_bytes: int, *, writeable: bool) -> Bytes:
    return as_strided(memory[start:], shape=(rows, size_bytes), strides=(step, 1), writeable=writeable)


def _check(memory: Bytes, offsets: I64, size_bytes: int) -> None:
    if int(offsets.min()) < 0 or int(offsets.max()) + size_bytes > len(memory):
        raise IndexError(
            f"blocks of {size_bytes} bytes at {offsets.min()}..{offsets.max()} in a memory of {len(memory)} bytes"
        )
