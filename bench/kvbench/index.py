"""`kvbench index`: how fast a process reads an index of many keys that another process wrote.

```
kvbench ──┬── writer   fills the table in shared memory and keeps it
          └── reader   maps it read-only and probes it: 90 % present keys, 10 % absent ones, in random order
```

The limit beside each row is the memory's own: one `numpy.take` of as many random entries of the same table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import BenchError
from kvbench.memory import U8, SharedArena, open_shared, require_available
from kvbench.sampling import Samples, alternate
from kvbench.workers import Worker
from kvstore.core.errors import UsageError
from kvstore.core.keys import KEY_DTYPE
from kvstore.core.states import BlockState
from kvstore.index import IndexReader, IndexWriter, buckets_for, index_bytes
from kvstore.index.layout import ENTRY_BYTES, POOL_UNIT_BYTES

KEYS_MAX: Final = 50_000_000
DEFAULT_KEYS: Final = 1_000_000
DEFAULT_BATCHES: Final = (1, 64, 1024)
DEFAULT_SECONDS: Final = 2.0
_ABSENT_SHARE: Final = 0.1
_INSERT_BATCH: Final = 16_384
_QUERY_KEYS: Final = 1 << 19  # distinct queries: far more than a cache remembers between two uses
_BYTES_PER_KEY: Final = 400  # of both processes together: table, keys, truth

Note = Callable[[str], None]
Keys = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """Everything that decides what `kvbench index` does.

    Args:
        keys: keys in the table.
        batches: keys per probe, one row each.
        seconds: wall-clock time per row.
        seed: keys and queries follow from it.

    Raises:
        UsageError: keys or a batch out of range.
    """

    keys: int = DEFAULT_KEYS
    batches: tuple[int, ...] = DEFAULT_BATCHES
    seconds: float = DEFAULT_SECONDS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.keys <= KEYS_MAX:
            raise UsageError(f"--keys: {self.keys} is out of range; allowed: 1 to {KEYS_MAX}")
        for batch in self.batches:
            if not 1 <= batch <= _QUERY_KEYS:
                raise UsageError(f"--batch: {batch} is out of range; allowed: 1 to {_QUERY_KEYS}")


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Probes of one batch size. The rate is the median over probes."""

    batch: int
    keys_per_s: float
    p50_us: float  # per probe of `batch` keys
    p99_us: float
    limit_keys_per_s: float  # numpy.take of as many random entries, in alternation
    ratio_to_limit: float
    checked: bool  # each answer of each probe was compared with the truth, and none was wrong
    samples: int


@dataclass(frozen=True, slots=True)
class IndexResult:
    """All rows, and what the table costs."""

    rows: list[IndexRow]
    resident_keys: int
    bytes_per_entry: float


def run_index(plan: IndexPlan, *, note: Note, step: Note) -> IndexResult:
    """Build the table, probe it; `step` is called once a row with a line about it, `note` with what else happens.

    Raises:
        UsageError: not enough memory.
        BenchError, KvStoreError: a process died, the table refused a key.
    """
    require_available(plan.keys * _BYTES_PER_KEY + (256 << 20), "lower --keys")
    table_bytes = index_bytes(buckets_for(plan.keys))
    with ExitStack() as stack:
        segment = SharedArena("kvbench-index", table_bytes)
        stack.callback(segment.close)
        begin = time.monotonic()
        note(f"filling a table with {plan.keys:,} keys")
        writer = stack.enter_context(Worker("index writer", IndexWriterSetup(plan.keys, plan.seed, segment.path)))
        writer.ready()
        resident = writer.ask(CountResident())
        note(f"filled {table_bytes / (1 << 20):.0f} MiB in {time.monotonic() - begin:.1f} s")
        reader = stack.enter_context(
            Worker("index reader", IndexReaderSetup(plan.keys, plan.seed, segment.reading_path))
        )
        reader.ready()
        rows: list[IndexRow] = []
        for batch in plan.batches:
            row = reader.ask(MeasureProbe(batch, plan.seconds))
            rows.append(row)
            step(summary(row))
    return IndexResult(rows, resident, table_bytes / resident)


def summary(row: IndexRow) -> str:
    """One line about a row."""
    text = f"index probe of {row.batch:,}: {row.keys_per_s / 1e6:.2f} M keys/s, p50 {row.p50_us:.1f} us"
    return text if row.checked else f"{text}, ANSWERS WRONG"


@dataclass(frozen=True, slots=True)
class IndexWriterSetup:
    """A writer whose table holds `keys` committed blocks; key number i has handle i."""

    keys: int
    seed: int
    path: str

    @contextmanager
    def open(self) -> Iterator[IndexWriter]:
        """The full table. Keeps it mapped until the context ends."""
        present, _ = make_keys(self.seed, self.keys)
        yield fill_table(open_shared(self.path, writable=True), present)


