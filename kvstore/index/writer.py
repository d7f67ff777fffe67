"""Writing the block index: one writer, the shard that owns it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import IndexFull
from kvstore.core.states import BlockState, Tier
from kvstore.index.layout import (
    I64,
    MAGIC,
    POOL_UNIT_BYTES,
    SLOTS_PER_BUCKET,
    U64,
    VERSION,
    Header,
    Table,
    Word,
    checksum,
    home_buckets,
    tags_of,
)

_SHIFT16 = np.uint64(16)
_SHIFT32 = np.uint64(32)
_SHIFT48 = np.uint64(48)
_MASK32 = np.uint64(0xFFFFFFFF)
_SEARCH_MAX = 256  # entries tried as stepping stones before the table counts as full


class IndexWriter:
    """The table's only writer. A block is named by its handle: a small dense number that the shard gives out.

    Args:
        memory: zeroed uint8 memory of `index_bytes(buckets)` bytes, shared with the readers.
        buckets: number of buckets, 8 entries each.
        handles: handles lie in [0, handles).
    """

    def __init__(self, memory: NDArray[np.uint8], buckets: int, handles: int) -> None:
        self._table = Table(memory, buckets)
        self._position: I64 = np.full(handles, -1, dtype=np.int64)
        header = self._table.header
        header[Header.BUCKETS] = buckets
        header[Header.VERSION] = VERSION
        header[Header.MAGIC] = MAGIC

    @property
    def resident(self) -> int:
        """Entries in use."""
        return int(self._table.header[Header.RESIDENT])

    @property
    def buckets(self) -> int:
        """Buckets of the table."""
        return self._table.buckets

    @property
    def slots(self) -> int:
        """Entries that the table has room for."""
        return self._table.buckets * SLOTS_PER_BUCKET

    def insert(
        self,
        keys: NDArray[np.void],
        generations: U64,
        offsets: I64,
        sizes: I64,
        handles: I64,
        namespace: int,
        layers: int,
        *,
        tier: Tier = Tier.DRAM,
    ) -> None:
        """Add n blocks: reserved ones in the pool, or committed ones on the SSD. Keys must be absent and distinct,
        which the shard has just checked.

        Raises:
            IndexFull: no place for one of them; none was added.
        """
        count = len(keys)
        self._reach(int(handles.max(initial=-1)) + 1)
        entries = np.empty((count, 8), dtype=np.uint64)
        entries[:, :3] = keys.view(np.uint64).reshape(count, 3)
        entries[:, Word.META] = handles.astype(np.uint64) | np.uint64(namespace << 32 | layers << 48)
        state, ready = (BlockState.RESERVED, 0) if tier is Tier.DRAM else (BlockState.COMMITTED, layers)
        _fill(entries, generations, offsets, sizes, _status(state, ready, generations, tier))
        self._place(entries, handles)

    def relocate(self, handles: I64, generations: U64, offsets: I64, tier: Tier) -> None:
        """Committed blocks are somewhere else from now on, under new generations; with LOADING no layer of them is
        there yet, and `set_status` says which are. Readers never take the old place for the new one: while the words
        change there is no status, so they look again.
        """
        table = self._table
        position = self._position[handles]
        entries = table.entries[position]
        sizes = (entries[:, Word.LOCATION] >> _SHIFT32).astype(np.int64)
        layers = entries[:, Word.META] >> _SHIFT48 if tier is not Tier.LOADING else 0
        table.status[position] = 0
        _fill(entries, generations, offsets, sizes, _status(BlockState.COMMITTED, layers, generations, tier))
        status = entries[:, Word.STATUS].copy()
        entries[:, Word.STATUS] = 0
        table.entries[position] = entries
        table.status[position] = status

    def set_status(
        self, handles: I64, state: BlockState, layers_ready: int | NDArray[np.integer], tier: Tier = Tier.DRAM
    ) -> None:
        """Set state, tier and watermark of blocks: one aligned 8-byte store each."""
        position = self._position[handles]
        generations = self._table.entries[position, Word.GENERATION]
        self._table.status[position] = _status(state, layers_ready, generations, tier)

    def remove(self, handles: I64) -> None:
        """Take blocks out. When this returns no reader accepts them, so their slots may be given away."""
        position = self._position[handles]
        table = self._table
        table.status[position] = 0
        table.tags[position // SLOTS_PER_BUCKET, position % SLOTS_PER_BUCKET] = 0
        table.entries[position, Word.GENERATION] = 0
        self._position[handles] = -1
        table.header[Header.RESIDENT] -= np.uint64(len(handles))

    def read(self, handles: I64) -> U64:
        """Entries of blocks that are in the table, shape (n, 8)."""
        return self._table.entries[self._position[handles]]

    def all_entries(self) -> U64:
        """A copy of every entry in use, shape (resident, 8), in table order."""
        return self._table.entries[np.flatnonzero(self._table.tags.reshape(-1))]

    def move_to(self, larger: IndexWriter) -> None:
        """Fill an empty, larger table with every entry of this one, then point the readers of this one away."""
        entries = self.all_entries()
        handles = (entries[:, Word.META] & _MASK32).astype(np.int64)
        larger._reach(len(self._position))
        larger._place(entries, handles)
        self._table.header[Header.RETIRED] = 1

    def note_warm(self, warm_bytes: int) -> None:
        """Publish how much of the pool is present in memory."""
        self._table.header[Header.WARM] = warm_bytes

    def _reach(self, handles: int) -> None:
        """Make room for handles below this number."""
        known = len(self._position)
        if handles > known:
            self._position = np.concatenate([self._position, np.full(max(known, handles - known), -1, np.int64)])

    def _place(self, entries: U64, handles: I64) -> None:
        table = self._table
        homes = home_buckets(entries, table.buckets)
        position = np.full(len(entries), -1, dtype=np.int64)
        # Two rounds in bulk: the emptier of the two buckets first, then for those that found it taken by others of the
        # same batch whichever has room now. What is left (full buckets) goes one by one.
        for _ in range(2):
            rest = np.flatnonzero(position < 0)
            if not len(rest):
                break
            used = np.count_nonzero(table.tags[homes[rest]], axis=2)
            emptier = (used[:, 1] < used[:, 0]).astype(np.int64)
            target = homes[rest, emptier]
            place = self._free_places(target)
            fits = np.flatnonzero(place >= 0)
            position[rest[fits]] = place[fits]
            self._write(place[fits], entries[rest[fits]])
        self._position[handles] = position
        for row in np.flatnonzero(position < 0).tolist():
            place = self._make_room(homes[row].tolist())
            if place < 0:
                self._take_back(handles)
                raise IndexFull(f"the index is full: {self.resident} entries in {self.slots} slots")
            self._position[handles[row]] = place
            self._write(np.array([place]), entries[row : row + 1])
        table.header[Header.RESIDENT] += np.uint64(len(entries))

    def _take_back(self, handles: I64) -> None:
        position = self._position[handles]
        written = position[position >= 0]
        self._table.status[written] = 0
        self._table.tags.reshape(-1)[written] = 0
        self._position[handles] = -1

    def _free_places(self, buckets: I64) -> I64:
        """A free place in each named bucket, all different; -1 where the bucket has too few. Shape (n,)."""
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        group_start = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
        rank = np.arange(len(ordered)) - group_start
        free = self._table.tags[ordered] == 0
        chosen = free & (np.cumsum(free, axis=1) == (rank + 1)[:, None])
        slot = np.argmax(chosen, axis=1)
        places = np.full(len(buckets), -1, dtype=np.int64)
        places[order] = np.where(chosen.any(axis=1), ordered * SLOTS_PER_BUCKET + slot, -1)
        return places

    def _write(self, places: I64, entries: U64) -> None:
        table = self._table
        table.entries[places] = entries
        # The tag last: a reader that sees it finds the entry whole.
        table.tags.reshape(-1)[places] = tags_of(entries[:, Word.KEY_LO])

    def _make_room(self, homes: list[int]) -> int:
        """A place in one of two full buckets, by moving entries to their other bucket (breadth first); -1 if there is
        none.
        """
        table = self._table
        paths: list[tuple[int, ...]] = [
            (bucket * SLOTS_PER_BUCKET + slot,) for bucket in homes for slot in range(SLOTS_PER_BUCKET)
        ]
        for path in paths:
            bucket = path[-1] // SLOTS_PER_BUCKET
            free = np.flatnonzero(table.tags[bucket] == 0)
            if len(free):
                return self._shift(path[:-1], bucket * SLOTS_PER_BUCKET + int(free[0]))
            if len(paths) >= _SEARCH_MAX:
                continue
            entry = table.entries[path[-1] : path[-1] + 1]
            both = home_buckets(entry, table.buckets)[0].tolist()
            other = both[0] if both[1] == bucket else both[1]
            if other != bucket:
                paths.extend((*path, other * SLOTS_PER_BUCKET + slot) for slot in range(SLOTS_PER_BUCKET))
        return -1

    def _shift(self, path: tuple[int, ...], free: int) -> int:
        """Move each entry of the path one step on, last first; the place that this frees is returned."""
        table = self._table
        tags = table.tags.reshape(-1)
        for place in reversed(path):
            # Copy, publish the copy, then clear the original: a reader may see it twice, or (counted) not at all.
            table.header[Header.MOVES] += np.uint64(1)
            table.entries[free] = table.entries[place]
            tags[free] = tags[place]
            tags[place] = 0
            table.status[place] = 0
            self._position[int(table.entries[free, Word.META] & _MASK32)] = free
            table.header[Header.MOVES] += np.uint64(1)
            free = place
        return free


def _fill(entries: U64, generations: U64, offsets: I64, sizes: I64, status: U64) -> None:
    entries[:, Word.GENERATION] = generations
    entries[:, Word.LOCATION] = (offsets // POOL_UNIT_BYTES).astype(np.uint64) | (sizes.astype(np.uint64) << _SHIFT32)
    entries[:, Word.STATUS] = status
    entries[:, Word.CHECK] = checksum(entries)


def _status(
    state: BlockState, layers_ready: int | NDArray[np.integer], generations: U64, tier: Tier = Tier.DRAM
) -> U64:
    ready = np.asarray(layers_ready, dtype=np.uint64)
    return np.uint64(state | tier << 8) | (ready << _SHIFT16) | ((generations & _MASK32) << _SHIFT32)
