"""What a shard decides about its SSD tier: what is written behind, what comes back, what a restart finds.

The disk worker does the work, in a process of its own (`kvstore.server.tiers.disk`). Here are the decisions, as plain
calls from the shard's one thread: requests are submitted, answers are fed back, nobody waits.

- *Write-behind*: a committed block is copied to the SSD while it stays in DRAM: at once, or when it is used a second
  time, or never (`Admission`). Its slot is held meanwhile. A full queue skips the block and counts it: no put waits.
- *Demotion*: a durable block that comes up for eviction gives its slot back and stays in the index, on the SSD only.
- *Promotion*: a block on the SSD that is wanted gets a slot, and the worker fills it. Whoever asks for it meanwhile
  waits for the same read. For readers of layers it fills many slots at once, the first layers of all of them first,
  and the index says how far it is.
- A slot that the worker fills is the worker's until it answers, however long that takes and whatever becomes of the
  key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.tenants import Quota
from kvstore.server.shard.blocks import BlockTable, Life, NamespaceInfo
from kvstore.server.tiers.disk.messages import (
    BLOCKS_MAX,
    LOAD_ROW,
    STORE_ROW,
    Answer,
    Flushed,
    Gone,
    Loaded,
    LoadStatus,
    Namespace,
    Removed,
    Scanned,
    StatsAnswer,
    Stored,
    StoreStatus,
)

I64 = NDArray[np.int64]
Rows = NDArray[np.void]
Board = NDArray[np.uint32]
Done = Callable[[], None]

RANGE_BYTES = 2 << 20  # of a block, to be read at a time for readers of layers: shorter reads slow the disk down
BY_LAYERS_BYTES_MIN = 2 * RANGE_BYTES
PIECE_BYTES = 8 << 20  # of smaller blocks: some are copied by their readers while others are read
LOADS_AT_ONCE_MAX = 4096  # blocks under way from the SSD; more wait for the next time they are asked for


class Admission(Enum):
    """Which committed blocks are written behind to the SSD."""

    ALWAYS = "always"
    SECOND = "second"  # use: what is read once, or put again, is likely to be wanted again
    NEVER = "never"


class Disk(Protocol):
    """What the shard needs of its disk worker: `kvstore.server.tiers.disk.client.DiskLink`."""

    def submit_quotas(self, quotas: dict[str, Quota]) -> None: ...
    def submit_store(self, space: Namespace, rows: Rows) -> int: ...
    def submit_load(self, rows: Rows) -> int: ...
    @property
    def load_room(self) -> int: ...
    def submit_remove(self, generation: int, keys: Rows) -> int: ...
    def submit_flush(self, generation: int, digest: bytes) -> int: ...
    def submit_scan(self) -> int: ...
    def submit_stats(self) -> int: ...


@dataclass(slots=True)
class DiskCounters:
    """Totals since the start. Names are those of the metrics."""

    written_behind_blocks: int = 0
    skipped_write_behind_blocks: int = 0  # the queue was full
    failed_write_behind_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    failed_promotions: int = 0
    refused_promotions: int = 0  # no slot, or too many under way
    found_blocks: int = 0  # by the scan of a restart
    lost_blocks: int = 0  # that the SSD gave up: evicted there, unreadable or damaged


@dataclass(slots=True)
class Waiter:
    """Somebody who wants to be told when blocks have come, or when it is too late to wait."""

    missing: set[int]
    deadline_s: float
    done: Done


@dataclass(slots=True)
class _Load:
    """Blocks of one size on their way from the SSD, as a whole or some layers after the other."""

    handles: I64
    ends: list[int]  # layers that are there once each of the requests before and this one have been answered
    open: set[int]  # requests without an answer, by their place
    good: NDArray[np.bool_]  # blocks of which nothing has failed so far


class ShardSide(Protocol):
    """What tiering needs of the shard that it belongs to."""

    def slots_for(self, handles: I64) -> I64:
        """Slots for some of these blocks, the first ones, evicting others: offsets, shape (at most n,)."""
        ...

    def free_slots(self, handles: I64, offsets: I64) -> None:
        """Give slots back that were meant for these blocks."""
        ...

    def next_generations(self, count: int) -> NDArray[np.uint64]:
        """Generations that nothing else has."""
        ...

    def keys_of(self, handles: I64) -> Rows:
        """Keys of blocks that are in the index."""
        ...

    def loading(self, handles: I64, generations: NDArray[np.uint64], offsets: I64) -> None:
        """These blocks are on their way from the SSD into these slots."""
        ...

    def loaded_layers(self, handles: I64, layers_ready: int) -> None:
        """So many layers of these blocks have come."""
        ...

    def arrived(self, handles: I64) -> None:
        """These blocks are in DRAM again, as a whole."""
        ...

    def not_arrived(self, handles: I64) -> None:
        """The disk worker has given up on these blocks, or they were deleted meanwhile: they are nowhere any more, and
        their slots are free.
        """
        ...

    def forget(self, handles: I64) -> None:
        """These blocks are nowhere any more."""
        ...

    def hold(self, handles: I64) -> None:
        """Their slots must not change."""
        ...

    def unhold(self, handles: I64) -> None:
        """They may again."""
        ...

    def find(self, keys: Rows) -> I64:
        """Handle of each key; -1 where it is not in the index."""
        ...

    def add_on_disk(self, info: NamespaceInfo, keys: Rows) -> I64:
        """Take in blocks that the SSD has and the index does not; their handles."""
        ...

    def namespace(self, number: int) -> NamespaceInfo:
        """What is known of a namespace."""
        ...


class Tiering:
    """See the module.

    Args:
        shard: the shard's own side.
        blocks: its block table.
        disk: the worker.
        touch_board: uint32 per handle; readers through shared memory leave their traces there.
    """

    def __init__(
        self, shard: ShardSide, blocks: BlockTable, disk: Disk, touch_board: Board, admission: Admission
    ) -> None:
        self._shard = shard
        self._blocks = blocks
        self._disk = disk
        self._board = touch_board
        self._admission = admission
        self._seen: Board = np.zeros(0, dtype=np.uint32)  # the board when the block was committed or last looked at
        self._stores: dict[int, tuple[I64, NDArray[np.uint64]]] = {}  # request: handles, generations
        self._loads: dict[int, tuple[_Load, int]] = {}  # request: what it is part of, and its place there
        self._loading = 0
        self._waiters: list[Waiter] = []
        self._removals: dict[int, Done] = {}
        self._scan = disk.submit_scan()
        self._scanned_namespaces: dict[int, NamespaceInfo] = {}
        self.scan_complete = False
        self.disk_stats: dict[str, Any] = {}
        self.counters = DiskCounters()

    # --- what happens in the shard -----------------------------------------------------------------------------------

    def committed(self, handles: I64) -> None:
        """Blocks were committed just now."""
        self._reach()
        self._seen[handles] = self._board[handles]
        if self._admission is Admission.ALWAYS:
            self._write_behind(handles)

    def used_again(self, handles: I64) -> None:
        """Committed blocks were asked for again by a call to the shard."""
        if self._admission is not Admission.NEVER:
            self._write_behind(handles)

    def scan_board(self) -> None:
        """Look for blocks that readers have used without telling. Called about once a second."""
        if self._admission is not Admission.SECOND:
            return
        self._reach()
        used = len(self._blocks)
        now = self._board[:used]
        handles = np.flatnonzero(now != self._seen[:used])
        self._seen[handles] = now[handles]
        self._write_behind(handles)

    def promote(
        self, handles: I64, deadline_s: float = 0.0, done: Done | None = None, *, by_layers: bool = False
    ) -> None:
        """Bring blocks back that are on the SSD. `done` is called once they are there, or can't be, or at the
        deadline.

        `by_layers`: for readers that follow them in the index. Large blocks come some layers at a time, small ones as
        a whole and a few at a time.
        """
        blocks = self._blocks
        cold = _each_once(handles[blocks.life[handles] == Life.ON_DISK])
        cold = cold[: max(0, LOADS_AT_ONCE_MAX - self._loading)]
        if by_layers:
            while len(cold):
                size = int(blocks.size[cold[0]])
                count = len(cold) if size >= BY_LAYERS_BYTES_MIN else max(1, PIECE_BYTES // size)
                self._load(cold[:count], by_layers=True)
                cold = cold[count:]
        else:
            self._load(cold)
        if done is None:
            return
        loading = handles[blocks.life[handles] == Life.LOADING]
        if not len(loading):
            done()
            return
        self._waiters.append(Waiter(set(loading.tolist()), deadline_s, done))

    def remove(self, generation: int, keys: Rows, done: Done) -> None:
        """Remove these keys from the SSD for good; `done` once that is durable."""
        for first in range(0, len(keys), BLOCKS_MAX):
            request = self._disk.submit_remove(generation, keys[first : first + BLOCKS_MAX])
            last = first + BLOCKS_MAX >= len(keys)
            self._removals[request] = done if last else _nothing

    def set_quotas(self, quotas: dict[str, Quota]) -> None:
        """What each tenant may have of the SSD from now on."""
        self._disk.submit_quotas(quotas)

    def flush(self, generation: int, digest: bytes, done: Done) -> None:
        """Remove a namespace (empty: all) from the SSD for good; `done` once that is durable."""
        self._removals[self._disk.submit_flush(generation, digest)] = done

    def expire(self, now_s: float) -> None:
        """Those who have waited long enough are told so."""
        late = [waiter for waiter in self._waiters if waiter.deadline_s <= now_s]
        if late:
            self._waiters = [waiter for waiter in self._waiters if waiter.deadline_s > now_s]
            for waiter in late:
                waiter.done()

    # --- what the worker answers -------------------------------------------------------------------------------------

    def take(self, answer: Answer) -> None:
        """Take in one answer of the worker."""
        match answer:
            case Stored():
                self._stored(answer)
            case Loaded():
                self._loaded(answer)
            case Removed() | Flushed():
                self._removals.pop(answer.request, _nothing)()
            case Scanned():
                self._scanned(answer)
            case Gone():
                self._gone(answer.keys)
            case StatsAnswer():
                self.disk_stats = answer.values

    def worker_died(self) -> None:
        """The worker is dead and its process gone: its slots are ours again, and nothing is on the SSD until the next
        worker's scan says so.
        """
        for handles, _ in self._stores.values():
            self._shard.unhold(handles)
        for request, (load, _) in list(self._loads.items()):
            self._loaded(Loaded(request, np.full(len(load.handles), LoadStatus.FAILED, dtype=np.uint8)))
        blocks = self._blocks
        self._shard.forget(blocks.select(Life.ON_DISK))
        blocks.durable[:] = False
        for done in self._removals.values():
            done()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _write_behind(self, handles: I64) -> None:
        blocks = self._blocks
        wanted = handles[(blocks.life[handles] == Life.COMMITTED) & ~blocks.durable[handles] & ~blocks.storing[handles]]
        for namespace in np.unique(blocks.namespace[wanted]).tolist():
            mine = wanted[blocks.namespace[wanted] == namespace]
            for first in range(0, len(mine), BLOCKS_MAX):
                self._store(namespace, mine[first : first + BLOCKS_MAX])

    def _store(self, namespace: int, handles: I64) -> None:
        blocks = self._blocks
        info = self._shard.namespace(namespace)
        space = Namespace(info.digest, info.layers, info.layer_bytes, info.tenant, info.label)
        # A queue with room for a few of them takes those: halves, until it says no to a single one.
        step = len(handles)
        first = 0
        while first < len(handles):
            part = handles[first : first + step]
            rows = np.zeros(len(part), dtype=STORE_ROW)
            rows["key"] = self._shard.keys_of(part)
            rows["generation"], rows["offset"] = blocks.generation[part], blocks.offset[part]
            request = self._disk.submit_store(space, rows)
            if request:
                self._stores[request] = (part, blocks.generation[part].copy())
                blocks.storing[part] = True
                self._shard.hold(part)
                first += len(part)
            elif step > 1:
                step //= 2
            else:
                self.counters.skipped_write_behind_blocks += len(handles) - first
                return

    def _stored(self, answer: Stored) -> None:
        handles, generations = self._stores.pop(answer.request, (_NONE, _NO_GENERATIONS))
        blocks = self._blocks
        same = (blocks.generation[handles] == generations) & (blocks.life[handles] == Life.COMMITTED)
        there = (answer.statuses == StoreStatus.DURABLE) | (answer.statuses == StoreStatus.EXISTS)
        blocks.durable[handles[same & there]] = True
        blocks.storing[handles] = False
        self.counters.written_behind_blocks += int(np.count_nonzero(there))
        self.counters.failed_write_behind_blocks += int(np.count_nonzero(~there))
        self._shard.unhold(handles)

    def _load(self, handles: I64, *, by_layers: bool = False) -> None:
        if not len(handles):
            return
        offsets = self._shard.slots_for(handles)
        granted = handles[: len(offsets)]
        self.counters.refused_promotions += len(handles) - len(granted)
        if not len(granted):
            return
        info = self._shard.namespace(int(self._blocks.namespace[granted[0]]))
        ends = _ranges(info, self._disk.load_room // len(granted)) if by_layers else [info.layers]
        rows = np.zeros(len(granted), dtype=LOAD_ROW)
        rows["key"] = self._shard.keys_of(granted)
        generations = self._shard.next_generations(len(granted))
        rows["generation"], rows["offset"] = generations, offsets
        load = _Load(granted, ends, set(range(len(ends))), np.ones(len(granted), dtype=np.bool_))
        for place, end in enumerate(ends):
            part = rows.copy()
            if len(ends) > 1:
                part["first"], part["end"] = ends[place - 1] if place else 0, end
            request = self._disk.submit_load(part)
            if not request:  # only the first can be refused: there is room for the others
                self.counters.refused_promotions += len(granted)
                self._shard.free_slots(granted, offsets)
                return
            self._loads[request] = load, place
        self._shard.loading(granted, generations, offsets)
        self._loading += len(granted)

    def _loaded(self, answer: Loaded) -> None:
        load, place = self._loads.pop(answer.request, (_NO_LOAD, 0))
        load.open.discard(place)
        load.good &= answer.statuses[: len(load.good)] == LoadStatus.OK
        handles = load.handles
        # A block that was deleted meanwhile has given its handle's row to the worker's slot: it ends with the answers.
        wanted = self._blocks.life[handles] == Life.LOADING
        if load.open:
            came = load.ends[min(load.open) - 1] if min(load.open) else 0
            self._shard.loaded_layers(handles[wanted & load.good], came)
            return
        self._loading -= len(handles)
        arrived = wanted & load.good
        self._shard.not_arrived(handles[~arrived])
        self._shard.arrived(handles[arrived])
        self.counters.promoted_blocks += int(np.count_nonzero(arrived))
        self.counters.failed_promotions += int(np.count_nonzero(wanted & ~arrived))
        self._tell(handles)

    def _tell(self, handles: I64) -> None:
        settled = set(handles.tolist())
        ended: list[Waiter] = []
        for waiter in self._waiters:
            waiter.missing -= settled
            if not waiter.missing:
                ended.append(waiter)
        if ended:
            self._waiters = [waiter for waiter in self._waiters if waiter.missing]
            for waiter in ended:
                waiter.done()

    def _scanned(self, answer: Scanned) -> None:
        for row in answer.namespaces:
            label, tenant = bytes(row["label"]).decode(errors="ignore"), bytes(row["tenant"]).decode()
            info = NamespaceInfo(bytes(row["digest"]), int(row["layers"]), int(row["layer_bytes"]), label, tenant)
            self._scanned_namespaces[int(row["number"])] = info
        for number in np.unique(answer.blocks["namespace"]).tolist():
            keys = np.ascontiguousarray(answer.blocks["key"][answer.blocks["namespace"] == number])
            known = self._shard.find(keys)
            resident = known[known >= 0]
            self._blocks.durable[resident[self._blocks.life[resident] == Life.COMMITTED]] = True
            added = self._shard.add_on_disk(self._scanned_namespaces[number], keys[known < 0])
            self.counters.found_blocks += len(added)
        self.scan_complete |= answer.complete

    def _gone(self, keys: Rows) -> None:
        handles = self._shard.find(keys)
        handles = np.unique(handles[handles >= 0])
        blocks = self._blocks
        blocks.durable[handles] = False
        lost = handles[blocks.life[handles] == Life.ON_DISK]
        self.counters.lost_blocks += len(lost)
        self._shard.forget(lost)

    def _reach(self) -> None:
        known, used = len(self._seen), len(self._blocks)
        if used > known:
            self._seen = np.concatenate([self._seen, np.zeros(max(used - known, known // 2, 1024), dtype=np.uint32)])


def _each_once(handles: I64) -> I64:
    """In the order of their first place: that of the prefix."""
    _, first = np.unique(handles, return_index=True)
    return handles[np.sort(first)]


def _ranges(info: NamespaceInfo, ranges_max: int) -> list[int]:
    """Where the parts end in which blocks of this namespace are read for readers of layers: layers."""
    if info.block_bytes < BY_LAYERS_BYTES_MIN or ranges_max < 2:
        return [info.layers]
    each = max(-(-RANGE_BYTES // info.layer_bytes), -(-info.layers // ranges_max))
    return [*range(each, info.layers, each), info.layers]


_NONE = np.zeros(0, dtype=np.int64)
_NO_GENERATIONS = np.zeros(0, dtype=np.uint64)
_NO_LOAD = _Load(_NONE, [], set(), np.zeros(0, dtype=np.bool_))


def _nothing() -> None:
    """Nobody waits."""
