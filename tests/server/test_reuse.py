"""The reuse policy: what it learns, what it must not do worse than LRU, and the table and runs that it stands on."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.simulate import simulated_hit_rate
from kvbench.trace import Request, Trace
from kvstore.server.eviction import POLICIES, NewPolicy
from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.history import KeyHistory
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.eviction.reuse import ReusePolicy
from kvstore.server.eviction.runs import Runs
from kvstore.testing.conformance import EvictionConformance, admit, keys_of

Prompts = Callable[[np.random.Generator], Iterator[list[int]]]


def new_reuse() -> tuple[ReusePolicy, np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    board = np.zeros(100_000, dtype=np.uint32)
    return ReusePolicy(board), board


class TestReuseConformance(EvictionConformance):
    def new_policy(self) -> EvictionPolicy:
        return new_reuse()[0]


def request(policy: EvictionPolicy, *handles: int) -> None:
    """A request for a chain that is not there, and the put that follows."""
    chain = np.array(handles)
    policy.note_request(keys_of(chain))
    admit(policy, chain)


def test_before_anything_is_learned_the_block_that_was_not_used_for_longest_goes_first() -> None:
    policy, _ = new_reuse()
    for handle in range(5):
        request(policy, handle)
    policy.touch(np.array([1]))
    policy.touch(np.array([0]))
    assert policy.candidates(5).tolist() == [2, 3, 4, 1, 0]


def test_a_trace_on_the_board_counts_as_a_use_and_counts_once() -> None:
    policy, board = new_reuse()
    for handle in range(4):
        request(policy, handle)
    board[[0, 2]] = 77
    assert policy.candidates(2).tolist() == [1, 3]
    request(policy, 4)
    assert policy.candidates(3).tolist() == [0, 2, 4]


def test_blocks_that_are_all_in_use_all_the_time_are_still_offered() -> None:
    policy, board = new_reuse()
    admit(policy, np.arange(100))
    board[:100] = 1
    assert sorted(policy.candidates(100).tolist()) == list(range(100))


def test_of_blocks_alike_those_that_are_cheap_to_compute_go_first() -> None:
    policy, _ = new_reuse()
    for handle, value in enumerate((1.0, 5.0, 0.2)):
        key = keys_of(np.array([handle]))
        policy.note_request(key)
        policy.admit(np.array([handle]), key, value)
    assert policy.candidates(3).tolist() == [2, 0, 1]


def test_blocks_of_a_kind_that_was_never_used_again_go_before_older_ones_of_a_kind_that_was() -> None:
    """Chains of one block come again 30 requests later; long ones never do."""
    policy, _ = new_reuse()
    handles = np.arange(100_000)
    for number in range(600):
        policy.note_request(keys_of(handles[number % 30 : number % 30 + 1]))
        policy.note_request(keys_of(handles[1000 + 20 * number :][:20]))
    request(policy, 5)
    request(policy, *range(90_000, 90_020))
    assert policy.candidates(21).tolist()[-1] == 5


# --- no worse than LRU where there is nothing to learn, or something else than conversations -------------------------


def zipf(random: np.random.Generator) -> Iterator[list[int]]:
    for number in np.minimum(random.zipf(1.2, 12_000), 20_000).tolist():
        yield [number]


def scan_beside_hot_blocks(random: np.random.Generator) -> Iterator[list[int]]:
    for number in range(6_000):
        yield [int(random.integers(0, 100))] if number % 2 else [1000 + number]


def loop(_: np.random.Generator) -> Iterator[list[int]]:
    for number in range(12_000):
        yield [number % 1_500]


def shifting_hot_blocks(random: np.random.Generator) -> Iterator[list[int]]:
    for number in range(12_000):
        yield [number // 3_000 * 1_000 + int(random.geometric(0.004))]


@pytest.mark.parametrize("prompts", [zipf, scan_beside_hot_blocks, loop, shifting_hot_blocks])
def test_on_other_traffic_it_is_at_most_two_hundredths_below_lru(prompts: Prompts) -> None:
    chains = list(prompts(np.random.default_rng(3)))
    numbers = {
        block: number for number, block in enumerate(dict.fromkeys(block for chain in chains for block in chain))
    }
    blocks = [np.array([numbers[block] for block in chain]) for chain in chains]
    trace = Trace("made-up", tuple(Request(part, part, 512) for part in blocks), len(numbers))
    keys = keys_of(np.arange(len(numbers)))
    ours, lru = (simulated_hit_rate(trace, keys, 400, new) for new in (ReusePolicy, LruPolicy))
    assert ours > lru - 0.02, f"{ours:.4f}, LRU {lru:.4f}"


@pytest.mark.parametrize("new_policy", POLICIES.values(), ids=POLICIES)
def test_a_loop_that_fits_is_always_hit(new_policy: NewPolicy) -> None:
    chains = tuple(Request(np.array([number % 50]), np.array([number % 50]), 512) for number in range(500))
    trace = Trace("loop", chains, 50)
    assert simulated_hit_rate(trace, keys_of(np.arange(50)), 60, new_policy) == pytest.approx(450 / 500)


# --- the table of keys -----------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True), max_size=12),
    rows=st.sampled_from([8, 64, 512]),
)
def test_a_key_that_is_known_is_found_where_it_was_put_and_a_large_table_forgets_none(
    batches: list[list[int]], rows: int
) -> None:
    history = KeyHistory(rows, 1 << 12)
    added: dict[int, int] = {}
    for time, batch in enumerate(batches, 1):
        keys = keys_of(np.array(batch))
        fresh = keys[history.find(keys) < 0]
        places = history.add(fresh, time).rows
        assert len(set(places[places >= 0].tolist())) == np.count_nonzero(places >= 0)
        added.update(zip(fresh.tolist(), places.tolist(), strict=True))
        found = history.find(keys)
        assert ((history.keys[found] == keys) | (found < 0)).all()
        if rows == 512:
            assert (found >= 0).all()


def test_a_full_bucket_forgets_the_key_seen_longest_ago_and_says_so() -> None:
    history = KeyHistory(8, 8)
    for time in range(1, 9):
        (row,) = history.add(np.array([time], dtype=np.uint64), time).rows.tolist()
        history.marks[row] = 100 + time
    history.times[history.find(np.array([1], dtype=np.uint64))] = 20
    added = history.add(np.array([99], dtype=np.uint64), 21)
    assert (added.forgotten_times.tolist(), added.forgotten_marks.tolist()) == ([2], [102])
    assert history.find(np.array([1, 2, 99], dtype=np.uint64)).tolist()[1] == -1


def test_a_table_that_grows_keeps_every_key_with_its_time_and_mark() -> None:
    history = KeyHistory(64, 1 << 10)
    keys = keys_of(np.arange(40))
    rows = history.add(keys, 7).rows
    history.marks[rows] = np.arange(40)
    history.reach(5_000)
    assert history.rows == 1 << 10
    found = history.find(keys)
    assert history.marks[found].tolist() == list(range(40))
    assert set(history.times[found].tolist()) == {7}


# --- runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_compacted_so_that_touching_for_ever_takes_no_memory() -> None:
    runs = Runs()
    handles = np.arange(100)
    for time in range(2_000):
        runs.append(handles, np.zeros(100, dtype=np.int64), np.ones(100, dtype=np.float32), time)
    assert runs.count < 100
    assert runs.blocks == 100
    assert sorted(runs.take(np.arange(runs.count), 1_000).tolist()) == list(range(100))
    assert runs.count == runs.blocks == 0
