"""The simulation beside models that are too simple to be wrong."""

from collections import OrderedDict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvbench.simulate import optimal_hit_rate, simulated_hit_rate
from kvbench.trace import Trace, read_trace
from kvstore.server.eviction import POLICIES, NewPolicy
from kvstore.testing.conformance import keys_of
from tests.kvbench.traces import made_up_prompts, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write_trace(tmp_path_factory.mktemp("traces") / "made-up.jsonl", made_up_prompts(400)))


def lru_hit_rate(trace: Trace, capacity: int) -> float:
    """What is there counts as used when the prompt is put, then the rest comes in; deepest first both times."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        blocks: list[int] = request.blocks.tolist()
        there = [block in cache for block in blocks]
        hits += [*there, False].index(False)
        for block in [block for block, found in zip(blocks, there, strict=True) if found][::-1]:
            cache.move_to_end(block)
        fresh = [block for block, found in zip(blocks, there, strict=True) if not found]
        while len(cache) + len(fresh) > capacity:
            cache.popitem(last=False)
        cache.update(dict.fromkeys(fresh[::-1]))
    return hits / trace.references


@pytest.mark.parametrize("capacity", [20, 100, 300])
def test_lru_hits_exactly_what_a_list_in_order_of_use_hits(trace: Trace, capacity: int) -> None:
    simulated = simulated_hit_rate(trace, keys_of(np.arange(trace.distinct_blocks)), capacity, POLICIES["lru"])
    assert simulated == lru_hit_rate(trace, capacity)


@pytest.mark.parametrize("new_policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_is_between_nothing_and_the_optimum_and_with_room_for_all_at_the_limit(
    trace: Trace, new_policy: NewPolicy
) -> None:
    keys = keys_of(np.arange(trace.distinct_blocks))
    for capacity in (50, 200):
        assert 0 < simulated_hit_rate(trace, keys, capacity, new_policy) < optimal_hit_rate(trace, capacity)
    assert simulated_hit_rate(trace, keys, trace.distinct_blocks, new_policy) == trace.hit_rate_limit()


def test_the_optimum_is_what_trying_every_choice_finds(tmp_path: Path) -> None:
    prompts = [[1, 2], [3], [4], [1, 2], [3], [1, 5], [4], [1, 2]]
    trace = read_trace(write_trace(tmp_path / "t.jsonl", prompts))
    requests = [request.blocks.tolist() for request in trace.requests]

    def best(number: int, kept: frozenset[int]) -> int:
        """Most hits from this request on."""
        if number == len(requests):
            return 0
        hits = [*(block in kept for block in requests[number]), False].index(False)
        known = sorted(kept | set(requests[number]))
        choices = combinations(known, min(2, len(known)))
        return hits + max(best(number + 1, frozenset(choice)) for choice in choices)

    assert optimal_hit_rate(trace, 2) == best(0, frozenset()) / trace.references
