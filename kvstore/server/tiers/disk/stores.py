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
from kvstore.server.tiers.disk.messages import NAMESPACES_MAX, Namespace, Quotas, Store, Stored, StoreStatus
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


class Stores:
    """See the module."""

    def __init__(self, books: Books, commits: Commits, writers: Workers) -> None:
        self._books = books
        self._commits = commits
        self._writers = writers

    def announce(self, told: Namespace) -> None:
        """Take in what a namespace is; one too many is never stored."""
        books = self._books
        if told.digest in books.namespaces or len(books.namespaces) == NAMESPACES_MAX:
            return
        number = max(books.by_number, default=-1) + 1
        row = NamespaceRow(number, 0, told.layers, told.layer_bytes, told.tenant, told.label)
        books.namespaces[told.digest] = self._commits.next.namespaces[told.digest] = row
        books.know(row)

    def set_quotas(self, quotas: Quotas) -> None:
        """Put quotas in force. Who is above its limit now gives blocks back when it next stores."""
        durable = self._books.directory.select(Life.DURABLE)
        owners = self._books.tenant_of[self._books.directory.namespace[durable]]
        self._books.tenants.set_quotas(quotas.quotas, lambda number: durable[owners == number])

    def store(self, request: int, store: Store) -> None:
        """Begin with a STORE."""
        geometry = Geometry(store.layers, store.layer_bytes)
        self._books.check_offsets(store.rows["offset"], geometry.size)
        count = len(store.rows)
        statuses = np.full(count, StoreStatus.FAILED, dtype=np.uint8)
        row = self._books.namespaces.get(store.digest)
        known = row is not None and (row.layers, row.layer_bytes) == (geometry.layers, geometry.layer_bytes)
        if not known or self._commits.resting:
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
            self._books.tenants.touch(np.unique(handles[statuses == StoreStatus.EXISTS]))
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
            tenant = int(self._books.tenant_of[self._books.namespaces[storing.store.digest].number])
            self._keep_within_limit(storing, slot_bytes, tenant)
            locations = self._books.slabs.allocate(slot_bytes, len(storing.waiting))
            self._write(storing, locations)
            missing = len(storing.waiting)
            ahead = max(1, min(AHEAD_BYTES_MAX, self._books.slabs.reach_bytes // AHEAD_SHARE) // slot_bytes)
            if missing:
                if self._commits.evicting or self._evict(slot_bytes, missing + ahead, tenant):
                    return  # go on when the evictions are durable
                self._refuse(storing.statuses, storing.waiting)
                self._commits.settle(storing, missing)
            elif self._books.complete and not self._commits.evicting and self._room(slot_bytes) < ahead:
                self._evict(slot_bytes, ahead, tenant)
            self._commits.waiting.popleft()

    def _keep_within_limit(self, storing: Storing, slot_bytes: int, tenant: int) -> None:
        """Evict a tenant's own blocks for what is beyond its limit, and refuse what does not fit even so."""
        tenants = self._books.tenants
        missing = len(storing.waiting) - tenants.room(tenant) // slot_bytes
        policy = tenants.policy(tenants.group_of(tenant))
        looks_left = 2 * len(policy)
        while missing > 0 and looks_left > 0 and len(candidates := policy.candidates(missing)):
            looks_left -= len(candidates)
            loose = self._books.directory.holds[candidates] == 0
            policy.touch(candidates[~loose][::-1])
            self._evict_blocks(candidates[loose])
            missing = len(storing.waiting) - tenants.room(tenant) // slot_bytes
        missing = min(missing, len(storing.waiting))  # it may be above its limit by more than this asks for
        if missing > 0:
            refused = storing.waiting[len(storing.waiting) - missing :]
            storing.waiting = storing.waiting[: len(storing.waiting) - missing]
            self._refuse(storing.statuses, refused)
            tenants.refused[tenant] += missing
            self._commits.settle(storing, missing)

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
        self._books.charge(handles)
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

    def _evict(self, slot_bytes: int, count: int, taker: int) -> bool:
        """Evict until `count` more slots of that size are on their way to a tenant; False if nothing may go."""
        directory, tenants = self._books.directory, self._books.tenants
        freed = 0
        tired: set[int] = set()
        looks_left = {group: 2 * len(tenants.policy(group)) for group in tenants.groups}
        while freed < count and (group := tenants.next_to_give(taker, tired)) is not None:
            policy = tenants.policy(group)
            candidates = policy.candidates(count - freed)
            fitting = np.cumsum(self._books.slot_bytes(candidates)) <= tenants.spare(group, taker)
            policy.restore(candidates[~fitting])
            candidates = candidates[fitting]
            looks_left[group] -= len(candidates)
            if not len(candidates) or looks_left[group] <= 0:
                tired.add(group)
            loose = directory.holds[candidates] == 0
            same = self._books.slabs.allocator.slot_bytes_of(directory.locations(candidates)) == slot_bytes
            policy.touch(candidates[~loose][::-1])
            freed += self._evict_blocks(candidates[loose & same])
            others = candidates[loose & ~same]
            if len(others):
                mates = self._slab_mates(int(others[0]), taker)
                policy.restore(others[~np.isin(others, mates)])
                if len(mates):
                    self._evict_blocks(mates)
                    freed += self._books.slabs.slab_bytes // slot_bytes
                else:
                    policy.touch(others[:1])
        return freed > 0

    def _slab_mates(self, handle: int, taker: int) -> I64:
        """All blocks in the slab of this one, itself included; none if one of them must stay."""
        directory, tenants = self._books.directory, self._books.tenants
        slab_bytes = self._books.slabs.slab_bytes
        taken = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE, Life.DYING)
        slabs = directory.locations(taken) // slab_bytes
        mates = taken[slabs == directory.locations(np.array([handle]))[0] // slab_bytes]
        free_to_go = (directory.life[mates] == Life.DURABLE) & (directory.holds[mates] == 0)
        poor = [group for group in tenants.groups if tenants.protected(group, taker, slab_bytes)]
        free_to_go &= ~np.isin(tenants.groups_of(mates), poor)
        return mates if free_to_go.all() else mates[:0]

    def _evict_blocks(self, handles: I64) -> int:
        self._commits.gone(handles, evicted=True)
        self._books.counters.evicted_blocks += len(handles)
        return len(handles)
