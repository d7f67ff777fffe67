"""Slab files: where payload lies. Slots by size class, one size a slab at a time.

```
<folder>/slab-00000.kv   slab_bytes each, preallocated when first used, deleted when a flush leaves it empty
slot                     payload from its start, to the next 4 KiB with anything
```

A location is the byte offset in the row of all slabs: slab number times slab bytes, plus the offset in the file.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.server.allocator import SlotAllocator
from kvstore.server.tiers.disk.files import ALIGN_BYTES, PIECES_MAX, File, Files

log = logging.getLogger("kvstore")

I64 = NDArray[np.int64]
RUN_BYTES_MAX = 4 << 20  # of one read or write: larger ones gain nothing, and smaller ones overlap better
_SLABS_WANTED = 32
_SLAB_BYTES_MIN, _SLAB_BYTES_MAX = 1 << 20, 1 << 30
_KEEP_FREE_BYTES = 64 << 20  # left on the file system for the catalog


def slab_bytes_for(capacity_bytes: int) -> int:
    """Size of the slabs of a new tier: a power of two that makes about 32 of them, at most 1 GiB."""
    wanted = max(1, capacity_bytes // _SLABS_WANTED)
    return min(max(1 << (wanted.bit_length() - 1), _SLAB_BYTES_MIN), _SLAB_BYTES_MAX)


def padded(size_bytes: int) -> int:
    """Bytes read or written for a block of this size."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that lie one behind the other: one vectored call."""

    slab: int
    offset: int  # in the file
    rows: list[int]


