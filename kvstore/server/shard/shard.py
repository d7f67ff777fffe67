"""A shard's state and every decision about it: plain synchronous calls, no socket, no clock, no thread.

One process owns a shard and calls it from one thread, so there is no lock. Time comes in as `now_s`. The index and
the pool
are memory shared with clients: what is decided here becomes visible to them by the index alone.

A slot is given away only when nobody can touch it any more:

- readers that copy without asking check the generation afterwards;
- readers with a lease are counted in `holds`: a deleted block stays where it is until the last one lets go (CONDEMNED);
- a writer whose reservation ran out may be frozen in the middle of a copy and wake up later, so its slot is kept aside
  until that session ends or reports (QUARANTINED). The *key* can be written again at once, into another slot.

A joint block is written by several sessions, each with a part of every layer (`parts`). It is complete when all parts
are. One that fails fails the block, and the slot is kept aside until none of the writers can be writing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import BlockTooLarge, IndexFull, NamespaceMismatch, UsageError
from kvstore.core.keys import KEY_DTYPE
from kvstore.core.states import BlockState, PutStatus, Tier
from kvstore.index import IndexReader, IndexWriter, Probe, buckets_for, index_bytes
from kvstore.index.layout import POOL_UNIT_BYTES
from kvstore.server.allocator import GRANULE_BYTES_MIN, SlotAllocator
from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.tenants import NOBODY, Quota, Tenants
from kvstore.server.shard.blocks import BlockTable, Life, NamespaceInfo
from kvstore.server.shard.device_tier import DeviceTier
from kvstore.server.shard.parts import PARTS_MAX, PartTable
from kvstore.server.shard.tiering import Admission, Disk, Tiering
from kvstore.wire.messages import (
    ANY_NAMESPACE,
    BY_LAYERS,
    FINISH_ROW,
    LOOKUP_ROW,
    RESERVE_ROW,
    Finish,
    KeyRequest,
    PartRequest,
)

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Rows = NDArray[np.void]

INDEX_LOAD_MAX = 0.85
INDEX_GROWTH = 1.5  # of the table when it gets crowded: from 55 % of its places on they are used
NAMESPACES_MAX = 4096
TTL_S_MAX = 600.0
FREE_UP_BLOCKS = 1024  # looked at in one step
DISK_OWNER = 0xFFFFFFFF  # of slots that the disk worker is filling for a block that was deleted
JOINT_OWNER = 0xFFFFFFFE  # of joint blocks: `PartTable` knows who writes them
_WITH_SLOT = (Life.RESERVED, Life.COMMITTED, Life.QUARANTINED, Life.CONDEMNED, Life.LOADING)
_RESERVED, _COMMITTED, _CONDEMNED = int(Life.RESERVED), int(Life.COMMITTED), int(Life.CONDEMNED)
_LOADING = int(Life.LOADING)


class IndexSegment(NamedTuple):
    """Shared memory of the index: a descriptor to hand to readers, and the mapping."""

    fd: int
    memory: NDArray[np.uint8]


@dataclass(slots=True)
class Counters:
    """Totals since the start. Names are those of the metrics (docs/operating.md)."""

    reserved_blocks: int = 0
    committed_blocks: int = 0
    committed_bytes: int = 0
    duplicate_puts: int = 0
    refused_puts: int = 0
    over_quota_puts: int = 0
    aborted_blocks: int = 0
    expired_reservations: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    deleted_blocks: int = 0
    leases: int = 0
    expired_leases: int = 0
    index_resizes: int = 0
    noted_requests: int = 0
    client_lookup_blocks: int = 0
    client_hit_blocks: int = 0
    client_read_bytes: int = 0
    client_read_blocks: int = 0
    client_lost_races: int = 0
    client_checksum_failures: int = 0


@dataclass(slots=True)
class Session:
    """A client's connection. Its leases and reservations end with it."""

    number: int
    leases: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Lease:
    session: Session
    handles: I64
    deadline_s: float


