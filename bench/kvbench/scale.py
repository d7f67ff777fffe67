"""`kvbench scale`: what one block costs the server, in time and memory, and whether many blocks make it cost more.

- *Eviction*: a shard's own decisions on a full pool, in this process and without payload: reserve and commit new keys,
  which evicts as many old ones, after some uses as reads leave them. A small and a large shard take turns, so that the
  machine's moods hit both.
- *Memory*: what the processes of a real server grow by while blocks are put, less their payload.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import kvstore
from kvbench.errors import BenchError
from kvbench.memory import require_available
from kvbench.sampling import alternate
from kvstore.core.errors import UsageError
from kvstore.core.keys import KEY_DTYPE
from kvstore.core.layout import OpaqueLayout
from kvstore.core.states import PutStatus
from kvstore.server.eviction import POLICIES
from kvstore.server.shard.blocks import NamespaceInfo
from kvstore.server.shard.shard import IndexSegment, Shard
from kvstore.testing.cluster import ServerProcess
from kvstore.wire.messages import REF, KeyRequest

DEFAULT_BLOCKS: Final = (10_000, 1_000_000)
DEFAULT_SECONDS: Final = 5.0
DEFAULT_BATCH: Final = 64
BLOCKS_MAX: Final = 4_000_000
_SLOT_BYTES: Final = 4096
_PAYLOAD_BYTES: Final = 2048
_CHUNK_BYTES: Final = 1 << 20
_FILL_BATCH: Final = 4096
_BYTES_PER_BLOCK: Final = _SLOT_BYTES + 1024  # of a server, and of both shards in this process

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """Everything that decides what `kvbench scale` does.

    Args:
        blocks: a small and a large number of blocks.
        batch: blocks of one put, and so of one eviction.
        seconds: wall-clock time for each policy.

    Raises:
        UsageError: a number out of range.
    """

    blocks: tuple[int, int] = DEFAULT_BLOCKS
    policies: tuple[str, ...]
    batch: int = DEFAULT_BATCH
    seconds: float = DEFAULT_SECONDS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1024 <= self.blocks[0] < self.blocks[1] <= BLOCKS_MAX:
            raise UsageError(f"--blocks: {self.blocks} is out of range; allowed: two numbers, 1024 to {BLOCKS_MAX}")
        if not 1 <= self.batch <= 1024:
            raise UsageError(f"--batch: {self.batch} is out of range; allowed: 1 to 1024")


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """Puts into a full shard of one size, each of which evicts as many blocks as it brings."""

    policy: str
    blocks: int
    evict_us_per_block: float  # median over batches: reserve, evict, commit
    ratio_to_small: float  # the same for the small shard = 1
    evicted: int
    checked: bool  # every put was stored, the shard stayed full, and its books add up


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A server that holds so many blocks."""

    policy: str
    blocks: int
    bytes_per_block: float  # that its processes grew by, less the pool
    put_us_per_block: float
    checked: bool  # all of them are resident


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """All rows."""

    eviction: list[EvictionRow]
    memory: list[MemoryRow]


def run_scale(plan: ScalePlan, *, note: Note, step: Note) -> ScaleResult:
    """Measure every policy; `step` is called twice for each.

    Raises:
        UsageError: not enough memory.
        BenchError, KvStoreError: a put was refused, or the server died.
    """
    require_available(plan.blocks[1] * _BYTES_PER_BLOCK + (512 << 20), "lower --blocks")
    eviction: list[EvictionRow] = []
    memory: list[MemoryRow] = []
    for policy in plan.policies:
        note(f"{policy}: filling shards of {plan.blocks[0]:,} and {plan.blocks[1]:,} blocks")
        rows = measure_eviction(plan, policy)
        eviction += rows
        step(f"{policy}: {rows[1].evict_us_per_block:.2f} us per evicted block, {rows[1].ratio_to_small:.2f} of small")
        note(f"{policy}: putting {plan.blocks[1]:,} blocks into a server")
        row = measure_memory(plan, policy)
        memory.append(row)
        step(f"{policy}: {row.bytes_per_block:.0f} bytes of memory per block")
    return ScaleResult(eviction, memory)


def measure_eviction(plan: ScalePlan, policy: str) -> list[EvictionRow]:
    """The small shard's row and the large one's."""
    small, large = (FullShard(count, policy, plan.batch, plan.seed) for count in plan.blocks)
    samples = alternate(large.put, small.put, seconds=plan.seconds)
    assert samples.limit_s is not None
    cost = [float(np.median(took)) * 1e6 / plan.batch for took in (samples.limit_s, samples.op_s)]
    return [
        EvictionRow(policy, shard.blocks, us, us / cost[0], shard.evicted, shard.checked)
        for shard, us in zip((small, large), cost, strict=True)
    ]


