"""The SSD tier: requests in, answers out, in one thread. Other threads do what waits; their results come back here.

```
books.py     blocks, slots, namespaces: what all parts share        stores.py    slots, evictions, payload to slabs
commits.py   what becomes durable together, and how blocks leave    loads.py     payload from slabs, checked
scan.py      after a restart: what is there
```
"""

from __future__ import annotations

import fcntl
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.server.tiers.disk.barriers import Barriers
from kvstore.server.tiers.disk.books import Books
from kvstore.server.tiers.disk.catalog import Catalog, Meta, Opened, open_or_set_aside, set_aside
from kvstore.server.tiers.disk.commits import Commits
from kvstore.server.tiers.disk.directory import Directory, Life
from kvstore.server.tiers.disk.files import Files, SystemFiles
from kvstore.server.tiers.disk.loads import Loads
from kvstore.server.tiers.disk.messages import (
    Answer,
    Flush,
    Flushed,
    Load,
    Namespace,
    Quotas,
    Remove,
    Removed,
    Request,
    Scan,
    Stats,
    StatsAnswer,
    Store,
)
from kvstore.server.tiers.disk.scan import Rescan
from kvstore.server.tiers.disk.slabs import Slabs, slab_bytes_for
from kvstore.server.tiers.disk.stores import Stores
from kvstore.server.tiers.disk.workers import Inbox, Workers

READ_THREADS: Final = 4
WRITE_THREADS: Final = 6  # more than readers: summing and copying come before a write, when the disk has nothing yet
SCRATCH_BYTES: Final = 2 << 20  # of each of them: one huge page
GROW_S: Final = 5.0  # after the file system refused another slab


