"""A file layer for the SSD tier that fails on demand."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.server.tiers.disk.files import File, Files


class FaultyFiles:
    """Passes everything on to real files, except what it has been told to do wrong. Thread-safe as the real ones.

    Attributes:
        full: no room: `create` raises ENOSPC. (What is preallocated can still be written.)
        broken: every write raises EIO.
        lose_writes: writes and syncs report success and do nothing, as after a power cut with a lying disk.
        reads: vectored reads so far.
    """

    def __init__(self, real: Files) -> None:
        self._real = real
        self.full = False
        self.broken = False
        self.lose_writes = False
        self.reads = 0
        self._faults: list[Callable[[Callable[[], int], Sequence[memoryview]], int]] = []
        self._lock = threading.Lock()

    def fail_next_read(self) -> None:
        """One read raises EIO."""

        def fail(_: Callable[[], int], __: Sequence[memoryview]) -> int:
            raise OSError(errno.EIO, "injected")

        self._faults.append(fail)

    def shorten_next_read(self, size_bytes: int) -> None:
        """One read returns no more than that, and the bytes behind it are left alone."""

        def shorten(read: Callable[[], int], pieces: Sequence[memoryview]) -> int:
            before = [bytes(piece) for piece in pieces]
            done = min(read(), size_bytes)
            start = 0
            for piece, old in zip(pieces, before, strict=True):
                kept = min(max(0, done - start), len(piece))
                piece[kept:] = old[kept:]
                start += len(piece)
            return done

        self._faults.append(shorten)

    def flip_in_next_read(self, position: int) -> None:
        """One bit of one byte of one read is wrong; `position` counts from its start, and wraps."""

        def flip(read: Callable[[], int], pieces: Sequence[memoryview]) -> int:
            done = read()
            at = position % done
            for piece in pieces:
                if at < len(piece):
                    piece[at] ^= 1
                    break
                at -= len(piece)
            return done

        self._faults.append(flip)

    def hang_next_read(self) -> threading.Event:
        """One read does not return before this event is set."""
        released = threading.Event()

        def hang(read: Callable[[], int], _: Sequence[memoryview]) -> int:
            released.wait()
            return read()

        self._faults.append(hang)
        return released

    def create(self, path: Path, size_bytes: int) -> File:
        if self.full:
            raise OSError(errno.ENOSPC, "injected")
        return _FaultyFile(self._real.create(path, size_bytes), self)

    def open(self, path: Path) -> File:
        return _FaultyFile(self._real.open(path), self)

    def remove(self, path: Path) -> None:
        self._real.remove(path)

    def free_bytes(self) -> int:
        return self._real.free_bytes()

    def read(self, read: Callable[[], int], pieces: Sequence[memoryview]) -> int:
        """A read of one of the files, with the next fault if there is one."""
        with self._lock:
            self.reads += 1
            fault = self._faults.pop(0) if self._faults else None
        return fault(read, pieces) if fault else read()


class _FaultyFile:
    def __init__(self, real: File, faults: FaultyFiles) -> None:
        self._real = real
        self._faults = faults
        self.direct = real.direct

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> int:
        if self._faults.broken:
            raise OSError(errno.EIO, "injected")
        if self._faults.lose_writes:
            return sum(len(piece) for piece in pieces)
        return self._real.pwritev(pieces, offset)

    def preadv(self, pieces: Sequence[memoryview], offset: int) -> int:
        return self._faults.read(lambda: self._real.preadv(pieces, offset), pieces)

    def fdatasync(self) -> None:
        if not self._faults.lose_writes:
            self._real.fdatasync()

    def size(self) -> int:
        return self._real.size()

    def close(self) -> None:
        self._real.close()