class Shard:
    """See the module.

    Args:
        pool_bytes, chunk_bytes: the pool, see `SlotAllocator`.
        new_segment: makes zeroed shared memory for an index of that many bytes.
        make_policy: makes an eviction order, empty: one for each tenant with a quota, one for all others.
        index_entries: entries that the first index is sized for; it grows by itself.
        disk_bytes: capacity of the SSD tier that `use_disk` will bring; 0 = none.
        watermark_bytes: kept free ahead of need, by `tick`.
    """

    def __init__(
        self,
        *,
        pool_bytes: int,
        chunk_bytes: int,
        new_segment: Callable[[int], IndexSegment],
        make_policy: Callable[[], EvictionPolicy],
        index_entries: int = 1 << 16,
        disk_bytes: int = 0,
        watermark_bytes: int = 0,
    ) -> None:
        self.allocator = SlotAllocator(pool_bytes, chunk_bytes)
        self.blocks = BlockTable((pool_bytes + disk_bytes) // POOL_UNIT_BYTES)
        self.parts = PartTable()
        self.tiering: Tiering | None = None
        self.device_tier: DeviceTier | None = None
        self.counters = Counters()
        self.tenants = Tenants(make_policy, self._owners, self._keys_and_values)
        self._watermark_bytes = watermark_bytes
        self._disk_quotas: dict[str, Quota] = {}
        self._new_segment = new_segment
        self._use_index(index_entries)
        self._namespaces: list[NamespaceInfo] = []
        self._namespace_ids: dict[bytes, int] = {}
        self._tenant_of: I64 = np.zeros(0, dtype=np.int64)  # by namespace
        self._layers_of: I64 = np.zeros(0, dtype=np.int64)  # by namespace
        self._value_of: NDArray[np.float64] = np.zeros(0)  # by namespace
        self._sessions = 0
        self._generation = 1
        self._leases: dict[int, _Lease] = {}
        self._lease_number = 0
        self._lease_expiries: list[tuple[float, int]] = []
        # Deadline, number, handles, and the first of as many generations in a row.
        self._reservation_expiries: list[tuple[float, int, NDArray[np.int32], int]] = []
        self._reservation_number = 0
        self._prolonged: dict[tuple[int, int], float] = {}  # handle, generation: until when; whose writers publish

    def use_disk(self, disk: Disk, touch_board: NDArray[np.uint32], admission: Admission) -> None:
        """Begin with a disk worker, the first one or the successor of one that died."""
        self.tiering = Tiering(self, self.blocks, disk, touch_board, admission)
        self.tiering.set_quotas(self._disk_quotas)

    # --- sessions and namespaces -------------------------------------------------------------------------------------

    def open_session(self) -> Session:
        """A client has connected."""
        self._sessions += 1
        return Session(self._sessions)

    def close_session(self, session: Session) -> None:
        """A client is gone, by its own wish or not: end its leases, drop what it had not committed."""
        for lease in list(session.leases):
            self._end_lease(lease)
        blocks = self.blocks
        mine = np.flatnonzero(blocks.owner[: len(blocks)] == session.number)
        reserved = mine[blocks.life[mine] == Life.RESERVED]
        self.counters.aborted_blocks += len(reserved)
        self._retire(reserved)
        quarantined = mine[blocks.life[mine] == Life.QUARANTINED]
        self._let_go(quarantined)
        self._leave_parts(self.parts.written_by(session.number))

    def open_namespace(self, info: NamespaceInfo) -> int:
        """The number of a namespace on this shard, given on first sight.

        Raises:
            NamespaceMismatch: the digest is known with another geometry.
            BlockTooLarge: a block would not fit the largest slot.
            UsageError: too many namespaces.
        """
        known = self._namespace_ids.get(info.digest)
        if known is not None:
            held = self._namespaces[known]
            if (held.layers, held.layer_bytes) != (info.layers, info.layer_bytes):
                raise NamespaceMismatch(
                    f"namespace {info.digest.hex()} has blocks of {held.layers} layers x {held.layer_bytes} bytes here, "
                    f"not {info.layers} x {info.layer_bytes}"
                )
            return known
        if info.slot_bytes > self.allocator.chunk_bytes:
            raise BlockTooLarge(
                f"a block of {info.block_bytes} bytes and its {info.layers} checksums don't fit the largest slot of "
                f"{self.allocator.chunk_bytes} bytes; use fewer tokens per block, or a larger --chunk on the server"
            )
        if len(self._namespaces) == NAMESPACES_MAX:
            raise UsageError(f"this shard serves {NAMESPACES_MAX} namespaces already, its limit")
        self._namespaces.append(info)
        self._namespace_ids[info.digest] = len(self._namespaces) - 1
        self._tenant_of = np.append(self._tenant_of, self.tenants.number(info.tenant))
        self._layers_of = np.append(self._layers_of, info.layers)
        self._value_of = np.append(self._value_of, info.value)
        return len(self._namespaces) - 1

    def namespace(self, number: int) -> NamespaceInfo:
        """The namespace of that number.

        Raises:
            NamespaceMismatch: there is none.
        """
        if number >= len(self._namespaces):
            raise NamespaceMismatch(f"unknown namespace number {number}; open the namespace first")
        return self._namespaces[number]

    def set_quotas(self, dram: dict[str, Quota], disk: dict[str, Quota]) -> None:
        """Put these quotas in force, by tenant, in place of all former ones.

        A tenant above a new limit gives blocks back when it next stores, or at the next `tick`.
        """
        committed = self.blocks.select(Life.COMMITTED)
        committed = committed[self.blocks.pins[committed] == 0]
        owners = self._owners(committed)
        self.tenants.set_quotas(dram, lambda number: committed[owners == number])
        self._disk_quotas = disk
        if self.tiering is not None:
            self.tiering.set_quotas(disk)

    # --- reading -----------------------------------------------------------------------------------------------------

    def lookup(self, request: KeyRequest) -> Rows:
        """State, tier, watermark and size of each key: `LOOKUP_ROW`, shape (n,). Changes nothing."""
        self._check_namespace(request.namespace)
        found = self._reader.probe(request.keys)
        rows = np.zeros(len(request.keys), dtype=LOOKUP_ROW)
        rows["state"] = found.states
        rows["tier"] = found.tiers
        rows["layers_ready"] = found.layers_ready
        rows["size"] = found.sizes
        return rows

    def lease(self, session: Session, refs: Rows, ttl_ms: int, now_s: float) -> tuple[int, U8]:
        """Hold blocks that the reader has found in the index: lease number, and 1 = held, 0 = gone meanwhile. Shape
        (n,).

        Whether a block holds the layers wanted was the reader's to see: a watermark only moves forward. The reader also
        leaves its trace on the touch board itself.
        """
        handles, held = self._named(refs)
        if not held.all():
            handles = handles[held]
        life = self.blocks.life[handles]
        present = (life == _COMMITTED) | (life == _RESERVED) | (life == _LOADING)
        if not present.all():
            held[held] = present
            handles = handles[present]
        np.add.at(self.blocks.holds, handles, 1)
        self._lease_number += 1
        lease = _Lease(session, handles, now_s + _ttl_s(ttl_ms))
        self._leases[self._lease_number] = lease
        session.leases.add(self._lease_number)
        heapq.heappush(self._lease_expiries, (lease.deadline_s, self._lease_number))
        self.counters.leases += 1
        return self._lease_number, held.astype(np.uint8)

    def renew(self, session: Session, leases: NDArray[np.uint64], ttl_ms: int, now_s: float) -> U8:
        """Prolong leases: 1 = renewed, 0 = ran out or not yours. Shape (n,)."""
        answers = np.zeros(len(leases), dtype=np.uint8)
        for row, number in enumerate(leases.tolist()):
            lease = self._leases.get(number)
            if lease is None or lease.session is not session or lease.deadline_s <= now_s:
                continue
            lease.deadline_s = now_s + _ttl_s(ttl_ms)
            heapq.heappush(self._lease_expiries, (lease.deadline_s, number))
            answers[row] = 1
        return answers

    def release(self, session: Session, leases: NDArray[np.uint64], now_s: float) -> U8:
        """End leases: 1 = it was valid until now, 0 = it had run out or is not yours. Shape (n,)."""
        answers = np.zeros(len(leases), dtype=np.uint8)
        for row, number in enumerate(leases.tolist()):
            lease = self._leases.get(number)
            if lease is None or lease.session is not session:
                continue
            answers[row] = lease.deadline_s > now_s
            self._end_lease(number)
        return answers

    def touch(self, request: KeyRequest) -> U8:
        """Count as used now: 1 = it is here. Shape (n,)."""
        self._check_namespace(request.namespace)
        found = self._reader.probe(request.keys)
        committed = found.states == BlockState.COMMITTED
        self._use(found.handles[committed])
        if self.tiering is not None:
            self.tiering.promote(found.handles[committed])
        return committed.astype(np.uint8)

    def note_chains(self, chains: Iterable[NDArray[np.uint64]]) -> None:
        """Readers tell what they asked for, hits and misses: low words of keys, one array for each request."""
        for chain in chains:
            self.tenants.note_request(chain)
            self.counters.noted_requests += 1

    def promote(self, request: KeyRequest, now_s: float, done: Callable[[], None]) -> None:
        """Bring blocks from the SSD into the pool; `done` is called when they are there or can't be, or after
        `ttl_ms`. BY_LAYERS: first the first layers of all of them, and `done` is called at once.
        """
        info_number = request.namespace
        self._check_namespace(info_number)
        found = self._reader.probe(request.keys)
        if self.tiering is None:
            done()
            return
        handles = found.handles[found.states == BlockState.COMMITTED]
        if request.flag == BY_LAYERS:
            handles = handles[self.blocks.namespace[handles] == info_number]
            self.tiering.promote(handles, by_layers=True)
            done()
            return
        self.tiering.promote(handles, now_s + _ttl_s(request.ttl_ms), done)

    # --- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, request: KeyRequest, now_s: float) -> Rows:
        """Give the caller a slot for every key that nobody has: `RESERVE_ROW`, shape (n,).

        `status` is STORED where the slot is the caller's to fill, else EXISTS, PENDING, NO_ROOM or OVER_QUOTA.

        Raises:
            NamespaceMismatch: unknown namespace, or blocks of another size than it has.
        """
        rows, _, _ = self._reserve(session.number, request, now_s)
        return rows

    def reserve_part(self, session: Session, request: PartRequest, now_s: float) -> Rows:
        """The same for some bytes of each layer: of a key that nobody has, or that is being written by parts of which
        none has any of these bytes. Then handle and generation name the part, in all calls of its writer.

        Raises:
            NamespaceMismatch: as `reserve`.
            UsageError: no such bytes, or so few that a block would have too many parts.
        """
        start, end, of = request.start, request.start + request.size, request.of
        info = self.namespace(of.namespace)
        if end > info.layer_bytes or request.size * PARTS_MAX < info.layer_bytes:
            raise UsageError(
                f"a part of bytes {start} to {end} of layers of {info.layer_bytes}: allowed is a range inside, of a "
                f"{PARTS_MAX}th of them or more"
            )
        rows, fresh, found = self._reserve(JOINT_OWNER, of, now_s)
        deadline_s = now_s + _ttl_s(of.ttl_ms)
        begun = rows["handle"][fresh].astype(np.int64)
        self.parts.begin(begun, info.layer_bytes, deadline_s)
        reserved = np.flatnonzero(found.states == BlockState.RESERVED)
        reserved = reserved[_first_of_each(of.keys[reserved])]
        reserved = reserved[self.blocks.owner[found.handles[reserved]] == JOINT_OWNER]
        joined = reserved[self.parts.are_unclaimed(found.handles[reserved], start, end)]
        self.counters.duplicate_puts -= len(joined)
        mine, handles = np.concatenate([fresh, joined]), np.concatenate([begun, found.handles[joined]])
        generations = self.next_generations(len(mine))
        rows["handle"][mine] = self.parts.claim(handles, session.number, start, end, generations, deadline_s)
        rows["generation"][mine], rows["offset"][mine] = generations, self.blocks.offset[handles]
        rows["status"][mine] = PutStatus.STORED
        return rows

    def _reserve(self, owner: int, request: KeyRequest, now_s: float) -> tuple[Rows, I64, Probe]:
        """Rows of the answer, which of them were reserved just now, and what was there."""
        info = self.namespace(request.namespace)
        if request.size_bytes != info.block_bytes:
            raise NamespaceMismatch(
                f"blocks of {request.size_bytes} bytes; namespace {info.digest.hex()} has blocks of {info.block_bytes} bytes"
            )
        self.expire(now_s)
        rows = np.zeros(len(request.keys), dtype=RESERVE_ROW)
        found = self._reader.probe(request.keys)
        states = found.states
        strangers = np.flatnonzero((states != BlockState.ABSENT) & (found.namespaces != request.namespace))
        if len(strangers):
            holder = self._namespaces[int(found.namespaces[strangers[0]])]
            raise NamespaceMismatch(
                f"keys of another namespace: the first is key {strangers[0]} of this call, stored under "
                f"{holder.digest.hex()} ({holder.label})"
            )
        rows["status"][states == BlockState.COMMITTED] = PutStatus.EXISTS
        rows["status"][states == BlockState.RESERVED] = PutStatus.PENDING
        self.counters.duplicate_puts += int(np.count_nonzero(states))
        # A put uses what is there of its prefix: making room for the rest must not evict that first.
        self._use(found.handles[states == BlockState.COMMITTED])
        absent = np.flatnonzero(states == BlockState.ABSENT)
        rows["status"][absent] = PutStatus.PENDING  # of a key that is named twice, all but the first
        fresh = absent[_first_of_each(request.keys[absent])]
        rows["status"][fresh] = PutStatus.STORED
        granted = self._reserve_fresh(owner, request, info, fresh, rows, now_s)
        self._refuse(request.namespace, rows, fresh[granted:])
        return rows, fresh[:granted], found

    def _refuse(self, namespace: int, rows: Rows, refused: I64) -> None:
        if not len(refused):
            return
        tenant = int(self._tenant_of[namespace])
        slot_bytes = self.allocator.slot_bytes_for(self._namespaces[namespace].slot_bytes)
        if self.tenants.room(tenant) < slot_bytes:
            rows["status"][refused] = PutStatus.OVER_QUOTA
            self.tenants.refused[tenant] += len(refused)
            self.counters.over_quota_puts += len(refused)
        else:
            rows["status"][refused] = PutStatus.NO_ROOM
            self.counters.refused_puts += len(refused)

    def _reserve_fresh(
        self, owner: int, request: KeyRequest, info: NamespaceInfo, fresh: I64, rows: Rows, now_s: float
    ) -> int:
        """Reserve the first keys of `fresh` that there is room for; how many."""
        tenant = int(self._tenant_of[request.namespace])
        offsets = self._allocate(self.allocator.slot_bytes_for(info.slot_bytes), len(fresh), tenant)
        count = min(len(offsets), self.blocks.available)
        self._free(offsets[count:], tenant)
        offsets = offsets[:count]
        if not count:
            return 0
        chosen = fresh[:count]
        handles = self.blocks.take(count)
        generations = self.next_generations(count)
        sizes = np.full(count, info.block_bytes, dtype=np.int64)
        try:
            self._make_index_room(count)
            self._index.insert(
                request.keys[chosen], generations, offsets, sizes, handles, request.namespace, info.layers
            )
        except IndexFull:
            self._free(offsets, tenant)
            self.blocks.give_back(handles)
            return 0
        blocks = self.blocks
        blocks.life[handles] = Life.RESERVED
        blocks.offset[handles] = offsets
        blocks.generation[handles] = generations
        blocks.size[handles] = info.block_bytes
        blocks.holds[handles] = 0
        blocks.namespace[handles] = request.namespace
        blocks.owner[handles] = owner
        rows["handle"][chosen] = handles
        rows["generation"][chosen] = generations
        rows["offset"][chosen] = offsets
        self.counters.reserved_blocks += count
        if owner != JOINT_OWNER:  # each part of a joint block has its own time
            self._reservation_number += 1
            deadline_s = now_s + _ttl_s(request.ttl_ms)
            # Kept until the deadline, whatever becomes of the blocks: so these are small.
            reserved = (deadline_s, self._reservation_number, handles.astype(np.int32), int(generations[0]))
            heapq.heappush(self._reservation_expiries, reserved)
        return count

    def publish(self, session: Session, refs: Rows, layers_ready: int, ttl_ms: int = 0, now_s: float = 0.0) -> U8:
        """Move the watermark of reserved blocks forward: 1 = done, 0 = no longer yours. Shape (n,).

        With `ttl_ms` their reservation lasts for at least so long from now on: who publishes is alive.
        """
        handles, mine = self._mine(session, refs, Life.RESERVED)
        entries = self._index.read(handles[mine])
        found = Probe(entries, handles[mine])
        sane = (found.layers_ready <= layers_ready) & (layers_ready <= found.layers)
        self._index.set_status(handles[mine][sane], BlockState.RESERVED, layers_ready)
        answers = np.zeros(len(refs), dtype=np.uint8)
        answers[np.flatnonzero(mine)[sane]] = 1
        answers[self._publish_parts(session, refs, layers_ready, now_s + _ttl_s(ttl_ms))] = 1
        if ttl_ms:
            named = zip(handles[mine].tolist(), self.blocks.generation[handles[mine]].tolist(), strict=True)
            self._prolonged.update(dict.fromkeys(named, now_s + _ttl_s(ttl_ms)))
        return answers

    def commit(self, session: Session, refs: Rows) -> U8:
        """Make reserved blocks complete and immutable: 1 = done, 0 = the reservation had ended. Shape (n,)."""
        handles, mine = self._mine(session, refs, Life.RESERVED)
        self._complete(handles[mine])
        self._end_quarantine(session, refs)
        answers = mine.astype(np.uint8)
        answers[self._commit_parts(session, refs)] = 1
        return answers

    def finish(self, session: Session, refs: Rows) -> Rows:
        """As `commit`, for a writer that leaves sums: `FINISH_ROW`, shape (n,). The last open part of a block is left
        as it is, and its writer is told so: all other bytes are there, and stay.
        """
        rows = np.zeros(len(refs), dtype=FINISH_ROW)
        places, parts = self.parts.named(refs, session.number)
        last = self._are_reserved(parts) & self.parts.are_last(parts)
        rows["status"][places[last]] = Finish.LAST
        rows["generation"][places[last]] = self.blocks.generation[self.parts.blocks(parts[last])]
        others = rows["status"] != Finish.LAST
        rows["status"][others] = self.commit(session, refs[others])
        return rows

    def _complete(self, done: I64) -> None:
        layers = Probe(self._index.read(done), done).layers
        self._index.set_status(done, BlockState.COMMITTED, layers)
        self.blocks.life[done] = Life.COMMITTED
        self.blocks.owner[done] = 0
        self.tenants.admit(done)
        if self.tiering is not None:
            self.tiering.committed(done)
        if self.device_tier is not None:
            self.device_tier.committed(done)
        self.counters.committed_blocks += len(done)
        self.counters.committed_bytes += int(self.blocks.size[done].sum())

    def abort(self, session: Session, refs: Rows) -> U8:
        """Give reserved blocks back: 1 = done, 0 = the reservation had ended. Shape (n,)."""
        handles, mine = self._mine(session, refs, Life.RESERVED)
        self.counters.aborted_blocks += int(np.count_nonzero(mine))
        # The writer itself says that it has stopped, so the slot need not be kept aside.
        self.blocks.owner[handles[mine]] = 0
        self._retire(handles[mine])
        self._end_quarantine(session, refs)
        answers = mine.astype(np.uint8)
        places, parts = self.parts.named(refs, session.number)
        answers[places] = self._are_reserved(parts)
        self._leave_parts(parts)
        return answers

    def _publish_parts(self, session: Session, refs: Rows, layers_ready: int, deadline_s: float) -> I64:
        """Move parts forward, and the watermarks of their blocks with the last of them; places of those refs."""
        places, parts = self.parts.named(refs, session.number)
        if not len(parts):
            return places
        sane = self._are_reserved(parts) & (self.parts.layers_ready(parts) <= layers_ready)
        sane &= layers_ready <= self._layers_of[self.blocks.namespace[self.parts.blocks(parts)]]
        self.parts.advance(parts[sane], layers_ready, deadline_s)
        self._show_watermarks(np.unique(self.parts.blocks(parts[sane])))
        return places[sane]

    def _commit_parts(self, session: Session, refs: Rows) -> I64:
        """Complete parts, and the blocks whose last ones they were; places of those refs."""
        places, parts = self.parts.named(refs, session.number)
        if not len(parts):
            return places
        in_time = self._are_reserved(parts)
        self._leave_parts(parts[~in_time])
        done = parts[in_time]
        handles = self.parts.blocks(done)
        self.parts.finish(done, self._layers_of[self.blocks.namespace[handles]])
        handles = np.unique(handles)
        complete = self.parts.are_complete(handles)
        self._show_watermarks(handles[~complete])
        self.parts.end(handles[complete])
        self._complete(handles[complete])
        return places[in_time]

    def _leave_parts(self, parts: I64) -> None:
        """Writers of parts have stopped before the end: their blocks are dropped."""
        if not len(parts):
            return
        self.parts.leave(parts)
        handles = np.unique(self.parts.blocks(parts))
        reserved = self.blocks.life[handles] == Life.RESERVED
        self.counters.aborted_blocks += int(np.count_nonzero(reserved))
        self._retire(handles[reserved])
        late = handles[~reserved]
        late = late[~self.parts.are_written(late)]
        self.parts.end(late)
        self._let_go(late)

    def _are_reserved(self, parts: I64) -> Mask:
        """Whether the blocks of these parts are still in the index. Shape (n,)."""
        return self.blocks.life[self.parts.blocks(parts)] == Life.RESERVED

    def _show_watermarks(self, handles: I64) -> None:
        if len(handles):
            self._index.set_status(handles, BlockState.RESERVED, self.parts.watermarks(handles))

    def delete(self, request: KeyRequest) -> U8:
        """Remove blocks, pinned ones too: 1 = it was here. Shape (n,). No later lookup finds them.

        With an SSD tier, `delete_on_disk` has to follow before the client may be told.
        """
        self._check_namespace(request.namespace)
        found = self._reader.probe(request.keys)
        present = found.positions >= 0
        handles = np.unique(found.handles[present])
        self.counters.deleted_blocks += len(handles)
        self._retire(handles)
        return present.astype(np.uint8)

    def delete_on_disk(self, keys: Rows, done: Callable[[], None]) -> None:
        """Make sure that these keys don't come back from the SSD; `done` is called once that is durable.

        All of them, in the index or not: the scan of a restart may not have come to them yet.
        """
        if self.tiering is None or not len(keys):
            done()
        else:
            self.tiering.remove(self._generation, keys, done)

    def pin(self, request: KeyRequest) -> U8:
        """Pins are counted: flag 1 adds one, 0 takes one off. 1 = it is here. Shape (n,). Pinned blocks are not
        evicted, and are in no order of eviction.
        """
        self._check_namespace(request.namespace)
        found = self._reader.probe(request.keys)
        committed = found.states == BlockState.COMMITTED
        handles = np.unique(found.handles[committed])
        pins = self.blocks.pins
        if request.flag:
            handles = handles[pins[handles] < np.iinfo(pins.dtype).max]
            self.tenants.remove(handles[pins[handles] == 0])
            pins[handles] += 1
        else:
            handles = handles[pins[handles] > 0]
            pins[handles] -= 1
            free = handles[(pins[handles] == 0) & (self.blocks.life[handles] == Life.COMMITTED)]
            self.tenants.admit(free)
        return committed.astype(np.uint8)

    def flush(self, digest: bytes) -> int:
        """Remove every block of a namespace (empty digest: of all); how many. With an SSD tier, `flush_on_disk`
        follows.
        """
        handles = self.blocks.select(Life.RESERVED, Life.COMMITTED, Life.ON_DISK, Life.LOADING)
        if digest:
            handles = handles[self.blocks.namespace[handles] == self._namespace_ids.get(digest, NAMESPACES_MAX)]
        self.counters.deleted_blocks += len(handles)
        self._retire(handles)
        return len(handles)

    def flush_on_disk(self, digest: bytes, done: Callable[[], None]) -> None:
        """The same for the SSD; `done` is called once it is durable."""
        if self.tiering is None:
            done()
        else:
            self.tiering.flush(self._generation, digest, done)

    # --- time --------------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """End what has run out by now."""
        while self._lease_expiries and self._lease_expiries[0][0] <= now_s:
            _, number = heapq.heappop(self._lease_expiries)
            lease = self._leases.get(number)
            if lease is not None and lease.deadline_s <= now_s:
                self.counters.expired_leases += 1
                self._end_lease(number)
        while self._reservation_expiries and self._reservation_expiries[0][0] <= now_s:
            _, _, narrow, first = heapq.heappop(self._reservation_expiries)
            handles = narrow.astype(np.int64)
            generations = np.arange(first, first + len(handles), dtype=np.uint64)
            blocks = self.blocks
            still = (blocks.life[handles] == Life.RESERVED) & (blocks.generation[handles] == generations)
            if self._prolonged:
                still &= ~self._wait_longer(handles, generations, now_s)
            self.counters.expired_reservations += int(np.count_nonzero(still))
            self._retire(handles[still])
        late = self.parts.due(now_s)
        self.counters.expired_reservations += len(late)
        self._retire(late)

    def _wait_longer(self, handles: I64, generations: NDArray[np.uint64], now_s: float) -> Mask:
        """Which of these reservations were prolonged beyond now: they come up again at their new time."""
        later = np.zeros(len(handles), dtype=np.bool_)
        for row, (handle, generation) in enumerate(zip(handles.tolist(), generations.tolist(), strict=True)):
            until_s = self._prolonged.pop((handle, generation), 0.0)
            if until_s <= now_s or self.blocks.life[handle] != Life.RESERVED:
                continue
            later[row] = True
            self._prolonged[handle, generation] = until_s
            self._reservation_number += 1
            one = (until_s, self._reservation_number, np.array([handle], dtype=np.int32), generation)
            heapq.heappush(self._reservation_expiries, one)
        return later

    def tick(self, now_s: float) -> None:
        """What is due by time, and room ahead of need: a put then seldom has to wait for an eviction."""
        self.expire(now_s)
        tenants = self.tenants
        for group, number in tenants.members.items():
            self._free_up(-tenants.room(number), number, group)
        if self.allocator.free_bytes >= self._watermark_bytes:
            return
        missing = 2 * self._watermark_bytes - self.allocator.free_bytes
        tired: set[int] = set()
        while missing > 0 and (group := tenants.next_to_give(NOBODY, tired)) is not None:
            missing -= self._free_up(min(missing, tenants.spare(group, NOBODY)), NOBODY, group)
            tired.add(group)

    # --- the SSD tier's side (`tiering.ShardSide`) -------------------------------------------------------------------

    def slots_for(self, handles: I64) -> I64:
        """Slots for some of these blocks, the first ones, evicting others: offsets, shape (at most n,)."""
        sizes = self.blocks.size[handles]
        count = int(
            np.argmin(np.append(sizes == sizes[0], False))
        )  # of one size at a time; the rest is asked for again
        # One tenant at a time, too: its quota decides.
        owners = self._owners(handles[:count])
        count = int(np.argmin(np.append(owners == owners[0], False)))
        info = self._namespaces[int(self.blocks.namespace[handles[0]])]
        return self._allocate(self.allocator.slot_bytes_for(info.slot_bytes), count, int(owners[0]))

    def loading(self, handles: I64, generations: NDArray[np.uint64], offsets: I64) -> None:
        """These blocks are on their way from the SSD into these slots."""
        blocks = self.blocks
        blocks.life[handles] = Life.LOADING
        blocks.generation[handles] = generations
        blocks.offset[handles] = offsets
        blocks.holds[handles] = 0
        self._index.relocate(handles, generations, offsets, Tier.LOADING)

    def loaded_layers(self, handles: I64, layers_ready: int) -> None:
        """So many layers of these blocks have come."""
        self._index.set_status(handles, BlockState.COMMITTED, layers_ready, Tier.LOADING)

    def free_slots(self, handles: I64, offsets: I64) -> None:
        """Give slots back that were meant for these blocks."""
        self.tenants.give(self._owners(handles), self.allocator.slot_bytes_of(offsets))
        self.allocator.free(offsets)

    def next_generations(self, count: int) -> NDArray[np.uint64]:
        """Generations that nothing else has."""
        first, self._generation = self._generation, self._generation + count
        return np.arange(first, self._generation, dtype=np.uint64)

    def keys_of(self, handles: I64) -> Rows:
        """Keys of blocks that are in the index."""
        return np.ascontiguousarray(self._index.read(handles)[:, :3]).view(KEY_DTYPE).reshape(-1)

    def arrived(self, handles: I64) -> None:
        """These blocks are in DRAM again, as a whole."""
        blocks = self.blocks
        blocks.life[handles] = Life.COMMITTED
        layers = self._layers_of[blocks.namespace[handles]]
        self._index.set_status(handles, BlockState.COMMITTED, layers)
        self.tenants.admit(handles[blocks.pins[handles] == 0])
        if self.device_tier is not None:
            self.device_tier.committed(handles)

    def not_arrived(self, handles: I64) -> None:
        """The disk worker has given up on these blocks, or they were deleted meanwhile: they are nowhere any more, and
        their slots are ours again.
        """
        failed = handles[self.blocks.life[handles] == Life.LOADING]
        self._index.remove(failed)
        self._let_go(handles)

    def forget(self, handles: I64) -> None:
        """These blocks are nowhere any more."""
        if len(handles):
            in_index = handles[self.blocks.life[handles] == Life.ON_DISK]
            self._index.remove(in_index)
            self.blocks.give_back(handles)

    def hold(self, handles: I64) -> None:
        """Their slots must not change."""
        self.blocks.holds[handles] += 1

    def unhold(self, handles: I64) -> None:
        """They may again."""
        self._release_holds(handles)

    def find(self, keys: Rows) -> I64:
        """Handle of each key; -1 where it is not in the index."""
        found = self._reader.probe(keys)
        return np.where(found.positions >= 0, found.handles, -1)

    def add_on_disk(self, info: NamespaceInfo, keys: Rows) -> I64:
        """Take in blocks that the SSD has and the index does not; their handles."""
        try:
            number = self.open_namespace(info)
        except UsageError:  # of other geometry, or too large for this pool: it can't be served
            return np.zeros(0, dtype=np.int64)
        count = min(len(keys), self.blocks.available)
        handles = self.blocks.take(count)
        generations = self.next_generations(count)
        nowhere = np.zeros(count, dtype=np.int64)
        sizes = np.full(count, info.block_bytes, dtype=np.int64)
        self._make_index_room(count)
        try:
            self._index.insert(keys[:count], generations, nowhere, sizes, handles, number, info.layers, tier=Tier.DISK)
        except IndexFull:
            self.blocks.give_back(handles)
            return np.zeros(0, dtype=np.int64)
        blocks = self.blocks
        blocks.life[handles] = Life.ON_DISK
        blocks.durable[handles] = True
        blocks.generation[handles] = generations
        blocks.size[handles] = info.block_bytes
        blocks.holds[handles] = 0
        blocks.namespace[handles] = number
        return handles

    def note_report(self, amounts: dict[str, int]) -> None:
        """Add what a client did without asking: reads through shared memory never pass here."""
        for name, amount in amounts.items():
            counter = f"client_{name}"
            setattr(self.counters, counter, getattr(self.counters, counter) + amount)

    def note_warm(self, warm_bytes: int) -> None:
        """Tell readers how much of the pool is present in memory."""
        self._index.note_warm(warm_bytes)

    # --- sight -------------------------------------------------------------------------------------------------------

    @property
    def index_fd(self) -> int:
        """Descriptor of the index segment in use."""
        return self._segment.fd

    def accounting(self) -> dict[str, int]:
        """Bytes of the pool: free + reserved + committed == capacity. Slots kept aside count as reserved, condemned
        ones as committed.
        """
        blocks = self.blocks
        given_out = blocks.select(*_WITH_SLOT)
        slot_bytes = self.allocator.slot_bytes_of(blocks.offset[given_out])
        writing = np.isin(blocks.life[given_out], (Life.RESERVED, Life.QUARANTINED, Life.LOADING))
        return {
            "free": self.allocator.free_bytes,
            "reserved": int(slot_bytes[writing].sum()),
            "committed": int(slot_bytes[~writing].sum()),
            "capacity": self.allocator.capacity_bytes,
        }

    def namespaces(self) -> list[dict[str, int | str]]:
        """Blocks and bytes of each namespace that has any."""
        committed = self.blocks.select(Life.COMMITTED)
        blocks = np.bincount(self.blocks.namespace[committed], minlength=len(self._namespaces))
        return [
            {
                "digest": info.digest.hex(),
                "label": info.label,
                "tenant": info.tenant,
                "blocks": int(count),
                "bytes": int(count) * info.block_bytes,
            }
            for info, count in zip(self._namespaces, blocks.tolist(), strict=True)
            if count
        ]

    def gauges(self) -> dict[str, int]:
        """What is there now."""
        blocks = self.blocks
        used = len(blocks)
        return {
            "resident_blocks": len(blocks.select(Life.COMMITTED)),
            "reserved_blocks_now": len(blocks.select(Life.RESERVED)),
            "quarantined_blocks": len(blocks.select(Life.QUARANTINED)),
            "condemned_blocks": len(blocks.select(Life.CONDEMNED)),
            "disk_blocks": len(blocks.select(Life.ON_DISK)),
            "loading_blocks": len(blocks.select(Life.LOADING)),
            "durable_blocks": int(np.count_nonzero(blocks.durable[:used])),
            "held_blocks": int(np.count_nonzero(blocks.holds[:used])),
            "pinned_blocks": int(np.count_nonzero(blocks.pins[:used])),
            "leases_now": len(self._leases),
            "index_slots": self._index.slots,
            "index_bytes": index_bytes(self._index.buckets),
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_namespace(self, number: int) -> None:
        # Keys of different namespaces never meet (each chain starts from its digest), so administration need not name
        # one.
        if number != ANY_NAMESPACE:
            self.namespace(number)

    def _named(self, refs: Rows) -> tuple[I64, NDArray[np.bool_]]:
        """Handles of refs, and which of them name a block of that generation, whatever its state."""
        generation = self.blocks.generation
        handles = refs["handle"].astype(np.int64)
        try:
            if len(handles) and handles.min() < 0:  # an index from the end would be a second name of another handle
                raise IndexError
            return handles, generation[handles] == refs["generation"]
        except IndexError:  # a handle that was never given out
            known = (handles >= 0) & (handles < len(generation))
            inside = np.where(known, handles, 0)
            named = known & (generation[inside] == refs["generation"]) if len(generation) else known
            return inside, named

    def _mine(self, session: Session, refs: Rows, life: Life) -> tuple[I64, NDArray[np.bool_]]:
        """Handles of refs, and which of them name a block in that state that this session reserved, each once."""
        handles, named = self._named(refs)
        if not named.any():
            return handles, named
        named &= (self.blocks.life[handles] == life) & (self.blocks.owner[handles] == session.number)
        rows = np.flatnonzero(named)
        first = np.zeros(len(refs), dtype=np.bool_)
        first[rows[np.unique(handles[rows], return_index=True)[1]]] = True
        return handles, first

    def _end_quarantine(self, session: Session, refs: Rows) -> None:
        """The writer has reported on a reservation that had run out: it writes there no more."""
        handles, late = self._mine(session, refs, Life.QUARANTINED)
        self._let_go(handles[late])

    def _use(self, handles: I64) -> None:
        """Count committed blocks, in prefix order and perhaps named twice, as used now."""
        if len(handles):
            _, first = np.unique(handles, return_index=True)
            used = handles[np.sort(first)]
            used = used[self.blocks.life[used] == Life.COMMITTED]
            self.tenants.touch(used)
            if self.tiering is not None:
                self.tiering.used_again(used)
            if self.device_tier is not None:
                self.device_tier.used(used)

    def _retire(self, handles: I64) -> None:
        """Take blocks out of the index, and their slots back as soon as nobody can touch them."""
        if not len(handles):
            return
        blocks = self.blocks
        self._index.remove(handles)
        if self.device_tier is not None:
            self.device_tier.left(handles)
        blocks.pins[handles] = 0
        blocks.durable[handles] = False
        life = blocks.life[handles]
        blocks.give_back(handles[life == Life.ON_DISK])
        # The slot is the disk worker's until it has answered; `tiering` gives it and the handle back then.
        loading = handles[life == Life.LOADING]
        blocks.life[loading] = Life.QUARANTINED
        blocks.owner[loading] = DISK_OWNER
        handles = handles[(life != Life.ON_DISK) & (life != Life.LOADING)]
        committed = handles[blocks.life[handles] == Life.COMMITTED]
        self.tenants.remove(committed)
        joint = handles[(blocks.life[handles] == Life.RESERVED) & (blocks.owner[handles] == JOINT_OWNER)]
        if len(joint):
            written = self.parts.are_written(joint)
            self.parts.drop(joint[written])
            self.parts.end(joint[~written])
            blocks.owner[joint[~written]] = 0
        writing = (blocks.life[handles] == Life.RESERVED) & (blocks.owner[handles] != 0)
        blocks.life[handles[writing]] = Life.QUARANTINED
        self._let_go(handles[~writing])

    def _let_go(self, handles: I64) -> None:
        """Free slots that are out of the index; those that readers hold wait for the last of them."""
        blocks = self.blocks
        held = blocks.holds[handles] > 0
        blocks.life[handles[held]] = Life.CONDEMNED
        free = handles[~held]
        self.free_slots(free, blocks.offset[free])
        blocks.give_back(free)

    def _end_lease(self, number: int) -> None:
        lease = self._leases.pop(number)
        lease.session.leases.discard(number)
        self._release_holds(lease.handles)

    def _release_holds(self, held: I64) -> None:
        blocks = self.blocks
        np.subtract.at(blocks.holds, held, 1)
        condemned = held[blocks.life[held] == _CONDEMNED]
        if len(condemned):
            handles = np.unique(condemned)
            self._let_go(handles[blocks.holds[handles] == 0])

    def _owners(self, handles: I64) -> I64:
        """The tenant of each block. Shape (n,)."""
        return self._tenant_of[self.blocks.namespace[handles]]

    def _keys_and_values(self, handles: I64) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Low words of the keys of blocks in the index, and what one of their bytes is worth. Shapes (n,)."""
        return self.keys_of(handles)["lo"], self._value_of[self.blocks.namespace[handles]]

    def _free(self, offsets: I64, tenant: int) -> None:
        """Give back slots that a tenant has not used yet."""
        self.tenants.take(tenant, -int(self.allocator.slot_bytes_of(offsets).sum()))
        self.allocator.free(offsets)

    def _allocate(self, slot_bytes: int, count: int, tenant: int) -> I64:
        """Up to `count` slots for a tenant, evicting its own blocks where its limit asks for it, and otherwise what the
        policies offer, until there are enough or nothing may go.
        """
        tenants = self.tenants
        if count * slot_bytes > tenants.room(tenant):
            self._free_up(count * slot_bytes - tenants.room(tenant), tenant, tenants.group_of(tenant))
            count = max(0, min(count, tenants.room(tenant) // slot_bytes))
        offsets = self.allocator.allocate(slot_bytes, count)
        tired: set[int] = set()
        staying: list[I64] = []  # out of the order while we look for others: each block is looked at once
        stuck: Mask | None = None
        while len(offsets) < count and (group := tenants.next_to_give(tenant, tired)) is not None:
            candidates = self._candidates(group, count - len(offsets), tenants.spare(group, tenant))
            same = self.allocator.slot_bytes_of(self.blocks.offset[candidates]) == slot_bytes
            if not same.all() and (stuck is None or len(tenants.groups) > 1):
                stuck = self._stuck_chunks(tenant)
            staying.append(self._evict(group, candidates, same, stuck))
            if not len(candidates):
                tired.add(group)
            offsets = np.concatenate([offsets, self.allocator.allocate(slot_bytes, count - len(offsets))])
        for kept in staying:
            tenants.touch(kept[::-1])
        tenants.take(tenant, len(offsets) * slot_bytes)
        return offsets

    def _candidates(self, group: int, count: int, spare_bytes: int) -> I64:
        """Up to `count` blocks of a group to evict, of no more than so many bytes in all."""
        policy = self.tenants.policy(group)
        candidates = policy.candidates(count)
        fitting = np.cumsum(self.allocator.slot_bytes_of(self.blocks.offset[candidates])) <= spare_bytes
        if not fitting.all():
            policy.restore(candidates[~fitting])
            candidates = candidates[fitting]
        return candidates

    def _free_up(self, wanted_bytes: int, taker: int, group: int) -> int:
        """Evict blocks of a group, of whatever size, until so many bytes are free or nothing may go; bytes freed."""
        policy = self.tenants.policy(group)
        staying: list[I64] = []
        freed = 0
        while freed < wanted_bytes:
            count = min(FREE_UP_BLOCKS, -(-(wanted_bytes - freed) // GRANULE_BYTES_MIN))
            candidates = policy.candidates(count)
            if not len(candidates):
                break
            stays = (self.blocks.holds[candidates] > 0) | (self.blocks.pins[candidates] > 0)
            staying.append(candidates[stays])
            loose = candidates[~stays]
            sizes = np.cumsum(self.allocator.slot_bytes_of(self.blocks.offset[loose]))
            enough = int(np.searchsorted(sizes, wanted_bytes - freed)) + 1
            allowed = int(np.searchsorted(sizes, self.tenants.spare(group, taker), side="right"))
            going = loose[: min(enough, allowed)]
            policy.restore(loose[len(going) :])
            if not len(going) and len(loose):
                break  # one more would be taken from its share
            freed += int(self.allocator.slot_bytes_of(self.blocks.offset[going]).sum())
            self._drop(going)
        for kept in staying:
            policy.touch(kept[::-1])
        return freed

    def _evict(self, group: int, candidates: I64, same: Mask, stuck: Mask | None) -> I64:
        """Evict those that may go: blocks of the wanted slot size (`same`) one by one, else the whole chunk of one of
        another size. Those that have to stay are returned, and not in the order any more.
        """
        blocks, policy = self.blocks, self.tenants.policy(group)
        stays = (blocks.holds[candidates] > 0) | (blocks.pins[candidates] > 0)
        if stuck is not None:
            stays |= ~same & stuck[self.allocator.chunk_of(blocks.offset[candidates])]
        self._drop(candidates[~stays & same])
        others = candidates[~stays & ~same]
        if len(others):
            mates = self._chunk_mates(int(others[0]))
            policy.restore(others[~np.isin(others, mates)])
            self._drop(mates)
        return candidates[stays]

    def _stuck_chunks(self, taker: int) -> Mask:
        """Which chunks can't be emptied for a tenant: one of their blocks is pinned, held, being written, or of a
        tenant that could fall below its share.
        """
        blocks = self.blocks
        given_out = blocks.select(*_WITH_SLOT)
        loose = (
            (blocks.life[given_out] == Life.COMMITTED) & (blocks.holds[given_out] == 0) & (blocks.pins[given_out] == 0)
        )
        tenants = self.tenants
        poor = [group for group in tenants.groups if tenants.protected(group, taker, self.allocator.chunk_bytes)]
        if poor:
            loose &= ~np.isin(tenants.groups_of(given_out), poor)
        stuck = np.zeros(self.allocator.pool_bytes // self.allocator.chunk_bytes, dtype=np.bool_)
        stuck[self.allocator.chunk_of(blocks.offset[given_out[~loose]])] = True
        return stuck

    def _chunk_mates(self, handle: int) -> I64:
        """All committed blocks in the chunk of this one, itself included."""
        blocks = self.blocks
        committed = blocks.select(Life.COMMITTED)
        chunk = blocks.offset[handle] // self.allocator.chunk_bytes
        return committed[self.allocator.chunk_of(blocks.offset[committed]) == chunk]

    def _drop(self, handles: I64) -> None:
        """Blocks leave DRAM: those that the SSD has stay in the index, the others are gone."""
        blocks = self.blocks
        self.counters.evicted_blocks += len(handles)
        self.counters.evicted_bytes += int(blocks.size[handles].sum())
        durable = blocks.durable[handles]
        if durable.any() and self.tiering is not None:
            demoted = handles[durable]
            self.tiering.counters.demoted_blocks += len(demoted)
            self.tenants.remove(demoted)
            generations = self.next_generations(len(demoted))
            self._index.relocate(demoted, generations, np.zeros(len(demoted), dtype=np.int64), Tier.DISK)
            blocks.generation[demoted] = generations
            if self.device_tier is not None:
                self.device_tier.left(demoted)
            blocks.life[demoted] = Life.ON_DISK
            self.free_slots(demoted, blocks.offset[demoted])
            handles = handles[~durable]
        self._retire(handles)

    def _use_index(self, entries: int) -> None:
        buckets = buckets_for(entries)
        self._segment = self._new_segment(index_bytes(buckets))
        self._index = IndexWriter(self._segment.memory, buckets, handles=1024)
        self._reader = IndexReader(self._segment.memory)

    def _make_index_room(self, count: int) -> None:
        """Move to a larger table before this one gets crowded. Readers see the old one retired and attach again."""
        wanted = self._index.resident + count
        if wanted <= self._index.slots * INDEX_LOAD_MAX:
            return
        old = self._index
        self._use_index(int(INDEX_GROWTH * wanted))
        old.move_to(self._index)
        self.counters.index_resizes += 1


def _ttl_s(ttl_ms: int) -> float:
    return min(ttl_ms / 1000, TTL_S_MAX)


def _first_of_each(keys: Rows) -> I64:
    """Rows of the first occurrence of each key, ascending."""
    if len(np.unique(keys["lo"])) == len(keys):
        return np.arange(len(keys))
    _, first = np.unique(keys, return_index=True)
    return np.sort(first)