class FolderLock:
    """One engine per folder.

    Raises:
        ConfigError: another one has it, or it can't be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "lock").open("w")
        except OSError as cause:
            raise ConfigError(f"disk tier in {str(folder)!r}: {cause.strerror}") from cause
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
        ConfigError: another engine uses the folder, it can't be made or opened, or the capacity is too small.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, pool: NDArray[np.uint8], boot_id: bytes, files: Files | None = None
    ) -> None:
        self._lock = FolderLock(folder)
        self._folder = folder
        try:
            opened = open_or_set_aside(folder / "catalog")
        except ConfigError:
            self._lock.close()
            raise
        slab_bytes = opened.meta.slab_bytes if opened.meta else slab_bytes_for(capacity_bytes)
        if capacity_bytes < slab_bytes:
            opened.catalog.close()
            self._lock.close()
            raise ConfigError(f"disk tier of {capacity_bytes} bytes: at least one slab of {slab_bytes} bytes")
        slabs = Slabs(folder, files if files is not None else SystemFiles(folder), capacity_bytes, slab_bytes)
        if opened.meta is None:
            slabs.delete_all()  # without a catalog nothing in them can be checked
        opened.catalog.put_meta(Meta(slab_bytes, clean=False))
        self._books = _books(opened, slabs, pool, boot_id)
        self._inbox = Inbox()
        self._readers = Workers("read", READ_THREADS, self._inbox, SCRATCH_BYTES)
        self._writers = Workers("write", WRITE_THREADS, self._inbox, SCRATCH_BYTES)
        self._committer = Workers("commit", 1, self._inbox)
        self._commits = Commits(self._books, self._committer, self._writers, self._after_commit)
        self._stores = Stores(self._books, self._commits, self._writers)
        self._loads = Loads(self._books, self._commits, self._readers, self._lose_catalog)
        clean = opened.meta is None or opened.meta.clean
        self._rescan = Rescan(self._books, self._commits, self._readers, clean=clean, lose=self._lose_catalog)
        self._grow_at_s = 0.0
        self._damage: Exception | None = None  # found in the catalog, which is replaced after the commit under way

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
            case Namespace():
                self._stores.announce(message)
            case Quotas():
                self._stores.set_quotas(message)
            case Store():
                self._stores.store(request, message)
            case Load():
                self._loads.load(request, message)
            case Remove():
                self._remove(request, message)
            case Flush():
                self._flush(request, message)
            case Scan():
                self._rescan.begin(request)
            case Stats():
                self._books.answers.append(StatsAnswer(request, self.stats()))
        self._commits.start()

    def poll(self) -> None:
        """Handle what threads have finished, and what is due by time. Call it every 100 ms, and when `fd` says so."""
        self._inbox.handle()
        self._readers.replace_stuck()
        self._commits.tick()
        now_s = time.monotonic()
        if now_s >= self._grow_at_s:
            self._grow_at_s = now_s + GROW_S
            self._books.slabs.grow_again()
        self._stores.advance()
        self._commits.start()

    def scan_step(self) -> None:
        """While `scanning`: take in the next piece of what is on the disk, and answer with it."""
        self._rescan.step()

    def answers(self) -> list[Answer]:
        """Answers since the last call, in order."""
        answers, self._books.answers = self._books.answers, []
        return answers

    @property
    def scanning(self) -> bool:
        """Whether `scan_step` has something to do."""
        return self._rescan.waiting

    @property
    def complete(self) -> bool:
        """Whether everything on the disk is known."""
        return self._books.complete

    @property
    def idle(self) -> bool:
        """Nothing is under way except, perhaps, reads."""
        return self._commits.idle

    def close(self) -> None:
        """Close the folder in order. What is under way and not durable yet is lost; wait for `idle` first."""
        for workers in (self._readers, self._writers, self._committer):
            workers.close()
        self._rescan.stop()
        books = self._books
        if not self._commits.committing:
            if self.idle and books.complete and not self._readers.unfinished:
                books.catalog.put_meta(Meta(books.slabs.slab_bytes, clean=True))
            books.catalog.close()
            if not self._readers.unfinished:
                books.slabs.close()
        self._lock.close()

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, and what each tenant has of the disk and may have: bytes of slots."""
        books = self._books
        return {
            "blocks": len(books.directory.select(Life.DURABLE)),
            "dying_blocks": len(books.directory.select(Life.DYING)),
            "disk_bytes": books.slabs.disk_bytes,
            "capacity_bytes": books.slabs.slabs_max * books.slabs.slab_bytes,
            "complete": int(books.complete),
            "writable": int(not self._commits.unwritable),
            "refused_growth": books.slabs.refused_growth,
            "namespaces": len(books.namespaces),
            "stuck_reads": self._readers.stuck,
            **asdict(books.counters),
            "quotas": books.tenants.describe(),
        }

    # --- removing -------------------------------------------------------------------------------------------------

    def _remove(self, request: int, remove: Remove) -> None:
        books, later = self._books, self._commits.next
        keys = np.unique(remove.keys)
        handles = books.directory.find(keys)
        handles = handles[handles >= 0]
        self._commits.drop(handles)
        for at in range(len(keys)):
            what = keys[at : at + 1].tobytes()
            later.barriers[what] = books.barriers.raise_to(what, remove.generation, books.sequence)
        if books.complete:
            self._fold_barriers()
        books.counters.removed_blocks += len(handles)
        later.answers.append(Removed(request, len(handles)))

    def _fold_barriers(self) -> None:
        forgotten, generation = self._books.barriers.fold()
        barriers = self._commits.next.barriers
        for what in forgotten:
            barriers[what] = None
        if forgotten:
            barriers[b""] = self._books.barriers.raise_to(b"", generation, 0)

    def _flush(self, request: int, flush: Flush) -> None:
        books, later = self._books, self._commits.next
        digests = [flush.digest] if flush.digest else list(books.namespaces)
        rows = {digest: books.namespaces[digest] for digest in digests if digest in books.namespaces}
        handles = books.directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE)
        handles = handles[np.isin(books.directory.namespace[handles], [row.number for row in rows.values()])]
        for row in rows.values():
            row.incarnation += 1
        later.namespaces.update(rows)
        later.barriers[flush.digest] = books.barriers.raise_to(flush.digest, flush.generation, 0)
        self._commits.drop(handles, lazily=True)
        books.counters.removed_blocks += len(handles)
        later.answers.append(Flushed(request, len(handles)))

    # --- a damaged catalog ----------------------------------------------------------------------------------------

    def _after_commit(self) -> None:
        if self._damage is not None:
            self._replace_catalog(self._damage)
        self._stores.advance()

    def _lose_catalog(self, damage: Exception) -> None:
        """The catalog turned out damaged: nothing on the disk can be checked any more, so nothing is served."""
        self._books.counters.lost_catalogs += 1
        self._damage = damage
        self._rescan.stop()
        known = self._books.directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE)
        if len(known):
            self._commits.gone(known)
        if not self._commits.committing:
            self._replace_catalog(damage)

    def _replace_catalog(self, damage: Exception) -> None:
        self._damage = None
        books, later = self._books, self._commits.next
        books.catalog.close()
        folder = self._folder / "catalog"
        set_aside(folder, damage)
        books.catalog = Catalog(folder)
        books.catalog.put_meta(Meta(books.slabs.slab_bytes, clean=False))
        self._commits.lazy.clear()
        later.deletes.clear()
        for row in books.namespaces.values():
            row.incarnation += 1
        later.namespaces.update(books.namespaces)
        later.barriers.update(books.barriers.items())
        self._rescan.finish()
        books.slabs.trim()


def _books(opened: Opened, slabs: Slabs, pool: NDArray[np.uint8], boot_id: bytes) -> Books:
    barriers = Barriers(boot_id, opened.barriers)
    removed = max((barrier.sequence for _, barrier in barriers.items()), default=0)
    return Books(
        pool=pool,
        directory=Directory(),
        slabs=slabs,
        catalog=opened.catalog,
        namespaces=opened.namespaces,
        barriers=barriers,
        sequence=1 + max(removed, opened.newest_sequence),
    )
