"""The slot allocator keeps its books: what is free and what is given out is always all there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.server.allocator import SlotAllocator

CHUNK = 64 << 10
SIZES = [1, 4096, 5000, 12_000, 20_000, 33_000, CHUNK - 1, CHUNK]


class Conservation(RuleBasedStateMachine):
    """Whatever is asked for and given back, no byte is lost and none is given out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, int] = {}  # offset -> slot size

    @initialize(chunks=st.integers(1, 9))
    def start(self, chunks: int) -> None:
        self.allocator = SlotAllocator(chunks * CHUNK, CHUNK)

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 40))
    def allocate(self, size: int, count: int) -> None:
        slot = self.allocator.slot_bytes_for(size)
        assert size <= slot <= CHUNK
        # What fits: free slots of that size, and whole chunks in which nothing is given out.
        busy = {offset // CHUNK for offset in self.given}
        taken = sum(1 for offset in self.given if self.given[offset] == slot)
        same = len({offset // CHUNK for offset in self.given if self.given[offset] == slot})
        idle = self.allocator.pool_bytes // CHUNK - len(busy)
        offsets = self.allocator.allocate(slot, count)
        assert len(offsets) == min(count, (same + idle) * (CHUNK // slot) - taken)
        for offset in offsets.tolist():
            assert offset not in self.given
            self.given[offset] = slot
        assert (self.allocator.slot_bytes_of(offsets) == slot).all()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.given)), min_size=1, unique=True))
        self.allocator.free(np.array(chosen, dtype=np.int64))
        for offset in chosen:
            del self.given[offset]

    @precondition(lambda self: self.given)
    @rule()
    def free_everything(self) -> None:
        self.allocator.free(np.array(list(self.given), dtype=np.int64))
        self.given.clear()

    @invariant()
    def free_and_given_out_are_the_capacity(self) -> None:
        given = sorted(self.given.items())
        assert self.allocator.free_bytes + sum(self.given.values()) == self.allocator.capacity_bytes
        assert self.allocator.capacity_bytes <= self.allocator.pool_bytes
        for (offset, size), (following, _) in itertools.pairwise(given):
            assert offset + size <= following, "two slots overlap"
        for offset, size in given:
            assert offset // CHUNK == (offset + size - 1) // CHUNK, "a slot crosses its chunk's end"
            assert offset % 4096 == 0


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestConservation.pytestmark = [pytest.mark.timeout(600)]  # pyright: ignore[reportAttributeAccessIssue] -- to shrink


@given(chunk_mib=st.integers(1, 2048), share=st.floats(0, 1))
def test_a_slot_serves_every_size_up_to_a_whole_chunk_and_wastes_little(chunk_mib: int, share: float) -> None:
    chunk = chunk_mib << 20
    size = max(1, int(chunk * share))
    slot = SlotAllocator(chunk, chunk).slot_bytes_for(size)
    assert size <= slot <= chunk
    assert slot % 4096 == 0
    assert slot - size < max(4096, size / 63)


def test_the_largest_slot_of_any_chunk_can_be_had() -> None:
    allocator = SlotAllocator(2 * (129 << 20), 129 << 20)
    assert len(allocator.allocate(allocator.slot_bytes_for(129 << 20), 3)) == 2


def test_another_size_takes_over_a_chunk_as_soon_as_its_last_slot_is_free() -> None:
    allocator = SlotAllocator(2 * CHUNK, CHUNK)
    small = allocator.allocate(4096, 32)
    assert len(allocator.allocate(CHUNK, 1)) == 0
    allocator.free(small[:16])
    assert allocator.allocate(CHUNK, 1).tolist() == [small[:16].min()]
    assert len(allocator.allocate(4096, 1)) == 0


def test_neighbours_are_given_out_together() -> None:
    """So that a batch is copied in one run."""
    allocator = SlotAllocator(4 * CHUNK, CHUNK)
    assert np.diff(allocator.allocate(4096, 16)).tolist() == [4096] * 15


@pytest.mark.parametrize("pool", [0, CHUNK + 1, -CHUNK])
def test_a_pool_that_is_no_whole_number_of_chunks_is_refused(pool: int) -> None:
    with pytest.raises(ValueError, match="not a multiple of its chunks"):
        SlotAllocator(pool, CHUNK)


def test_withheld_chunks_come_back_with_what_was_in_them() -> None:
    allocator = SlotAllocator(3 * CHUNK, CHUNK)
    allocator.withhold(np.array([0, 2]))
    assert allocator.available(4096) == CHUNK // 4096
    fresh = allocator.allocate(4096, 100)
    assert set(allocator.chunk_of(fresh).tolist()) == {1}
    assert allocator.is_withheld(np.array([0, CHUNK, 2 * CHUNK])).tolist() == [True, False, True]
    used = np.array([0, 3 * 8192])
    allocator.restore(0, 8192, used)
    allocator.restore(2, 0, np.zeros(0, np.int64))
    assert allocator.slot_bytes_of(used).tolist() == [8192, 8192]
    assert allocator.assigned_chunks().tolist() == [0, 1]
    again = allocator.allocate(8192, 100)
    assert not set(used.tolist()) & set(again.tolist())
    assert len(again) == 2 * CHUNK // 8192 - 2
    allocator.free(np.concatenate([used, again, fresh]))
    allocator.drop_empty_chunks()
    assert len(allocator.assigned_chunks()) == 0
    assert allocator.free_bytes == allocator.capacity_bytes == 3 * CHUNK