class FullShard:
    """A shard whose pool is full of small blocks. The pool itself is never touched, so it takes no memory.

    Args:
        blocks: at least so many, up to whole chunks.
    """

    def __init__(self, blocks: int, policy: str, batch: int, seed: int) -> None:
        chunks = -(-blocks * _SLOT_BYTES // _CHUNK_BYTES)
        self.blocks = chunks * (_CHUNK_BYTES // _SLOT_BYTES)
        self._board = np.zeros(self.blocks, dtype=np.uint32)
        self._shard = Shard(
            pool_bytes=chunks * _CHUNK_BYTES,
            chunk_bytes=_CHUNK_BYTES,
            new_segment=lambda size: IndexSegment(-1, np.zeros(size // 16, np.complex128).view(np.uint8)),
            make_policy=lambda: POLICIES[policy](self._board),
        )
        self._shard.open_namespace(NamespaceInfo(bytes(16), 1, _PAYLOAD_BYTES, "kvbench scale"))
        self._session = self._shard.open_session()
        self._random = np.random.default_rng(seed)
        self._batch = batch
        self._stored = True
        for first in range(0, self.blocks, _FILL_BATCH):
            self._put(min(_FILL_BATCH, self.blocks - first))

    def put(self, turn: int) -> float:
        """Put one batch, which evicts another: the seconds that it took."""
        # Reads by others in between, a few of them of blocks that are about to go.
        self._board[self._random.integers(0, self.blocks, self._batch)] = turn + 1
        return self._put(self._batch)

    @property
    def evicted(self) -> int:
        """Blocks, so far."""
        return self._shard.counters.evicted_blocks

    @property
    def checked(self) -> bool:
        """Every put was stored, and the shard is as full as it should be."""
        books = self._shard.accounting()
        full = self._shard.gauges()["resident_blocks"] == self.blocks
        return self._stored and full and books["committed"] == books["capacity"] == self.blocks * _SLOT_BYTES

    def _put(self, count: int) -> float:
        words = self._random.integers(0, 1 << 64, size=(count, 3), dtype=np.uint64)
        request = KeyRequest(0, words.view(KEY_DTYPE).reshape(count), ttl_ms=30_000, size_bytes=_PAYLOAD_BYTES)
        begin = time.perf_counter()
        rows = self._shard.reserve(self._session, request, 0.0)
        refs = np.zeros(count, dtype=REF)
        refs["handle"], refs["generation"] = rows["handle"], rows["generation"]
        done = self._shard.commit(self._session, refs)
        took = time.perf_counter() - begin
        self._stored &= bool((rows["status"] == PutStatus.STORED).all() and done.all())
        return took


def measure_memory(plan: ScalePlan, policy: str) -> MemoryRow:
    """Put that many blocks into a server and see what its processes grow by."""
    blocks = plan.blocks[1]
    pool_bytes = -(-blocks * _SLOT_BYTES * 9 // 8 >> 28) << 28
    namespace = kvstore.Namespace(
        model="kvbench",
        revision=f"seed-{plan.seed}",
        dtype="uint8",
        block_tokens=1,
        layout=OpaqueLayout("scale", 1, _PAYLOAD_BYTES),
    )
    with ExitStack() as stack:
        server = ServerProcess(dram=str(pool_bytes), watermark=0, policy=policy)
        stack.callback(server.close)
        server.start()
        server.wait_warm()
        before = own_memory_bytes(server)
        # A client that is gone again: as long as it maps the index, it would be counted with half of those pages.
        with kvstore.connect(server.address, namespace=namespace, transport="shm") as client:
            put_us = _put_all(client, blocks)
        grown = own_memory_bytes(server) - before
        resident = sum(shard["gauges"]["resident_blocks"] for shard in server.status()["shards"])
    return MemoryRow(policy, blocks, grown / blocks, put_us, resident == blocks)


def _put_all(client: kvstore.Client, blocks: int) -> float:
    """Put so many blocks, in chains of up to 4,096 blocks of one token each; microseconds per block."""
    payload = np.zeros((_FILL_BATCH, _PAYLOAD_BYTES), dtype=np.uint8)
    took = 0.0
    for number, first in enumerate(range(0, blocks, _FILL_BATCH)):
        count = min(_FILL_BATCH, blocks - first)
        keys = client.keys(np.arange(count, dtype=np.int32) + number)
        begin = time.perf_counter()
        statuses = client.put(keys, payload[:count]).statuses
        took += time.perf_counter() - begin
        if not (statuses == PutStatus.STORED).all():
            raise BenchError(f"{np.count_nonzero(statuses)} blocks of a put were not stored")
    return took * 1e6 / blocks


def own_memory_bytes(server: ServerProcess) -> int:
    """Memory of a server's processes, each page counted once; without the pool, which is always there in full."""
    total = 0
    for pid in server.pids():
        inside_pool = False
        for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
            if "-" in line.partition(" ")[0]:  # a mapping begins: its address range comes first
                inside_pool = "/memfd:kvstore-pool-" in line
            elif line.startswith("Pss:") and not inside_pool:
                total += int(line.split()[1]) << 10
    return total
