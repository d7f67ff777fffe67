"""Readers in processes of their own race one writer over a shared index and a shared pool, and check every answer.

Every fact of an entry follows from its key and generation, and so does every byte of its slot:

```
entry   handle = slot, offset = slot * 4096, size and layers = functions of key and generation
slot    4 layers of 16 words, each word = stamp(generation)     written before the watermark passes that layer
```

So an answer that mixes two entries, is out of date, or comes with bytes of another block can't go unnoticed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import cast

import numpy as np
from numpy.typing import NDArray

import kvstore.index.reader as reader_module
from kvstore.core.states import BlockState
from kvstore.index import IndexReader, IndexWriter, index_bytes
from kvstore.index.layout import U64, Word, tags_of
from kvstore.testing.waiting import until
from kvstore.transport.memory import create_segment, map_segment
from tests.index.tables import Keys, random_keys

CONTROL_BYTES = 4096
BUCKETS = 40
BLOCKS_MAX = 260  # of 320 places: inserts often have to move other entries aside
KEYS = 400
PERMANENT = 40  # the first ones are never removed: a reader should find them always
SLOTS = KEYS
SLOT_BYTES = 4096
LAYERS = 4
LAYER_WORDS = 16
STAMP_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def all_keys() -> Keys:
    """The keys of the race."""
    return random_keys(KEYS, seed=11)


def stamp(generations: U64) -> U64:
    """What fills the slot of a block of that generation."""
    return generations * STAMP_FACTOR + np.uint64(1)


def size_of(keys: Keys, generations: U64) -> NDArray[np.int64]:
    """The size that a block claims."""
    return (((keys["lo"] ^ stamp(generations)) >> np.uint64(40)) % np.uint64(4000)).astype(np.int64) + 1


class Arena:
    """The shared memory: a word to stop the readers, the index, the pool."""

    def __init__(self, fd: int) -> None:
        memory = map_segment(fd, writable=True)
        self.stop = memory[:8].view(np.uint64)
        self.index = memory[CONTROL_BYTES : CONTROL_BYTES + index_bytes(BUCKETS)]
        pool = memory[CONTROL_BYTES + index_bytes(BUCKETS) :]
        self.slots: U64 = pool.view(np.uint64).reshape(SLOTS, SLOT_BYTES // 8)

    @staticmethod
    def create() -> int:
        """Descriptor of a new one."""
        return create_segment("index-race", CONTROL_BYTES + index_bytes(BUCKETS) + SLOTS * SLOT_BYTES)


@dataclass(slots=True)
class Report:
    """What one reader saw."""

    answers: int = 0  # keys asked about
    accepted: int = 0  # of those, blocks whose bytes were accepted
    lost: int = 0  # blocks that changed while their bytes were copied
    permanent_misses: int = 0
    violations: list[str] = field(default_factory=list[str])


# --- the readers ------------------------------------------------------------------------------------------------------


def read(parent: int, fd: int, seed: int, blind: bool, pipe: Connection) -> None:
    """Main function of a reader process. A blind reader skips the check of the entry's checksum."""
    if blind:
        _blindfold()
    own = os.open(f"/proc/{parent}/fd/{fd}", os.O_RDWR)
    arena = Arena(own)
    os.close(own)
    reader = IndexReader(arena.index)
    keys = all_keys()
    newest = np.zeros(KEYS, dtype=np.uint64)
    random = np.random.default_rng(seed)
    report = Report()
    pipe.send("ready")
    while not arena.stop[0] and not report.violations:
        count = int(random.choice([1, 1, 2, 3, 16, 64]))
        chosen = random.integers(0, KEYS, size=count) if random.random() < 0.8 else random.integers(0, PERMANENT, count)
        _ask(reader, arena, keys, chosen, int(random.integers(1, LAYERS + 1)), newest, report)
    pipe.send(report)


