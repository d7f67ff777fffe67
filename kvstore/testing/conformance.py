"""Suites that every implementation of a port must pass. Subclass one in a test file and say how yours is made.

class TestMyPolicy(EvictionConformance):
    def new_policy(self) -> EvictionPolicy:
        return MyPolicy()
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.base import EvictionPolicy

I64 = NDArray[np.int64]


def _handles(*numbers: int) -> I64:
    return np.array(numbers, dtype=np.int64)


class EvictionConformance:
    """What `kvstore.server.eviction.base.EvictionPolicy` promises, for any order of preference."""

    def new_policy(self) -> EvictionPolicy:
        """An empty policy, good for handles 0 to 9,999."""
        raise NotImplementedError

    def test_every_admitted_block_is_offered_once(self) -> None:
        policy = self.new_policy()
        policy.admit(_handles(3, 1, 4))
        policy.admit(_handles(5, 9))
        assert len(policy) == 5
        assert sorted(policy.candidates(100).tolist()) == [1, 3, 4, 5, 9]
        assert len(policy) == 0
        assert policy.candidates(100).tolist() == []

    def test_no_more_are_offered_than_asked_for(self) -> None:
        policy = self.new_policy()
        policy.admit(np.arange(10))
        assert len(policy.candidates(0)) == 0
        assert len(policy.candidates(3)) == 3
        assert len(policy) == 7

    def test_an_empty_policy_offers_nothing(self) -> None:
        policy = self.new_policy()
        policy.admit(_handles())
        policy.touch(_handles())
        policy.remove(_handles())
        policy.restore(_handles())
        assert policy.candidates(5).tolist() == []
        assert len(policy) == 0

    def test_deeper_blocks_of_a_batch_go_before_those_that_they_depend_on(self) -> None:
        policy = self.new_policy()
        policy.admit(_handles(10, 11, 12, 13))
        assert policy.candidates(2).tolist() == [13, 12]
        assert policy.candidates(2).tolist() == [11, 10]

    def test_removed_blocks_are_never_offered(self) -> None:
        policy = self.new_policy()
        policy.admit(np.arange(6))
        policy.remove(_handles(1, 4))
        assert len(policy) == 4
        assert sorted(policy.candidates(10).tolist()) == [0, 2, 3, 5]

    def test_removing_what_is_not_there_changes_nothing(self) -> None:
        policy = self.new_policy()
        policy.admit(_handles(1))
        policy.remove(_handles(2, 700))
        assert len(policy) == 1
        policy.candidates(1)
        policy.remove(_handles(1))
        assert len(policy) == 0

    def test_a_handle_may_be_used_again_for_another_block(self) -> None:
        policy = self.new_policy()
        policy.admit(_handles(7))
        policy.remove(_handles(7))
        policy.admit(_handles(7))
        assert len(policy) == 1
        assert policy.candidates(5).tolist() == [7]

    def test_restored_candidates_are_the_next_ones_to_go_in_the_same_order(self) -> None:
        policy = self.new_policy()
        policy.admit(np.arange(10))
        first = policy.candidates(4)
        policy.restore(first[1:])
        assert len(policy) == 9
        assert policy.candidates(3).tolist() == first[1:].tolist()

    def test_a_candidate_that_is_kept_and_touched_is_back_in_the_order(self) -> None:
        policy = self.new_policy()
        policy.admit(np.arange(3))
        kept = policy.candidates(1)
        policy.touch(kept)
        assert len(policy) == 3
        assert sorted(policy.candidates(3).tolist()) == [0, 1, 2]

    def test_touching_again_and_again_offers_no_block_twice(self) -> None:
        policy = self.new_policy()
        policy.admit(np.arange(8))
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
        match int(random.integers(0, 4)):
            case 0:
                fresh = batch[[number not in there for number in batch.tolist()]]
                policy.admit(fresh)
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
