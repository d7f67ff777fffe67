"""Result memory that is used again: touching fresh pages costs an order of magnitude more than copying into them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.memory import prefault

SMALL_BYTES = 128 << 10  # below this the allocator itself hands back warm memory
IDLE_BYTES_MAX = 1 << 30


class ArenaPool:
    """Hands out uint8 arrays. Memory comes back by itself when the array and every view of it are gone."""

    def __init__(self, idle_bytes_max: int = IDLE_BYTES_MAX) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """An array of that many bytes, content undefined."""
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, dtype=np.uint8)
        capacity = _rounded(size_bytes)
        memory = self._reuse(capacity) or _fresh(capacity)
        # numpy keeps the ctypes object alive through every view, and it can be watched, which a mapping can't.
        raw = (ctypes.c_ubyte * capacity).from_buffer(memory)
        weakref.finalize(raw, self._give_back, memory, capacity)
        return np.frombuffer(raw, dtype=np.uint8)[:size_bytes]

    def _reuse(self, capacity: int) -> mmap.mmap | None:
        with self._lock:
            idle = self._idle.get(capacity)
            if not idle:
                return None
            self._idle_bytes -= capacity
            return idle.pop()

    def _give_back(self, memory: mmap.mmap, capacity: int) -> None:
        with self._lock:
            if self._idle_bytes + capacity <= self._idle_bytes_max:
                self._idle.setdefault(capacity, []).append(memory)
                self._idle_bytes += capacity


def _rounded(size_bytes: int) -> int:
    """Up to an eighth of the power of two, so that calls of about the same size share memory."""
    step = max(mmap.PAGESIZE, (1 << (size_bytes.bit_length() - 1)) // 8)
    return -(-size_bytes // step) * step


def _fresh(capacity: int) -> mmap.mmap:
    memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    prefault(np.frombuffer(memory, dtype=np.uint8))
    return memory