def _ask(
    reader: IndexReader,
    arena: Arena,
    keys: Keys,
    chosen: NDArray[np.int64],
    layers_end: int,
    newest: U64,
    report: Report,
) -> None:
    asked = keys[chosen]
    probe = reader.probe(asked)
    found = np.flatnonzero(probe.positions >= 0)
    generations = probe.generations[found]
    report.answers += len(chosen)
    report.permanent_misses += int(np.count_nonzero((probe.positions < 0) & (chosen < PERMANENT)))
    _check(report, "another key's entry", probe.entries[found, :3].tolist(), [list(row) for row in asked[found]])
    _check(report, "size", probe.sizes[found], size_of(asked[found], generations))
    _check(report, "offset", probe.offsets[found], probe.handles[found] * SLOT_BYTES)
    _check(report, "layers", probe.layers[found], np.full(len(found), LAYERS))
    ready = np.where(probe.states[found] == BlockState.COMMITTED, LAYERS, 0)
    _check(report, "watermark", np.maximum(probe.layers_ready[found], ready), probe.layers_ready[found])
    older = generations < newest[chosen[found]]
    if older.any():
        report.violations.append(f"generation {generations[older]} after {newest[chosen[found]][older]}")
    np.maximum.at(newest, chosen[found], generations)
    # Copy, then ask whether the entries still stand: only then do the bytes count.
    readable = found[probe.layers_ready[found] >= layers_end]
    slots = (probe.offsets[readable] // SLOT_BYTES) % SLOTS
    copied = arena.slots[slots, : layers_end * LAYER_WORDS]
    standing = reader.unchanged(probe, readable)
    report.accepted += int(np.count_nonzero(standing))
    report.lost += int(np.count_nonzero(~standing))
    expected = stamp(probe.generations[readable])[:, None]
    wrong = standing & (copied != expected).any(axis=1)
    if wrong.any():
        report.violations.append(f"bytes of another block under generations {probe.generations[readable][wrong]}")


def _check(report: Report, what: str, seen: object, expected: object) -> None:
    if not np.array_equal(np.asarray(seen), np.asarray(expected)):
        report.violations.append(f"{what}: {seen} instead of {expected}")


def _blindfold() -> None:
    def believe(entries: U64) -> U64:
        return entries[:, Word.CHECK]

    def is_whole(_: list[int]) -> bool:
        return True

    reader_module.checksum = believe
    reader_module.__dict__["_is_whole"] = is_whole


# --- the writer -------------------------------------------------------------------------------------------------------


class SlowWriter(IndexWriter):
    """Writes an entry word by word in random order, the tag first: the worst that a reader can meet."""

    random = np.random.default_rng(5)

    def _write(self, places: NDArray[np.int64], entries: U64) -> None:
        table = self._table
        table.tags.reshape(-1)[places] = tags_of(entries[:, Word.KEY_LO])
        for word in self.random.permutation(8).tolist():
            table.entries[places, word] = entries[:, word]
            os.sched_yield()  # let the readers look


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Errors of the writer that readers must notice."""

    recycle_early: bool = False  # the slot is written again before the entry is taken out
    publish_early: bool = False  # the watermark passes the layers before their bytes are there


class Churn:
    """Puts, publishes, commits and removes blocks as fast as it can."""

    def __init__(self, arena: Arena, writer: IndexWriter, mistakes: Mistakes) -> None:
        self._arena = arena
        self._writer = writer
        self._mistakes = mistakes
        self._keys = all_keys()
        self._random = np.random.default_rng(7)
        self._generation = 1
        self._slot = np.full(KEYS, -1, dtype=np.int64)
        self._free = list(range(SLOTS))
        self._put(np.arange(PERMANENT))
        self.rounds = 0

    def round(self) -> None:
        """One batch out, one batch in."""
        self.rounds += 1
        present = np.flatnonzero(self._slot[PERMANENT:] >= 0) + PERMANENT
        if len(present) + PERMANENT > BLOCKS_MAX:
            self._remove(self._random.choice(present, size=int(self._random.integers(1, 30)), replace=False))
        absent = np.flatnonzero(self._slot < 0)
        self._put(self._random.choice(absent, size=int(self._random.integers(1, 12)), replace=False))

    def _put(self, chosen: NDArray[np.int64]) -> None:
        self._random.shuffle(self._free)
        slots = np.array([self._free.pop() for _ in range(len(chosen))], dtype=np.int64)
        generations = np.arange(self._generation, self._generation + len(chosen), dtype=np.uint64)
        self._generation += len(chosen)
        keys = self._keys[chosen]
        self._writer.insert(keys, generations, slots * SLOT_BYTES, size_of(keys, generations), slots, 3, LAYERS)
        self._slot[chosen] = slots
        if self._mistakes.publish_early:
            self._writer.set_status(slots, BlockState.RESERVED, LAYERS)
        for layer in range(LAYERS):
            words = slice(layer * LAYER_WORDS, (layer + 1) * LAYER_WORDS)
            self._arena.slots[slots, words] = stamp(generations)[:, None]
            if not self._mistakes.publish_early:
                self._writer.set_status(slots, BlockState.RESERVED, layer + 1)
        self._writer.set_status(slots, BlockState.COMMITTED, LAYERS)

    def _remove(self, chosen: NDArray[np.int64]) -> None:
        slots = self._slot[chosen]
        if self._mistakes.recycle_early:
            self._arena.slots[slots] = 0
        self._writer.remove(slots)
        self._arena.slots[slots] = 0
        self._slot[chosen] = -1
        self._free.extend(slots.tolist())


# --- the race ---------------------------------------------------------------------------------------------------------


class Race:
    """Three reader processes and the writer in this one, as a context manager.

    Args:
        writer: makes the writer; `IndexWriter` itself unless the test has a worse one.
        mistakes: what the writer does wrong.
        blind: whether the readers skip the checksum.
    """

    READERS = 3

    def __init__(
        self,
        *,
        writer: Callable[[NDArray[np.uint8], int, int], IndexWriter] = IndexWriter,
        mistakes: Mistakes | None = None,
        blind: bool = False,
    ) -> None:
        self._fd = Arena.create()
        self._arena = Arena(self._fd)
        self.churn = Churn(self._arena, writer(self._arena.index, BUCKETS, SLOTS), mistakes or Mistakes())
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._readers: list[BaseProcess] = []
        for seed in range(self.READERS):
            near, far = context.Pipe()
            process = context.Process(target=read, args=(os.getpid(), self._fd, seed, blind, far), daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._readers.append(process)

    def run(self, seconds: float) -> list[Report]:
        """Write until the time is over or a reader has seen enough."""
        for pipe in self._pipes:
            assert pipe.poll(30), "a reader did not start"
            pipe.recv()
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and not any(pipe.poll() for pipe in self._pipes):
            for _ in range(50):
                self.churn.round()
        self._arena.stop[0] = 1
        for pipe in self._pipes:
            until(lambda pipe=pipe: pipe.poll(), what="a reader's report")
        return [cast("Report", pipe.recv()) for pipe in self._pipes]

    def __enter__(self) -> Race:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arena.stop[0] = 1
        for process in self._readers:
            process.join(10)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        os.close(self._fd)
