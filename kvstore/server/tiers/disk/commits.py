"""Commits: what becomes durable together, and how blocks leave.

Order of durability of a block: payload written, slab synced, catalog row written, catalog log synced, then reported.
While one commit is under way the next one gathers.

Order of reuse of a slot: the row's deletion is durable, the last read has ended, then the slot is given away. So a row
never points at another block's bytes; and if a disk lies about syncing, the checksums catch it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.tiers.disk.books import Books
from kvstore.server.tiers.disk.catalog import ROW, Barrier, Batch, CatalogUnwritableError, NamespaceRow
from kvstore.server.tiers.disk.directory import Life
from kvstore.server.tiers.disk.messages import Answer, Flushed, Gone, Store, Stored, StoreStatus
from kvstore.server.tiers.disk.payload import Geometry
from kvstore.server.tiers.disk.workers import Scratch, Workers

log = logging.getLogger("kvstore")

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]

COMMIT_BYTES: Final = 64 << 20  # of payload that one commit gathers while writes are under way
LAZY_DELETES_MAX: Final = 8192  # rows that no longer count, cleared away with one commit
GONE_MAX: Final = 16384  # keys of one message
RETRY_S: Final = 1.0  # after the catalog refused a write


@dataclass(slots=True)
class Storing:
    """A STORE under way."""

    request: int
    store: Store
    geometry: Geometry
    statuses: U8
    waiting: I64  # rows without a slot so far
    open: int  # rows without a status so far


@dataclass(slots=True)
class Written:
    """Blocks whose payload is on the disk."""

    storing: Storing
    rows: list[int]
    handles: I64
    sums: list[bytes]


@dataclass(slots=True)
class Commit:
    """What becomes durable together."""

    written: list[Written] = field(default_factory=list[Written])
    slabs: set[int] = field(default_factory=set[int])
    namespaces: dict[bytes, NamespaceRow] = field(default_factory=dict[bytes, NamespaceRow])
    barriers: dict[bytes, Barrier | None] = field(default_factory=dict[bytes, Barrier | None])  # None: forget it
    deletes: list[U64] = field(default_factory=list[U64])  # rows, by sequence
    releases: list[I64] = field(default_factory=list[I64])  # handles that this commit holds
    evicted: int = 0  # of those, how many a store may be waiting for
    answers: list[Answer] = field(default_factory=list[Answer])

    def __bool__(self) -> bool:
        return bool(self.written or self.namespaces or self.barriers or self.deletes or self.releases or self.answers)


class Commits:
    """See the module.

    Args:
        books: what this works on.
        committer: one thread.
        writers: the threads that write payload.
        after: called after each commit, durable or not.
    """

    def __init__(self, books: Books, committer: Workers, writers: Workers, after: Callable[[], None]) -> None:
        self._books = books
        self._committer = committer
        self._writers = writers
        self._after = after
        self.next = Commit()
        self.lazy: deque[U64] = deque()  # rows that count no more
        self.waiting: deque[Storing] = deque()  # stores that have no slots yet; commits free some
        self.evicting = 0  # slots of evicted blocks that the next commits give back
        self.committing = False
        self.unwritable = False
        self._retry_at_s = 0.0  # 0 = now

    @property
    def resting(self) -> bool:
        """The catalog has refused a write, and is not asked again yet."""
        return self.unwritable and self._retry_at_s > 0

    @property
    def idle(self) -> bool:
        """Nothing is on its way to the disk."""
        return not (self.waiting or self.committing or self.next or self._writers.unfinished)

    def tick(self) -> None:
        """What is due by time."""
        if time.monotonic() >= self._retry_at_s:
            self._retry_at_s = 0.0

    def start(self) -> None:
        """Make durable what has gathered, unless a commit is under way or the catalog needs a rest."""
        if self.committing or self.resting or not (self.next or self.lazy) or self._gathers():
            return
        commit, self.next = self.next, Commit()
        for written in commit.written:
            self._leave_out_dead(written)
        batch = self._batch(commit)
        alive = any(written.rows for written in commit.written)
        files = [self._books.slabs.file(number) for number in commit.slabs] if alive else []
        catalog, reopen = self._books.catalog, self.unwritable

        def work(_: Scratch) -> None:
            for file in files:
                file.fdatasync()
            if reopen:
                catalog.reopen()
            catalog.write(batch)
            catalog.sync()

        def done(_: None, error: Exception | None) -> None:
            self.committing = False
            if error is None:
                self._committed(commit)
            else:
                self._uncommitted(commit, error)
            self._after()

        self.committing = True
        self._committer.submit(work, done)

    def settle(self, storing: Storing, rows: int) -> None:
        """So many more rows have their status; answer when all have, and let the policy see the batch as one."""
        storing.open -= rows
        if storing.open:
            return
        # What the answer says holds where it stands among the answers: some of these blocks may have left meanwhile.
        statuses = storing.statuses
        handles = self._books.directory.find(np.ascontiguousarray(storing.store.rows["key"]))
        there = (handles >= 0) & (self._books.directory.life[handles] == Life.DURABLE)
        claimed = (statuses == StoreStatus.DURABLE) | (statuses == StoreStatus.EXISTS)
        statuses[claimed & ~there] = StoreStatus.BUSY
        self._books.admit(handles[(statuses == StoreStatus.DURABLE) & there])
        self._books.answers.append(Stored(storing.request, statuses))

    def fail(self, written: Written, *, row_written: bool = False) -> None:
        """These blocks did not become durable; a row that may have reached the catalog all the same is deleted."""
        handles = written.handles
        living = handles[np.isin(self._books.directory.life[handles], (Life.WRITING, Life.COMMITTING))]
        self.drop(living, row_written=row_written)
        self._books.release(handles)
        written.storing.statuses[written.rows] = StoreStatus.FAILED
        self._books.counters.failed_stores += len(written.rows)
        self.settle(written.storing, len(written.rows))

    def drop(self, handles: I64, *, lazily: bool = False, evicted: bool = False, row_written: bool = False) -> None:
        """Blocks leave: no longer found from now on, for good with the next commit.

        Args:
            handles: found so far, each once.
            lazily: their rows count no more after the next commit, and are cleared away some time.
            evicted: a store may be waiting for their slots.
            row_written: those being committed may have a row, although the commit failed.
        """
        if not len(handles):
            return
        directory = self._books.directory
        lives = directory.life[handles]
        self._books.policy.remove(handles[lives == Life.DURABLE])
        in_catalog = lives == Life.DURABLE
        if self.committing or row_written:
            in_catalog |= lives == Life.COMMITTING
        recorded = handles[in_catalog]
        directory.unlink(handles)
        directory.life[handles] = Life.DYING
        if not len(recorded):
            return
        sequences = directory.sequence[recorded].copy()
        if lazily:
            self.lazy.append(sequences)
        else:
            self.next.deletes.append(sequences)
        self._books.hold(recorded)
        self.next.releases.append(recorded)
        if evicted:
            self.next.evicted += len(recorded)
            self.evicting += len(recorded)

    def gone(self, handles: I64, *, evicted: bool = False) -> None:
        """Drop blocks that the shard still believes to be here, and tell it."""
        for start in range(0, len(handles), GONE_MAX):
            keys = self._books.directory.keys(handles[start : start + GONE_MAX])
            self._books.answers.append(Gone(keys))
        self.drop(handles, evicted=evicted)

    def _gathers(self) -> bool:
        """Whether waiting makes the next commit larger and keeps nobody waiting: a flush of the disk costs as much as
        writing some megabytes, and stores are in no hurry.
        """
        gathered = sum(len(written.rows) * written.storing.geometry.size for written in self.next.written)
        in_no_hurry = not (self.next.answers or self.waiting)
        return in_no_hurry and self._writers.unfinished > 0 and gathered < COMMIT_BYTES

    def _leave_out_dead(self, written: Written) -> None:
        """Blocks that were removed while they were written: no row for them."""
        alive = self._books.directory.life[written.handles] == Life.COMMITTING
        dead = [row for row, ok in zip(written.rows, alive.tolist(), strict=True) if not ok]
        if not dead:
            return
        self._books.release(written.handles[~alive])
        written.storing.statuses[dead] = StoreStatus.STALE
        self._books.counters.stale_stores += len(dead)
        self.settle(written.storing, len(dead))
        written.rows = [row for row, ok in zip(written.rows, alive.tolist(), strict=True) if ok]
        written.sums = [sums for sums, ok in zip(written.sums, alive.tolist(), strict=True) if ok]
        written.handles = written.handles[alive]

    def _batch(self, commit: Commit) -> Batch:
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
        while self.lazy and lazy < LAZY_DELETES_MAX:
            sequences = self.lazy.popleft()
            if len(sequences) > LAZY_DELETES_MAX:
                self.lazy.appendleft(sequences[LAZY_DELETES_MAX:])
            batch.delete_blocks(sequences[:LAZY_DELETES_MAX])
            lazy += len(sequences)
        for written in commit.written:
            if written.rows:
                batch.put_blocks(
                    self._rows(written.handles), self._books.directory.sequence[written.handles], written.sums
                )
        return batch

    def _rows(self, handles: I64) -> NDArray[np.void]:
        directory = self._books.directory
        rows = np.zeros(len(handles), ROW)
        rows["key"] = directory.keys(handles)
        rows["location"] = directory.locations(handles)
        rows["size"] = directory.size[handles]
        namespace = self._books.by_number[int(directory.namespace[handles[0]])]  # one run is of one namespace
        rows["namespace"] = namespace.number
        rows["incarnation"] = namespace.incarnation
        rows["layers"] = namespace.layers
        return rows

    def _committed(self, commit: Commit) -> None:
        self._books.counters.commits += 1
        self.unwritable = False
        directory = self._books.directory
        for written in commit.written:
            if not written.rows:
                continue
            handles = written.handles
            alive = handles[directory.life[handles] == Life.COMMITTING]
            directory.life[alive] = Life.DURABLE
            self._books.release(handles)
            written.storing.statuses[written.rows] = StoreStatus.DURABLE
            self._books.counters.stored_blocks += len(handles)
            self._books.counters.stored_bytes += len(handles) * written.storing.geometry.size
            self.settle(written.storing, len(written.rows))
        self.evicting -= commit.evicted
        for handles in commit.releases:
            self._books.release(handles)
        self._books.answers.extend(commit.answers)
        if any(isinstance(answer, Flushed) for answer in commit.answers):
            self._books.slabs.trim()

    def _uncommitted(self, commit: Commit, error: Exception) -> None:
        """Stores have failed; what must not be forgotten, deletes above all, goes into the next commit."""
        if not isinstance(error, OSError):
            raise error
        if not self.unwritable:
            log.error("the SSD tier's catalog can't be written (%s); trying again every %g s", error, RETRY_S)
        self.unwritable = True
        self._retry_at_s = time.monotonic() + RETRY_S
        row_written = isinstance(error, CatalogUnwritableError)
        for written in commit.written:
            if written.rows:
                self.fail(written, row_written=row_written)
        later = self.next
        later.namespaces = commit.namespaces | later.namespaces
        later.barriers = commit.barriers | later.barriers
        later.deletes = commit.deletes + later.deletes
        later.releases = commit.releases + later.releases
        later.evicted += commit.evicted
        later.answers = commit.answers + later.answers
        while self.waiting:
            storing = self.waiting.popleft()
            storing.statuses[storing.waiting] = StoreStatus.FAILED
            self._books.counters.failed_stores += len(storing.waiting)
            self.settle(storing, len(storing.waiting))
