"""Segments and the pool in them."""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvstore.transport.memory import create_pool, map_pool, map_segment, private_arena

SIZE = 3 * mmap.PAGESIZE


def test_a_pool_has_all_its_bytes_behind_half_a_page_that_nobody_uses() -> None:
    fd = create_pool("test", SIZE)
    try:
        pool, segment = map_pool(fd, writable=True), map_segment(fd, writable=False)
        assert len(pool) == SIZE
        pool[:] = 7
        assert not segment[: len(segment) - SIZE].any()
        assert (segment[len(segment) - SIZE :] == 7).all()
    finally:
        os.close(fd)


def test_no_slot_begins_right_below_a_callers_array_within_a_page_or_right_above_it() -> None:
    """Where the target is up to 31 bytes above the source, processors that copy by microcode run at half speed."""
    fd = create_pool("test", SIZE)
    try:
        slot = map_pool(fd, writable=True).ctypes.data
    finally:
        os.close(fd)
    for array in (np.empty(64 << 20, np.uint8), private_arena(1 << 20)):
        distance = (array.ctypes.data - slot) % mmap.PAGESIZE
        assert 64 <= distance <= mmap.PAGESIZE - 64
