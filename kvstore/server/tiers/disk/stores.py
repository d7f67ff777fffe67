"""Storing: which blocks get which slots, what is evicted for them, and their way to the slabs."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.tiers.disk.books import Books
from kvstore.server.tiers.disk.catalog import NamespaceRow
from kvstore.server.tiers.disk.commits import Commits, Storing, Written
from kvstore.server.tiers.disk.directory import Life
from kvstore.server.tiers.disk.messages import Store, Stored, StoreStatus
from kvstore.server.tiers.disk.payload import Geometry, write_run
from kvstore.server.tiers.disk.slabs import Run
from kvstore.server.tiers.disk.workers import Scratch, Workers

log = logging.getLogger("kvstore")

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

AHEAD_BYTES_MAX: Final = (
    256 << 20
)  # kept free ahead of need, so that a store seldom waits for an eviction to be durable
AHEAD_SHARE: Final = 16  # of the capacity, where that is less
NUMBERS_MAX: Final = 1 << 14  # namespaces; all of them fit one message


class Stores:
    """See the module."""

    def __init__(self, books: Books, commits: Commits, writers: Workers) -> None:
        self._books = books
        self._commits = commits
        self._writers = writers

    def store(self, request: int, store: Store) -> None:
        """Begin with a STORE."""
        geometry = Geometry(store.layers, store.layer_bytes)
        self._books.check_offsets(store.rows["offset"], geometry.size)
        count = len(store.rows)
        statuses = np.full(count, StoreStatus.FAILED, dtype=np.uint8)
        namespace = self._namespace(store.digest, geometry)
        if namespace is None or self._commits.resting:
            self._books.counters.failed_stores += count
            self._books.answers.append(Stored(request, statuses))
            return
        keys = np.ascontiguousarray(store.rows["key"])
        handles = self._books.directory.find(keys)
        stale = self._books.barriers.stale(store.digest, keys, store.rows["generation"])
        first = np.zeros(count, dtype=np.bool_)
        first[np.unique(keys, return_index=True)[1]] = True
        there = handles >= 0
        statuses[there | ~first] = StoreStatus.BUSY
        statuses[there & (self._books.directory.life[handles] == Life.DURABLE)] = StoreStatus.EXISTS
        statuses[stale] = StoreStatus.STALE
        self._books.counters.stale_stores += int(np.count_nonzero(stale))
        if self._books.complete:
            self._books.policy.touch(np.unique(handles[statuses == StoreStatus.EXISTS]))
        fresh = np.flatnonzero(first & ~there & ~stale)
        if geometry.size > self._books.slabs.slab_bytes:
            self._refuse(statuses, fresh)
            fresh = fresh[:0]
        storing = Storing(request, store, geometry, statuses, fresh, len(fresh))
        if len(fresh):
            self._commits.waiting.append(storing)
            self.advance()
        else:
            self._books.answers.append(Stored(request, statuses))

    def advance(self) -> None:
        """Give slots to stores that wait for them, in order of arrival."""
        while self._commits.waiting:
            storing = self._commits.waiting[0]
            slot_bytes = self._books.slabs.allocator.slot_bytes_for(storing.geometry.size)
            locations = self._books.slabs.allocate(slot_bytes, len(storing.waiting))
            self._write(storing, locations)
            missing = len(storing.waiting)
            ahead = max(1, min(AHEAD_BYTES_MAX, self._books.slabs.reach_bytes // AHEAD_SHARE) // slot_bytes)
            if missing:
                if self._commits.evicting or self._evict(slot_bytes, missing + ahead):
                    return  # go on when the evictions are durable
                self._refuse(storing.statuses, storing.waiting)
                self._commits.settle(storing, missing)
            elif self._books.complete and not self._commits.evicting and self._room(slot_bytes) < ahead:
                self._evict(slot_bytes, ahead)
            self._commits.waiting.popleft()

    def _namespace(self, digest: bytes, geometry: Geometry) -> NamespaceRow | None:
        """The row of a namespace, made on first sight; None for one known with another geometry, or one too many."""
        row = self._books.namespaces.get(digest)
        if row is None:
            if len(self._books.namespaces) == NUMBERS_MAX:
                return None
            number = max(self._books.by_number, default=-1) + 1
            row = NamespaceRow(number, 0, geometry.layers, geometry.layer_bytes)
            self._books.namespaces[digest] = self._books.by_number[number] = row
            self._commits.next.namespaces[digest] = row
        return row if (row.layers, row.layer_bytes) == (geometry.layers, geometry.layer_bytes) else None

    def _room(self, slot_bytes: int) -> int:
        """Slots of that size that can be had without an eviction."""
        return self._books.slabs.allocator.available(slot_bytes)

    def _refuse(self, statuses: U8, rows: I64) -> None:
        statuses[rows] = StoreStatus.NO_ROOM
        self._books.counters.refused_stores += len(rows)

    def _write(self, storing: Storing, locations: I64) -> None:
        """Send the first waiting rows to their slots."""
        count = len(locations)
        if not count:
            return
        rows, storing.waiting = storing.waiting[:count], storing.waiting[count:]
        # Another store, or the scan, may have brought the same key while this one waited.
        keys = np.ascontiguousarray(storing.store.rows["key"][rows])
        stale = self._books.barriers.stale(storing.store.digest, keys, storing.store.rows["generation"][rows])
        barred = stale | (self._books.directory.find(keys) >= 0)
        if barred.any():
            storing.statuses[rows] = np.where(stale, StoreStatus.STALE, StoreStatus.BUSY)
            self._books.slabs.free(locations[barred])
            rows, locations, keys = rows[~barred], locations[~barred], keys[~barred]
            self._commits.settle(storing, int(np.count_nonzero(barred)))
            if not len(rows):
                return
        # A batch is in prefix order: its first block counts as the newest, so that the scan tells a prefix from its
        # start, and eviction after a restart begins at its end.
        sequences = np.arange(self._books.sequence, self._books.sequence + len(rows), dtype=np.uint64)[::-1]
        self._books.sequence += len(rows)
        size, number = storing.geometry.size, self._books.namespaces[storing.store.digest].number
        handles = self._books.directory.add(keys, locations, size, number, sequences)
        self._books.hold(handles)
        offsets = storing.store.rows["offset"]
        for run in self._books.slabs.runs(locations, np.full(len(rows), size, dtype=np.int64)):
            chosen = rows[run.rows]
            self._write_run(storing, run, chosen.tolist(), handles[run.rows], offsets[chosen].tolist())

    def _write_run(self, storing: Storing, run: Run, rows: list[int], handles: I64, pool_offsets: list[int]) -> None:
        file, pool, geometry = self._books.slabs.file(run.slab), self._books.pool, storing.geometry

        def work(scratch: Scratch) -> list[bytes]:
            return write_run(file, run.offset, pool, pool_offsets, geometry, scratch)

        def done(sums: list[bytes] | None, error: Exception | None) -> None:
            written = Written(storing, rows, handles, sums or [])
            if sums is None:
                log.warning("a write to the SSD tier failed: %s", error)
                self._commits.fail(written)
                return
            directory = self._books.directory
            directory.life[handles[directory.life[handles] == Life.WRITING]] = Life.COMMITTING
            self._commits.next.written.append(written)
            self._commits.next.slabs.add(run.slab)

        self._writers.submit(work, done)

    def _evict(self, slot_bytes: int, count: int) -> bool:
        """Evict until `count` more slots of that size are on their way; False if nothing may go."""
        directory, policy = self._books.directory, self._books.policy
        freed = 0
        looks_left = 2 * len(policy)
        while freed < count and looks_left > 0:
            candidates = policy.candidates(count - freed)
            if not len(candidates):
                break
            looks_left -= len(candidates)
            loose = directory.holds[candidates] == 0
            same = self._books.slabs.allocator.slot_bytes_of(directory.locations(candidates)) == slot_bytes
            policy.touch(candidates[~loose][::-1])
            freed += self._evict_blocks(candidates[loose & same])
            others = candidates[loose & ~same]
            if len(others):
                mates = self._slab_mates(int(others[0]))
                policy.restore(others[~np.isin(others, mates)])
                if len(mates):
                    self._evict_blocks(mates)
                    freed += self._books.slabs.slab_bytes // slot_bytes
                else:
                    policy.touch(others[:1])
        return freed > 0

    def _slab_mates(self, handle: int) -> I64:
        """All blocks in the slab of this one, itself included; none if one of them must stay."""
        directory = self._books.directory
        taken = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE, Life.DYING)
        slabs = directory.locations(taken) // self._books.slabs.slab_bytes
        mates = taken[slabs == directory.locations(np.array([handle]))[0] // self._books.slabs.slab_bytes]
        free_to_go = (directory.life[mates] == Life.DURABLE) & (directory.holds[mates] == 0)
        return mates if free_to_go.all() else mates[:0]

    def _evict_blocks(self, handles: I64) -> int:
        self._commits.gone(handles, evicted=True)
        self._books.counters.evicted_blocks += len(handles)
        return len(handles)
