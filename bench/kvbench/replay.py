"""`kvbench replay`: a trace's prompts through the real service, one server per row.

```
for each request      keys of its whole chain of blocks
    lookup            how many of them lead as hits                                          timed
    read              these, into memory of the client; every byte compared                  timed
    put               the chain in prefix order: what is there stays and counts as used, the rest is written
```

A block's bytes follow from its number, so that a block which holds another one's bytes, or half of them, is noticed.

The room is exact. A chunk of the pool holds a whole number of slots, so a pool of whole chunks has some slots too many.
These are taken by ballast: blocks that were put, leased and then deleted, which neither the index nor the eviction
policy knows of any more, but whose slots stay occupied until the lease ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvbench.errors import BenchError
from kvbench.memory import arena, require_available
from kvbench.plan import MIB
from kvbench.trace import TOKENS_PER_ID, Request, Trace, block_keys
from kvstore.core.errors import UsageError
from kvstore.core.keys import BlockKeys
from kvstore.core.layout import OpaqueLayout
from kvstore.core.sizes import format_size
from kvstore.core.states import PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.transport.trailer import slot_payload_bytes

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Keys = NDArray[np.void]
Note = Callable[[str], None]
Part = Callable[[float], None]

DEFAULT_FRACTIONS: Final = (0.02, 0.05, 0.10, 0.25)
DEFAULT_BLOCK_BYTES: Final = 4096
DEFAULT_ADMISSION: Final = "second"
BLOCK_BYTES_MAX: Final = 64 << 10
_CHUNK_BYTES: Final = MIB
_CHUNKS_MIN: Final = 8
_SLOT_GRANULE: Final = 4096  # of slots up to 256 KiB
_UNLIMITED_SLACK: Final = 1.25
_TIMEOUT_S: Final = 20.0
_BALLAST_TTL_S: Final = 600.0
_LIMIT_BYTES: Final = 64 * MIB  # that the memcpy beside each read walks through
_SERVER_OVERHEAD_BYTES: Final = 256 * MIB
_PARTS: Final = 200  # of the bar, per row
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Everything that decides what `kvbench replay` does with a trace.

    Args:
        capacities: blocks that the DRAM tier holds, one row each (and policy); None: all of the trace.
        policies: eviction policies of the server.
        block_bytes: of one block; small ones, for what is measured is the choice of blocks.
        disk_bytes: SSD tier below the DRAM tier; 0 = none.
        admission: which blocks are written to it.
        seed: block content follows from it.

    Raises:
        UsageError: a number is out of range.
    """

    capacities: tuple[int | None, ...]
    policies: tuple[str, ...]
    block_bytes: int = DEFAULT_BLOCK_BYTES
    disk_bytes: int = 0
    admission: str = DEFAULT_ADMISSION
    seed: int = 0

    def __post_init__(self) -> None:
        if not 8 <= self.block_bytes <= BLOCK_BYTES_MAX or self.block_bytes % 8:
            raise UsageError(
                f"--block-bytes: {format_size(self.block_bytes)} is no size for a replay; allowed: multiples of 8 bytes "
                f"from 8 to {format_size(BLOCK_BYTES_MAX)}"
            )

    @property
    def slot_bytes(self) -> int:
        """What a block and its trailer take in the pool."""
        return -(-slot_payload_bytes(self.block_bytes, 1) // _SLOT_GRANULE) * _SLOT_GRANULE


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One replay of the whole trace. Times are per request; those of reads, per request that hit."""

    trace: str
    policy: str
    capacity_blocks: int
    requests: int
    hit_rate_blocks: float  # share of all block references that were read as part of a leading run of hits
    saved_tokens: int
    lookup_p50_us: float
    lookup_p99_us: float
    read_p50_us: float
    read_p99_us: float
    hit_rate_dram: float  # the part of `hit_rate_blocks` that was in DRAM
    hit_rate_disk: float  # and the part that came from the SSD
    read_limit_p50_us: float  # one memcpy of as many bytes as each read, in alternation
    limit_hit_rate: float  # of a cache without bounds
    ratio_to_limit: float
    unlimited: bool  # everything fitted
    distinct_blocks: int
    input_tokens: int
    block_bytes: int
    read_bytes: int
    written_bytes: int
    evicted_blocks: int
    evicted_bytes: int
    refused_blocks: int
    resident_blocks: int  # in DRAM, at the end
    disk_bytes: int  # capacity of the SSD tier
    disk_blocks: int  # on the SSD only, at the end
    seconds: float
    checked: bool  # every byte of every read was compared and none was wrong, and the room was what it should be


def capacities_of(trace: Trace, blocks: tuple[int, ...], fractions: tuple[float, ...]) -> tuple[int | None, ...]:
    """Capacities in blocks, ascending, each once; without any: 2, 5, 10, 25 % of the distinct blocks, and all (None).

    Raises:
        UsageError: a capacity would hold less than the longest prompt.
    """
    if not blocks and not fractions:
        small = (int(trace.distinct_blocks * fraction) for fraction in DEFAULT_FRACTIONS)
        # Of a trace cut short the smallest of these are no measure of anything.
        return (*sorted({count for count in small if count >= trace.longest}), None)
    wanted = sorted({*blocks, *(int(trace.distinct_blocks * fraction) for fraction in fractions)})
    if wanted[0] < trace.longest:
        flag = "--capacity-blocks" if wanted[0] in blocks else "--capacity-fraction"
        raise UsageError(
            f"{flag}: {wanted[0]} blocks are less than the longest prompt; allowed for this trace: from {trace.longest} blocks"
        )
    return tuple(count if count < trace.distinct_blocks else None for count in wanted)


def run_replay(trace: Trace, plan: ReplayPlan, *, note: Note, step: Note, part: Part) -> list[ReplayRow]:
    """Replay the trace once per capacity and policy; `step` is called once a row, `part` with the share of one done.

    Raises:
        UsageError: the plan does not fit the machine.
        BenchError, KvStoreError: the server can't hold what it should, or can't be reached.
    """
    largest = max(_pool_bytes(trace, plan, capacity) for capacity in plan.capacities)
    require_available(largest + 2 * _LIMIT_BYTES + _SERVER_OVERHEAD_BYTES, "lower the capacity or --block-bytes")
    note(f"{trace.name}: keys of {trace.distinct_blocks:,} blocks, {trace.references:,} references to them")
    bench = ReplayBench(trace, plan)
    rows: list[ReplayRow] = []
    for capacity in plan.capacities:
        for policy in plan.policies:
            row = bench.replay(capacity, policy, part)
            rows.append(row)
            step(summary(row))
    return rows


def summary(row: ReplayRow) -> str:
    """One line about a row."""
    room = "all" if row.unlimited else f"{row.capacity_blocks:,}"
    text = (
        f"{row.trace}, {row.policy}, {room} blocks: {row.hit_rate_blocks:.4f} of blocks hit, lookup p50 "
        f"{row.lookup_p50_us:.0f} us"
    )
    return text if row.checked else f"{text}, CONTENT OR ROOM WRONG"


class NumberedContent:
    """Blocks whose bytes follow from their number: words of one random block, each plus a word of the number's.

    A shifted block, a piece of another one's, or one never written differs in every word.
    """

    def __init__(self, seed: int, block_bytes: int, numbers: int) -> None:
        random = np.random.default_rng(seed)
        self._base: U64 = random.integers(0, 1 << 64, block_bytes // 8, dtype=np.uint64)
        self._stamps: U64 = (np.arange(numbers, dtype=np.uint64) + np.uint64(seed % (1 << 32) + 1)) * _GOLDEN

    def fill(self, rows: U8, numbers: I64) -> None:
        """Write the blocks `numbers`, shape (n,), into `rows`, uint8 of shape (n, block_bytes)."""
        np.add(self._base, self._stamps[numbers, None], out=rows.view(np.uint64))

    def damaged(self, rows: U8, numbers: I64) -> int:
        """How many of the blocks have a wrong byte."""
        right = rows.view(np.uint64) - self._base == self._stamps[numbers, None]
        return int(np.count_nonzero(~right.all(axis=1)))


@dataclass(slots=True)
class _Tally:
    """Sums over the requests so far."""

    lookup_s: list[float] = field(default_factory=list[float])
    read_s: list[float] = field(default_factory=list[float])
    limit_s: list[float] = field(default_factory=list[float])
    hits: int = 0
    saved_tokens: int = 0
    written: int = 0
    refused: int = 0
    damaged: int = 0


class ReplayBench:
    """A trace with its keys, content, and the memory that an engine would have."""

    def __init__(self, trace: Trace, plan: ReplayPlan) -> None:
        self._trace = trace
        self._plan = plan
        self._namespace = kvstore.Namespace(
            model="kvbench",
            revision="replay",
            dtype="uint8",
            block_tokens=TOKENS_PER_ID,
            layout=OpaqueLayout("kvbench", 1, plan.block_bytes),
        )
        self._keys: Keys = block_keys(trace, self._namespace)
        self._content = NumberedContent(plan.seed, plan.block_bytes, trace.distinct_blocks)
        self._rows = arena(trace.longest * plan.block_bytes).reshape(trace.longest, plan.block_bytes)
        size = max(_LIMIT_BYTES, trace.longest * plan.block_bytes)
        self._far, self._near = arena(size), arena(size)
        self._limit_at = 0

    def replay(self, capacity: int | None, policy: str, part: Part) -> ReplayRow:
        """Start a server of that capacity, send it the whole trace, and ask it what it did."""
        pool_bytes = _pool_bytes(self._trace, self._plan, capacity)
        requests = self._trace.requests
        tally = _Tally()
        with _server(self._plan, pool_bytes, policy) as server:
            server.wait_warm()
            with kvstore.connect(server.address, namespace=self._namespace, timeout_s=_TIMEOUT_S) as client:
                begin = time.monotonic()
                with self._exact_room(server, client, pool_bytes, capacity):
                    for number, request in enumerate(requests):
                        self._serve(client, request, tally)
                        if number % max(1, len(requests) // _PARTS) == 0:
                            part(number / len(requests))
                    took_s = time.monotonic() - begin
                    status = server.status()["shards"][0]
        return self._row(capacity, policy, tally, status, took_s)

    def _serve(self, client: kvstore.Client, request: Request, tally: _Tally) -> None:
        keys = BlockKeys(self._keys[request.blocks])
        rows = self._rows[: len(keys)]
        begin = time.perf_counter()
        found = client.lookup(keys)
        tally.lookup_s.append(time.perf_counter() - begin)
        hits = self._read(client, keys[: found.hit_blocks], rows, request, tally) if found.hit_blocks else 0
        self._content.fill(rows[hits:], request.blocks[hits:])
        statuses = client.put(keys, rows).statuses
        if (statuses == PutStatus.FAILED).any():
            raise BenchError("a put failed: the server can't be reached")
        tally.written += int(np.count_nonzero(statuses == PutStatus.STORED))
        tally.refused += int(np.count_nonzero(statuses == PutStatus.NO_ROOM))

    def _read(self, client: kvstore.Client, keys: BlockKeys, rows: U8, request: Request, tally: _Tally) -> int:
        """Read leading hits and compare them; how many were still there."""
        wanted = len(keys)
        rows[:wanted] = 0  # so that a block which the read does not write is noticed
        begin = time.perf_counter()
        hits = client.get_into(keys, rows[:wanted]).hit_blocks
        tally.read_s.append(time.perf_counter() - begin)
        tally.limit_s.append(self._memcpy(wanted * self._plan.block_bytes))
        tally.damaged += self._content.damaged(rows[:hits], request.blocks[:hits])
        tally.hits += hits
        # The last block of a prompt is seldom full.
        tally.saved_tokens += min(hits * TOKENS_PER_ID, request.input_tokens)
        return hits

    def _memcpy(self, size_bytes: int) -> float:
        """Seconds that one copy of as many bytes takes."""
        if self._limit_at + size_bytes > len(self._far):
            self._limit_at = 0
        span = slice(self._limit_at, self._limit_at + size_bytes)
        self._limit_at += size_bytes
        begin = time.perf_counter()
        np.copyto(self._near[span], self._far[span])
        return time.perf_counter() - begin

    @contextmanager
    def _exact_room(
        self, server: ServerProcess, client: kvstore.Client, pool_bytes: int, capacity: int | None
    ) -> Iterator[None]:
        """Room for exactly `capacity` blocks while the context is open."""
        if capacity is None:
            yield
            return
        slots = pool_bytes // _CHUNK_BYTES * (_CHUNK_BYTES // self._plan.slot_bytes)
        surplus = slots - capacity
        keys = client.keys(np.zeros(surplus * TOKENS_PER_ID, dtype=np.int32), extra=b"ballast")
        stored = client.put(keys, np.zeros((surplus, self._plan.block_bytes), dtype=np.uint8)).stored
        with client.view(keys, ttl_s=_BALLAST_TTL_S) as ballast:
            client.delete(keys)
            shard = server.status()["shards"][0]
            taken = (shard["bytes"]["committed"], shard["pool_bytes"], int(ballast.ok.sum()), stored)
            if taken != (surplus * self._plan.slot_bytes, pool_bytes, surplus, surplus):
                raise BenchError(f"the server has no room of exactly {capacity} blocks: {shard['bytes']}")
            yield

    def _row(
        self, capacity: int | None, policy: str, tally: _Tally, status: dict[str, Any], took_s: float
    ) -> ReplayRow:
        trace = self._trace
        counters, gauges = status["counters"], status["gauges"]
        resident = gauges["resident_blocks"]
        promoted = status["disk"]["counters"]["promoted_blocks"] if "disk" in status else 0
        room = trace.distinct_blocks if capacity is None else capacity
        hit_rate, limit = tally.hits / trace.references, trace.hit_rate_limit()
        return ReplayRow(
            trace=trace.name,
            policy=policy,
            capacity_blocks=room,
            requests=len(trace.requests),
            hit_rate_blocks=hit_rate,
            saved_tokens=tally.saved_tokens,
            lookup_p50_us=_percentile_us(tally.lookup_s, 50),
            lookup_p99_us=_percentile_us(tally.lookup_s, 99),
            read_p50_us=_percentile_us(tally.read_s, 50),
            read_p99_us=_percentile_us(tally.read_s, 99),
            hit_rate_dram=(tally.hits - promoted) / trace.references,
            hit_rate_disk=promoted / trace.references,
            read_limit_p50_us=_percentile_us(tally.limit_s, 50),
            limit_hit_rate=limit,
            ratio_to_limit=hit_rate / limit if limit else 1.0,
            unlimited=capacity is None,
            distinct_blocks=trace.distinct_blocks,
            input_tokens=trace.input_tokens,
            block_bytes=self._plan.block_bytes,
            read_bytes=tally.hits * self._plan.block_bytes,
            written_bytes=tally.written * self._plan.block_bytes,
            evicted_blocks=counters["evicted_blocks"],
            evicted_bytes=counters["evicted_bytes"],
            refused_blocks=tally.refused,
            resident_blocks=resident,
            disk_bytes=self._plan.disk_bytes,
            disk_blocks=gauges.get("disk_blocks", 0),
            seconds=took_s,
            checked=tally.damaged == 0 and resident <= room,
        )


def _server(plan: ReplayPlan, pool_bytes: int, policy: str) -> ServerProcess:
    # The seed of keys is given so that the keys of a trace are made once for all servers.
    return ServerProcess(
        dram=str(pool_bytes),
        chunk=_CHUNK_BYTES,
        disk=plan.disk_bytes,
        admission=plan.admission,
        watermark=0,  # a capacity is a capacity
        key_seed=0,
        policy=policy,
    )


def _pool_bytes(trace: Trace, plan: ReplayPlan, capacity: int | None) -> int:
    """Whole chunks with room for the capacity and some ballast; for all of the trace, with some to spare."""
    blocks = int(trace.distinct_blocks * _UNLIMITED_SLACK) if capacity is None else capacity + 1
    return max(_CHUNKS_MIN, -(-blocks // (_CHUNK_BYTES // plan.slot_bytes))) * _CHUNK_BYTES


def _percentile_us(seconds: list[float], percent: float) -> float:
    """Percentile in microseconds; 0 without any."""
    return float(np.percentile(np.array(seconds), percent)) * 1e6 if seconds else 0.0
