"""The SSD tier: every decision about it, in one thread. Other threads do what waits; their results come back here.

Order of durability of a block: payload written, slab synced, catalog row written, catalog log synced, then reported.
What becomes durable together is one commit; while one is under way the next one gathers.

Order of reuse of a slot: the row's deletion is durable, the last read has ended, then the slot is given away. So a row
never points at another block's bytes; and if a disk lies about syncing, the checksums catch it.

A slot's holds count what is in flight on it. A block that leaves is DYING until they are zero.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.tiers.disk.barriers import Barriers
from kvstore.server.tiers.disk.catalog import (
    ROW,
    Barrier,
    Batch,
    Catalog,
    CatalogDamagedError,
    CatalogUnwritableError,
    Meta,
    NamespaceRow,
    open_or_set_aside,
    set_aside,
)
from kvstore.server.tiers.disk.directory import Directory, Life
from kvstore.server.tiers.disk.files import Files, SystemFiles
from kvstore.server.tiers.disk.messages import (
    SCANNED_BLOCK,
    SCANNED_NAMESPACE,
    Answer,
    Flush,
    Flushed,
    Gone,
    Load,
    Loaded,
    LoadStatus,
    Remove,
    Removed,
    Request,
    Scan,
    Scanned,
    Stats,
    StatsAnswer,
    Store,
    Stored,
    StoreStatus,
)
from kvstore.server.tiers.disk.payload import Geometry, Target, read_layers, read_run, write_run
from kvstore.server.tiers.disk.slabs import Run, Slabs, padded, slab_bytes_for
from kvstore.server.tiers.disk.workers import Inbox, Scratch, Workers
from kvstore.transport.memory import private_arena

log = logging.getLogger("kvstore")

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

READ_THREADS: Final = 4
WRITE_THREADS: Final = 4
AHEAD_BYTES_MAX: Final = (
    256 << 20
)  # kept free ahead of need, so that a store seldom waits for an eviction to be durable
AHEAD_SHARE: Final = 16  # of the capacity, where that is less
COMMIT_BYTES: Final = 64 << 20  # of payload that one commit gathers while writes are under way
SCAN_PIECE: Final = 4096
SUSPECTS_MAX: Final = 64  # newest blocks that are read and checked after an unclean end
SUSPECT_BYTES_MAX: Final = 64 << 20
LAZY_DELETES_MAX: Final = 8192  # rows that no longer count, cleared away with one commit
RETRY_S: Final = 1.0  # after the catalog refused a write
GROW_S: Final = 5.0  # after the file system refused another slab
NUMBERS_MAX: Final = 1 << 16


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    missed_blocks: int = 0
    removed_blocks: int = 0
    evicted_blocks: int = 0
    stale_stores: int = 0
    refused_stores: int = 0
    failed_stores: int = 0
    failed_reads: int = 0  # blocks that could not be read or whose checksum was wrong; each was dropped
    dropped_tail_blocks: int = 0  # blocks of an unclean end whose payload was not what the catalog says
    lost_catalogs: int = 0
    commits: int = 0


@dataclass(slots=True)
class _Storing:
    """A STORE under way."""

    request: int
    store: Store
    geometry: Geometry
    statuses: U8
    waiting: I64  # rows without a slot so far
    open: int  # rows without a status so far


@dataclass(slots=True)
class _Loading:
    """A LOAD under way."""

    request: int
    rows: NDArray[np.void]
    statuses: U8
    open: int  # rows without a status so far, and one more until all have been looked at


@dataclass(slots=True)
class _Written:
    """Blocks whose payload is on the disk."""

    storing: _Storing
    rows: list[int]
    handles: I64
    sums: list[bytes]


@dataclass(slots=True)
class _Commit:
    """What becomes durable together."""

    written: list[_Written] = field(default_factory=list[_Written])
    slabs: set[int] = field(default_factory=set[int])
    namespaces: dict[bytes, NamespaceRow] = field(default_factory=dict[bytes, NamespaceRow])
    barriers: dict[bytes, Barrier | None] = field(default_factory=dict[bytes, Barrier | None])  # None: forget it
    deletes: list[U64] = field(default_factory=list[U64])  # rows, by sequence
    releases: list[I64] = field(default_factory=list[I64])  # handles that this commit holds
    evicted: int = 0  # of those, how many a store may be waiting for
    answers: list[Answer] = field(default_factory=list[Answer])

    def __bool__(self) -> bool:
        return bool(self.written or self.namespaces or self.barriers or self.deletes or self.releases or self.answers)


class FolderLock:
    """One engine per folder.

    Raises:
        ConfigError: another one has it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            self._file.close()
            raise ConfigError(f"disk tier in {str(folder)!r}: another server uses this folder") from cause

    def close(self) -> None:
        """Let another one have it."""
        self._file.close()


