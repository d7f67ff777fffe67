"""Shared memory between the processes of one host: anonymous files passed over a local socket.

`memfd` rather than `/dev/shm` files: nothing is left behind by a killed server (the kernel frees the memory with the
last mapping), a container's 64 MiB `/dev/shm` is no limit, and who may map it is decided by who is handed the
descriptor. A descriptor opened read-only can't be mapped writable, so readers can't damage the index.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
# Where a pool begins in its segment. C libraries copy up to some MiB by microcode (`rep movsb`), which runs at a fourth
# to half of its speed when the target lies up to 31 bytes above the source within a page (AMD Zen 3 and 4: 3 to 7 GiB/s
# instead of 12). Slots begin at the same place of a page, a caller's large array 0 (mmap), 16 (malloc) or 64 bytes
# (aligned allocation) into one: half a page away no such pair meets, in either direction.
POOL_START_BYTES = 2048
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create_segment(name: str, size_bytes: int) -> int:
    """A new anonymous shared file of that size, zeroed, no memory used until it is touched; returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


def read_only(fd: int) -> int:
    """A second descriptor of the same segment through which it can only be read."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_segment(fd: int, *, writable: bool) -> NDArray[np.uint8]:
    """The whole segment as a uint8 array. It stays mapped until the array and every view of it are gone."""
    size = os.fstat(fd).st_size
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def create_pool(name: str, size_bytes: int) -> int:
    """A segment for blocks, to be mapped by `map_pool`; returns its descriptor."""
    return create_segment(name, POOL_START_BYTES + size_bytes)


def map_pool(fd: int, *, writable: bool) -> NDArray[np.uint8]:
    """The blocks' part of such a segment, from the middle of a page on (see `POOL_START_BYTES`)."""
    return map_segment(fd, writable=writable)[POOL_START_BYTES:]


def private_arena(size_bytes: int) -> NDArray[np.uint8]:
    """Private memory for buffers that are reused: huge pages where the kernel has them, untouched so far."""
    mapping = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)[:size_bytes]


def prefault(memory: NDArray[np.uint8]) -> None:
    """Make every page of this memory present, so that no copy pays for page faults later. Best effort, releases the
    GIL.

    First touch of a page costs an order of magnitude more than copying into it (docs/benchmarks.md).
    """
    if not len(memory):
        return
    address = memory.ctypes.data
    start = address & ~(mmap.PAGESIZE - 1)
    length = address + len(memory) - start
    advice = _MADV_POPULATE_WRITE if memory.flags.writeable else _MADV_POPULATE_READ
    if _libc.madvise(start, length, advice) != 0:
        # A kernel before 5.14: reading one byte a page makes it present. (Writing could undo another process's write.)
        memory[:: mmap.PAGESIZE].max()
