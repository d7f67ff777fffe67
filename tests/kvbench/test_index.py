"""`kvbench index` on a small table, and that a wrong answer never passes for a right one."""

from typing import Any

import numpy as np
import pytest

from kvbench.index import IndexPlan, ProbeBench, fill_table, make_keys, run_index
from kvbench.memory import arena
from kvstore.core.errors import UsageError
from kvstore.index import IndexWriter, buckets_for, index_bytes

KEYS = 3000


def table() -> tuple[IndexWriter, ProbeBench]:
    present, absent = make_keys(5, KEYS)
    memory = arena(index_bytes(buckets_for(KEYS)))
    return fill_table(memory, present), ProbeBench(memory, present, absent, seed=5)


def test_a_small_run_answers_every_batch_and_checks_it() -> None:
    steps: list[str] = []
    result = run_index(IndexPlan(keys=KEYS, batches=(1, 32), seconds=0.05), note=lambda _: None, step=steps.append)
    assert [row.batch for row in result.rows] == [1, 32]
    assert all(row.checked and row.keys_per_s > 0 and row.p50_us > 0 for row in result.rows)
    assert result.resident_keys == KEYS
    assert result.bytes_per_entry < 128
    assert len(steps) == 2


def test_present_and_absent_keys_are_all_answered_right() -> None:
    _, bench = table()
    assert bench.measure(512, seconds=0.05).checked


@pytest.mark.parametrize("batch", [1, 512])
def test_keys_that_are_gone_from_the_table_are_noticed(batch: int) -> None:
    writer, bench = table()
    writer.remove(np.arange(KEYS // 2, dtype=np.int64))
    assert not bench.measure(batch, seconds=0.05).checked


def test_an_answer_about_another_block_is_noticed() -> None:
    present, absent = make_keys(5, KEYS)
    memory = arena(index_bytes(buckets_for(KEYS)))
    fill_table(memory, present[::-1].copy())
    assert not ProbeBench(memory, present, absent, seed=5).measure(512, seconds=0.05).checked


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [({"keys": 0}, "--keys: 0 "), ({"keys": 1 << 40}, "--keys: 1099511627776 "), ({"batches": (0,)}, "--batch: 0 ")],
)
def test_a_number_out_of_range_is_named_with_what_is_allowed(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError, match=f"^{culprit}.*allowed: 1 to "):
        IndexPlan(**arguments)
