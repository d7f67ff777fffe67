"""Copies of many blocks are what a loop over single blocks would do, however they lie."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.transport.copying import copy_blocks
from kvstore.transport.memory import create_segment, map_segment, prefault, private_arena, read_only
from kvstore.transport.trailer import read_trailers, slot_payload_bytes, sums_of, trailer_offset, write_trailers

Offsets = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Offsets, Offsets, int]:
    """Offsets of n blocks in a target (apart from one another) and in a source (anywhere), and their size."""
    size = draw(st.sampled_from([1, 7, 8, 64, 1000, 4096, 20_000]))
    count = draw(st.integers(0, 24))
    unit = draw(st.sampled_from([1, 8, size]))
    slots = draw(st.permutations(range(count + draw(st.integers(0, 4)))))[:count]
    targets = slots if draw(st.booleans()) else sorted(slots)
    gap = draw(st.sampled_from([0, 1, 8, 4096]))
    sources = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count)) if draw(st.booleans()) else targets
    return (
        np.array(targets, dtype=np.int64) * (size + gap),
        np.array(sources, dtype=np.int64) * unit,
        size,
    )


@settings(max_examples=400)
@given(layout=layouts())
def test_a_batch_is_copied_as_its_blocks_would_be_one_by_one(layout: tuple[Offsets, Offsets, int]) -> None:
    targets, sources, size = layout
    source = np.random.default_rng(1).integers(0, 256, int(sources.max(initial=0)) + size, dtype=np.uint8)
    target = np.zeros(int(targets.max(initial=0)) + size, dtype=np.uint8)
    expected = target.copy()
    for to, start in zip(targets.tolist(), sources.tolist(), strict=True):
        expected[to : to + size] = source[start : start + size]
    copy_blocks(target, targets, source, sources, size)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("to", "start"), [(-1, 0), (0, -1), (93, 0), (0, 93)])
def test_a_block_that_would_reach_outside_is_refused_before_anything_is_copied(to: int, start: int) -> None:
    target, source = np.zeros(100, dtype=np.uint8), np.ones(100, dtype=np.uint8)
    for rows in (1, 3):
        targets, sources = np.full(rows, 10), np.full(rows, 10)
        targets[-1], sources[-1] = to, start
        with pytest.raises(IndexError, match="blocks of 8 bytes"):
            copy_blocks(target, targets, source, sources, 8)
    assert not target.any()


def test_nothing_to_copy_is_no_error() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    copy_blocks(np.zeros(0, dtype=np.uint8), nothing, np.zeros(0, dtype=np.uint8), nothing, 8)


# --- trailers ---------------------------------------------------------------------------------------------------------


@given(layer_bytes=st.integers(1, 300), layers=st.integers(1, 5), count=st.integers(1, 6))
def test_sums_written_behind_the_payload_are_read_back_and_the_payload_is_untouched(
    layer_bytes: int, layers: int, count: int
) -> None:
    size = layer_bytes * layers
    slot = slot_payload_bytes(size, layers)
    pool = np.random.default_rng(2).integers(0, 256, count * slot, dtype=np.uint8)
    before = pool.copy()
    offsets = np.arange(count, dtype=np.int64)[::-1] * slot
    sums = np.array([sums_of(memoryview(pool)[o : o + size], layer_bytes) for o in offsets.tolist()], dtype=np.uint64)
    generations = np.arange(5, 5 + count, dtype=np.uint64)
    write_trailers(pool, offsets, size, generations, sums)
    read = read_trailers(pool, offsets, size, layers)
    assert read[:, 0].tolist() == generations.tolist()
    assert (read[:, 1:] == sums).all()
    for offset in offsets.tolist():
        assert np.array_equal(pool[offset : offset + size], before[offset : offset + size])
        assert trailer_offset(size) % 8 == 0


def test_a_flipped_bit_changes_the_sum_of_its_layer_and_no_other() -> None:
    payload = bytearray(range(60))
    before = sums_of(memoryview(payload), 20)
    payload[25] ^= 1
    after = sums_of(memoryview(payload), 20)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


# --- shared memory ----------------------------------------------------------------------------------------------------


def test_two_mappings_of_a_segment_are_the_same_memory_and_a_read_only_descriptor_maps_none_to_write() -> None:
    fd = create_segment("test", 1 << 16)
    other = read_only(fd)
    try:
        memory, seen = map_segment(fd, writable=True), map_segment(other, writable=False)
        with pytest.raises(PermissionError):
            map_segment(other, writable=True)
    finally:
        os.close(fd)
        os.close(other)
    memory[12345] = 7
    assert seen[12345] == 7
    assert not seen.flags.writeable


@pytest.mark.parametrize("size", [0, 1, 4096, 12_345])
def test_prefaulting_changes_no_byte(size: int) -> None:
    memory = private_arena(size)
    assert len(memory) == size
    memory[:] = 5
    prefault(memory)
    prefault(memory[min(3, size) :])
    assert (memory == 5).all()
