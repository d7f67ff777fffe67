"""The disk's own speed: direct file I/O of whole blocks, with nothing but threads around it.

The file has the shape that a batch of the tier's has: preallocated, written before, opened with O_DIRECT where the file
system has that, one read or write per block, as many threads as the tier uses, synced after the writes of a batch.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import BenchError
from kvstore.core.errors import UsageError

U8 = NDArray[np.uint8]

THREADS: Final = 4  # each way. More gained nothing on the project's machine
_PIECE_BYTES: Final = 16 << 20  # of filling the file


class DirectFile:
    """A file of blocks beside memory of the same shape.

    Args:
        path: removed when it is closed.
        memory: page-aligned, prefaulted uint8 of shape (blocks, block_bytes); what is written comes from it, and what
            is read goes there.

    Raises:
        UsageError: the file can't be made, or the disk is full.
    """

    def __init__(self, path: Path, memory: U8) -> None:
        self._path = path
        self._rows = [memoryview(row) for row in memory]
        self._block_bytes = memory.shape[1]
        try:
            self._fd, self.direct = _open(path)
        except OSError as cause:
            raise UsageError(f"--dir {path.parent}: {cause.strerror}; allowed: a folder this user may write") from cause
        self._writers = ThreadPoolExecutor(THREADS, thread_name_prefix="direct-write")
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="direct-read")
        try:
            self._fill(memory)
        except OSError as cause:
            self.close()
            raise UsageError(
                f"--dir {path.parent}: {memory.nbytes} bytes can't be written: {cause.strerror}; allowed: a folder with room"
            ) from cause

    def write(self, rows: Iterable[int]) -> float:
        """Write these blocks and sync; seconds."""
        begin = time.perf_counter()
        self._end_write(self._start(self._writers, self._write_block, rows))
        return time.perf_counter() - begin

    def read(self, rows: Iterable[int]) -> float:
        """Read these blocks; seconds."""
        begin = time.perf_counter()
        _wait(self._start(self._readers, self._read_block, rows))
        return time.perf_counter() - begin

    def write_and_read(self, write: Iterable[int], read: Iterable[int]) -> float:
        """Both at the same time, until both are done and the writes are synced; seconds."""
        begin = time.perf_counter()
        writing = self._start(self._writers, self._write_block, write)
        reading = self._start(self._readers, self._read_block, read)
        self._end_write(writing)
        _wait(reading)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Remove the file."""
        self._writers.shutdown()
        self._readers.shutdown()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def _fill(self, memory: U8) -> None:
        os.posix_fallocate(self._fd, 0, memory.nbytes)
        # What was preallocated but never written reads as zeros without the disk being asked, and is slower to write.
        flat = memoryview(memory.reshape(-1))
        for offset in range(0, len(flat), _PIECE_BYTES):
            piece = flat[offset : offset + _PIECE_BYTES]
            if os.pwrite(self._fd, piece, offset) != len(piece):
                raise BenchError(f"{self._path}: a write was cut short")
        os.fdatasync(self._fd)

    def _start(
        self, threads: ThreadPoolExecutor, action: Callable[[int], None], rows: Iterable[int]
    ) -> list[Future[None]]:
        return [threads.submit(action, row) for row in rows]

    def _end_write(self, writing: list[Future[None]]) -> None:
        _wait(writing)
        os.fdatasync(self._fd)

    def _write_block(self, row: int) -> None:
        if os.pwritev(self._fd, [self._rows[row]], row * self._block_bytes) != self._block_bytes:
            raise BenchError(f"{self._path}: a write was cut short")

    def _read_block(self, row: int) -> None:
        if os.preadv(self._fd, [self._rows[row]], row * self._block_bytes) != self._block_bytes:
            raise BenchError(f"{self._path}: a read was cut short")


def _open(path: Path) -> tuple[int, bool]:
    """A new file, and whether it is direct: some file systems refuse the flag at `open`, others at the first write."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        return os.open(path, flags, 0o600), False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        os.pwrite(fd, page, 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    return fd, True


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()
