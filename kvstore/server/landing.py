"""Landing space: memory of a shard that clients may write to from afar. Blocks get into the pool from there only by the
hand of a data port worker, which compares their sums on the way.

The pool itself is never written to from afar. A write that was given up can still arrive, long after its slot has
become another block's; here it can spoil no more than what is being put.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.memory import map_segment

GRANT_BYTES_MAX = 4 << 20  # of one connection: two halves, one being filled while the other is taken


@dataclass(frozen=True, slots=True)
class Grant:
    """A piece of landing space that is one connection's alone. No bytes: there was none left."""

    start: int  # in the shard's landing space
    memory: NDArray[np.uint8]


class LandingSpace:
    """One worker's part of a shard's landing space. Threads may share it.

    Args:
        fd: the memory of all workers' parts.
        start, size_bytes: of this worker's.
    """

    def __init__(self, fd: int, start: int, size_bytes: int) -> None:
        self._memory = map_segment(fd, writable=True)[start : start + size_bytes]
        self._start = start
        self._lock = threading.Lock()
        each = min(GRANT_BYTES_MAX, size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._each = each
        self._free = [place * each for place in range(size_bytes // each)][::-1] if each else []

    def grant(self, wanted_bytes: int) -> Grant:
        """A piece of at most that size, until `take_back`."""
        size = min(wanted_bytes, self._each)
        with self._lock:
            if not self._free or size < mmap.PAGESIZE:
                return Grant(self._start, self._memory[:0])
            place = self._free.pop()
        return Grant(self._start + place, self._memory[place : place + size])

    def take_back(self, grant: Grant) -> None:
        """The end of its connection. What its client still has on the way may arrive in the next one's put, and fail
        it by its sums.
        """
        if len(grant.memory):
            with self._lock:
                self._free.insert(0, grant.start - self._start)  # the longer it rests, the less is still on the way
