"""Least recently used, with the traces of readers that never call the server."""

import tracemalloc

import numpy as np

from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.lru import LruPolicy
from kvstore.testing.conformance import EvictionConformance, admit


def new_lru() -> tuple[LruPolicy, np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    board = np.zeros(100_000, dtype=np.uint32)
    return LruPolicy(board), board


class TestLruConformance(EvictionConformance):
    def new_policy(self) -> EvictionPolicy:
        return new_lru()[0]


def test_the_block_that_was_not_used_for_longest_goes_first() -> None:
    policy, _ = new_lru()
    for handle in range(5):
        admit(policy, np.array([handle]))
    policy.touch(np.array([1]))
    policy.touch(np.array([0]))
    assert policy.candidates(5).tolist() == [2, 3, 4, 1, 0]


def test_a_trace_on_the_board_counts_as_a_use() -> None:
    policy, board = new_lru()
    for handle in range(4):
        admit(policy, np.array([handle]))
    board[[0, 2]] = 77
    assert policy.candidates(2).tolist() == [1, 3]
    assert policy.candidates(2).tolist() == [0, 2]


def test_a_trace_counts_once() -> None:
    policy, board = new_lru()
    admit(policy, np.array([0]))
    board[0] = 77
    admit(policy, np.array([1]))
    assert policy.candidates(1).tolist() == [1]
    admit(policy, np.array([2]))
    assert policy.candidates(1).tolist() == [0]


def test_a_trace_from_before_a_block_was_admitted_does_not_count() -> None:
    """The board's word belongs to the handle, which another block had before."""
    policy, board = new_lru()
    board[0] = 77
    admit(policy, np.array([0]))
    admit(policy, np.array([1]))
    assert policy.candidates(1).tolist() == [0]


def test_blocks_that_are_all_in_use_all_the_time_are_still_offered() -> None:
    policy, board = new_lru()
    admit(policy, np.arange(100))
    board[:] += 1
    assert sorted(policy.candidates(100).tolist()) == list(range(100))


def test_no_block_is_offered_twice_when_the_log_is_compacted_while_candidates_are_sought() -> None:
    policy, board = new_lru()
    old, busy = np.arange(10), np.arange(10, 2010)
    admit(policy, old)
    for _ in range(4):
        policy.touch(busy)
    policy.remove(busy)  # the log is now long and mostly out of date
    board[3] = 77
    offered = [*policy.candidates(5).tolist(), *policy.candidates(10).tolist()]
    assert sorted(offered) == old.tolist()
    assert len(policy) == 0


def test_touching_a_few_blocks_for_ever_costs_no_memory() -> None:
    policy, _ = new_lru()
    admit(policy, np.arange(10))
    tracemalloc.start()
    try:
        for _ in range(20_000):
            policy.touch(np.array([1, 2, 3]))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1 << 20
