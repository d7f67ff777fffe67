"""The benchmark's content check: what was written is recognised, anything else is noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbench.content import Content

BLOCK_BYTES = 16 << 10
BLOCKS = 4
IDS = np.arange(BLOCKS, dtype=np.int64)
CONTENT = Content(7, BLOCK_BYTES, BLOCKS)


def filled() -> NDArray[np.uint8]:
    rows = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    CONTENT.fill(rows, IDS)
    return rows


def test_another_process_expects_the_same_bytes() -> None:
    assert Content(7, BLOCK_BYTES, BLOCKS).damaged(filled(), IDS, whole=True) == []


def test_another_seed_expects_other_bytes() -> None:
    assert Content(8, BLOCK_BYTES, BLOCKS).damaged(filled(), IDS, whole=False) == IDS.tolist()


@settings(deadline=None)
@given(block=st.integers(0, BLOCKS - 1), byte=st.integers(0, BLOCK_BYTES - 1), flip=st.integers(1, 255))
def test_one_flipped_byte_anywhere_is_noticed_when_whole_blocks_are_compared(block: int, byte: int, flip: int) -> None:
    rows = filled()
    rows[block, byte] ^= flip
    assert CONTENT.damaged(rows, IDS, whole=True) == [block]


@pytest.mark.parametrize("page", range(BLOCK_BYTES // 4096))
def test_a_page_of_another_block_is_noticed_by_its_stamp_alone(page: int) -> None:
    rows = filled()
    rows[1, page * 4096 : (page + 1) * 4096] = rows[2, page * 4096 : (page + 1) * 4096]
    assert CONTENT.damaged(rows, IDS, whole=False) == [1]


def test_a_page_at_the_wrong_place_of_its_own_block_is_noticed() -> None:
    rows = filled()
    rows[3, :4096] = rows[3, 4096:8192]
    assert CONTENT.damaged(rows, IDS, whole=False) == [3]


def test_an_older_version_of_a_block_is_noticed() -> None:
    assert CONTENT.damaged(filled(), IDS + BLOCKS, whole=False) == (IDS + BLOCKS).tolist()


def test_new_stamps_turn_a_block_into_its_other_version_entirely() -> None:
    rows = filled()
    CONTENT.stamp(rows, IDS + BLOCKS)
    assert CONTENT.damaged(rows, IDS + BLOCKS, whole=True) == []


def test_a_blotted_page_never_passes_for_one_that_was_read() -> None:
    rows = filled()
    CONTENT.blot(rows)
    assert CONTENT.damaged(rows, IDS, whole=False) == IDS.tolist()


def test_blocks_in_separate_buffers_are_checked_like_rows() -> None:
    separate = [row.copy() for row in filled()]
    separate[2][100] ^= 1
    assert CONTENT.damaged(separate, IDS, whole=True) == [2]
