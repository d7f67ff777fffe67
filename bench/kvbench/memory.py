"""Memory that benchmarks copy through: prefaulted, for the first touch of a page costs more than ten copies of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import UsageError
from kvstore.core.sizes import format_size
from kvstore.transport.memory import create_segment, map_segment, prefault, private_arena, read_only

U8 = NDArray[np.uint8]


def arena(size_bytes: int) -> U8:
    """Private memory, every page present, uint8 of shape (size_bytes,)."""
    memory = private_arena(size_bytes)
    prefault(memory)
    return memory


class SharedArena:
    """Memory that several processes map, each from the path. Gone with the last mapping."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._fd = create_segment(name, size_bytes)
        self._reading_fd = read_only(self._fd)

    @property
    def path(self) -> str:
        """Where other processes of this user open it while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def reading_path(self) -> str:
        """The same, for reading only."""
        return f"/proc/{os.getpid()}/fd/{self._reading_fd}"

    def map(self) -> U8:
        """All of it, writable, not yet touched."""
        return map_segment(self._fd, writable=True)

    def close(self) -> None:
        """Close this process's descriptors; mappings stay valid."""
        os.close(self._fd)
        os.close(self._reading_fd)


def open_shared(path: str, *, writable: bool) -> U8:
    """Map another process's `SharedArena`, every page present in this process's page table."""
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        memory = map_segment(fd, writable=writable)
    finally:
        os.close(fd)
    prefault(memory)
    return memory


def require_available(needed_bytes: int, hint: str) -> None:
    """Refuse a run that would push the machine into swap, or be killed.

    Raises:
        UsageError: less memory is available; `hint` says what to change.
    """
    available = memory_bytes("MemAvailable")
    if available is not None and needed_bytes > available:
        spare = format_size(available >> 20 << 20)
        raise UsageError(f"this run needs {format_size(needed_bytes)} of memory, {spare} are available; {hint}")


def memory_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes; None where there is no such file or field."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) << 10 if values else None
