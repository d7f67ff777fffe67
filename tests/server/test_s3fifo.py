"""S3-FIFO: what is used once goes quickly, what comes back stays, readers of shared memory included."""

import numpy as np

from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.s3fifo import S3FifoPolicy
from kvstore.testing.conformance import EvictionConformance, admit, keys_of


def new_s3fifo() -> tuple[S3FifoPolicy, np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    board = np.zeros(100_000, dtype=np.uint32)
    return S3FifoPolicy(board), board


class TestS3FifoConformance(EvictionConformance):
    def new_policy(self) -> EvictionPolicy:
        return new_s3fifo()[0]


def test_a_scan_passes_by_blocks_that_were_used_twice() -> None:
    policy, _ = new_s3fifo()
    admit(policy, np.arange(50))
    for _ in range(2):
        policy.touch(np.arange(50))
    for first in range(50, 2050, 50):
        admit(policy, np.arange(first, first + 50))
        policy.remove(policy.candidates(len(policy) - 100))
    left = policy.candidates(100)
    assert set(range(50)) <= set(left.tolist())


def test_a_block_that_comes_again_soon_after_it_went_is_kept_longer_than_a_new_one() -> None:
    policy, _ = new_s3fifo()
    admit(policy, np.arange(20))
    gone = policy.candidates(1)
    policy.remove(gone)
    admit(policy, np.array([30]), keys_of(gone))
    admit(policy, np.array([31]))
    assert policy.candidates(21).tolist()[-1] == 30


def test_reads_that_only_the_board_knows_of_count_as_a_use() -> None:
    policy, board = new_s3fifo()
    admit(policy, np.array([0]))
    admit(policy, np.array([1]))
    policy.touch(np.array([0]))
    policy.touch(np.array([1]))
    board[0] = 77  # the second use
    assert policy.candidates(1).tolist() == [1]


def test_blocks_that_are_all_in_use_all_the_time_are_still_offered() -> None:
    policy, board = new_s3fifo()
    admit(policy, np.arange(100))
    for tick in range(1, 5):
        policy.touch(np.arange(100))
        board[:100] = tick
    assert sorted(policy.candidates(100).tolist()) == list(range(100))
