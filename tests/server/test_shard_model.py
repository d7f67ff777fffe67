"""The shard against a model in plain Python: every answer, every byte of the pool, after every step.

The model knows who may still touch which slot: the writers of a reservation until they report or leave (even when the
reservation ran out long ago), and readers with a lease. A slot that is given out while somebody may touch it fails the
step. Which blocks are evicted is the policy's choice; the model learns it and checks that they were free to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.errors import NamespaceMismatch
from kvstore.core.states import BlockState, PutStatus
from kvstore.server.eviction import POLICIES
from kvstore.server.eviction.tenants import Quota
from kvstore.server.shard.shard import Session
from kvstore.testing.clock import FakeClock
from kvstore.wire.messages import ANY_NAMESPACE, REF, Finish, KeyRequest
from tests.server.shards import CHUNK, Rows, keys, namespace, new_shard, reserve, reserve_part

TENANTS = ["ann", "bob", "cid"]
# Slots of 4, 12 and 32 KiB, each of a tenant of its own.
SPACES = [namespace(1, 1, 100, "ann"), namespace(2, 2, 4500, "bob"), namespace(3, 4, 8000, "cid")]
LAYERS = [space.layers for space in SPACES]
NUMBERS = 30  # keys of each namespace
SESSIONS = 3


@dataclass(slots=True, eq=False)
class Part:
    """What one of several writers has of a block."""

    block: Block
    handle: int
    generation: int
    start: int
    end: int
    client: int  # that reserved it
    writer: int | None  # the same, while it may still write
    deadline_s: float
    layers_ready: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """One block from its reservation until nobody can touch its slot any more."""

    key: int  # number of the key; its namespace is key % 3
    handle: int
    generation: int
    offset: int
    slot_bytes: int
    writer: int | None  # session that may still write; of a block without parts
    deadline_s: float  # of a joint block: until when all of it has to be claimed
    parts: list[Part] = field(default_factory=list[Part])
    state: BlockState = BlockState.RESERVED  # ABSENT: out of the index, but not out of use
    layers_ready: int = 0
    pins: int = 0
    holds: int = 0

    @property
    def space(self) -> int:
        return self.key % len(SPACES)

    @property
    def layer_bytes(self) -> int:
        return SPACES[self.space].layer_bytes

    @property
    def claimed(self) -> bool:
        return sum(part.end - part.start for part in self.parts) == self.layer_bytes

    @property
    def complete(self) -> bool:
        return self.claimed and all(part.done for part in self.parts)

    @property
    def watermark(self) -> int:
        return min(part.layers_ready for part in self.parts) if self.claimed else 0

    @property
    def written(self) -> bool:
        """Whether somebody may be writing to its slot."""
        return self.writer is not None or any(part.writer is not None for part in self.parts)

    def is_late(self, now_s: float) -> bool:
        if not self.parts:
            return self.deadline_s <= now_s
        slow = any(not part.done and part.deadline_s <= now_s for part in self.parts)
        return slow or (not self.claimed and self.deadline_s <= now_s)

    @property
    def may_go(self) -> bool:
        return self.state == BlockState.COMMITTED and not self.holds and not self.pins

    @property
    def in_use(self) -> bool:
        return self.state != BlockState.ABSENT or self.written or self.holds > 0


@dataclass(slots=True)
class Lease:
    session: int
    blocks: list[Block]
    deadline_s: float


@dataclass(slots=True)
class Client:
    session: Session
    granted: list[Block] = field(default_factory=list[Block])  # everything that it ever reserved
    parts: list[Part] = field(default_factory=list[Part])  # the same
    leases: list[int] = field(default_factory=list[int])  # every number that it was ever given


clients = st.integers(0, SESSIONS - 1)
numbers = st.integers(0, NUMBERS - 1)
batches = st.lists(numbers, min_size=1, max_size=14)
spaces = st.integers(0, len(SPACES) - 1)
ttls = st.sampled_from([1000, 5000, 20_000])
HALVES, QUARTERS = [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]  # in quarters of a layer
shares = st.sampled_from([*HALVES, *HALVES, *QUARTERS, (1, 3), (0, 4)])


class ShardAgainstAModel(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.blocks: list[Block] = []  # in use, in no order
        self.leases: dict[int, Lease] = {}
        self.quotas: dict[str, Quota] = {}

    @initialize(chunks=st.integers(1, 6), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, chunks: int, policy: str) -> None:
        self.chunks = chunks
        self.shard, self.board = new_shard(chunks, index_entries=4, watermark_bytes=8192, policy=policy)
        assert [self.shard.open_namespace(space) for space in SPACES] == [0, 1, 2]
        self.clients = [Client(self.shard.open_session()) for _ in range(SESSIONS)]

    # --- writing -----------------------------------------------------------------------------------------------------

    @rule(client=clients, space=spaces, batch=batches, ttl_ms=ttls)
    def reserve_some(self, client: int, space: int, batch: list[int], ttl_ms: int) -> None:
        self.put(client, space, batch, ttl_ms)

    @rule(client=clients, space=spaces, batch=st.lists(numbers, min_size=5, max_size=30, unique=True))
    def store_some(self, client: int, space: int, batch: list[int]) -> None:
        granted = self.put(client, space, batch, 20_000)
        self.settle(client, granted, commit=True)

    @rule(client=clients, data=st.data(), commit=st.booleans())
    def settle_some(self, client: int, data: st.DataObject, commit: bool) -> None:
        """Anything that the client ever reserved, however long ago, and what others reserved as well."""
        known = [block for other in self.clients for block in other.granted[-20:]]
        if known:
            self.settle(client, data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=12)), commit)

    @rule(client=clients, data=st.data(), layers_ready=st.integers(0, 5))
    def publish_some(self, client: int, data: st.DataObject, layers_ready: int) -> None:
        known = [block for other in self.clients for block in other.granted[-20:]]
        if not known:
            return
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=8, unique=True))
        answers = self.shard.publish(self.clients[client].session, self.refs(chosen), layers_ready)
        for block, answer in zip(chosen, answers.tolist(), strict=True):
            mine = block.state == BlockState.RESERVED and block.writer == client
            sane = block.layers_ready <= layers_ready <= LAYERS[block.space]
            assert answer == (mine and sane)
            if answer:
                block.layers_ready = layers_ready

    # --- writing together --------------------------------------------------------------------------------------------

    @rule(
        client=clients,
        space=spaces,
        batch=st.lists(st.integers(0, 11), min_size=1, max_size=8),
        share=shares,
        ttl_ms=ttls,
    )
    def reserve_a_part_of_some(
        self, client: int, space: int, batch: list[int], share: tuple[int, int], ttl_ms: int
    ) -> None:
        self.put_part(client, space, batch, share, ttl_ms)

    @rule(space=spaces, batch=st.lists(st.integers(12, 20), min_size=1, max_size=8, unique=True), data=st.data())
    def store_some_together(self, space: int, batch: list[int], data: st.DataObject) -> None:
        """Two or four clients, in any order, the same one perhaps more than once."""
        for share in data.draw(st.sampled_from([HALVES, QUARTERS]).flatmap(st.permutations)):
            client = data.draw(clients)
            self.settle_parts(client, self.put_part(client, space, batch, share, 20_000), "commit")

    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "finish", "abort"]))
    def settle_some_parts(self, data: st.DataObject, how: str) -> None:
        chosen, client = self.some_parts(data)
        if chosen:
            self.settle_parts(client, chosen, how)

    @rule(data=st.data(), layers_ready=st.integers(0, 4), ttl_ms=st.sampled_from([0, 0, 5000]))
    def publish_some_parts(self, data: st.DataObject, layers_ready: int, ttl_ms: int) -> None:
        chosen, client = self.some_parts(data)
        chosen = list(dict.fromkeys(chosen))
        session = self.clients[client].session
        answers = self.shard.publish(session, self.refs(chosen), layers_ready, ttl_ms, self.clock.now_s)
        for part, answer in zip(chosen, answers.tolist(), strict=True):
            mine = part.writer == client and part.block.state == BlockState.RESERVED
            assert answer == (mine and part.layers_ready <= layers_ready <= LAYERS[part.block.space])
            if answer:
                part.layers_ready = layers_ready
                part.deadline_s = max(part.deadline_s, self.clock.now_s + ttl_ms / 1000)
                part.block.layers_ready = part.block.watermark

    @rule(batch=st.lists(numbers, min_size=1, max_size=6), space=spaces)
    def delete_some(self, batch: list[int], space: int) -> None:
        chosen = [self.key(space, number) for number in batch]
        answers = self.shard.delete(KeyRequest(ANY_NAMESPACE, keys(*chosen)))
        assert answers.tolist() == [self.visible(key) is not None for key in chosen]
        for key in chosen:
            block = self.visible(key)
            if block is not None:
                self.take_out(block)

    @rule(space=st.none() | spaces)
    def flush(self, space: int | None) -> None:
        gone = [b for b in self.blocks if b.state != BlockState.ABSENT and space in (None, b.space)]
        assert self.shard.flush(b"" if space is None else SPACES[space].digest) == len(gone)
        for block in gone:
            self.take_out(block)

    @rule(client=clients, space=spaces, other=spaces, batch=batches)
    def put_keys_of_another_namespace(self, client: int, space: int, other: int, batch: list[int]) -> None:
        chosen = [self.key(other, number) for number in batch]
        self.expire()
        request = KeyRequest(space, keys(*chosen), ttl_ms=1000, size_bytes=SPACES[space].block_bytes)
        if space != other and any(self.visible(key) for key in chosen):
            with pytest.raises(NamespaceMismatch, match=f"model-{other + 1}"):
                self.shard.reserve(self.clients[client].session, request, self.clock.now_s)

    # --- quotas ------------------------------------------------------------------------------------------------------

    @rule(tenant=st.sampled_from(TENANTS), limit=st.sampled_from([0, 5, 9, 20]), share=st.sampled_from([0, 3, 8]))
    def give_a_quota(self, tenant: str, limit: int, share: int) -> None:
        self.quotas[tenant] = Quota(limit * 4096, share * 4096)
        self.shard.set_quotas(self.quotas, {})

    @rule()
    def make_room_ahead(self) -> None:
        before = self.used()
        self.expire_in_model()
        self.shard.tick(self.clock.now_s)
        self.learn_evictions()
        for space, (had, has) in enumerate(zip(before, self.used(), strict=True)):
            quota = self.quota(space)
            if not quota.limit or had <= quota.limit:
                assert has >= min(had, quota.share), "a block was taken from a tenant's share to make room for nobody"
            elif has > quota.limit:
                assert not any(block.may_go for block in self.blocks if block.space == space)

    # --- reading -----------------------------------------------------------------------------------------------------

    @rule(client=clients, data=st.data(), ttl_ms=ttls)
    def lease_some(self, client: int, data: st.DataObject, ttl_ms: int) -> None:
        known = [block for other in self.clients for block in other.granted[-20:]]
        if not known:
            return
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=8))
        asking = self.clients[client]
        number, held = self.shard.lease(asking.session, self.refs(chosen), ttl_ms, self.clock.now_s)
        assert held.tolist() == [block.state != BlockState.ABSENT for block in chosen]
        holding = [block for block in chosen if block.state != BlockState.ABSENT]
        for block in holding:
            block.holds += 1
        self.leases[number] = Lease(client, holding, self.clock.now_s + ttl_ms / 1000)
        asking.leases.append(number)

    @rule(data=st.data(), ttl_ms=ttls)
    def renew_some(self, data: st.DataObject, ttl_ms: int) -> None:
        for number, client in self.some_leases(data):
            lease = self.leases.get(number)
            good = lease is not None and lease.session == client and lease.deadline_s > self.clock.now_s
            answer = self.shard.renew(
                self.clients[client].session, np.array([number], dtype=np.uint64), ttl_ms, self.clock.now_s
            )
            assert answer.tolist() == [good]
            if lease is not None and good:
                lease.deadline_s = self.clock.now_s + ttl_ms / 1000

    @rule(data=st.data())
    def release_some(self, data: st.DataObject) -> None:
        for number, client in self.some_leases(data):
            lease = self.leases.get(number)
            mine = lease is not None and lease.session == client
            answer = self.shard.release(
                self.clients[client].session, np.array([number], dtype=np.uint64), self.clock.now_s
            )
            assert answer.tolist() == [mine and lease is not None and lease.deadline_s > self.clock.now_s]
            if mine:
                self.end_lease(number)

    @rule(data=st.data(), space=spaces, on=st.sampled_from([True, True, False]))
    def pin_some(self, data: st.DataObject, space: int, on: bool) -> None:
        known = [block.key for block in self.blocks if block.state == BlockState.COMMITTED and block.space == space]
        some = st.sampled_from(sorted(known)) if known else st.just(space)
        chosen = data.draw(st.lists(some | numbers.map(lambda number: self.key(space, number)), min_size=1, max_size=5))
        answers = self.shard.pin(KeyRequest(space, keys(*chosen), flag=int(on)))
        found = [self.visible(key) for key in chosen]
        committed = [block is not None and block.state == BlockState.COMMITTED for block in found]
        assert answers.tolist() == committed
        for block in {id(b): b for b, good in zip(found, committed, strict=True) if b is not None and good}.values():
            block.pins = block.pins + 1 if on else max(0, block.pins - 1)

    @rule(batch=batches, space=spaces)
    def touch_some(self, batch: list[int], space: int) -> None:
        chosen = [self.key(space, number) for number in batch]
        answers = self.shard.touch(KeyRequest(space, keys(*chosen)))
        found = [self.visible(key) for key in chosen]
        assert answers.tolist() == [b is not None and b.state == BlockState.COMMITTED for b in found]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def readers_leave_traces(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(block.handle for block in self.blocks)), max_size=8))
        self.board[chosen] += 1

    # --- time and sessions -------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2, 8, 30]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        self.shard.expire(self.clock.now_s)
        self.expire_in_model()

    @rule(client=clients)
    def a_client_leaves_and_another_comes(self, client: int) -> None:
        self.shard.close_session(self.clients[client].session)
        for number in [number for number, lease in self.leases.items() if lease.session == client]:
            self.end_lease(number)
        for block in list(self.blocks):
            if block.writer == client:
                block.writer = None
                if block.state == BlockState.RESERVED:
                    block.state = BlockState.ABSENT
            for part in block.parts:
                if part.writer == client:
                    self.leave(part)
        self.forget_unused()
        self.clients[client] = Client(self.shard.open_session())

    # --- what must hold after every step -----------------------------------------------------------------------------

    @invariant()
    def the_pool_is_all_accounted_for(self) -> None:
        books = self.shard.accounting()
        assert books["free"] + books["reserved"] + books["committed"] == books["capacity"]
        writing = [
            b for b in self.blocks if b.state == BlockState.RESERVED or (b.state == BlockState.ABSENT and b.written)
        ]
        assert books["reserved"] == sum(block.slot_bytes for block in writing)
        assert books["committed"] == sum(b.slot_bytes for b in self.blocks) - books["reserved"]
        gauges = self.shard.gauges()
        assert gauges["resident_blocks"] == sum(b.state == BlockState.COMMITTED for b in self.blocks)
        assert gauges["reserved_blocks_now"] == sum(b.state == BlockState.RESERVED for b in self.blocks)
        assert gauges["quarantined_blocks"] == len(writing) - gauges["reserved_blocks_now"]
        assert gauges["leases_now"] == len(self.leases)
        assert gauges["held_blocks"] == sum(block.holds > 0 for block in self.blocks)
        assert gauges["pinned_blocks"] == sum(block.pins > 0 for block in self.blocks)

    @invariant()
    def a_joint_block_is_visible_if_and_only_if_all_parts_are_committed(self) -> None:
        for block in self.blocks:
            if block.parts and block.state != BlockState.ABSENT:
                assert (block.state == BlockState.COMMITTED) == block.complete
        assert len(self.shard.parts) == sum(
            len(block.parts) for block in self.blocks if block.state != BlockState.COMMITTED and self.has_rows(block)
        )

    @invariant()
    def every_slot_counts_on_its_tenants_quota(self) -> None:
        told = {row["tenant"]: row["used"] for row in self.shard.tenants.describe()}
        assert [told[tenant] for tenant in TENANTS] == self.used()

    @invariant()
    def every_key_is_where_the_model_has_it(self) -> None:
        everything = list(range(NUMBERS * len(SPACES)))
        rows = self.shard.lookup(KeyRequest(ANY_NAMESPACE, keys(*everything)))
        for key, row in zip(everything, rows, strict=True):
            block = self.visible(key)
            assert row["state"] == (BlockState.ABSENT if block is None else block.state)
            if block is not None:
                assert row["size"] == SPACES[block.space].block_bytes
                assert row["layers_ready"] == block.layers_ready

    # --- the model ---------------------------------------------------------------------------------------------------

    def key(self, space: int, number: int) -> int:
        return number * len(SPACES) + space

    def visible(self, key: int) -> Block | None:
        found = [block for block in self.blocks if block.key == key and block.state != BlockState.ABSENT]
        assert len(found) <= 1
        return found[0] if found else None

    def some_parts(self, data: st.DataObject) -> tuple[list[Part], int]:
        """Anybody's, running or long over, and mostly the client that had one of them."""
        known = [part for other in self.clients for part in other.parts[-30:]]
        if not known:
            return [], 0
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=12))
        return chosen, data.draw(st.sampled_from([part.client for part in chosen]) | clients)

    def has_rows(self, block: Block) -> bool:
        """Whether the shard still has to remember the block's parts."""
        return block.state == BlockState.RESERVED or block.written

    def put_part(self, client: int, space: int, batch: list[int], share: tuple[int, int], ttl_ms: int) -> list[Part]:
        """Reserve a part, and check each answer. The parts that were granted."""
        chosen = [self.key(space, number) for number in batch]
        start, end = (quarter * SPACES[space].layer_bytes // 4 for quarter in share)
        self.expire_in_model()
        expected = self.expected_statuses(chosen)
        rows = reserve_part(
            self.shard, self.clients[client].session, space, chosen, (start, end), self.clock.now_s, ttl_ms
        )
        self.learn_evictions()
        granted: list[Part] = []
        for place, (key, row, told) in enumerate(zip(chosen, rows, expected, strict=True)):
            block = self.visible(key)
            if block is not None and block.parts and key not in chosen[:place] and block.state == BlockState.RESERVED:
                free = all(part.end <= start or end <= part.start for part in block.parts)
                assert row["status"] == (PutStatus.STORED if free else PutStatus.PENDING)
                if not free:
                    continue
                assert row["offset"] == block.offset, "parts of one block in different slots"
            elif told is not None:
                assert row["status"] == told
                continue
            elif row["status"] != PutStatus.STORED:
                assert row["status"] in {PutStatus.NO_ROOM, PutStatus.OVER_QUOTA}
                continue
            else:
                block = self.grant(None, key, row, ttl_ms)
            deadline_s = self.clock.now_s + ttl_ms / 1000
            part = Part(block, int(row["handle"]), int(row["generation"]), start, end, client, client, deadline_s)
            block.parts.append(part)
            granted.append(part)
        self.clients[client].parts += granted
        return granted

    def settle_parts(self, client: int, chosen: list[Part], how: str) -> None:
        session, named = self.clients[client].session, self.refs(chosen)
        last = [
            part.writer == client
            and part.block.state == BlockState.RESERVED
            and part.block.claimed
            and all(other.done for other in part.block.parts if other is not part)
            for part in chosen
        ]
        match how:
            case "commit":
                answers = self.shard.commit(session, named).tolist()
            case "finish":
                rows = self.shard.finish(session, named)
                answers = rows["status"].tolist()
            case _:
                answers = self.shard.abort(session, named).tolist()
        alive = [part.writer == client and part.block.state == BlockState.RESERVED for part in chosen]
        for place, (part, answer) in enumerate(zip(chosen, answers, strict=True)):
            again = part in chosen[:place]
            if how == "finish" and last[place] and not again:
                assert answer == Finish.LAST
                continue
            assert answer == (alive[place] and not again)
            if again or part.writer != client:
                continue
            if how == "abort" or not alive[place]:
                self.leave(part)
            else:
                part.done, part.writer, part.layers_ready = True, None, LAYERS[part.block.space]
                part.block.layers_ready = part.block.watermark
                if part.block.complete:
                    part.block.state = BlockState.COMMITTED
        self.forget_unused()

    def leave(self, part: Part) -> None:
        """A writer stops before the end."""
        part.writer = None
        if part.block.state == BlockState.RESERVED:
            part.block.state = BlockState.ABSENT

    def put(self, client: int, space: int, batch: list[int], ttl_ms: int) -> list[Block]:
        """Reserve, and check each answer and each slot. The blocks that were granted."""
        chosen = [self.key(space, number) for number in batch]
        self.expire_in_model()
        expected = self.expected_statuses(chosen)
        before = self.used()
        rows = reserve(self.shard, self.clients[client].session, space, chosen, self.clock.now_s, ttl_ms)
        self.learn_evictions()
        granted: list[Block] = []
        for key, row, told in zip(chosen, rows, expected, strict=True):
            if told is not None:
                assert row["status"] == told
            elif row["status"] == PutStatus.STORED:
                granted.append(self.grant(client, key, row, ttl_ms))
            else:
                assert row["status"] in {PutStatus.NO_ROOM, PutStatus.OVER_QUOTA}
        slot = self.shard.allocator.slot_bytes_for(SPACES[space].slot_bytes)
        after, quota = self.used(), self.quota(space)
        if granted and quota.limit:
            assert after[space] <= quota.limit
        for other in set(range(len(SPACES))) - {space}:
            assert after[other] >= min(before[other], self.quota(other).share), "another tenant's share was taken"
        if PutStatus.OVER_QUOTA in rows["status"]:
            assert 0 < quota.limit < after[space] + slot
            assert not any(block.may_go for block in self.blocks if block.space == space and block.slot_bytes == slot)
        if PutStatus.NO_ROOM in rows["status"] and not any(quota.share for quota in self.quotas.values()):
            assert not self.room_for(slot), "refused although something could have gone"
        self.clients[client].granted += granted
        return granted

    def used(self) -> list[int]:
        """Bytes of slots of each space, which is each tenant."""
        return [sum(block.slot_bytes for block in self.blocks if block.space == space) for space in range(len(SPACES))]

    def quota(self, space: int) -> Quota:
        return self.quotas.get(TENANTS[space], Quota())

    def expected_statuses(self, chosen: list[int]) -> list[PutStatus | None]:
        """What must be answered; None where it is STORED or a refusal."""
        expected: list[PutStatus | None] = []
        for place, key in enumerate(chosen):
            block = self.visible(key)
            if block is not None:
                expected.append(PutStatus.EXISTS if block.state == BlockState.COMMITTED else PutStatus.PENDING)
            else:
                expected.append(PutStatus.PENDING if key in chosen[:place] else None)
        return expected

    def grant(self, client: int | None, key: int, row: Rows, ttl_ms: int) -> Block:
        offset = int(row["offset"])
        slot_bytes = self.shard.allocator.slot_bytes_for(SPACES[key % len(SPACES)].slot_bytes)
        for block in self.blocks:
            apart = offset + slot_bytes <= block.offset or block.offset + block.slot_bytes <= offset
            assert apart, "a slot was given out while somebody may touch it"
        handle, generation = int(row["handle"]), int(row["generation"])
        if client is None:  # the row names a part
            found = self.shard.find(keys(key))
            handle, generation = int(found[0]), int(self.shard.blocks.generation[found[0]])
        assert handle not in {block.handle for block in self.blocks}
        deadline_s = self.clock.now_s + ttl_ms / 1000
        block = Block(key, handle, generation, offset, slot_bytes, client, deadline_s)
        self.blocks.append(block)
        return block

    def settle(self, client: int, chosen: list[Block], commit: bool) -> None:
        call = self.shard.commit if commit else self.shard.abort
        answers = call(self.clients[client].session, self.refs(chosen)).tolist()
        for place, (block, answer) in enumerate(zip(chosen, answers, strict=True)):
            again = block in chosen[:place]
            mine = block.writer == client and block in self.blocks
            assert answer == (mine and not again and block.state == BlockState.RESERVED)
            if again or not mine:
                continue
            if block.state == BlockState.RESERVED:
                block.state = BlockState.COMMITTED if commit else BlockState.ABSENT
                block.layers_ready = LAYERS[block.space] if commit else 0
            block.writer = None  # it has reported: it writes there no more
        self.forget_unused()

    def learn_evictions(self) -> None:
        committed = [block for block in self.blocks if block.state == BlockState.COMMITTED]
        seen = self.shard.lookup(KeyRequest(ANY_NAMESPACE, keys(*[block.key for block in committed])))["state"]
        for block, state in zip(committed, seen.tolist(), strict=True):
            if state != BlockState.COMMITTED:
                assert block.may_go, "a pinned or leased block was evicted"
                self.take_out(block)

    def room_for(self, slot_bytes: int) -> bool:
        """Whether a slot of that size is free, or would be if everything went that may go."""
        for chunk in range(self.chunks):
            here = [block for block in self.blocks if block.offset // CHUNK == chunk]
            if all(block.may_go for block in here):
                return True
            free_to_take = len(here) < CHUNK // slot_bytes or any(block.may_go for block in here)
            if here[0].slot_bytes == slot_bytes and free_to_take:
                return True
        return False

    def expire_in_model(self) -> None:
        for number in [n for n, lease in self.leases.items() if lease.deadline_s <= self.clock.now_s]:
            self.end_lease(number)
        for block in self.blocks:
            if block.state == BlockState.RESERVED and block.is_late(self.clock.now_s):
                block.state = BlockState.ABSENT  # its writers may still be writing
        self.forget_unused()

    def take_out(self, block: Block) -> None:
        block.state, block.pins = BlockState.ABSENT, 0
        self.forget_unused()

    def end_lease(self, number: int) -> None:
        for block in self.leases.pop(number).blocks:
            block.holds -= 1
        self.forget_unused()

    def forget_unused(self) -> None:
        self.blocks = [block for block in self.blocks if block.in_use]

    def some_leases(self, data: st.DataObject) -> list[tuple[int, int]]:
        """Lease numbers, running or long over, each with a client, mostly its own."""
        live = [(number, lease.session) for number, lease in sorted(self.leases.items())]
        any_of_anybody = [
            (n, client) for client in range(SESSIONS) for other in self.clients for n in other.leases[-5:]
        ]
        if not any_of_anybody:
            return []
        some = st.sampled_from(any_of_anybody)
        return data.draw(st.lists(st.sampled_from(live) | some if live else some, min_size=1, max_size=4, unique=True))

    def refs(self, chosen: Sequence[Block | Part]) -> Rows:
        named = np.zeros(len(chosen), dtype=REF)
        named["handle"] = [block.handle for block in chosen]
        named["generation"] = [block.generation for block in chosen]
        return named


TestShardAgainstAModel = ShardAgainstAModel.TestCase
TestShardAgainstAModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestShardAgainstAModel.pytestmark = [pytest.mark.timeout(900)]  # pyright: ignore[reportAttributeAccessIssue] -- to shrink