class Slabs:
    """The slab files of one folder and which of their slots are given out. One thread owns it; files are used by many.

    Args:
        capacity_bytes: all slabs together stay within it.
        slab_bytes: size of one.
    """

    def __init__(self, folder: Path, files: Files, capacity_bytes: int, slab_bytes: int) -> None:
        self._folder = folder
        self._fs = files
        self.slab_bytes = slab_bytes
        self.slabs_max = capacity_bytes // slab_bytes
        self.allocator = SlotAllocator(self.slabs_max * slab_bytes, slab_bytes)
        self._files: dict[int, File] = {}
        self.refused_growth = 0  # times that the file system had no room for another slab
        self._starved: set[int] = set()  # slabs that it had no room for

    @property
    def disk_bytes(self) -> int:
        """What all slab files take, as `du` sees it."""
        return len(self._files) * self.slab_bytes

    @property
    def reach_bytes(self) -> int:
        """What the slabs can come to, as far as is known: the capacity, or less on a full file system."""
        return self.disk_bytes if self._starved else self.slabs_max * self.slab_bytes

    def take_over(self) -> I64:
        """Open the slabs of a former run, out of use until `restore`; their numbers. Others are deleted."""
        for path in sorted(self._folder.glob("slab-*.kv")):
            number = _number_of(path)
            if number is not None and number < self.slabs_max:
                file = self._fs.open(path)
                if file.size() == self.slab_bytes:
                    self._files[number] = file
                    continue
                file.close()
                log.warning("%s is not %d bytes long: an unfinished slab, dropped", path, self.slab_bytes)
            self._fs.remove(path)
        numbers = np.array(sorted(self._files), dtype=np.int64)
        self.allocator.withhold(numbers)
        return numbers

    def has(self, locations: I64, sizes: I64) -> NDArray[np.bool_]:
        """Which slots lie in slabs that are there."""
        slabs = locations // self.slab_bytes
        ends_inside = (locations % self.slab_bytes + sizes <= self.slab_bytes) & (locations % ALIGN_BYTES == 0)
        return np.isin(slabs, list(self._files)) & ends_inside

    def restore(self, number: int, slot_bytes: int, used: I64) -> None:
        """Put a taken over slab into use: its slot size and the locations used. With none, the file is deleted."""
        self.allocator.restore(number, slot_bytes, used)
        if not len(used):
            self._delete(number)

    def allocate(self, slot_bytes: int, count: int) -> I64:
        """Up to `count` slots, with their files there; fewer when slabs or the file system have no more room."""
        locations = self.allocator.allocate(slot_bytes, count)
        fresh = [number for number in np.unique(locations // self.slab_bytes).tolist() if number not in self._files]
        failed = next((number for number in fresh if not self._create(number)), None)
        if failed is None:
            return locations
        there = np.isin(locations // self.slab_bytes, list(self._files))
        self.allocator.free(locations[~there])
        self._starve()
        rest = self.allocator.allocate(slot_bytes, count - int(np.count_nonzero(there)))
        return np.concatenate([locations[there], rest])

    def grow_again(self) -> None:
        """Try again, at the next need, to make the slabs that there was no room for."""
        for number in self._starved:
            self.allocator.restore(number, 0, np.zeros(0, np.int64))
        self._starved.clear()

    def free(self, locations: I64) -> None:
        """Take slots back. What lies in a slab that isn't restored yet is left to `restore`."""
        self.allocator.free(locations[~self.allocator.is_withheld(locations)])

    def trim(self) -> None:
        """Delete the files of slabs without a used slot."""
        self.allocator.drop_empty_chunks()
        in_use = set(self.allocator.assigned_chunks().tolist())
        for number in sorted(self._files.keys() - in_use):
            if not self.allocator.is_withheld(np.array([number * self.slab_bytes]))[0]:
                self._delete(number)

    def file(self, number: int) -> File:
        """The file of a slab that is there."""
        return self._files[number]

    def runs(self, locations: I64, sizes: I64) -> Iterator[Run]:
        """Cut n slots into calls: neighbours together, ordered by where they lie."""
        order: list[int] = np.argsort(locations, kind="stable").tolist()
        slabs: list[int] = (locations // self.slab_bytes).tolist()
        starts: list[int] = locations.tolist()
        lengths: list[int] = [padded(size) for size in sizes.tolist()]
        rows: list[int] = []
        end: int = 0
        run_bytes: int = 0
        for row in order:
            joins = (
                len(rows) > 0
                and starts[row] == end
                and slabs[row] == slabs[rows[0]]
                and run_bytes + lengths[row] <= RUN_BYTES_MAX
                and len(rows) < PIECES_MAX
            )
            if not joins and rows:
                yield Run(slabs[rows[0]], starts[rows[0]] % self.slab_bytes, rows)
                rows, run_bytes = [], 0
            rows.append(row)
            run_bytes += lengths[row]
            end = starts[row] + lengths[row]
        if rows:
            yield Run(slabs[rows[0]], starts[rows[0]] % self.slab_bytes, rows)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def delete_all(self) -> None:
        """Delete every slab file, those of nobody too."""
        self.close()
        for path in self._folder.glob("slab-*.kv"):
            self._fs.remove(path)

    def _path(self, number: int) -> Path:
        return self._folder / f"slab-{number:05d}.kv"

    def _create(self, number: int) -> bool:
        try:
            if self._fs.free_bytes() < self.slab_bytes + _KEEP_FREE_BYTES:
                raise OSError(errno.ENOSPC, "kept free for the catalog")
            self._files[number] = self._fs.create(self._path(number), self.slab_bytes)
        except OSError as error:
            if not self._starved:
                log.warning("no room for another slab (%s); the tier goes on with %d", error, len(self._files))
            self.refused_growth += 1
            return False
        return True

    def _starve(self) -> None:
        """Go on with the slabs that are there."""
        self.allocator.drop_empty_chunks()
        missing = np.array(sorted(set(range(self.slabs_max)) - self._files.keys() - self._starved), dtype=np.int64)
        self.allocator.withhold(missing)
        self._starved.update(missing.tolist())

    def _delete(self, number: int) -> None:
        self._files.pop(number).close()
        self._fs.remove(self._path(number))


def _number_of(path: Path) -> int | None:
    digits = path.stem.removeprefix("slab-")
    return int(digits) if digits.isdigit() else None
