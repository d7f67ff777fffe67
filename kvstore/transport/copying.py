"""Copies of many equal-sized blocks between two memories, in few steps.

Blocks that were stored together mostly lie in neighbouring slots. Wherever both sides advance by a constant stride
the whole run is one strided copy. What is scattered is moved by index, in a loop of numpy's own: straight from a source
without gaps, else, where blocks are small, through a gather that stays in the processor's cache. Larger ones are copied
block by block: the steps then cost a small part of what the bytes do.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], None]
"""Copies the second array into the first, both of shape (rows, size) with gapless rows, as `numpy.copyto` does."""

_SMALL_BYTES = 32 << 10
_CACHED_BYTES = 512 << 10
_TOUCHED_BYTES_MAX = 128 << 10  # blocks up to this size are touched before they are copied, where there are many
_TOUCHED_RUN_BYTES = 1 << 20


def copy_blocks(target: Bytes, target_offsets: I64, source: Bytes, source_offsets: I64, size_bytes: int) -> None:
    """`target[t : t + size] = source[s : s + size]` for each pair of offsets. Target blocks must not overlap.

    Raises:
        IndexError: a block would reach outside its memory.
    """
    CopyPlan(target_offsets, source_offsets).copy(target, 0, source, 0, size_bytes)


class CopyPlan:
    """Copies of n blocks, to be made many times with both sides shifted: the runs are looked for once.

    Args:
        target_offsets, source_offsets: where each block begins, shape (n,).
    """

    def __init__(self, target_offsets: I64, source_offsets: I64) -> None:
        self._to, self._from = target_offsets, source_offsets
        self._count = count = len(target_offsets)
        if not count:
            return
        self._span = int(target_offsets.min()), int(target_offsets.max())
        self._source_span = int(source_offsets.min()), int(source_offsets.max())
        starts = _run_starts(target_offsets, source_offsets)
        self._scattered = len(starts) * 4 > count > 1
        ends = np.append(starts[1:], count)
        nexts = np.minimum(starts + 1, count - 1)
        self._runs = np.stack(
            [
                ends - starts,
                target_offsets[starts],
                target_offsets[nexts] - target_offsets[starts],
                source_offsets[starts],
                source_offsets[nexts] - source_offsets[starts],
            ],
            axis=1,
        ).tolist()

    def copy(
        self,
        target: Bytes,
        target_shift: int,
        source: Bytes,
        source_shift: int,
        size_bytes: int,
        by: Copy | None = None,
    ) -> None:
        """`target[t + target_shift :][:size] = source[s + source_shift :][:size]` for each pair of offsets.

        `by` copies each run, if that is given, instead of numpy.

        Raises:
            IndexError: a block would reach outside its memory.
        """
        if not self._count:
            return
        _check(target, self._span, target_shift, size_bytes)
        _check(source, self._source_span, source_shift, size_bytes)
        if by is not None:
            for rows, to, to_step, start, step in self._runs:
                by(
                    np.ndarray((rows, size_bytes), np.uint8, target.data, to + target_shift, (to_step, 1)),
                    np.ndarray((rows, size_bytes), np.uint8, source.data, start + source_shift, (step, 1)),
                )
            return
        if self._scattered and self._copy_by_index(target[target_shift:], source[source_shift:], size_bytes):
            return
        for rows, to, to_step, start, step in self._runs:
            if rows == 1:
                np.copyto(
                    target[to + target_shift : to + target_shift + size_bytes],
                    source[start + source_shift : start + source_shift + size_bytes],
                )
                continue
            each = rows if size_bytes > _TOUCHED_BYTES_MAX else max(1, _TOUCHED_RUN_BYTES // size_bytes)
            for first in range(0, rows, each):
                count = min(each, rows - first)
                at = start + source_shift + first * step
                if count < rows:
                    # One byte of each page: the processor looks many pages up at once, and a copy one after the other.
                    pages = -(-size_bytes // mmap.PAGESIZE)
                    np.ndarray((count, pages), np.uint8, source.data, at, (step, mmap.PAGESIZE)).copy()
                np.copyto(
                    np.ndarray(
                        (count, size_bytes), np.uint8, target.data, to + target_shift + first * to_step, (to_step, 1)
                    ),
                    np.ndarray((count, size_bytes), np.uint8, source.data, at, (step, 1)),
                )

    def _copy_by_index(self, target: Bytes, source: Bytes, size_bytes: int) -> bool:
        # Each memory is seen as one item per place where a block could begin, so numpy moves whole blocks by index.
        item = f"V{size_bytes}"
        to, places = _windows(target, self._to, size_bytes)
        if _gapless(self._from, size_bytes):
            first = self._source_span[0]
            to[places] = source[first : first + self._count * size_bytes].view(item)
            return True
        if size_bytes > _SMALL_BYTES:
            return False
        # What is read of one batch is still in the processor's cache when it is written.
        start, sources = _windows(source, self._from, size_bytes)
        batch = max(1, _CACHED_BYTES // size_bytes)
        for first in range(0, self._count, batch):
            to[places[first : first + batch]] = start[sources[first : first + batch]]
        return True


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


def _gapless(offsets: I64, size_bytes: int) -> bool:
    return bool((np.diff(offsets) == size_bytes).all())


def _windows(memory: Bytes, offsets: I64, size_bytes: int) -> tuple[NDArray[np.void], I64]:
    """Items of that many bytes that overlap, one at each multiple of the offsets' common divisor; which are meant."""
    unit = max(1, int(np.gcd.reduce(offsets)))
    count = (len(memory) - size_bytes) // unit + 1
    return np.ndarray((count,), dtype=f"V{size_bytes}", buffer=memory.data, strides=(unit,)), offsets // unit


def _check(memory: Bytes, span: tuple[int, int], shift: int, size_bytes: int) -> None:
    if span[0] + shift < 0 or span[1] + shift + size_bytes > len(memory):
        raise IndexError(
            f"blocks of {size_bytes} bytes at {span[0] + shift}..{span[1] + shift} in a memory of {len(memory)} bytes"
        )
