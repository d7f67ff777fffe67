"""`kvbench scale` on small numbers, and that what is wrong never passes for right."""

from typing import Any

import numpy as np
import pytest

from kvbench import report
from kvbench.scale import FullShard, ScalePlan, measure_memory, own_memory_bytes, run_scale
from kvstore.core.errors import UsageError
from kvstore.testing.cluster import ServerProcess

SMALL = ScalePlan(blocks=(1024, 8192), policies=("lru",), seconds=0.2)


def test_a_small_run_measures_both_sizes_and_a_server_and_checks_them(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    result = run_scale(SMALL, note=lambda _: None, step=steps.append)
    assert [row.blocks for row in result.eviction] == [1024, 8192]
    assert result.eviction[0].ratio_to_small == 1.0
    assert all(row.checked and row.evict_us_per_block > 0 and row.evicted > 0 for row in result.eviction)
    (memory,) = result.memory
    assert memory.checked
    assert memory.blocks == 8192
    assert 0 < memory.bytes_per_block < 4096
    assert len(steps) == 2
    report.print_scale(result)
    assert "8,192" in capsys.readouterr().out
    assert report.scale_json(result, {}, seed=0)["checked"]


def test_a_shard_that_is_no_longer_full_is_noticed() -> None:
    shard = FullShard(1024, "lru", 64, 0)
    shard.put(0)
    assert shard.checked
    assert shard.evicted == 64
    shard._shard.flush(b"")  # pyright: ignore[reportPrivateUsage] -- the fault is planted
    assert not shard.checked


def test_the_pool_is_not_counted_as_memory_of_the_server() -> None:
    with ServerProcess(dram="512MiB") as server:
        server.wait_warm()
        assert 10 << 20 < own_memory_bytes(server) < 400 << 20


def test_memory_grows_by_less_than_a_kilobyte_a_block() -> None:
    row = measure_memory(ScalePlan(blocks=(1024, 50_000), policies=("lru",)), "lru")
    assert row.checked
    assert np.isfinite(row.bytes_per_block)
    assert 0 < row.bytes_per_block < 1024


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [({"blocks": (10, 5000)}, "--blocks"), ({"batch": 0}, "--batch"), ({"batch": 5000}, "--batch")],
)
def test_a_number_out_of_range_is_named_with_what_is_allowed(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError, match=f"^{culprit}.*allowed: "):
        ScalePlan(policies=("lru",), **arguments)
