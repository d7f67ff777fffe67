"""Suites that every implementation of a port must pass. Subclass one in a test file and say how yours is made.

class TestMyPolicy(EvictionConformance):
    def new_policy(self) -> EvictionPolicy:
        return MyPolicy()
"""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError, KvStoreError, NamespaceMismatch, ProtocolError, Unavailable
from kvstore.core.keys import KEY_DTYPE
from kvstore.core.layout import OpaqueLayout
from kvstore.core.namespace import Namespace
from kvstore.core.states import BlockState, PutStatus
from kvstore.device.base import LEGACY_STREAM, Copies, Device, Memory, host_memory
from kvstore.server.eviction.base import EvictionPolicy
from kvstore.testing.waiting import until
from kvstore.transport.base import Keys, LayerSink, LayerSource, Part, ShardLink, Wanted
from kvstore.transport.buffers import LayerMemory, Pieces, Region

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def _handles(*numbers: int) -> I64:
    return np.array(numbers, dtype=np.int64)


def keys_of(handles: I64) -> U64:
    """Keys spread like hashes, one for each number."""
    return (handles.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def admit(policy: EvictionPolicy, handles: I64, keys: U64 | None = None) -> None:
    """Admit blocks, with the keys of their handles' numbers unless given."""
    policy.admit(handles, keys_of(handles) if keys is None else keys)


class EvictionConformance(ABC):
    """What `kvstore.server.eviction.base.EvictionPolicy` promises, for any order of preference."""

    @abstractmethod
    def new_policy(self) -> EvictionPolicy:
        """An empty policy, good for handles 0 to 99,999."""

    def test_every_admitted_block_is_offered_once(self) -> None:
        policy = self.new_policy()
        admit(policy, _handles(3, 1, 4))
        admit(policy, _handles(5, 9))
        assert len(policy) == 5
        assert sorted(policy.candidates(100).tolist()) == [1, 3, 4, 5, 9]
        assert len(policy) == 0
        assert policy.candidates(100).tolist() == []

    def test_no_more_are_offered_than_asked_for(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(10))
        assert len(policy.candidates(0)) == 0
        assert len(policy.candidates(3)) == 3
        assert len(policy) == 7

    def test_an_empty_policy_offers_nothing(self) -> None:
        policy = self.new_policy()
        admit(policy, _handles())
        policy.touch(_handles())
        policy.remove(_handles())
        policy.restore(_handles())
        assert policy.candidates(5).tolist() == []
        assert len(policy) == 0

    def test_deeper_blocks_of_a_batch_go_before_those_that_they_depend_on(self) -> None:
        policy = self.new_policy()
        admit(policy, _handles(10, 11, 12, 13))
        assert policy.candidates(2).tolist() == [13, 12]
        assert policy.candidates(2).tolist() == [11, 10]

    def test_removed_blocks_are_never_offered(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(6))
        policy.remove(_handles(1, 4))
        assert len(policy) == 4
        assert sorted(policy.candidates(10).tolist()) == [0, 2, 3, 5]

    def test_removing_what_is_not_there_changes_nothing(self) -> None:
        policy = self.new_policy()
        admit(policy, _handles(1))
        policy.remove(_handles(2, 700))
        assert len(policy) == 1
        policy.candidates(1)
        policy.remove(_handles(1))
        assert len(policy) == 0

    def test_a_handle_may_be_used_again_for_another_block(self) -> None:
        policy = self.new_policy()
        admit(policy, _handles(7))
        policy.remove(_handles(7))
        admit(policy, _handles(7))
        assert len(policy) == 1
        assert policy.candidates(5).tolist() == [7]

    def test_of_blocks_that_one_request_uses_the_deeper_ones_go_first(self) -> None:
        policy = self.new_policy()
        chain = np.arange(8)
        policy.note_request(keys_of(chain))
        admit(policy, chain)
        policy.note_request(keys_of(chain))
        policy.touch(chain)
        assert policy.candidates(3).tolist() == [7, 6, 5]

    def test_restored_candidates_are_the_next_ones_to_go_in_the_same_order(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(10))
        first = policy.candidates(4)
        policy.restore(first[1:])
        assert len(policy) == 9
        assert policy.candidates(3).tolist() == first[1:].tolist()

    def test_a_candidate_that_is_kept_and_touched_is_back_in_the_order(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(3))
        kept = policy.candidates(1)
        policy.touch(kept)
        assert len(policy) == 3
        assert sorted(policy.candidates(3).tolist()) == [0, 1, 2]

    def test_a_restored_candidate_that_is_used_or_removed_is_not_offered_in_its_old_place(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(6))
        first = policy.candidates(3)
        policy.restore(first)
        policy.touch(first[:1])
        policy.remove(first[1:2])
        assert len(policy) == 5
        assert policy.candidates(1).tolist() == first[2:].tolist()
        again = policy.candidates(10)
        policy.restore(again)
        assert policy.candidates(10).tolist() == again.tolist()

    def test_requests_for_unknown_keys_add_no_blocks(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(3))
        for first in range(0, 5000, 50):
            policy.note_request(keys_of(np.arange(first, first + 50)))
        policy.note_request(keys_of(_handles()))
        policy.note_request(keys_of(_handles(4, 4, 4)))  # of a client that breaks the rules
        assert sorted(policy.candidates(10).tolist()) == [0, 1, 2]

    def test_a_block_costs_the_same_however_many_there_are(self) -> None:
        few, many = (min(self._seconds_of_turnover(blocks) for _ in range(3)) for blocks in (2_000, 64_000))
        assert many < 5 * few, f"{few:.4f} s with 2,000 blocks, {many:.4f} s with 64,000"

    def _seconds_of_turnover(self, blocks: int) -> float:
        """Seconds that 100 requests take in a full cache, each of which evicts and admits 16 blocks."""
        policy = self.new_policy()
        for first in range(0, blocks, 16):
            admit(policy, np.arange(first, first + 16))
        random = np.random.default_rng(2)
        begin = time.perf_counter()
        for number in range(100):
            policy.note_request(keys_of(np.arange(number, number + 32) + blocks))
            used = random.integers(0, blocks, 16)
            gone = policy.candidates(16)
            policy.remove(gone)
            policy.touch(np.setdiff1d(used, gone))
            admit(policy, gone, keys_of(np.arange(number, number + 16) + blocks))
        return time.perf_counter() - begin

    def test_touching_again_and_again_offers_no_block_twice(self) -> None:
        policy = self.new_policy()
        admit(policy, np.arange(8))
        for round_number in range(500):
            policy.touch(_handles(round_number % 8, (round_number + 3) % 8))
        assert len(policy) == 8
        assert sorted(policy.candidates(100).tolist()) == list(range(8))

    def test_whatever_is_done_the_blocks_offered_are_those_that_are_there(self) -> None:
        random = np.random.default_rng(1)
        for _ in range(20):
            policy, there = self.new_policy(), set[int]()
            for _ in range(200):
                self._one_step(random, policy, there)
                assert len(policy) == len(there)
            assert sorted(policy.candidates(10_000).tolist()) == sorted(there)

    def _one_step(self, random: np.random.Generator, policy: EvictionPolicy, there: set[int]) -> None:
        batch = random.choice(40, size=int(random.integers(1, 12)), replace=False)
        policy.note_request(keys_of(batch[: int(random.integers(0, 12))]))
        match int(random.integers(0, 4)):
            case 0:
                fresh = batch[[number not in there for number in batch.tolist()]]
                admit(policy, fresh)
                there.update(fresh.tolist())
            case 1:
                policy.touch(batch[[number in there for number in batch.tolist()]])
            case 2:
                policy.remove(batch[:3])
                there.difference_update(batch[:3].tolist())
            case _:
                offered = policy.candidates(len(batch))
                assert len(set(offered.tolist())) == len(offered) == min(len(batch), len(there))
                assert there.issuperset(offered.tolist())
                third = len(offered) // 3
                policy.restore(offered[:third])
                policy.touch(offered[third : 2 * third])
                there.difference_update(offered[2 * third :].tolist())


LINK_NAMESPACE = Namespace(
    model="conformance",
    revision="1",
    dtype="uint8",
    block_tokens=4,
    layout=OpaqueLayout(tag="t", layers=4, layer_bytes_per_block=1000),
)
TIMEOUT_S = 10.0
ALL_LAYERS = (0, LINK_NAMESPACE.layers)
PARTS = Part(0, 400), Part(400, 600)  # of a layer
WHOLE = Wanted(0, LINK_NAMESPACE.layers, 0, LINK_NAMESPACE.layer_bytes)
TTL_S = 30.0
NewLink = Callable[[], ShardLink]


class LinkConformance:
    """What `kvstore.transport.base.ShardLink` promises, whatever carries the bytes.

    Give it a fixture `new_link`: a `NewLink` that makes links to one and the same shard with a pool of 8 MiB, and
    closes them in the end.
    """

    def opened(self, new_link: NewLink) -> ShardLink:
        """A link on which the namespace of these tests is open."""
        link = new_link()
        link.open(LINK_NAMESPACE, TIMEOUT_S)
        return link

    def test_what_was_stored_is_looked_up_and_fetched_by_every_link(self, new_link: NewLink) -> None:
        link, other = self.opened(new_link), self.opened(new_link)
        keys, blocks = self._stored(link, 7)
        for reader in (link, other):
            found = reader.lookup(keys, TIMEOUT_S)
            assert found.states.tolist() == [BlockState.COMMITTED] * 7
            assert found.layers_ready.tolist() == [LINK_NAMESPACE.layers] * 7
            assert np.array_equal(self._fetched(reader, keys), blocks)

    def test_one_block_alone_is_fetched_as_well(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 1)
        assert np.array_equal(self._fetched(link, keys), blocks)
        assert not link.fetch(_fresh_keys(1), _region(1, LINK_NAMESPACE.block_bytes), ALL_LAYERS, TIMEOUT_S).any()

    def test_any_range_of_layers_can_be_fetched(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 3)
        for first, end in [(0, 1), (1, 3), (3, 4), (0, 4)]:
            for count in (1, 3):
                size = (end - first) * LINK_NAMESPACE.layer_bytes
                into = _region(count, size)
                assert link.fetch(keys[:count], into, (first, end), TIMEOUT_S).all()
                expected = blocks.reshape(3, 4, -1)[:count, first:end].reshape(count, -1)
                assert np.array_equal(into.memory.reshape(count, size), expected)

    def test_blocks_may_lie_anywhere_in_the_callers_memory(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        size = LINK_NAMESPACE.block_bytes
        keys, blocks = _fresh_keys(3), _content(3)
        scattered = np.zeros(6 * size, dtype=np.uint8)
        offsets = np.array([4, 0, 2]) * size + 13
        for offset, block in zip(offsets.tolist(), blocks, strict=True):
            scattered[offset : offset + size] = block
        assert link.store(keys, Region(scattered, offsets), TIMEOUT_S).tolist() == [PutStatus.STORED] * 3
        pieces = Pieces(tuple(np.zeros(size, dtype=np.uint8) for _ in range(3)))
        assert link.fetch(keys, pieces, ALL_LAYERS, TIMEOUT_S).all()
        assert all(np.array_equal(piece, block) for piece, block in zip(pieces.memories, blocks, strict=True))
        target = np.zeros_like(scattered)
        assert link.fetch(keys, Region(target, offsets), ALL_LAYERS, TIMEOUT_S).all()
        assert np.array_equal(target, scattered)

    def test_absent_blocks_are_misses_between_hits(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 3)
        mixed = np.concatenate([keys[:1], _fresh_keys(2), keys[1:], _fresh_keys(1)])
        there = [True, False, False, True, True, False]
        assert (link.lookup(mixed, TIMEOUT_S).states == BlockState.COMMITTED).tolist() == there
        into = _region(6, LINK_NAMESPACE.block_bytes)
        assert link.fetch(mixed, into, ALL_LAYERS, TIMEOUT_S).tolist() == there
        assert np.array_equal(into.memory.reshape(6, -1)[there], blocks)

    def test_a_second_store_leaves_the_first_ones_bytes(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 2)
        again = link.store(np.concatenate([keys, keys]), _region(4, LINK_NAMESPACE.block_bytes), TIMEOUT_S)
        assert again.tolist() == [PutStatus.EXISTS] * 4
        assert np.array_equal(self._fetched(link, keys), blocks)

    def test_of_a_key_that_is_named_twice_one_is_stored(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = _fresh_keys(1), _content(2)
        statuses = link.store(np.concatenate([keys, keys]), _as_region(blocks), TIMEOUT_S)
        assert statuses.tolist() == [PutStatus.STORED, PutStatus.PENDING]
        assert np.array_equal(self._fetched(link, keys), blocks[:1])

    def test_deleted_blocks_are_gone_for_every_link(self, new_link: NewLink) -> None:
        link, other = self.opened(new_link), self.opened(new_link)
        keys, _ = self._stored(link, 3)
        assert other.delete(np.concatenate([keys[:2], _fresh_keys(1)]), TIMEOUT_S).tolist() == [True, True, False]
        assert link.lookup(keys, TIMEOUT_S).states.tolist() == [0, 0, BlockState.COMMITTED]
        into = _region(3, LINK_NAMESPACE.block_bytes)
        assert link.fetch(keys, into, ALL_LAYERS, TIMEOUT_S).tolist() == [False, False, True]
        assert link.store(keys, _region(3, LINK_NAMESPACE.block_bytes), TIMEOUT_S).tolist() == [0, 0, PutStatus.EXISTS]

    def test_pin_and_touch_tell_what_is_there(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, _ = self._stored(link, 2)
        asked = np.concatenate([_fresh_keys(1), keys])
        assert link.pin(asked, True, TIMEOUT_S).tolist() == [False, True, True]
        assert link.touch(asked, TIMEOUT_S).tolist() == [False, True, True]
        assert link.pin(asked, False, TIMEOUT_S).tolist() == [False, True, True]

    def test_leased_blocks_can_be_read_and_not_written_even_when_they_are_deleted_meanwhile(
        self, new_link: NewLink
    ) -> None:
        link, other = self.opened(new_link), self.opened(new_link)
        keys, blocks = self._stored(link, 2)
        held = link.lease(np.concatenate([keys, _fresh_keys(1)]), 30.0, TIMEOUT_S)
        assert held.held.tolist() == [True, True, False]
        assert held.blocks[2] is None
        other.delete(keys, TIMEOUT_S)
        for _ in range(50):  # more than the pool: their slots would be used again if they were free
            self._stored(other, 100)
        held.renew(30.0, TIMEOUT_S)
        assert held.valid()
        for block, expected in zip(held.blocks[:2], blocks, strict=True):
            assert block is not None
            assert np.array_equal(block, expected)
            assert not block.flags.writeable
        held.release()
        link.tidy(TIMEOUT_S)

    def test_nothing_is_asked_for_and_answered(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        none, memory = _fresh_keys(0), _region(0, LINK_NAMESPACE.block_bytes)
        assert len(link.lookup(none, TIMEOUT_S).states) == 0
        assert len(link.fetch(none, memory, ALL_LAYERS, TIMEOUT_S)) == 0
        assert len(link.store(none, memory, TIMEOUT_S)) == 0
        assert len(link.delete(none, TIMEOUT_S)) == len(link.pin(none, True, TIMEOUT_S)) == 0
        assert len(link.touch(none, TIMEOUT_S)) == 0
        held = link.lease(none, 30.0, TIMEOUT_S)
        assert held.blocks == []
        held.release()
        assert link.usable

    def test_keys_of_another_namespace_are_misses_and_can_not_be_stored(self, new_link: NewLink) -> None:
        link, stranger = self.opened(new_link), new_link()
        keys, blocks = self._stored(link, 2)
        twin = replace(LINK_NAMESPACE, revision="2")  # blocks of the same size
        stranger.open(twin, TIMEOUT_S)
        assert not stranger.lookup(keys, TIMEOUT_S).states.any()
        memory = _region(2, twin.block_bytes)
        assert not stranger.fetch(keys, memory, ALL_LAYERS, TIMEOUT_S).any()
        assert not stranger.fetch(keys[:1], memory.take(np.arange(1)), ALL_LAYERS, TIMEOUT_S).any()
        assert not stranger.lease(keys, 30.0, TIMEOUT_S).held.any()
        _refused(NamespaceMismatch, lambda: stranger.store(keys, memory, TIMEOUT_S))
        assert stranger.usable, "an error of the caller costs nobody the link"
        assert np.array_equal(self._fetched(link, keys), blocks)

    def test_threads_may_share_a_link(self, new_link: NewLink) -> None:
        link = self.opened(new_link)

        def work(_: int) -> bool:
            keys, blocks = self._stored(link, 5)
            good = all(np.array_equal(self._fetched(link, keys), blocks) for _ in range(5))
            return good and link.usable and bool(link.delete(keys, TIMEOUT_S).all())

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(64)))

    def test_a_link_counts_what_went_over_it(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, _ = self._stored(link, 3)
        link.lookup(np.concatenate([keys, _fresh_keys(2)]), TIMEOUT_S)
        self._fetched(link, keys)
        self._fetched(link, keys[:1])
        counters = link.meter.counters
        assert (counters.written_blocks, counters.written_bytes) == (3, 3 * LINK_NAMESPACE.block_bytes)
        assert (counters.lookup_blocks, counters.hit_blocks) == (5, 3)
        assert (counters.read_blocks, counters.read_bytes) == (4, 4 * LINK_NAMESPACE.block_bytes)
        assert (counters.lost_races, counters.checksum_failures) == (0, 0)
        link.report(TIMEOUT_S)

    def test_a_namespace_is_opened_before_anything_else(self, new_link: NewLink) -> None:
        link = new_link()
        _refused(ProtocolError, lambda: link.store(_fresh_keys(1), _region(1, 8), TIMEOUT_S))

    def test_a_closed_link_is_unavailable_and_can_be_closed_again(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, _ = self._stored(link, 1)
        link.close()
        link.close()
        assert not link.usable
        memory = _region(1, LINK_NAMESPACE.block_bytes)
        for call in (
            lambda: link.lookup(keys, TIMEOUT_S),
            lambda: link.fetch(keys, memory, ALL_LAYERS, TIMEOUT_S),
            lambda: link.store(keys, memory, TIMEOUT_S),
            lambda: link.lease(keys, 30.0, TIMEOUT_S),
            lambda: link.delete(keys, TIMEOUT_S),
            lambda: link.pin(keys, True, TIMEOUT_S),
            lambda: link.touch(keys, TIMEOUT_S),
            lambda: link.report(TIMEOUT_S),
        ):
            _refused(Unavailable, call)

    def _stored(self, link: ShardLink, count: int) -> tuple[Keys, NDArray[np.uint8]]:
        keys, blocks = _fresh_keys(count), _content(count)
        assert link.store(keys, _as_region(blocks), TIMEOUT_S).tolist() == [PutStatus.STORED] * count
        return keys, blocks

    def _fetched(self, link: ShardLink, keys: Keys) -> NDArray[np.uint8]:
        into = _region(len(keys), LINK_NAMESPACE.block_bytes)
        assert link.fetch(keys, into, ALL_LAYERS, TIMEOUT_S).all()
        return into.memory.reshape(len(keys), -1)


class LayerConformance:
    """What `LayerSource` and `LayerSink` promise, whatever carries the bytes. With the fixture of `LinkConformance`."""

    def opened(self, new_link: NewLink) -> ShardLink:
        """A link on which the namespace of these tests is open."""
        link = new_link()
        link.open(LINK_NAMESPACE, TIMEOUT_S)
        return link

    def test_layers_of_blocks_that_are_there_arrive_in_order(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 7)
        into, memory = self._memory(7)
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            for layer in range(LINK_NAMESPACE.layers):
                self._until_settled(source, layer + 1)
                assert (source.arrived > layer).all()
                assert np.array_equal(into[:, layer], self._layered(blocks)[:, layer])

    def test_some_bytes_of_some_layers_go_to_scattered_places_and_nowhere_else(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 3)
        wanted = Wanted(first=1, end=3, start=120, size=300)
        pages = [np.full((9, 300), 0xA5, np.uint8) for _ in range(wanted.layers)]
        slots = np.array([7, 0, 4])
        memory = LayerMemory(tuple(page.reshape(-1) for page in pages), (0, 0), slots * 300, gapless=False)
        with closing(link.layers(keys, wanted, memory, TTL_S, TIMEOUT_S)) as source:
            self._until_settled(source, wanted.layers)
            assert source.arrived.tolist() == [2, 2, 2]
        for place, page in enumerate(pages):
            assert np.array_equal(page[slots], self._layered(blocks)[:, 1 + place, 120:420])
            assert (np.delete(page, slots, axis=0) == 0xA5).all()

    def test_blocks_that_are_absent_are_settled_and_have_not_arrived(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 2)
        mixed = np.concatenate([keys[:1], _fresh_keys(2), keys[1:]])
        into, memory = self._memory(4)
        with closing(link.layers(mixed, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            self._until_settled(source, LINK_NAMESPACE.layers)
            assert source.arrived.tolist() == [4, 0, 0, 4]
        assert np.array_equal(into[[0, 3]], self._layered(blocks))

    def test_nothing_at_all_is_settled(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        for keys in (_fresh_keys(0), _fresh_keys(2)):
            with closing(link.layers(keys, WHOLE, self._memory(len(keys))[1], TTL_S, TIMEOUT_S)) as source:
                self._until_settled(source, LINK_NAMESPACE.layers)
                assert not source.advance(TIMEOUT_S)

    def test_a_reader_gets_each_layer_that_a_writer_has_written_and_no_other(self, new_link: NewLink) -> None:
        link, writer = self.opened(new_link), self.opened(new_link)
        keys, blocks = _fresh_keys(3), _content(3)
        into, memory = self._memory(3)
        sink = writer.publish(keys, TTL_S, TIMEOUT_S)
        assert sink.statuses.tolist() == [PutStatus.STORED] * 3
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            for layer in range(LINK_NAMESPACE.layers):
                for _ in range(3):
                    source.advance(TIMEOUT_S)
                assert source.settled == layer
                sink.write(layer, _as_region(self._layered(blocks)[:, layer].copy()), TIMEOUT_S)
                self._until_settled(source, layer + 1)
                assert np.array_equal(into[:, : layer + 1], self._layered(blocks)[:, : layer + 1])
            assert sink.commit(TIMEOUT_S).all()
            assert source.arrived.tolist() == [LINK_NAMESPACE.layers] * 3
        assert (link.lookup(keys, TIMEOUT_S).states == BlockState.COMMITTED).all()

    def test_an_aborted_block_that_is_put_again_is_not_read_on(self, new_link: NewLink) -> None:
        link, writer = self.opened(new_link), self.opened(new_link)
        keys, blocks = _fresh_keys(2), _content(2)
        into, memory = self._memory(2)
        sink = writer.publish(keys, TTL_S, TIMEOUT_S)
        sink.write(0, _as_region(self._layered(blocks)[:, 0].copy()), TIMEOUT_S)
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            self._until_settled(source, 1)
            sink.abort(TIMEOUT_S)
            assert writer.store(keys, _as_region(_content(2)), TIMEOUT_S).tolist() == [PutStatus.STORED] * 2
            self._until_settled(source, LINK_NAMESPACE.layers)
            assert source.arrived.tolist() == [1, 1]
        assert np.array_equal(into[:, 0], self._layered(blocks)[:, 0])
        assert not into[:, 1:].any()

    def test_blocks_that_are_deleted_while_they_are_read_are_read_to_the_end(self, new_link: NewLink) -> None:
        link, other = self.opened(new_link), self.opened(new_link)
        keys, blocks = self._stored(link, 3)
        into, memory = self._memory(3)
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            self._until_settled(source, 1)
            assert other.delete(keys, TIMEOUT_S).all()
            others = _fresh_keys(100)
            other.store(others, _as_region(_content(100)), TIMEOUT_S)
            self._until_settled(source, LINK_NAMESPACE.layers)
            assert source.arrived.tolist() == [LINK_NAMESPACE.layers] * 3
        assert np.array_equal(into, self._layered(blocks))
        other.delete(others, TIMEOUT_S)

    def test_layers_that_share_places_are_written_only_where_there_is_room(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 5)
        size, room = LINK_NAMESPACE.layer_bytes, [1]
        ring = np.zeros((2, 5, size), dtype=np.uint8)
        shifts = tuple(layer % 2 * ring[0].nbytes for layer in range(LINK_NAMESPACE.layers))
        memory = LayerMemory(
            (ring.reshape(-1),) * len(shifts), shifts, np.arange(5) * size, gapless=False, limit=lambda: room[0]
        )
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            for layer in range(LINK_NAMESPACE.layers):
                self._until_settled(source, layer + 1)
                for _ in range(3):
                    assert not source.advance(TIMEOUT_S)
                assert source.arrived.tolist() == [layer + 1] * 5
                assert source.fileno() < 0
                assert np.array_equal(ring[layer % 2], self._layered(blocks)[:, layer])
                if layer:
                    assert np.array_equal(ring[1 - layer % 2], self._layered(blocks)[:, layer - 1])
                room[0] += 1

    def test_after_the_end_nothing_is_written_any_more(self, new_link: NewLink) -> None:
        link, writer = self.opened(new_link), self.opened(new_link)
        keys, blocks = _fresh_keys(2), _content(2)
        into, memory = self._memory(2)
        sink = writer.publish(keys, TTL_S, TIMEOUT_S)
        source = link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)
        source.close(abandon=True)
        source.close()
        sink.write(0, _as_region(self._layered(blocks)[:, 0].copy()), TIMEOUT_S)
        _refused(Unavailable, lambda: self._until_settled(source, 1))
        assert not into.any()
        assert link.usable
        sink.abort(TIMEOUT_S)

    def test_only_what_nobody_has_is_published(self, new_link: NewLink) -> None:
        link = self.opened(new_link)
        keys, blocks = self._stored(link, 2)
        both = np.concatenate([keys, _fresh_keys(1)])
        sink = link.publish(both, TTL_S, TIMEOUT_S)
        assert sink.statuses.tolist() == [PutStatus.EXISTS, PutStatus.EXISTS, PutStatus.STORED]
        mine = _content(1)
        for layer in range(LINK_NAMESPACE.layers):
            sink.write(layer, _as_region(self._layered(mine)[:, layer].copy()), TIMEOUT_S)
        assert sink.commit(TIMEOUT_S).tolist() == [False, False, True]
        into = _region(3, LINK_NAMESPACE.block_bytes)
        assert link.fetch(both, into, ALL_LAYERS, TIMEOUT_S).all()
        assert np.array_equal(into.memory.reshape(3, -1), np.concatenate([blocks, mine]))

    def test_a_reader_gets_each_layer_that_all_writers_of_a_block_have_written_and_no_other(
        self, new_link: NewLink
    ) -> None:
        link, writers = self.opened(new_link), [self.opened(new_link) for _ in PARTS]
        keys, blocks = _fresh_keys(3), _content(3)
        into, memory = self._memory(3)
        first, second = (w.publish(keys, TTL_S, TIMEOUT_S, part) for w, part in zip(writers, PARTS, strict=True))
        assert first.statuses.tolist() == second.statuses.tolist() == [PutStatus.STORED] * 3
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            for layer in range(LINK_NAMESPACE.layers):
                self._write_part(second, PARTS[1], layer, blocks)
                for _ in range(3):
                    source.advance(TIMEOUT_S)
                assert source.settled == layer
                self._write_part(first, PARTS[0], layer, blocks)
                self._until_settled(source, layer + 1)
                assert np.array_equal(into[:, : layer + 1], self._layered(blocks)[:, : layer + 1])
            assert second.commit(TIMEOUT_S).all()
            assert (link.lookup(keys, TIMEOUT_S).states == BlockState.RESERVED).all()
            assert first.commit(TIMEOUT_S).all()
        found = link.lookup(keys, TIMEOUT_S)
        assert (found.states == BlockState.COMMITTED).all()
        assert (found.layers_ready == LINK_NAMESPACE.layers).all()
        target = _region(3, LINK_NAMESPACE.block_bytes)
        assert link.fetch(keys, target, ALL_LAYERS, TIMEOUT_S).all()
        assert np.array_equal(target.memory.reshape(3, -1), blocks)
        assert [w.meter.counters.written_bytes for w in writers] == [3 * 4 * part.size for part in PARTS]

    def test_a_part_is_one_writers_and_a_block_is_one_writers_or_several_ones(self, new_link: NewLink) -> None:
        link, other = self.opened(new_link), self.opened(new_link)
        keys, blocks = self._stored(link, 1)
        keys = np.concatenate([keys, _fresh_keys(2)])
        whole = other.publish(keys[1:2], TTL_S, TIMEOUT_S)
        mine = link.publish(keys, TTL_S, TIMEOUT_S, PARTS[0])
        assert mine.statuses.tolist() == [PutStatus.EXISTS, PutStatus.PENDING, PutStatus.STORED]
        for part in (PARTS[0], Part(399, 10), None):
            again = other.publish(keys[2:], TTL_S, TIMEOUT_S, part)
            assert again.statuses.tolist() == [PutStatus.PENDING]
            assert again.commit(TIMEOUT_S).tolist() == [False]
        assert other.store(keys[2:], _as_region(blocks), TIMEOUT_S).tolist() == [PutStatus.PENDING]
        for sink in (whole, mine):
            sink.abort(TIMEOUT_S)
        assert not link.lookup(keys[1:], TIMEOUT_S).states.any()

    def test_a_writer_that_gives_up_its_part_ends_the_block_for_all(self, new_link: NewLink) -> None:
        link, writers = self.opened(new_link), [self.opened(new_link) for _ in PARTS]
        keys, blocks = _fresh_keys(2), _content(2)
        into, memory = self._memory(2)
        first, second = (w.publish(keys, TTL_S, TIMEOUT_S, part) for w, part in zip(writers, PARTS, strict=True))
        self._write_part(first, PARTS[0], 0, blocks)
        self._write_part(second, PARTS[1], 0, blocks)
        with closing(link.layers(keys, WHOLE, memory, TTL_S, TIMEOUT_S)) as source:
            self._until_settled(source, 1)
            first.abort(TIMEOUT_S)
            other = _content(2)
            assert link.store(keys, _as_region(other), TIMEOUT_S).tolist() == [PutStatus.STORED] * 2
            for layer in range(1, LINK_NAMESPACE.layers):
                self._write_part(second, PARTS[1], layer, blocks)
            self._until_settled(source, LINK_NAMESPACE.layers)
            assert source.arrived.tolist() == [1, 1]
        assert second.commit(TIMEOUT_S).tolist() == [False, False]
        assert np.array_equal(into[:, 0], self._layered(blocks)[:, 0])
        assert not into[:, 1:].any()
        target = _region(2, LINK_NAMESPACE.block_bytes)
        assert link.fetch(keys, target, ALL_LAYERS, TIMEOUT_S).all()
        assert np.array_equal(target.memory.reshape(2, -1), other)

    def _write_part(self, sink: LayerSink, part: Part, layer: int, blocks: NDArray[np.uint8]) -> None:
        piece = self._layered(blocks)[:, layer, part.start : part.start + part.size]
        sink.write(layer, _as_region(piece.copy()), TIMEOUT_S)

    def _stored(self, link: ShardLink, count: int) -> tuple[Keys, NDArray[np.uint8]]:
        keys, blocks = _fresh_keys(count), _content(count)
        assert link.store(keys, _as_region(blocks), TIMEOUT_S).tolist() == [PutStatus.STORED] * count
        return keys, blocks

    def _layered(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return blocks.reshape(len(blocks), LINK_NAMESPACE.layers, -1)

    def _memory(self, count: int) -> tuple[NDArray[np.uint8], LayerMemory]:
        """Zeros, shape (count, layers, bytes of a layer), and the same as a target of all layers."""
        layers, size = LINK_NAMESPACE.layers, LINK_NAMESPACE.layer_bytes
        into = np.zeros((count, layers, size), dtype=np.uint8)
        offsets = np.arange(count, dtype=np.int64) * (layers * size)
        shifts = tuple(range(0, layers * size, size))
        return into, LayerMemory((into.reshape(-1),) * layers, shifts, offsets, gapless=True)

    def _until_settled(self, source: LayerSource, layers: int) -> None:
        until(lambda: source.settled >= layers or (source.advance(TIMEOUT_S) and False), TIMEOUT_S, f"layer {layers}")


_random = np.random.default_rng()  # so that two runs against one server do not meet


def _refused(kind: type[KvStoreError], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def _fresh_keys(count: int) -> Keys:
    return _random.integers(1, 1 << 63, size=(count, 3), dtype=np.uint64).view(KEY_DTYPE).reshape(count)


def _content(count: int) -> NDArray[np.uint8]:
    return _random.integers(0, 256, size=(count, LINK_NAMESPACE.block_bytes), dtype=np.uint8)


def _as_region(blocks: NDArray[np.uint8]) -> Region:
    return Region(blocks.reshape(-1), np.arange(len(blocks), dtype=np.int64) * blocks.shape[1])


def _region(count: int, size_bytes: int) -> Region:
    return Region(np.zeros(count * size_bytes, dtype=np.uint8), np.arange(count, dtype=np.int64) * size_bytes)


_COPY_TIMEOUT_S = 30.0
# Another process: opens the segment by what is on its command line, copies it out, and writes its complement into it.
_NEIGHBOUR = """
import sys, numpy as np
from kvstore.device.base import Copies, Export, host_memory
from kvstore.device.opening import open_device
name, nbytes, fd, handle = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
device = open_device(name)
segment = device.open_shared(Export(nbytes, fd, handle))
seen = np.zeros(nbytes, dtype=np.uint8)
whole = Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, nbytes))
device.copy(host_memory(seen), segment, whole).wait(30)
np.bitwise_not(seen, out=seen)
device.copy(segment, host_memory(seen), whole).wait(30)
device.close_shared(segment)
device.close()
"""


class DeviceConformance:
    """What `kvstore.device.base.Device` promises. Give it a fixture `device`: an open `Device`, closed in the end."""

    def test_bytes_come_back_from_the_device_as_they_went(self, device: Device) -> None:
        memory = device.allocate(1 << 20)
        sent = _noise(1 << 20)
        self._move(device, memory, host_memory(sent), _whole(1 << 20))
        received = np.zeros_like(sent)
        self._move(device, host_memory(received), memory, _whole(1 << 20))
        assert np.array_equal(received, sent)
        device.free(memory)

    def test_scattered_blocks_go_where_they_belong_and_nothing_else_changes(self, device: Device) -> None:
        size, count = 4096, 64
        random = np.random.default_rng(3)
        source = _noise(2 * count * size)
        memory = device.allocate(2 * count * size)
        self._move(device, memory, host_memory(np.zeros_like(source)), _whole(len(source)))
        to, start = random.permutation(2 * count)[:count] * size, random.permutation(2 * count)[:count] * size
        self._move(device, memory, host_memory(source), Copies.of_blocks(to, start, size))
        received = np.zeros_like(source)
        self._move(device, host_memory(received), memory, _whole(len(source)))
        expected = np.zeros_like(source)
        for target, offset in zip(to.tolist(), start.tolist(), strict=True):
            expected[target : target + size] = source[offset : offset + size]
        assert np.array_equal(received, expected)
        device.free(memory)

    def test_copies_of_one_batch_may_differ_in_size_and_need_no_alignment(self, device: Device) -> None:
        source = _noise(10_000)
        memory = device.allocate(10_000)
        copies = Copies(np.array([9000, 1, 77]), np.array([3, 5000, 4999]), np.array([1000, 1, 4000]))
        self._move(device, memory, host_memory(source), copies)
        received = np.zeros_like(source)
        self._move(
            device, host_memory(received), memory, Copies(copies.target_offsets, copies.target_offsets, copies.sizes)
        )
        for target, offset, size in zip(*(part.tolist() for part in _parts(copies)), strict=True):
            assert np.array_equal(received[target : target + size], source[offset : offset + size])
        device.free(memory)

    def test_copies_between_two_pieces_of_the_device(self, device: Device) -> None:
        first, second = device.allocate(8192), device.allocate(8192)
        sent = _noise(8192)
        device.copy(first, host_memory(sent), _whole(8192))
        swapped = Copies(np.array([0, 4096]), np.array([4096, 0]), np.array([4096, 4096]))
        device.copy(second, first, swapped)  # not waited for: copies of one device end in their order
        received = np.zeros_like(sent)
        self._move(device, host_memory(received), second, _whole(8192))
        assert np.array_equal(received, np.concatenate([sent[4096:], sent[:4096]]))
        device.free(first)
        device.free(second)

    def test_registered_memory_copies_like_any_other(self, device: Device) -> None:
        array = np.asarray(_noise(4 << 20))
        memory = host_memory(array)
        device.register(memory)
        target = device.allocate(4 << 20)
        blocks = np.random.default_rng(0).permutation(64) * 65536
        self._move(device, target, memory, Copies.of_blocks(np.arange(64) * 65536, blocks, 65536))
        received = np.zeros_like(array)
        self._move(device, host_memory(received), target, _whole(4 << 20))
        assert np.array_equal(received.reshape(64, -1), array.reshape(64, -1)[blocks // 65536])
        device.unregister(memory)
        device.unregister(memory)  # once more changes nothing
        device.free(target)

    def test_a_copy_that_reaches_outside_is_refused(self, device: Device) -> None:
        memory, host = device.allocate(8192), host_memory(np.zeros(8192, dtype=np.uint8))
        inside = np.array([0])
        for outside in (np.array([-1]), np.array([4097])):
            for copies in (Copies.of_blocks(inside, outside, 4096), Copies.of_blocks(outside, inside, 4096)):
                _refusal(IndexError, lambda copies=copies: device.copy(memory, host, copies))
        device.free(memory)

    def test_an_empty_batch_ends(self, device: Device) -> None:
        memory = device.allocate(16)
        nothing = np.zeros(0, dtype=np.int64)
        ticket = device.copy(memory, host_memory(np.zeros(16, np.uint8)), Copies(nothing, nothing, nothing))
        ticket.wait(_COPY_TIMEOUT_S)
        assert ticket.done()
        device.free(memory)

    def test_more_memory_than_there_can_be_is_refused_in_one_line(self, device: Device) -> None:
        refused = _refusal(DeviceError, lambda: device.allocate(1 << 60))
        assert "\n" not in refused
        assert device.name in refused

    def test_a_segment_is_the_same_memory_in_another_process(self, device: Device) -> None:
        nbytes = 1 << 20
        segment, export = device.allocate_shared(nbytes)
        sent = _noise(nbytes)
        self._move(device, segment, host_memory(sent), _whole(nbytes))
        words = [device.name, str(nbytes), str(export.fd), export.handle.hex()]
        pass_fds = [export.fd] if export.fd >= 0 else []
        subprocess.run([sys.executable, "-c", _NEIGHBOUR, *words], pass_fds=pass_fds, check=True, timeout=60)
        received = np.zeros_like(sent)
        self._move(device, host_memory(received), segment, _whole(nbytes))
        assert np.array_equal(received, ~sent)
        device.free(segment)

    def test_what_is_asked_for_from_several_threads_arrives(self, device: Device) -> None:
        memory = device.allocate(16 << 16)
        sent = [_noise(65536, seed) for seed in range(16)]

        def there_and_back(row: int) -> bool:
            place, start = np.array([row * 65536]), np.zeros(1, dtype=np.int64)
            received = np.zeros(65536, dtype=np.uint8)
            device.copy(memory, host_memory(sent[row]), Copies.of_blocks(place, start, 65536))
            self._move(device, host_memory(received), memory, Copies.of_blocks(start, place, 65536))
            return np.array_equal(received, sent[row])

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(there_and_back, range(16)))
        device.free(memory)

    def test_the_device_is_idle_once_what_was_asked_for_has_ended(self, device: Device) -> None:
        memory = device.allocate(1 << 20)
        self._move(device, memory, host_memory(_noise(1 << 20)), _whole(1 << 20))
        assert device.idle()
        device.free(memory)

    def test_copies_may_follow_the_default_stream(self, device: Device) -> None:
        memory = device.allocate(4096)
        device.follow(LEGACY_STREAM)
        self._move(device, memory, host_memory(_noise(4096)), _whole(4096))
        device.free(memory)

    def test_what_the_engine_does_next_starts_after_copies_that_precede_it(self, device: Device) -> None:
        memory, sent = device.allocate(1 << 20), _noise(1 << 20)
        ticket = device.copy(memory, host_memory(sent), _whole(1 << 20))
        ticket.precede(LEGACY_STREAM, _COPY_TIMEOUT_S)
        device.follow(LEGACY_STREAM)  # as an engine that reads the memory on that stream
        received = np.zeros_like(sent)
        self._move(device, host_memory(received), memory, _whole(1 << 20))
        assert np.array_equal(received, sent)
        ticket.precede(LEGACY_STREAM, _COPY_TIMEOUT_S)  # also once they have ended
        device.free(memory)

    def test_a_closed_device_refuses(self, device: Device) -> None:
        memory = device.allocate(4096)
        device.close()
        device.close()
        _refusal(DeviceError, lambda: device.copy(memory, host_memory(_noise(4096)), _whole(4096)))

    def _move(self, device: Device, target: Memory, source: Memory, copies: Copies) -> None:
        device.copy(target, source, copies).wait(_COPY_TIMEOUT_S)


def _noise(size_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def _whole(size_bytes: int) -> Copies:
    return Copies(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full(1, size_bytes))


def _refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    """What the call says when it raises that, as it must."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def _parts(copies: Copies) -> tuple[I64, I64, I64]:
    return copies.target_offsets, copies.source_offsets, copies.sizes
