"""Slots of a pool, of memory or of slab files, by size class, without fragmentation death.

The pool is cut into chunks. A chunk serves one slot size at a time; when its last slot is freed it can serve any other.
So a change of block size costs the eviction of whole chunks, never a pool full of holes that fit nobody.

Sizes are rounded up to 1/64 of their power of two (at least 4 KiB), so rounding wastes at most 1.6 % from 256 KiB on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
GRANULE_BYTES_MIN = 4096
_UNASSIGNED = 0


class SlotAllocator:
    """Owns the map of the pool. Offsets are bytes from its start.

    At every moment `free_bytes` plus the bytes of all slots given out equals `capacity_bytes`: the pool less the
    tails of chunks that their slots don't fill.

    Args:
        pool_bytes: size of the pool, a multiple of `chunk_bytes`.
        chunk_bytes: size of a chunk, and the largest slot.
    """

    def __init__(self, pool_bytes: int, chunk_bytes: int) -> None:
        if pool_bytes % chunk_bytes or pool_bytes <= 0:
            raise ValueError(f"pool of {pool_bytes} bytes is not a multiple of its chunks of {chunk_bytes} bytes")
        self.pool_bytes = pool_bytes
        self.chunk_bytes = chunk_bytes
        chunks = pool_bytes // chunk_bytes
        self._slot_bytes: I64 = np.zeros(chunks, dtype=np.int64)  # of each chunk; 0 = unassigned
        self._used: I64 = np.zeros(chunks, dtype=np.int64)  # slots given out, of each chunk
        self._spare = list(range(chunks - 1, -1, -1))  # unassigned chunks, the lowest last: taken first
        self._withheld: set[int] = set()
        self._free: dict[int, _Stack] = {}
        self._tails_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slots can use with the chunks assigned as they are."""
        return self.pool_bytes - self._tails_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free slots and of chunks that serve no size yet."""
        return len(self._spare) * self.chunk_bytes + sum(size * len(stack) for size, stack in self._free.items())

    def slot_bytes_for(self, size_bytes: int) -> int:
        """The slot size that serves a block of this size, trailer included."""
        granule = max(GRANULE_BYTES_MIN, (1 << (size_bytes.bit_length() - 1)) // 64)
        # A chunk need not be a multiple of the granule, so the largest slot may be a little finer.
        return min(-(-size_bytes // granule) * granule, self.chunk_bytes)

    def chunk_of(self, offsets: I64) -> I64:
        """The chunk of each slot."""
        return offsets // self.chunk_bytes

    def slot_bytes_of(self, offsets: I64) -> I64:
        """The slot size at each offset."""
        return self._slot_bytes[offsets // self.chunk_bytes]

    def allocate(self, slot_bytes: int, count: int) -> I64:
        """Up to `count` slots: fewer when the free ones and the spare chunks don't suffice. Neighbours where
        possible.
        """
        stack = self._free.setdefault(slot_bytes, _Stack())
        while len(stack) < count and self._assign_chunk(slot_bytes, stack):
            pass
        offsets = stack.pop(min(count, len(stack)))
        np.add.at(self._used, self.chunk_of(offsets), 1)
        return offsets

    def free(self, offsets: I64) -> None:
        """Take slots back."""
        chunks = self.chunk_of(offsets)
        np.subtract.at(self._used, chunks, 1)
        sizes = self._slot_bytes[chunks]
        for size in np.unique(sizes).tolist():
            self._free[size].push(offsets[sizes == size])

    def available(self, slot_bytes: int) -> int:
        """Slots of this size that are free, or would be cut from spare chunks."""
        free = self._free.get(slot_bytes)
        return (len(free) if free else 0) + len(self._spare) * (self.chunk_bytes // slot_bytes)

    def withhold(self, chunks: I64) -> None:
        """Give nothing out of these spare chunks until `restore` says what is in them."""
        withheld = set(chunks.tolist())
        self._spare = [chunk for chunk in self._spare if chunk not in withheld]
        self._withheld |= withheld

    def is_withheld(self, offsets: I64) -> NDArray[np.bool_]:
        """Which offsets lie in a withheld chunk."""
        return np.isin(self.chunk_of(offsets), list(self._withheld))

    def restore(self, chunk: int, slot_bytes: int, used: I64) -> None:
        """A withheld chunk serves `slot_bytes`, and these distinct offsets in it are given out; none: it is spare."""
        self._withheld.remove(chunk)
        if not len(used):
            self._spare.append(chunk)
            return
        self._slot_bytes[chunk] = slot_bytes
        self._used[chunk] = len(used)
        slots = self.chunk_bytes // slot_bytes
        self._tails_bytes += self.chunk_bytes - slots * slot_bytes
        offsets = chunk * self.chunk_bytes + np.arange(slots - 1, -1, -1, dtype=np.int64) * slot_bytes
        self._free.setdefault(slot_bytes, _Stack()).push(offsets[~np.isin(offsets, used)])

    def drop_empty_chunks(self) -> None:
        """Chunks without a used slot serve no size any more."""
        self._reclaim_empty_chunks(_UNASSIGNED)

    def assigned_chunks(self) -> I64:
        """Chunks that serve a size now."""
        return np.flatnonzero(self._slot_bytes)

    def _assign_chunk(self, slot_bytes: int, stack: _Stack) -> bool:
        if not self._spare:
            self._reclaim_empty_chunks(slot_bytes)
        if not self._spare:
            return False
        chunk = self._spare.pop()
        slots = self.chunk_bytes // slot_bytes
        self._slot_bytes[chunk] = slot_bytes
        self._tails_bytes += self.chunk_bytes - slots * slot_bytes
        start = chunk * self.chunk_bytes
        stack.push(start + np.arange(slots - 1, -1, -1, dtype=np.int64) * slot_bytes)
        return True

    def _reclaim_empty_chunks(self, wanted: int) -> None:
        """Take chunks without a used slot away from the other sizes."""
        empty = np.flatnonzero((self._used == 0) & (self._slot_bytes != wanted) & (self._slot_bytes != _UNASSIGNED))
        for chunk in empty[::-1].tolist():
            size = int(self._slot_bytes[chunk])
            self._free[size].drop_range(chunk * self.chunk_bytes, (chunk + 1) * self.chunk_bytes)
            self._tails_bytes -= self.chunk_bytes - self.chunk_bytes // size * size
            self._slot_bytes[chunk] = _UNASSIGNED
            self._spare.append(chunk)


class _Stack:
    """Free offsets of one size, last in first out, in one growing array."""

    def __init__(self) -> None:
        self._items: I64 = np.empty(64, dtype=np.int64)
        self._top = 0

    def __len__(self) -> int:
        return self._top

    def push(self, offsets: I64) -> None:
        top = self._top + len(offsets)
        if top > len(self._items):
            grown = np.empty(max(top, 2 * len(self._items)), dtype=np.int64)
            grown[: self._top] = self._items[: self._top]
            self._items = grown
        self._items[self._top : top] = offsets
        self._top = top

    def pop(self, count: int) -> I64:
        top = self._top - count
        taken = self._items[top : self._top][::-1].copy()
        self._top = top
        return taken

    def drop_range(self, start: int, end: int) -> None:
        items = self._items[: self._top]
        kept = items[(items < start) | (items >= end)]
        self._items[: len(kept)] = kept
        self._top = len(kept)