class DiskTier:
    """See the module. `handle` requests, call `poll` when `fd` is readable, take the `answers`.

    Args:
        folder: made if need be; nobody else's.
        capacity_bytes: bound on what the slab files take.
        pool: the shard's DRAM pool.
        boot_id: 16 bytes that tell one run of the shard from another.
        files: the file layer.

    Raises:
        ConfigError: another engine uses the folder, it can't be made, or the capacity is too small.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, pool: NDArray[np.uint8], boot_id: bytes, files: Files | None = None
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise ConfigError(f"disk tier in {str(folder)!r}: {cause.strerror}") from cause
        self._lock = FolderLock(folder)
        self._folder = folder
        self._files = files if files is not None else SystemFiles(folder)
        self._pool = memoryview(pool)
        self._boot_id = boot_id
        self._capacity_bytes = capacity_bytes
        self._inbox = Inbox()
        self._readers = Workers("read", READ_THREADS, self._inbox)
        self._writers = Workers("write", WRITE_THREADS, self._inbox)
        self._committer = Workers("commit", 1, self._inbox)
        self._answers: list[Answer] = []
        self._storing: deque[_Storing] = deque()
        self._next = _Commit()
        self._committing = False
        self._evicting = 0  # slots of evicted blocks that the next commits give back
        self._lazy: deque[U64] = deque()
        self._retry_at_s = 0.0  # 0 = now
        self._grow_at_s = 0.0
        self._unwritable = False
        self._lost: Exception | None = None  # damage found in the catalog, which is replaced after the commit under way
        self._not_slots: set[int] = set()  # handles whose place was no slot of ours
        self.counters = Counters()
        self._open()

    # --- what the worker process calls ----------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable when `poll` has something to do."""
        return self._inbox.fd

    def handle(self, request: int, message: Request) -> None:
        """Begin with a request. Its answer comes with the `answers`, at once or later.

        Raises:
            ProtocolError: it reaches beyond the pool.
        """
        match message:
            case Store():
                self._store(request, message)
            case Load():
                self._load(request, message)
            case Remove():
                self._remove(request, message)
            case Flush():
                self._flush(request, message)
            case Scan():
                self._scan_request = request
            case Stats():
                self._answers.append(StatsAnswer(request, self.stats()))
        self._commit()

    def poll(self) -> None:
        """Handle what threads have finished, and what is due by time. Call it every 100 ms, and when `fd` says so."""
        self._inbox.handle()
        self._readers.replace_stuck()
        now_s = time.monotonic()
        if now_s >= self._retry_at_s:
            self._retry_at_s = 0.0
        if now_s >= self._grow_at_s:
            self._grow_at_s = now_s + GROW_S
            self._slabs.grow_again()
        self._advance()
        self._commit()

    def answers(self) -> list[Answer]:
        """Answers since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def scanning(self) -> bool:
        """Whether `scan_step` has something to do."""
        return self._scan is not None and self._scan_request is not None

    @property
    def complete(self) -> bool:
        """Whether everything on the disk is known."""
        return self._complete

    @property
    def idle(self) -> bool:
        """Nothing is under way except, perhaps, reads."""
        return not (self._storing or self._committing or self._next or self._writers.unfinished)

    def close(self) -> None:
        """Close the folder in order. What is under way and not durable yet is lost; wait for `idle` first."""
        for workers in (self._readers, self._writers, self._committer):
            workers.close()
        self._scan = None
        if not self._committing:
            if self.idle and self._complete and not self._readers.unfinished:
                self._catalog.put_meta(Meta(self._slabs.slab_bytes, clean=True))
            self._catalog.close()
            if not self._readers.unfinished:
                self._slabs.close()
        self._lock.close()

    def stats(self) -> dict[str, int]:
        """Gauges and counters."""
        directory = self._directory
        return {
            "blocks": len(directory.select(Life.DURABLE)),
            "dying_blocks": len(directory.select(Life.DYING)),
            "disk_bytes": self._slabs.disk_bytes,
            "capacity_bytes": self._slabs.slabs_max * self._slabs.slab_bytes,
            "complete": int(self._complete),
            "writable": int(not self._unwritable),
            "refused_growth": self._slabs.refused_growth,
            "namespaces": len(self._namespaces),
            "stuck_reads": self._readers.stuck,
            **asdict(self.counters),
        }

    # --- start and scan -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        opened = open_or_set_aside(self._folder / "catalog")
        self._catalog, meta = opened.catalog, opened.meta
        slab_bytes = meta.slab_bytes if meta else slab_bytes_for(self._capacity_bytes)
        if self._capacity_bytes < slab_bytes:
            raise ConfigError(f"disk tier of {self._capacity_bytes} bytes: at least one slab of {slab_bytes} bytes")
        self._slabs = Slabs(self._folder, self._files, self._capacity_bytes, slab_bytes)
        if meta is None:
            self._slabs.delete_all()  # without a catalog nothing in them can be checked
        self._catalog.put_meta(Meta(slab_bytes, clean=False))
        self._directory = Directory()
        self._policy: EvictionPolicy = LruPolicy(np.zeros(self._slabs.allocator.pool_bytes // 4096, np.uint32))
        self._namespaces = opened.namespaces
        self._by_number = {row.number: row for row in self._namespaces.values()}
        self._barriers = Barriers(self._boot_id, opened.barriers)
        self._sequence = 1 + max((barrier.sequence for _, barrier in self._barriers.items()), default=0)
        self._sequence = self._first_sequence = max(self._sequence, 1 + opened.newest_sequence)
        self._taken_over = self._slabs.take_over()
        self._complete = False
        self._scan: Iterator[tuple[NDArray[np.void], U64]] | None = self._catalog.blocks(SCAN_PIECE)
        self._scan_request: int | None = None
        self._told_namespaces = False
        self._suspects_left = 0 if meta is None or meta.clean else SUSPECTS_MAX
        self._suspects_open = 0
        self._scanned: list[I64] = []  # handles, newest first

    def scan_step(self) -> None:
        """Take in the next piece of what is on the disk, and answer with it."""
        assert self._scan is not None
        try:
            rows, sequences = next(self._scan, (None, None))
        except CatalogDamagedError as damage:
            self._lose_catalog(damage)
            return
        if rows is None or sequences is None:
            self._scan = None
            self._finish_scan()
            return
        former = sequences < self._first_sequence  # the rest is of this run, and known
        rows, sequences = rows[former], sequences[former]
        alive = self._alive(rows, sequences)
        self._lazy.append(sequences[~alive])
        rows, sequences = rows[alive], sequences[alive]
        locations = rows["location"].astype(np.int64)
        handles = self._directory.add(
            np.ascontiguousarray(rows["key"]), locations, rows["size"], rows["namespace"], sequences
        )
        self._directory.life[handles] = Life.DURABLE
        self._scanned.append(handles)
        suspects = self._take_suspects(handles)
        self._tell(handles[suspects:])

    def _alive(self, rows: NDArray[np.void], sequences: U64) -> Mask:
        """Rows that count: of the namespace as it is now, in slabs that are there, newest of their key, not removed."""
        keys = np.ascontiguousarray(rows["key"])
        known = np.zeros(len(rows), dtype=np.bool_)
        for number in np.unique(rows["namespace"]).tolist():
            row = self._by_number.get(number)
            if row is not None:
                same = (rows["namespace"] == number) & (rows["incarnation"] == row.incarnation)
                known |= same & (rows["layers"] == row.layers) & (rows["size"] == row.layers * row.layer_bytes)
        lengths = rows["size"].astype(np.int64)
        alive = known & self._slabs.has(rows["location"].astype(np.int64), lengths)
        alive &= ~self._barriers.removed(keys, sequences)
        alive &= self._directory.find(keys) < 0
        candidates = np.flatnonzero(alive)
        first = np.zeros(len(rows), dtype=np.bool_)
        first[candidates[np.unique(keys[candidates], return_index=True)[1]]] = True
        return alive & first

    def _take_suspects(self, handles: I64) -> int:
        """Check the newest blocks after an unclean end before they are told; how many of `handles` these are."""
        sizes = self._directory.size[handles].astype(np.int64)
        fitting = int(np.searchsorted(np.cumsum(sizes), SUSPECT_BYTES_MAX, side="right"))
        count = min(len(handles), self._suspects_left, fitting)
        self._suspects_left = self._suspects_left - count if count == len(handles) else 0
        suspects = handles[:count]
        for handle, sums in zip(suspects.tolist(), self._catalog.sums(self._directory.sequence[suspects]), strict=True):
            self._check_suspect(handle, sums or b"")
        return count

    def _check_suspect(self, handle: int, sums: bytes) -> None:
        one = np.array([handle], dtype=np.int64)
        slab, offset = divmod(int(self._directory.locations(one)[0]), self._slabs.slab_bytes)
        row = self._by_number[int(self._directory.namespace[handle])]
        geometry = Geometry(row.layers, row.layer_bytes)
        file = self._slabs.file(slab)

        def work(_: Scratch) -> bool:
            memory = memoryview(private_arena(padded(geometry.size)))
            return read_run(file, offset, memory, [Target(geometry, 0, 0, sums)])[0]

        def done(right: bool | None, error: Exception | None) -> None:
            self._suspects_open -= 1
            if self._directory.life[handle] == Life.DURABLE:
                if right and error is None:
                    self._tell(one)
                else:
                    self.counters.dropped_tail_blocks += 1
                    self._drop(one)
            self._release(one)
            self._finish_scan()

        self._suspects_open += 1
        self._hold(one)
        self._readers.submit(work, done)

    def _tell(self, handles: I64, *, complete: bool = False) -> None:
        if self._scan_request is None:
            return
        namespaces = np.zeros(0 if self._told_namespaces else len(self._namespaces), SCANNED_NAMESPACE)
        if not self._told_namespaces:
            self._told_namespaces = True
            for place, (digest, row) in enumerate(self._namespaces.items()):
                namespaces[place] = (digest, row.number, row.layers, row.layer_bytes)
        elif not len(handles) and not complete:
            return
        blocks = np.zeros(len(handles), SCANNED_BLOCK)
        blocks["key"] = self._directory.keys(handles)
        blocks["namespace"] = self._directory.namespace[handles]
        blocks["size"] = self._directory.size[handles]
        self._answers.append(Scanned(self._scan_request, namespaces, blocks, complete))

    def _finish_scan(self) -> None:
        """Once all is known: free slots are known too, and ages."""
        if self._complete or self._scan is not None or self._suspects_open:
            return
        directory = self._directory
        taken = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE, Life.DYING)
        taken = taken[np.isin(directory.locations(taken) // self._slabs.slab_bytes, self._taken_over)]
        misplaced = self._restore_slabs(taken)
        if len(misplaced):
            self._gone(misplaced)
        self._complete = True
        stored_meanwhile = self._policy.candidates(len(self._policy))
        for handles in reversed(self._scanned):
            self._policy.admit(handles[directory.life[handles] == Life.DURABLE])
        self._policy.admit(stored_meanwhile[::-1])  # they came with the first to go in front
        self._scanned.clear()
        for what in self._barriers.forget_other_boots():
            self._next.barriers[what] = None
        self._tell(np.zeros(0, np.int64), complete=True)

    def _restore_slabs(self, taken: I64) -> I64:
        """Give the slabs of the former run back to the allocator with the slots of these handles used. Handles that fit
        no slot of their slab, which no run of ours leaves behind, are returned.
        """
        allocator, directory = self._slabs.allocator, self._directory
        order = np.argsort(directory.sequence[taken], kind="stable")[::-1]
        taken = taken[order]
        locations = directory.locations(taken)
        slabs = locations // self._slabs.slab_bytes
        misplaced: list[I64] = []
        for number in self._taken_over.tolist():
            here = np.flatnonzero(slabs == number)
            if not len(here):
                self._slabs.restore(number, 0, np.zeros(0, np.int64))
                continue
            slot_bytes = allocator.slot_bytes_for(int(directory.size[taken[here[0]]]))
            sizes = directory.size[taken[here]].astype(np.int64)
            fits = (locations[here] % self._slabs.slab_bytes % slot_bytes == 0) & (sizes <= slot_bytes)
            first = np.zeros(len(here), dtype=np.bool_)
            first[np.unique(locations[here], return_index=True)[1]] = True
            fits &= first
            self._slabs.restore(number, slot_bytes, locations[here[fits]])
            misplaced.append(taken[here[~fits]])
        lost = np.concatenate(misplaced) if misplaced else np.zeros(0, np.int64)
        self._not_slots = set(lost.tolist())
        return lost[directory.life[lost] == Life.DURABLE]

    # --- storing --------------------------------------------------------------------------------------------------

    def _store(self, request: int, store: Store) -> None:
        geometry = Geometry(store.layers, store.layer_bytes)
        self._check_offsets(store.rows["offset"], geometry.size)
        count = len(store.rows)
        statuses = np.full(count, StoreStatus.FAILED, dtype=np.uint8)
        namespace = self._namespace(store.digest, geometry)
        if namespace is None or (self._unwritable and self._retry_at_s > 0):
            self.counters.failed_stores += count
            self._answers.append(Stored(request, statuses))
            return
        keys = np.ascontiguousarray(store.rows["key"])
        handles = self._directory.find(keys)
        stale = self._barriers.stale(store.digest, keys, store.rows["generation"])
        first = np.zeros(count, dtype=np.bool_)
        first[np.unique(keys, return_index=True)[1]] = True
        there = handles >= 0
        statuses[there | ~first] = StoreStatus.BUSY
        statuses[there & (self._directory.life[handles] == Life.DURABLE)] = StoreStatus.EXISTS
        statuses[stale] = StoreStatus.STALE
        self.counters.stale_stores += int(np.count_nonzero(stale))
        if self._complete:
            self._policy.touch(np.unique(handles[statuses == StoreStatus.EXISTS]))
        fresh = np.flatnonzero(first & ~there & ~stale)
        if geometry.size > self._slabs.slab_bytes:
            self._refuse(statuses, fresh)
            fresh = fresh[:0]
        storing = _Storing(request, store, geometry, statuses, fresh, len(fresh))
        if len(fresh):
            self._storing.append(storing)
            self._advance()
        else:
            self._answers.append(Stored(request, statuses))

    def _namespace(self, digest: bytes, geometry: Geometry) -> NamespaceRow | None:
        """The row of a namespace, made on first sight; None for one known with another geometry, or one too many."""
        row = self._namespaces.get(digest)
        if row is None:
            if len(self._namespaces) == NUMBERS_MAX:
                return None
            number = max(self._by_number, default=-1) + 1
            row = NamespaceRow(number, 0, geometry.layers, geometry.layer_bytes)
            self._namespaces[digest] = self._by_number[number] = row
            self._next.namespaces[digest] = row
        return row if (row.layers, row.layer_bytes) == (geometry.layers, geometry.layer_bytes) else None

    def _advance(self) -> None:
        """Give slots to stores that wait for them, in order of arrival."""
        while self._storing:
            storing = self._storing[0]
            slot_bytes = self._slabs.allocator.slot_bytes_for(storing.geometry.size)
            locations = self._slabs.allocate(slot_bytes, len(storing.waiting))
            self._write(storing, locations)
            missing = len(storing.waiting)
            ahead = max(1, min(AHEAD_BYTES_MAX, self._slabs.reach_bytes // AHEAD_SHARE) // slot_bytes)
            if missing:
                if self._evicting or self._evict(slot_bytes, missing + ahead):
                    return  # go on when the evictions are durable
                self._refuse(storing.statuses, storing.waiting)
                self._settle(storing, missing)
            elif self._complete and not self._evicting and self._room(slot_bytes) < ahead:
                self._evict(slot_bytes, ahead)
            self._storing.popleft()

    def _room(self, slot_bytes: int) -> int:
        """Slots of that size that can be had without an eviction."""
        return self._slabs.allocator.available(slot_bytes)

    def _refuse(self, statuses: U8, rows: I64) -> None:
        statuses[rows] = StoreStatus.NO_ROOM
        self.counters.refused_stores += len(rows)

    def _settle(self, storing: _Storing, rows: int) -> None:
        """So many more rows have their status; answer when all have, and let the policy see the batch as one."""
        storing.open -= rows
        if storing.open:
            return
        # What the answer says holds where it stands among the answers: some of these blocks may have left meanwhile.
        statuses = storing.statuses
        handles = self._directory.find(np.ascontiguousarray(storing.store.rows["key"]))
        there = (handles >= 0) & (self._directory.life[handles] == Life.DURABLE)
        claimed = (statuses == StoreStatus.DURABLE) | (statuses == StoreStatus.EXISTS)
        statuses[claimed & ~there] = StoreStatus.BUSY
        self._policy.admit(handles[(statuses == StoreStatus.DURABLE) & there])
        self._answers.append(Stored(storing.request, statuses))

    def _write(self, storing: _Storing, locations: I64) -> None:
        """Send the first waiting rows to their slots."""
        count = len(locations)
        if not count:
            return
        rows, storing.waiting = storing.waiting[:count], storing.waiting[count:]
        # Another store, or the scan, may have brought the same key while this one waited.
        keys = np.ascontiguousarray(storing.store.rows["key"][rows])
        stale = self._barriers.stale(storing.store.digest, keys, storing.store.rows["generation"][rows])
        barred = stale | (self._directory.find(keys) >= 0)
        if barred.any():
            storing.statuses[rows] = np.where(stale, StoreStatus.STALE, StoreStatus.BUSY)
            self._slabs.free(locations[barred])
            rows, locations, keys = rows[~barred], locations[~barred], keys[~barred]
            self._settle(storing, int(np.count_nonzero(barred)))
            if not len(rows):
                return
        # A batch is in prefix order: its first block counts as the newest, so that the scan tells a prefix from its
        # start, and eviction after a restart begins at its end.
        sequences = np.arange(self._sequence, self._sequence + len(rows), dtype=np.uint64)[::-1]
        self._sequence += len(rows)
        size, number = storing.geometry.size, self._namespaces[storing.store.digest].number
        handles = self._directory.add(keys, locations, size, number, sequences)
        self._hold(handles)
        offsets = storing.store.rows["offset"]
        for run in self._slabs.runs(locations, np.full(len(rows), size, dtype=np.int64)):
            chosen = rows[run.rows]
            self._write_run(storing, run, chosen.tolist(), handles[run.rows], offsets[chosen].tolist())

    def _write_run(self, storing: _Storing, run: Run, rows: list[int], handles: I64, pool_offsets: list[int]) -> None:
        file, pool, geometry = self._slabs.file(run.slab), self._pool, storing.geometry

        def work(_: Scratch) -> list[bytes]:
            return write_run(file, run.offset, pool, pool_offsets, geometry)

        def done(sums: list[bytes] | None, error: Exception | None) -> None:
            written = _Written(storing, rows, handles, sums or [])
            if sums is None:
                log.warning("a write to the SSD tier failed: %s", error)
                self._fail_written(written)
                return
            directory = self._directory
            directory.life[handles[directory.life[handles] == Life.WRITING]] = Life.COMMITTING
            self._next.written.append(written)
            self._next.slabs.add(run.slab)

        self._writers.submit(work, done)

    def _fail_written(self, written: _Written, *, row_written: bool = False) -> None:
        """These blocks did not become durable; a row that may have reached the catalog all the same is deleted."""
        handles = written.handles
        living = handles[np.isin(self._directory.life[handles], (Life.WRITING, Life.COMMITTING))]
        self._drop(living, row_written=row_written)
        self._release(handles)
        written.storing.statuses[written.rows] = StoreStatus.FAILED
        self.counters.failed_stores += len(written.rows)
        self._settle(written.storing, len(written.rows))

    # --- committing -----------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Make durable what has gathered, unless a commit is under way or the catalog needs a rest."""
        resting = self._unwritable and self._retry_at_s > 0
        if self._committing or resting or not (self._next or self._lazy) or self._gathers():
            return
        commit, self._next = self._next, _Commit()
        for written in commit.written:
            self._leave_out_dead(written)
        batch = self._batch(commit)
        files = [self._slabs.file(number) for number in commit.slabs] if any(w.rows for w in commit.written) else []
        catalog, reopen = self._catalog, self._unwritable

        def work(_: Scratch) -> None:
            for file in files:
                file.fdatasync()
            if reopen:
                catalog.reopen()
            catalog.write(batch)
            catalog.sync()

        def done(_: None, error: Exception | None) -> None:
            self._committing = False
            if error is None:
                self._committed(commit)
            else:
                self._uncommitted(commit, error)
            if self._lost is not None:
                self._replace_catalog(self._lost)
            self._advance()

        self._committing = True
        self._committer.submit(work, done)

    def _gathers(self) -> bool:
        """Whether waiting makes the next commit larger and keeps nobody waiting: a flush of the disk costs as much as
        writing some megabytes, and stores are in no hurry.
        """
        gathered = sum(len(written.rows) * written.storing.geometry.size for written in self._next.written)
        in_no_hurry = not (self._next.answers or self._storing)
        return in_no_hurry and self._writers.unfinished > 0 and gathered < COMMIT_BYTES

    def _leave_out_dead(self, written: _Written) -> None:
        """Blocks that were removed while they were written: no row for them."""
        alive = self._directory.life[written.handles] == Life.COMMITTING
        dead = [row for row, ok in zip(written.rows, alive.tolist(), strict=True) if not ok]
        if not dead:
            return
        self._release(written.handles[~alive])
        written.storing.statuses[dead] = StoreStatus.STALE
        self.counters.stale_stores += len(dead)
        self._settle(written.storing, len(dead))
        written.rows = [row for row, ok in zip(written.rows, alive.tolist(), strict=True) if ok]
        written.sums = [sums for sums, ok in zip(written.sums, alive.tolist(), strict=True) if ok]
        written.handles = written.handles[alive]

    def _batch(self, commit: _Commit) -> Batch:
        batch = Batch()
        for digest, row in commit.namespaces.items():
            batch.put_namespace(digest, row)
        for what, barrier in commit.barriers.items():
            if barrier is None:
                batch.delete_barrier(what)
            else:
                batch.put_barrier(what, barrier)
        for sequences in commit.deletes:
            batch.delete_blocks(sequences)
        lazy = 0
        while self._lazy and lazy < LAZY_DELETES_MAX:
            sequences = self._lazy.popleft()
            if len(sequences) > LAZY_DELETES_MAX:
                self._lazy.appendleft(sequences[LAZY_DELETES_MAX:])
            batch.delete_blocks(sequences[:LAZY_DELETES_MAX])
            lazy += len(sequences)
        for written in commit.written:
            if written.rows:
                batch.put_blocks(self._rows(written.handles), self._directory.sequence[written.handles], written.sums)
        return batch

    def _rows(self, handles: I64) -> NDArray[np.void]:
        directory = self._directory
        rows = np.zeros(len(handles), ROW)
        rows["key"] = directory.keys(handles)
        rows["location"] = directory.locations(handles)
        rows["size"] = directory.size[handles]
        namespace = self._by_number[int(directory.namespace[handles[0]])]  # one run is of one namespace
        rows["namespace"] = namespace.number
        rows["incarnation"] = namespace.incarnation
        rows["layers"] = namespace.layers
        return rows

    def _committed(self, commit: _Commit) -> None:
        self.counters.commits += 1
        self._unwritable = False
        directory = self._directory
        for written in commit.written:
            if not written.rows:
                continue
            handles = written.handles
            alive = handles[directory.life[handles] == Life.COMMITTING]
            directory.life[alive] = Life.DURABLE
            self._release(handles)
            written.storing.statuses[written.rows] = StoreStatus.DURABLE
            self.counters.stored_blocks += len(handles)
            self.counters.stored_bytes += len(handles) * written.storing.geometry.size
            self._settle(written.storing, len(written.rows))
        self._evicting -= commit.evicted
        for handles in commit.releases:
            self._release(handles)
        self._answers.extend(commit.answers)
        if any(isinstance(answer, Flushed) for answer in commit.answers):
            self._slabs.trim()

    def _uncommitted(self, commit: _Commit, error: Exception) -> None:
        """Stores have failed; what must not be forgotten, deletes above all, goes into the next commit."""
        if not isinstance(error, OSError):
            raise error
        if not self._unwritable:
            log.error("the SSD tier's catalog can't be written (%s); trying again every %g s", error, RETRY_S)
        self._unwritable = True
        self._retry_at_s = time.monotonic() + RETRY_S
        row_written = isinstance(error, CatalogUnwritableError)
        for written in commit.written:
            if written.rows:
                self._fail_written(written, row_written=row_written)
        later = self._next
        later.namespaces = commit.namespaces | later.namespaces
        later.barriers = commit.barriers | later.barriers
        later.deletes = commit.deletes + later.deletes
        later.releases = commit.releases + later.releases
        later.evicted += commit.evicted
        later.answers = commit.answers + later.answers
        while self._storing:
            storing = self._storing.popleft()
            storing.statuses[storing.waiting] = StoreStatus.FAILED
            self.counters.failed_stores += len(storing.waiting)
            self._settle(storing, len(storing.waiting))

    # --- removing -------------------------------------------------------------------------------------------------

    def _remove(self, request: int, remove: Remove) -> None:
        keys = np.unique(remove.keys)
        handles = self._directory.find(keys)
        handles = handles[handles >= 0]
        self._drop(handles)
        for at in range(len(keys)):
            what = keys[at : at + 1].tobytes()
            self._next.barriers[what] = self._barriers.raise_to(what, remove.generation, self._sequence)
        if self._complete:
            self._fold_barriers()
        self.counters.removed_blocks += len(handles)
        self._next.answers.append(Removed(request, len(handles)))

    def _fold_barriers(self) -> None:
        forgotten, generation = self._barriers.fold()
        for what in forgotten:
            self._next.barriers[what] = None
        if forgotten:
            self._next.barriers[b""] = self._barriers.raise_to(b"", generation, 0)

    def _flush(self, request: int, flush: Flush) -> None:
        directory = self._directory
        digests = [flush.digest] if flush.digest else list(self._namespaces)
        handles = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE)
        numbers = [self._namespaces[digest].number for digest in digests if digest in self._namespaces]
        handles = handles[np.isin(directory.namespace[handles], numbers)]
        for digest in digests:
            row = self._namespaces.get(digest)
            if row is not None:
                row.incarnation += 1
                self._next.namespaces[digest] = row
        self._next.barriers[flush.digest] = self._barriers.raise_to(flush.digest, flush.generation, 0)
        self._drop(handles, lazily=True)
        self.counters.removed_blocks += len(handles)
        self._next.answers.append(Flushed(request, len(handles)))

    def _drop(self, handles: I64, *, lazily: bool = False, evicted: bool = False, row_written: bool = False) -> None:
        """Blocks leave: no longer found from now on, for good with the next commit.

        Args:
            handles: found so far, each once.
            lazily: their rows count no more after the next commit, and are cleared away some time.
            evicted: a store may be waiting for their slots.
            row_written: those being committed may have a row, although the commit failed.
        """
        if not len(handles):
            return
        directory = self._directory
        lives = directory.life[handles]
        self._policy.remove(handles[lives == Life.DURABLE])
        in_catalog = lives == Life.DURABLE
        if self._committing or row_written:
            in_catalog |= lives == Life.COMMITTING
        recorded = handles[in_catalog]
        directory.unlink(handles)
        directory.life[handles] = Life.DYING
        if not len(recorded):
            return
        sequences = directory.sequence[recorded].copy()
        if lazily:
            self._lazy.append(sequences)
        else:
            self._next.deletes.append(sequences)
        self._hold(recorded)
        self._next.releases.append(recorded)
        if evicted:
            self._next.evicted += len(recorded)
            self._evicting += len(recorded)

    def _gone(self, handles: I64) -> None:
        """Drop blocks that the shard still believes to be here, and tell it."""
        keys = self._directory.keys(handles)
        self._drop(handles)
        self._answers.append(Gone(keys))

    def _evict(self, slot_bytes: int, count: int) -> bool:
        """Evict until `count` more slots of that size are on their way; False if nothing may go."""
        directory, policy = self._directory, self._policy
        freed = 0
        looks_left = 2 * len(policy)
        while freed < count and looks_left > 0:
            candidates = policy.candidates(count - freed)
            if not len(candidates):
                break
            looks_left -= len(candidates)
            loose = directory.holds[candidates] == 0
            same = self._slabs.allocator.slot_bytes_of(directory.locations(candidates)) == slot_bytes
            policy.touch(candidates[~loose][::-1])
            freed += self._evict_blocks(candidates[loose & same])
            others = candidates[loose & ~same]
            if len(others):
                mates = self._slab_mates(int(others[0]))
                policy.restore(others[~np.isin(others, mates)])
                if len(mates):
                    self._evict_blocks(mates)
                    freed += self._slabs.slab_bytes // slot_bytes
                else:
                    policy.touch(others[:1])
        return freed > 0

    def _slab_mates(self, handle: int) -> I64:
        """All blocks in the slab of this one, itself included; none if one of them must stay."""
        directory = self._directory
        taken = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE, Life.DYING)
        slabs = directory.locations(taken) // self._slabs.slab_bytes
        mates = taken[slabs == directory.locations(np.array([handle]))[0] // self._slabs.slab_bytes]
        free_to_go = (directory.life[mates] == Life.DURABLE) & (directory.holds[mates] == 0)
        return mates if free_to_go.all() else mates[:0]

    def _evict_blocks(self, handles: I64) -> int:
        if len(handles):
            self._answers.append(Gone(self._directory.keys(handles)))
            self._drop(handles, evicted=True)
            self.counters.evicted_blocks += len(handles)
        return len(handles)

    # --- loading --------------------------------------------------------------------------------------------------

    def _load(self, request: int, load: Load) -> None:
        directory = self._directory
        rows = load.rows
        handles = directory.find(np.ascontiguousarray(rows["key"]))
        found = handles >= 0
        found[found] = directory.life[handles[found]] == Life.DURABLE
        statuses = np.full(len(rows), LoadStatus.MISS, dtype=np.uint8)
        loading = _Loading(request, rows, statuses, 1)
        chosen = np.flatnonzero(found)
        if len(chosen):
            self._check_offsets(rows["offset"][chosen], directory.size[handles[chosen]].astype(np.int64))
            if self._complete:  # before that there is no order to keep
                self._policy.touch(np.unique(handles[chosen]))
            self._read(loading, chosen, handles[chosen])
        self.counters.missed_blocks += len(rows) - len(chosen)
        self._settle_load(loading, 1)

    def _read(self, loading: _Loading, chosen: I64, handles: I64) -> None:
        """Start the reads of these rows: neighbours that are wanted whole together, ranges one by one."""
        directory = self._directory
        try:
            sums = self._catalog.sums(directory.sequence[handles])
        except CatalogDamagedError as damage:
            self._lose_catalog(damage)
            return
        targets: dict[int, tuple[int, Target]] = {}
        whole: list[int] = []
        for place, (row, handle) in enumerate(zip(chosen.tolist(), handles.tolist(), strict=True)):
            namespace = self._by_number[int(directory.namespace[handle])]
            wanted = loading.rows[row]
            first, end = int(wanted["first"]), int(wanted["end"]) or namespace.layers
            if not first < end <= namespace.layers:
                continue
            geometry = Geometry(namespace.layers, namespace.layer_bytes)
            target = Target(geometry, int(wanted["offset"]), int(wanted["generation"]), sums[place] or b"")
            targets[place] = (handle, target)
            if (first, end) == (0, namespace.layers):
                whole.append(place)
            else:
                self._read_range(loading, row, handle, target, first, end)
        if not whole:
            return
        there = handles[whole]
        for run in self._slabs.runs(directory.locations(there), directory.size[there].astype(np.int64)):
            places = [whole[at] for at in run.rows]
            self._read_run(loading, run, chosen[places], handles[places], [targets[place][1] for place in places])

    def _read_run(self, loading: _Loading, run: Run, rows: I64, handles: I64, targets: list[Target]) -> None:
        file, pool = self._slabs.file(run.slab), self._pool

        def work(_: Scratch) -> list[bool]:
            return read_run(file, run.offset, pool, targets)

        self._submit_read(loading, rows, handles, work)

    def _read_range(self, loading: _Loading, row: int, handle: int, target: Target, first: int, end: int) -> None:
        one = np.array([handle], dtype=np.int64)
        slab, offset = divmod(int(self._directory.locations(one)[0]), self._slabs.slab_bytes)
        file, pool = self._slabs.file(slab), self._pool

        def work(scratch: Scratch) -> list[bool]:
            return [read_layers(file, offset, pool, target, first, end, scratch)]

        self._submit_read(loading, np.array([row]), one, work)

    def _submit_read(self, loading: _Loading, rows: I64, handles: I64, work: Callable[[Scratch], list[bool]]) -> None:
        def done(right: list[bool] | None, error: Exception | None) -> None:
            directory = self._directory
            answers = np.array(right if error is None and right else [False] * len(rows), dtype=np.bool_)
            durable = directory.life[handles] == Life.DURABLE
            loading.statuses[rows] = np.where(
                durable, np.where(answers, LoadStatus.OK, LoadStatus.FAILED), LoadStatus.MISS
            )
            bad = np.unique(handles[durable & ~answers])
            if len(bad):
                log.warning("%d blocks of the SSD tier were unreadable or damaged, and are dropped", len(bad))
                self.counters.failed_reads += len(bad)
                self._gone(bad)
            good = handles[durable & answers]
            self.counters.loaded_blocks += len(good)
            self.counters.loaded_bytes += int(directory.size[good].sum())
            self._release(handles)
            self._settle_load(loading, len(rows))

        loading.open += len(rows)
        self._hold(handles)
        self._readers.submit(work, done)

    def _settle_load(self, loading: _Loading, rows: int) -> None:
        loading.open -= rows
        if not loading.open:
            self._answers.append(Loaded(loading.request, loading.statuses))

    def _check_offsets(self, offsets: U64, sizes: int | I64) -> None:
        if not len(offsets):
            return
        ends = offsets.astype(np.int64) + -(-np.asarray(sizes) // 4096) * 4096
        if int(ends.max()) > len(self._pool) or (offsets % np.uint64(4096)).any():
            raise ProtocolError("a block outside the pool, or not on a page")

    # --- holds ----------------------------------------------------------------------------------------------------

    def _hold(self, handles: I64) -> None:
        np.add.at(self._directory.holds, handles, 1)

    def _release(self, handles: I64) -> None:
        """Let go; a dying block that nothing holds any more gives its slot back."""
        directory = self._directory
        np.subtract.at(directory.holds, handles, 1)
        free = np.unique(handles)
        free = free[(directory.holds[free] == 0) & (directory.life[free] == Life.DYING)]
        if not len(free):
            return
        slots = free
        if self._not_slots:
            slots = free[~np.isin(free, list(self._not_slots))]
            self._not_slots -= set(free.tolist())
        self._slabs.free(directory.locations(slots))
        directory.give_back(free)

    # --- a damaged catalog ----------------------------------------------------------------------------------------

    def _lose_catalog(self, damage: Exception) -> None:
        """The catalog turned out damaged: nothing on the disk can be checked any more, so nothing is served."""
        self.counters.lost_catalogs += 1
        self._lost = damage
        self._scan = None
        known = self._directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE)
        if len(known):
            self._gone(known)
        if not self._committing:
            self._replace_catalog(damage)

    def _replace_catalog(self, damage: Exception) -> None:
        self._lost = None
        self._catalog.close()
        folder = self._folder / "catalog"
        set_aside(folder, damage)
        self._catalog = Catalog(folder)
        self._catalog.put_meta(Meta(self._slabs.slab_bytes, clean=False))
        self._lazy.clear()
        self._next.deletes.clear()
        for digest, row in self._namespaces.items():
            row.incarnation += 1
            self._next.namespaces[digest] = row
        for what, barrier in self._barriers.items():
            self._next.barriers[what] = barrier
        self._finish_scan()
        self._slabs.trim()
