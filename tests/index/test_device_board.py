"""The board between the shard and readers of its device segment."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.device_board import ROW_BYTES, DeviceBoard


def board(handles: int = 8) -> DeviceBoard:
    return DeviceBoard(np.zeros(handles * ROW_BYTES, dtype=np.uint8))


def handles(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def generations(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(numbers, dtype=np.uint64)


def test_a_fresh_board_names_nothing() -> None:
    assert board().find(handles(0, 5), generations(0, 1)).placements.tolist() == [0, 0]


def test_a_block_is_found_where_it_was_placed_under_its_own_generation_only() -> None:
    there = board()
    there.place(handles(3, 1), generations(10, 11), handles(4096, 0))
    found = there.find(handles(1, 3, 3, 2), generations(11, 10, 9, 10))
    assert (found.placements != 0).tolist() == [True, True, False, False]
    assert found.offsets[:2].tolist() == [0, 4096]
    assert there.stand(handles(1, 3), found.placements[:2]).all()


def test_what_was_cleared_neither_is_found_nor_stands() -> None:
    there = board()
    there.place(handles(3), generations(10), handles(4096))
    found = there.find(handles(3), generations(10))
    there.clear(handles(3))
    assert not there.stand(handles(3), found.placements).any()
    assert not there.find(handles(3), generations(10)).placements.any()


def test_a_block_that_came_back_to_its_place_does_not_vouch_for_what_was_copied_before() -> None:
    """In between another block lay there, and a slow reader has copied that one."""
    there = board()
    there.place(handles(3), generations(10), handles(4096))
    before = there.find(handles(3), generations(10))
    there.clear(handles(3))
    there.place(handles(3), generations(10), handles(4096))
    after = there.find(handles(3), generations(10))
    assert not there.stand(handles(3), before.placements).any()
    assert there.stand(handles(3), after.placements).all()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), max_size=40))
def test_nothing_stands_unless_it_was_there_all_the_time(steps: list[tuple[bool, int, int, int]]) -> None:
    there, seen = board(4), dict[int, tuple[int, int]]()  # handle: step that placed it last, generation
    looks: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint64]], int]] = []
    for number, (place, handle, generation, offset) in enumerate(steps):
        if place:
            there.place(handles(handle), generations(generation), handles(offset))
            seen[handle] = (number, generation)
            looks.append((handle, there.find(handles(handle), generations(generation)).placements, number))
        else:
            there.clear(handles(handle))
            seen.pop(handle, None)
    for handle, placements, number in looks:
        still = handle in seen and seen[handle][0] == number
        assert bool(there.stand(handles(handle), placements)[0]) == still
