"""After a restart: what is on the disk, newest first, told to the shard piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.tiers.disk.books import Books
from kvstore.server.tiers.disk.catalog import CatalogDamagedError
from kvstore.server.tiers.disk.commits import Commits
from kvstore.server.tiers.disk.directory import Life
from kvstore.server.tiers.disk.messages import SCANNED_BLOCK, SCANNED_NAMESPACE, Scanned
from kvstore.server.tiers.disk.payload import Geometry, Target, read_run
from kvstore.server.tiers.disk.slabs import padded
from kvstore.server.tiers.disk.workers import Scratch, Workers
from kvstore.transport.memory import private_arena

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

SCAN_PIECE: Final = 4096
SUSPECTS_MAX: Final = 64  # newest blocks that are read and checked after an unclean end
SUSPECT_BYTES_MAX: Final = 64 << 20


class Rescan:
    """See the module.

    Args:
        books: what this works on, empty so far.
        commits: for rows that count no more.
        readers: threads.
        clean: the last owner of the folder closed it.
        lose: called when the catalog turns out damaged.
    """

    def __init__(
        self, books: Books, commits: Commits, readers: Workers, *, clean: bool, lose: Callable[[Exception], None]
    ) -> None:
        self._books = books
        self._commits = commits
        self._readers = readers
        self._lose = lose
        self._taken_over = books.slabs.take_over()
        self._first_sequence = books.sequence  # rows from there on are of this run
        self._scan: Iterator[tuple[NDArray[np.void], U64]] | None = books.catalog.blocks(SCAN_PIECE)
        self._request: int | None = None
        self._told_namespaces = False
        self._suspects_left = 0 if clean else SUSPECTS_MAX
        self._suspects_open = 0
        self._scanned: list[I64] = []  # handles, newest first

    def begin(self, request: int) -> None:
        """The shard has asked."""
        self._request = request

    @property
    def waiting(self) -> bool:
        """Whether `step` has something to do."""
        return self._scan is not None and self._request is not None

    def stop(self) -> None:
        """No more of it."""
        self._scan = None

    def step(self) -> None:
        """Take in the next piece of what is on the disk, and answer with it."""
        assert self._scan is not None
        try:
            rows, sequences = next(self._scan, (None, None))
        except CatalogDamagedError as damage:
            self._lose(damage)
            return
        if rows is None or sequences is None:
            self._scan = None
            self.finish()
            return
        former = sequences < self._first_sequence  # the rest is of this run, and known
        rows, sequences = rows[former], sequences[former]
        alive = self._alive(rows, sequences)
        self._commits.lazy.append(sequences[~alive])
        rows, sequences = rows[alive], sequences[alive]
        locations = rows["location"].astype(np.int64)
        handles = self._books.directory.add(
            np.ascontiguousarray(rows["key"]), locations, rows["size"], rows["namespace"], sequences
        )
        self._books.directory.life[handles] = Life.DURABLE
        self._books.charge(handles)
        self._scanned.append(handles)
        suspects = self._take_suspects(handles)
        self._tell(handles[suspects:])

    def finish(self) -> None:
        """Once all is known: free slots are known too, and ages."""
        if self._books.complete or self._scan is not None or self._suspects_open:
            return
        directory = self._books.directory
        taken = directory.select(Life.WRITING, Life.COMMITTING, Life.DURABLE, Life.DYING)
        taken = taken[np.isin(directory.locations(taken) // self._books.slabs.slab_bytes, self._taken_over)]
        misplaced = self._restore_slabs(taken)
        if len(misplaced):
            self._commits.gone(misplaced)
        self._books.complete = True
        tenants = self._books.tenants
        policies = [tenants.policy(group) for group in tenants.groups]
        stored_meanwhile = [policy.candidates(len(policy)) for policy in policies]
        for handles in reversed(self._scanned):
            tenants.admit(handles[directory.life[handles] == Life.DURABLE])
        for policy, handles in zip(policies, stored_meanwhile, strict=True):
            policy.touch(handles[::-1])  # they came with the first to go in front
        self._scanned.clear()
        for what in self._books.barriers.forget_other_boots():
            self._commits.next.barriers[what] = None
        self._tell(np.zeros(0, np.int64), complete=True)

    def _alive(self, rows: NDArray[np.void], sequences: U64) -> Mask:
        """Rows that count: of the namespace as it is now, in slabs that are there, newest of their key, not removed."""
        keys = np.ascontiguousarray(rows["key"])
        known = np.zeros(len(rows), dtype=np.bool_)
        for number in np.unique(rows["namespace"]).tolist():
            row = self._books.by_number.get(number)
            if row is not None:
                same = (rows["namespace"] == number) & (rows["incarnation"] == row.incarnation)
                known |= same & (rows["layers"] == row.layers) & (rows["size"] == row.layers * row.layer_bytes)
        lengths = rows["size"].astype(np.int64)
        alive = known & self._books.slabs.has(rows["location"].astype(np.int64), lengths)
        alive &= ~self._books.barriers.removed(keys, sequences)
        alive &= self._books.directory.find(keys) < 0
        candidates = np.flatnonzero(alive)
        first = np.zeros(len(rows), dtype=np.bool_)
        first[candidates[np.unique(keys[candidates], return_index=True)[1]]] = True
        return alive & first

    def _take_suspects(self, handles: I64) -> int:
        """Check the newest blocks after an unclean end before they are told; how many of `handles` these are."""
        sizes = self._books.directory.size[handles].astype(np.int64)
        fitting = int(np.searchsorted(np.cumsum(sizes), SUSPECT_BYTES_MAX, side="right"))
        count = min(len(handles), self._suspects_left, fitting)
        self._suspects_left = self._suspects_left - count if count == len(handles) else 0
        suspects = handles[:count]
        for handle, sums in zip(
            suspects.tolist(), self._books.catalog.sums(self._books.directory.sequence[suspects]), strict=True
        ):
            self._check_suspect(handle, sums or b"")
        return count

    def _check_suspect(self, handle: int, sums: bytes) -> None:
        one = np.array([handle], dtype=np.int64)
        slab, offset = divmod(int(self._books.directory.locations(one)[0]), self._books.slabs.slab_bytes)
        row = self._books.by_number[int(self._books.directory.namespace[handle])]
        geometry = Geometry(row.layers, row.layer_bytes)
        file = self._books.slabs.file(slab)

        def work(scratch: Scratch) -> bool:
            memory = private_arena(padded(geometry.size))
            return read_run(file, offset, memory, [Target(geometry, 0, 0, sums)], scratch)[0]

        def done(right: bool | None, error: Exception | None) -> None:
            self._suspects_open -= 1
            if self._books.directory.life[handle] == Life.DURABLE:
                if right and error is None:
                    self._tell(one)
                else:
                    self._books.counters.dropped_tail_blocks += 1
                    self._commits.drop(one)
            self._books.release(one)
            self.finish()

        self._suspects_open += 1
        self._books.hold(one)
        self._readers.submit(work, done)

    def _tell(self, handles: I64, *, complete: bool = False) -> None:
        if self._request is None:
            return
        namespaces = np.zeros(0 if self._told_namespaces else len(self._books.namespaces), SCANNED_NAMESPACE)
        if not self._told_namespaces:
            self._told_namespaces = True
            for place, (digest, row) in enumerate(self._books.namespaces.items()):
                tenant, label = row.tenant.encode(), row.label.encode()
                namespaces[place] = (digest, row.number, row.layers, row.layer_bytes, tenant, label)
        elif not len(handles) and not complete:
            return
        blocks = np.zeros(len(handles), SCANNED_BLOCK)
        blocks["key"] = self._books.directory.keys(handles)
        blocks["namespace"] = self._books.directory.namespace[handles]
        blocks["size"] = self._books.directory.size[handles]
        self._books.answers.append(Scanned(self._request, namespaces, blocks, complete))

    def _restore_slabs(self, taken: I64) -> I64:
        """Give the slabs of the former run back to the allocator with the slots of these handles used. Handles that fit
        no slot of their slab, which no run of ours leaves behind, are returned.
        """
        allocator, directory = self._books.slabs.allocator, self._books.directory
        order = np.argsort(directory.sequence[taken], kind="stable")[::-1]
        taken = taken[order]
        locations = directory.locations(taken)
        slabs = locations // self._books.slabs.slab_bytes
        misplaced: list[I64] = []
        for number in self._taken_over.tolist():
            here = np.flatnonzero(slabs == number)
            if not len(here):
                self._books.slabs.restore(number, 0, np.zeros(0, np.int64))
                continue
            slot_bytes = allocator.slot_bytes_for(int(directory.size[taken[here[0]]]))
            sizes = directory.size[taken[here]].astype(np.int64)
            fits = (locations[here] % self._books.slabs.slab_bytes % slot_bytes == 0) & (sizes <= slot_bytes)
            first = np.zeros(len(here), dtype=np.bool_)
            first[np.unique(locations[here], return_index=True)[1]] = True
            fits &= first
            self._books.slabs.restore(number, slot_bytes, locations[here[fits]])
            misplaced.append(taken[here[~fits]])
        lost = np.concatenate(misplaced) if misplaced else np.zeros(0, np.int64)
        self._books.not_slots = set(lost.tolist())
        return lost[directory.life[lost] == Life.DURABLE]
