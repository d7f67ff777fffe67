"""`kvbench replay` against real servers: exact capacities, hit rates that a model gives too, damage that is noticed."""

import json
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from kvbench.cli import main
from kvbench.memory import arena
from kvbench.replay import NumberedContent, ReplayPlan, ReplayRow, capacities_of, run_replay
from kvbench.simulate import simulated_hit_rate
from kvbench.trace import Trace, read_trace
from kvstore.core.errors import UsageError
from kvstore.server.eviction import POLICIES
from kvstore.testing.conformance import keys_of
from tests.kvbench.traces import made_up_prompts, write_trace

ROW_FIELDS = {
    "trace",
    "policy",
    "capacity_blocks",
    "requests",
    "hit_rate_blocks",
    "saved_tokens",
    "lookup_p50_us",
    "lookup_p99_us",
    "read_p50_us",
    "read_p99_us",
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write_trace(tmp_path_factory.mktemp("traces") / "made-up.jsonl", made_up_prompts(300)))


def replay(
    trace: Trace, *capacities: int | None, disk_bytes: int = 0, admission: str = "second", policy: str = "lru"
) -> list[ReplayRow]:
    plan = ReplayPlan(capacities=capacities, policies=(policy,), disk_bytes=disk_bytes, admission=admission)
    return run_replay(trace, plan, note=lambda _: None, step=lambda _: None, part=lambda _: None)


def lru_hits(trace: Trace, capacity: int) -> int:
    """Leading hits of an exact LRU cache that takes each prompt in after its request, deepest block first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        blocks: list[int] = request.blocks.tolist()
        hits += next((depth for depth, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def test_a_cache_with_room_for_all_hits_what_the_trace_itself_allows_and_evicts_nothing(trace: Trace) -> None:
    (row,) = replay(trace, None)
    assert row.hit_rate_blocks == row.limit_hit_rate == trace.hit_rate_limit()
    assert row.ratio_to_limit == 1.0
    assert (row.evicted_blocks, row.refused_blocks) == (0, 0)
    assert row.capacity_blocks == row.resident_blocks == trace.distinct_blocks
    assert row.written_bytes == trace.distinct_blocks * row.block_bytes
    assert row.read_bytes == row.hit_rate_blocks * trace.references * row.block_bytes
    assert row.checked


def test_a_small_cache_holds_exactly_that_many_blocks_and_hits_as_its_policy_does(trace: Trace) -> None:
    for row in replay(trace, 100, 300):
        assert row.resident_blocks == row.capacity_blocks
        assert row.evicted_blocks > 0
        assert row.hit_rate_blocks == pytest.approx(lru_hits(trace, row.capacity_blocks) / trace.references, abs=0.01)
        assert row.checked


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_hits_as_its_policy_does_alone(trace: Trace, policy: str) -> None:
    (row,) = replay(trace, 150, policy=policy)
    keys = keys_of(np.arange(trace.distinct_blocks))
    assert row.hit_rate_blocks == pytest.approx(simulated_hit_rate(trace, keys, 150, POLICIES[policy]), abs=0.01)
    assert row.checked


def test_an_ssd_below_brings_back_what_dram_has_dropped(trace: Trace) -> None:
    (small,) = replay(trace, 100)
    (row,) = replay(trace, 100, disk_bytes=64 << 20, admission="always")
    assert row.hit_rate_blocks > small.hit_rate_blocks
    assert row.hit_rate_disk > 0
    assert row.hit_rate_dram + row.hit_rate_disk == pytest.approx(row.hit_rate_blocks)
    assert row.disk_blocks > 0
    assert row.checked


def test_the_last_block_of_a_prompt_saves_only_the_tokens_that_it_has(tmp_path: Path) -> None:
    (row,) = replay(read_trace(write_trace(tmp_path / "t.jsonl", [[1, 2], [1, 2]])), None)
    assert row.saved_tokens == 2 * 512 - 100


def test_every_wrong_byte_and_every_exchanged_block_is_noticed() -> None:
    content = NumberedContent(3, 4096, 10)
    rows = arena(2 * 4096).reshape(2, 4096)
    numbers = np.array([4, 7])
    content.fill(rows, numbers)
    assert content.damaged(rows, numbers) == 0
    assert content.damaged(rows, numbers[::-1]) == 2
    for byte in (0, 17, 4095):
        rows[1, byte] ^= 1
        assert content.damaged(rows, numbers) == 1
        rows[1, byte] ^= 1
    rows[0] = np.roll(rows[0], 8)
    assert content.damaged(rows, numbers) == 1


def test_a_read_that_gives_another_blocks_bytes_makes_the_row_wrong(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = NumberedContent.fill

    def fill_wrong(self: NumberedContent, rows: np.ndarray, numbers: np.ndarray) -> None:
        fill(self, rows, np.where(numbers == 5, 6, numbers))

    monkeypatch.setattr(NumberedContent, "fill", fill_wrong)
    (row,) = replay(trace, None)
    assert not row.checked


def test_without_a_capacity_there_are_four_shares_of_the_distinct_blocks_and_all(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[number] for number in range(1000)]))
    assert capacities_of(trace, (), ()) == (20, 50, 100, 250, None)
    assert capacities_of(trace, (70, 50), (0.05, 0.5, 1.0)) == (50, 70, 500, None)


@pytest.mark.parametrize(
    ("blocks", "fractions", "flag"), [((5,), (), "--capacity-blocks"), ((), (0.001,), "--capacity-fraction")]
)
def test_a_capacity_below_the_longest_prompt_is_refused_with_what_is_allowed(
    trace: Trace, blocks: tuple[int, ...], fractions: tuple[float, ...], flag: str
) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: .*allowed for this trace: from {trace.longest} blocks"):
        capacities_of(trace, blocks, fractions)


@pytest.mark.parametrize("size", [0, 12, 1 << 20])
def test_a_block_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=r"^--block-bytes: .*allowed: multiples of 8 bytes"):
        ReplayPlan(capacities=(None,), policies=("lru",), block_bytes=size)


def test_rows_carry_what_the_issue_lists() -> None:
    assert {field.name for field in fields(ReplayRow)} >= ROW_FIELDS


def test_a_replay_prints_a_table_and_writes_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_trace(tmp_path / "made-up.jsonl", made_up_prompts(60))
    out = tmp_path / "replay.json"
    flags = ["--capacity-fraction", "0.3,1", "--policy", "lru", "--limit-requests", "50", "--json", str(out)]
    assert main(["replay", "--trace", str(path), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("made-up: ")
    assert "[2/2]" in captured.err
    value = json.loads(out.read_text())
    assert value["command"] == "kvbench replay"
    assert value["checked"] is True
    assert value["arguments"]["trace"] == str(path)
    assert [row["unlimited"] for row in value["rows"]] == [False, True]
    for row in value["rows"]:
        assert row.keys() >= ROW_FIELDS
        assert (row["trace"], row["policy"], row["requests"]) == ("made-up", "lru", 50)
        assert 0 < row["lookup_p50_us"] <= row["lookup_p99_us"]
        assert 0 < row["read_p50_us"] <= row["read_p99_us"]