@dataclass(frozen=True, slots=True)
class CountResident:
    """Entries in the writer's table."""

    def run(self, writer: IndexWriter, /) -> int:
        return writer.resident


@dataclass(frozen=True, slots=True)
class IndexReaderSetup:
    """A reader of that table, and queries whose answers it knows."""

    keys: int
    seed: int
    path: str

    @contextmanager
    def open(self) -> Iterator[ProbeBench]:
        """Ready to probe."""
        present, absent = make_keys(self.seed, self.keys)
        yield ProbeBench(open_shared(self.path, writable=False), present, absent, seed=self.seed)


@dataclass(frozen=True, slots=True)
class MeasureProbe:
    """Measure probes of one batch size."""

    batch: int
    seconds: float

    def run(self, bench: ProbeBench, /) -> IndexRow:
        return bench.measure(self.batch, self.seconds)


class ProbeBench:
    """Queries over a table: 9 of 10 are present, in random order.

    Args:
        memory: the index segment.
        present: keys in the table, key i with handle i, shape (keys,).
        absent: keys that are not, shape (any,).
    """

    def __init__(self, memory: U8, present: Keys, absent: Keys, *, seed: int) -> None:
        random = np.random.default_rng(seed + 1)
        self._reader = IndexReader(memory)
        self._handles = random.integers(0, len(present), _QUERY_KEYS)
        self._queries = present[self._handles]
        missing = np.flatnonzero(random.random(_QUERY_KEYS) < _ABSENT_SHARE)
        self._queries[missing] = absent[random.integers(0, len(absent), len(missing))]
        self._handles[missing] = -1
        entries = len(memory) // ENTRY_BYTES
        self._entries = memory[: entries * ENTRY_BYTES].view(np.uint64).reshape(entries, ENTRY_BYTES // 8)
        self._places = random.integers(0, entries, _QUERY_KEYS)
        self._wrong = 0

    def measure(self, batch: int, seconds: float) -> IndexRow:
        """Probe batches of that size for about that long."""
        self._wrong = 0
        samples = alternate(
            lambda turn: self._probe(batch, turn), lambda turn: self._take(batch, turn), seconds=seconds
        )
        return _row(batch, samples, checked=self._wrong == 0)

    def _probe(self, batch: int, turn: int) -> float:
        span = _span(batch, turn)
        queries = self._queries[span]
        begin = time.perf_counter()
        probe = self._reader.probe(queries)
        states = probe.states
        took = time.perf_counter() - begin
        truth = self._handles[span]
        right = (states == BlockState.COMMITTED) & (probe.handles == truth) & (probe.positions >= 0)
        right |= (truth < 0) & (states == BlockState.ABSENT) & (probe.positions < 0)
        self._wrong += int((~right).sum())
        return took

    def _take(self, batch: int, turn: int) -> float:
        places = self._places[_span(batch, turn)]
        begin = time.perf_counter()
        np.take(self._entries, places, axis=0)
        return time.perf_counter() - begin


def make_keys(seed: int, count: int) -> tuple[Keys, Keys]:
    """`count` present keys and a tenth as many absent ones (at least one), KEY_DTYPE; random words, as hashes are."""
    random = np.random.default_rng(seed)
    total = count + max(1, int(count * _ABSENT_SHARE))
    words = random.integers(0, 1 << 64, size=(total, 3), dtype=np.uint64)
    keys = words.view(KEY_DTYPE).reshape(total)
    return keys[:count], keys[count:]


def fill_table(memory: U8, keys: Keys) -> IndexWriter:
    """Insert and commit every key, key i with handle i."""
    count = len(keys)
    writer = IndexWriter(memory, buckets_for(count), handles=count)
    for first in range(0, count, _INSERT_BATCH):
        handles = np.arange(first, min(first + _INSERT_BATCH, count), dtype=np.int64)
        writer.insert(
            keys[first : first + len(handles)],
            generations=(handles + 1).astype(np.uint64),
            offsets=handles * POOL_UNIT_BYTES,
            sizes=np.full(len(handles), POOL_UNIT_BYTES, dtype=np.int64),
            handles=handles,
            namespace=1,
            layers=1,
        )
        writer.set_status(handles, BlockState.COMMITTED, 1)
    if writer.resident != count:
        raise BenchError(f"the table holds {writer.resident} of {count} keys")
    return writer


def _span(batch: int, turn: int) -> slice:
    first = turn % (_QUERY_KEYS // batch) * batch
    return slice(first, first + batch)


def _row(batch: int, samples: Samples, *, checked: bool) -> IndexRow:
    rate, limit = samples.rate(batch), samples.limit_rate(batch)
    assert limit is not None
    return IndexRow(
        batch=batch,
        keys_per_s=rate,
        p50_us=samples.percentile_us(50),
        p99_us=samples.percentile_us(99),
        limit_keys_per_s=limit,
        ratio_to_limit=rate / limit,
        checked=checked,
        samples=len(samples.op_s),
    )
