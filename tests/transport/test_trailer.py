"""The trailer of a slot, and the shared memory that slots lie in."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.memory import create_segment, map_segment, prefault, private_arena, read_only
from kvstore.transport.trailer import read_trailers, slot_payload_bytes, sums_of, trailer_offset, write_trailers


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
