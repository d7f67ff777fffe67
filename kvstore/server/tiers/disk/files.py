"""The file layer: the few calls that the tier makes, so that tests can put faults between it and the disk.

Calls are the system's own: they may do less than asked, and raise `OSError`. Buffers and offsets are multiples of
`ALIGN_BYTES`, as O_DIRECT wants them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

log = logging.getLogger("kvstore")

ALIGN_BYTES: Final = 4096
PIECES_MAX: Final = 512  # of one call; the kernel takes 1,024


class File(Protocol):
    """An open file of fixed size."""

    @property
    def direct(self) -> bool:
        """Whether the disk itself reads and writes the buffers: the page cache is not in between."""
        ...

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> int:
        """Write the pieces one behind the other; bytes written."""
        ...

    def preadv(self, pieces: Sequence[memoryview], offset: int) -> int:
        """Fill the pieces one after the other; bytes read, 0 at the end of the file."""
        ...

    def fdatasync(self) -> None:
        """Return when all that was written is on the medium."""
        ...

    def size(self) -> int:
        """Size in bytes."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class Files(Protocol):
    """Files of one folder."""

    def create(self, path: Path, size_bytes: int) -> File:
        """A new file with its blocks preallocated, in place of one of that name; nothing is left where that fails."""
        ...

    def open(self, path: Path) -> File:
        """An existing file."""
        ...

    def remove(self, path: Path) -> None:
        """Delete a file; none there is fine."""
        ...

    def free_bytes(self) -> int:
        """What the file system has left."""
        ...


class SystemFile:
    """A file of the operating system. The GIL is free in every call."""

    __slots__ = ("_fd", "direct")

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self.direct = direct

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(self._fd, pieces, offset)

    def preadv(self, pieces: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._fd, pieces, offset)

    def fdatasync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)


class SystemFiles:
    """Files in a folder, with O_DIRECT where its file system has it.

    Args:
        direct: False turns O_DIRECT off; True uses it if a trial shows that it works, and says so once if not.
    """

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        self._folder = folder
        self.direct = direct and _direct_works(folder)
        if direct and not self.direct:
            log.warning("%s: this file system has no O_DIRECT; plain I/O is used, through the page cache", folder)
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def create(self, path: Path, size_bytes: int) -> SystemFile:
        fd = os.open(path, self._flags | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except BaseException:  # whatever it was, a file of half its size must not stay
            os.close(fd)
            path.unlink()
            raise
        sync_folder(path.parent)
        return SystemFile(fd, direct=self.direct)

    def open(self, path: Path) -> SystemFile:
        return SystemFile(os.open(path, self._flags), direct=self.direct)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_fully(file: File, pieces: Sequence[memoryview], offset: int) -> None:
    """Fill all pieces.

    Raises:
        OSError: the disk's own, or EIO where the file ends before.
    """
    _complete(file.preadv, pieces, offset, "the file ends before the block")


def write_fully(file: File, pieces: Sequence[memoryview], offset: int) -> None:
    """Write all pieces.

    Raises:
        OSError: the disk's own.
    """
    _complete(file.pwritev, pieces, offset, "nothing was written")


def _complete(call: _VectoredCall, pieces: Sequence[memoryview], offset: int, none_left: str) -> None:
    wanted = sum(len(piece) for piece in pieces)
    done = call(pieces, offset)
    if done == wanted:
        return  # the usual case
    rest = list(pieces)
    while True:
        # What isn't a whole number of pages can't be continued with O_DIRECT: the last page is done again.
        done -= done % ALIGN_BYTES
        if done <= 0:
            raise OSError(errno.EIO, none_left)
        offset += done
        wanted -= done
        while rest and done >= len(rest[0]):
            done -= len(rest.pop(0))
        if done:
            rest[0] = rest[0][done:]
        done = call(rest, offset)
        if done == wanted:
            return


class _VectoredCall(Protocol):
    def __call__(self, pieces: Sequence[memoryview], offset: int, /) -> int: ...


def _direct_works(folder: Path) -> bool:
    """Try it: some file systems refuse the flag at `open`, others only at the first read or write."""
    trial = folder / f"direct-{os.getpid()}.trial"
    page = mmap.mmap(-1, ALIGN_BYTES)
    try:
        fd = os.open(trial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        return False
    finally:
        trial.unlink(missing_ok=True)
    try:
        return os.pwrite(fd, page, 0) == ALIGN_BYTES and os.preadv(fd, [page], 0) == ALIGN_BYTES
    except OSError as error:
        return error.errno == errno.ENOSPC  # a full disk says nothing about the flag
    finally:
        os.close(fd)
