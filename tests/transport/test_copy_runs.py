"""`copy_blocks` where offsets form runs: up, down, on the spot, in odd steps, and broken by jumps. Against a loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.transport.copying import copy_blocks

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SIZES = [1, 2, 3, 7, 8, 64, 255, 4096, 4097, 16 << 10, (16 << 10) + 1, 65_536, 70_000]
MEMORY_BYTES = 3 << 20

_source = np.random.default_rng(0).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)


def naive(target: Bytes, target_offsets: I64, source: Bytes, source_offsets: I64, size: int) -> None:
    for to, start in zip(target_offsets.tolist(), source_offsets.tolist(), strict=True):
        target[to : to + size] = source[start : start + size]


def check(target_offsets: I64, source_offsets: I64, size: int, memory_bytes: int = MEMORY_BYTES) -> None:
    """The copy does what the loop does, and touches nothing else."""
    copied, expected = np.full(memory_bytes, 0xA5, np.uint8), np.full(memory_bytes, 0xA5, np.uint8)
    source = _source[:memory_bytes]
    copy_blocks(copied, target_offsets, source, source_offsets, size)
    naive(expected, target_offsets, source, source_offsets, size)
    assert np.array_equal(copied, expected)


def of(*offsets: int) -> I64:
    return np.array(offsets, dtype=np.int64)


@st.composite
def copies(draw: st.DrawFn) -> tuple[I64, I64, int, int]:
    """Target offsets (never overlapping), source offsets, block size, bytes of each memory: runs up and down in
    both, jumps between them, single blocks.
    """
    size = draw(st.one_of(st.sampled_from(SIZES), st.integers(1, 70_000)))
    count = draw(st.integers(1, max(1, min(40, MEMORY_BYTES // size // 2))))
    slots = MEMORY_BYTES // size
    aligned = draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    places: dict[str, list[int]] = {"to": [], "from": []}
    for side in ("to", "from"):
        order = places[side]
        while len(order) < count:
            run = int(random.integers(1, 12))
            step = int(random.choice([1, 1, -1, 2, -3, 0 if side == "from" else 1]))
            start = int(random.integers(0, slots))
            run_places = [start + step * turn for turn in range(run)]
            fresh = [place for place in run_places if 0 <= place < slots and (side == "from" or place not in order)]
            order.extend(fresh[: count - len(order)])
    shift = 0 if aligned else int(random.integers(0, size))
    to, start = of(*places["to"]) * size, of(*places["from"]) * size
    if not aligned:  # source blocks may overlap one another
        start = np.clip(start + random.integers(-size, size, count), 0, MEMORY_BYTES - size)
        to = to + shift
    return to, start, size, MEMORY_BYTES + size


@settings(max_examples=150, deadline=None)
@given(copies())
def test_any_copy_does_what_the_loop_does(case: tuple[I64, I64, int, int]) -> None:
    to, start, size, memory_bytes = case
    copied, expected = np.full(memory_bytes, 0xA5, np.uint8), np.full(memory_bytes, 0xA5, np.uint8)
    copy_blocks(copied, to, _source, start, size)
    naive(expected, to, _source, start, size)
    assert np.array_equal(copied, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("to_step", "step"), [(1, 1), (1, -1), (-1, 1), (-1, -1), (3, 2), (1, 0), (-2, 5)])
def test_a_run_in_constant_steps_is_copied_whole(size: int, to_step: int, step: int) -> None:
    rows = np.arange(8)
    check((rows - 7 if to_step < 0 else rows) * to_step * size, (rows - 7 if step < 0 else rows) * step * size, size)


@pytest.mark.parametrize("size", [1, 100, 4096, 70_000])
def test_runs_of_two_and_single_blocks_alternate(size: int) -> None:
    to = of(0, 1, 5, 9, 10, 30, 20, 21, 22, 3) * size
    start = of(7, 8, 0, 2, 3, 9, 1, 2, 3, 40) * size
    check(to, start, size)


def test_steps_that_are_no_multiple_of_the_size_make_runs_too() -> None:
    check(np.arange(20) * 5003, np.arange(20) * 4999 + 1, 4321)


def test_the_same_source_block_can_go_to_many_places() -> None:
    check(np.arange(30) * 1000, np.full(30, 12_345), 1000)


def test_blocks_that_fill_both_memories_to_the_last_byte_fit() -> None:
    check(np.arange(16)[::-1] * 1024, np.arange(16) * 1024, 1024, memory_bytes=16 << 10)
    check(of(3, 2, 0, 1) * 70_000, of(0, 2, 1, 3) * 70_000, 70_000, memory_bytes=280_000)


def test_a_read_only_source_is_enough() -> None:
    source = np.arange(100, dtype=np.uint8)
    source.flags.writeable = False
    target = np.zeros(100, dtype=np.uint8)
    copy_blocks(target, of(0, 10, 20), source, of(50, 60, 70), 10)
    assert target[:30].tolist() == list(range(50, 80))


@pytest.mark.parametrize("scattered", [False, True], ids=["in-a-run", "scattered"])
@pytest.mark.parametrize("size", [16, 40_000])
@pytest.mark.parametrize("side", ["target", "source"])
@pytest.mark.parametrize("bad", [-1, "end", 2**62], ids=str)
def test_an_offset_outside_is_an_index_error_and_nothing_is_copied(
    bad: int | str, side: str, size: int, scattered: bool
) -> None:
    good = of(0, 3, 1, 6) * size if scattered else np.arange(4) * size
    wrong = good.copy()
    wrong[2] = 8 * size - size + 1 if bad == "end" else bad
    target, source = np.zeros(8 * size, np.uint8), np.ones(8 * size, np.uint8)
    offsets = (wrong, good) if side == "target" else (good, wrong)
    with pytest.raises(IndexError, match=rf"^blocks of {size} bytes at [^\n]+ in a memory of {8 * size} bytes$"):
        copy_blocks(target, offsets[0], source, offsets[1], size)
    assert not target.any()
