"""Loading: blocks and layer ranges from the slabs into the pool, every byte checked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.server.tiers.disk.books import Books
from kvstore.server.tiers.disk.catalog import CatalogDamagedError
from kvstore.server.tiers.disk.commits import Commits
from kvstore.server.tiers.disk.directory import Life
from kvstore.server.tiers.disk.messages import Load, Loaded, LoadStatus
from kvstore.server.tiers.disk.payload import Geometry, Target, read_layers, read_run
from kvstore.server.tiers.disk.slabs import Run
from kvstore.server.tiers.disk.workers import Scratch, Workers

log = logging.getLogger("kvstore")

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(slots=True)
class _Loading:
    """A LOAD under way."""

    request: int
    rows: NDArray[np.void]
    statuses: U8
    open: int  # rows without a status so far, and one more until all have been looked at


class Loads:
    """See the module.

    Args:
        books: what this works on.
        commits: for blocks that turn out unreadable.
        readers: threads.
        lose: called when the catalog turns out damaged.
    """

    def __init__(self, books: Books, commits: Commits, readers: Workers, lose: Callable[[Exception], None]) -> None:
        self._books = books
        self._commits = commits
        self._readers = readers
        self._lose = lose

    def load(self, request: int, load: Load) -> None:
        """Begin with a LOAD."""
        directory = self._books.directory
        rows = load.rows
        handles = directory.find(np.ascontiguousarray(rows["key"]))
        found = handles >= 0
        found[found] = directory.life[handles[found]] == Life.DURABLE
        statuses = np.full(len(rows), LoadStatus.MISS, dtype=np.uint8)
        loading = _Loading(request, rows, statuses, 1)
        chosen = np.flatnonzero(found)
        if len(chosen):
            self._books.check_offsets(rows["offset"][chosen], directory.size[handles[chosen]].astype(np.int64))
            if self._books.complete:  # before that there is no order to keep
                self._books.tenants.touch(np.unique(handles[chosen]))
            self._read(loading, chosen, handles[chosen])
        self._books.counters.missed_blocks += len(rows) - len(chosen)
        self._settle_load(loading, 1)

    def _read(self, loading: _Loading, chosen: I64, handles: I64) -> None:
        """Start the reads of these rows: neighbours that are wanted whole together, ranges one by one."""
        directory = self._books.directory
        try:
            sums = self._books.catalog.sums(directory.sequence[handles])
        except CatalogDamagedError as damage:
            self._lose(damage)
            return
        targets: dict[int, tuple[int, Target]] = {}
        whole: list[int] = []
        for place, (row, handle) in enumerate(zip(chosen.tolist(), handles.tolist(), strict=True)):
            namespace = self._books.by_number[int(directory.namespace[handle])]
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
        for run in self._books.slabs.runs(directory.locations(there), directory.size[there].astype(np.int64)):
            places = [whole[at] for at in run.rows]
            self._read_run(loading, run, chosen[places], handles[places], [targets[place][1] for place in places])

    def _read_run(self, loading: _Loading, run: Run, rows: I64, handles: I64, targets: list[Target]) -> None:
        file, pool = self._books.slabs.file(run.slab), self._books.pool

        def work(scratch: Scratch) -> list[bool]:
            return read_run(file, run.offset, pool, targets, scratch)

        self._submit_read(loading, rows, handles, work)

    def _read_range(self, loading: _Loading, row: int, handle: int, target: Target, first: int, end: int) -> None:
        one = np.array([handle], dtype=np.int64)
        slab, offset = divmod(int(self._books.directory.locations(one)[0]), self._books.slabs.slab_bytes)
        file, pool = self._books.slabs.file(slab), self._books.pool

        def work(scratch: Scratch) -> list[bool]:
            return [read_layers(file, offset, pool, target, first, end, scratch)]

        self._submit_read(loading, np.array([row]), one, work)

    def _submit_read(self, loading: _Loading, rows: I64, handles: I64, work: Callable[[Scratch], list[bool]]) -> None:
        def done(right: list[bool] | None, error: Exception | None) -> None:
            directory = self._books.directory
            answers = np.array(right if error is None and right else [False] * len(rows), dtype=np.bool_)
            durable = directory.life[handles] == Life.DURABLE
            loading.statuses[rows] = np.where(
                durable, np.where(answers, LoadStatus.OK, LoadStatus.FAILED), LoadStatus.MISS
            )
            bad = np.unique(handles[durable & ~answers])
            if len(bad):
                log.warning("%d blocks of the SSD tier were unreadable or damaged, and are dropped", len(bad))
                self._books.counters.failed_reads += len(bad)
                self._commits.gone(bad)
            good = handles[durable & answers]
            self._books.counters.loaded_blocks += len(good)
            self._books.counters.loaded_bytes += int(directory.size[good].sum())
            self._books.release(handles)
            self._settle_load(loading, len(rows))

        loading.open += len(rows)
        self._books.hold(handles)
        self._readers.submit(work, done)

    def _settle_load(self, loading: _Loading, rows: int) -> None:
        loading.open -= rows
        if not loading.open:
            self._books.answers.append(Loaded(loading.request, loading.statuses))
