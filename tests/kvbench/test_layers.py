"""`kvbench layers` against a real server: a small run is complete and checked, and damage never goes unnoticed."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.cli import main
from kvbench.consumer import Consumer, ConsumerSetup, CpuCost, Fill, MeasurePipeline, MeasureThroughput, Rounds, Scene
from kvbench.errors import BenchError
from kvbench.layers import cpu_row, pipeline_row
from kvbench.memory import SharedArena
from kvbench.overlap import SMOLLM2, BlockSet, Compute
from kvbench.plan import Transport
from kvbench.report import layers_headlines, layers_json
from kvstore.testing.cluster import ServerProcess
from tests.kvbench.rows import LAYERS_RESULT

BLOCKS = 3
NAMESPACE = SMOLLM2.namespace(16, "test")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as server:
        yield server


@pytest.fixture
def consumer(server: ServerProcess) -> Iterator[Consumer]:
    """A consumer in this process, its blocks put."""
    far = SharedArena("kvbench-test", 4096)
    setup = ConsumerSetup(server.address, 7, BLOCKS * NAMESPACE.block_bytes, far.path, raw_port=0)
    with setup.open() as consumer:
        Fill(BlockSet(NAMESPACE, BLOCKS)).run(consumer)
        assert consumer.scene is not None
        yield consumer
        if consumer.scene is not None:
            consumer.scene.clear()
    far.close()


def scene_of(consumer: Consumer) -> Scene:
    assert consumer.scene is not None
    return consumer.scene


def spoil(consumer: Consumer, block: int, byte: int) -> None:
    """Put one block again, with one bit of one byte flipped."""
    scene = scene_of(consumer)
    client, keys = scene.client(Transport.SHM), scene.keys[block : block + 1]
    damaged = scene.put[block].copy()
    damaged[byte] ^= 1
    client.delete(keys)
    assert client.put(keys, damaged[None]).stored == 1


@pytest.mark.parametrize("transport", list(Transport))
def test_one_flipped_bit_of_any_layer_is_noticed_by_a_pipeline(consumer: Consumer, transport: Transport) -> None:
    pipeline = MeasurePipeline(transport, Compute.SLEEP, 1.0, BLOCKS, rounds=1)
    assert pipeline.run(consumer).damaged == 0
    spoil(consumer, block=1, byte=NAMESPACE.block_bytes - 1)  # of the last layer, and no stamp
    assert pipeline.run(consumer).damaged > 0


@pytest.mark.parametrize("transport", list(Transport))
def test_one_flipped_bit_is_noticed_beside_get_into(consumer: Consumer, transport: Transport) -> None:
    throughput = MeasureThroughput(transport, seconds=0.01)
    assert throughput.run(consumer)[1] == 0
    spoil(consumer, block=2, byte=4097)
    assert throughput.run(consumer)[1] > 0


def test_a_missing_block_ends_the_run(consumer: Consumer) -> None:
    scene = scene_of(consumer)
    scene.client(Transport.SHM).delete(scene.keys[1:2])
    for command in (
        MeasurePipeline(Transport.SHM, Compute.SLEEP, 1.0, BLOCKS, rounds=1),
        MeasureThroughput(Transport.SHM, seconds=0.01),
    ):
        with pytest.raises(BenchError, match=f"2 of {BLOCKS} blocks"):
            command.run(consumer)


def test_rows_are_medians_and_predict_from_the_times_of_each_layer() -> None:
    rounds = Rounds(
        total_s=np.array([0.010, 0.012, 0.099]),
        compute_s=np.array([0.004, 0.004, 0.004]),
        transfer_s=np.array([0.009, 0.009, 0.009]),
        first_s=np.array([0.001, 0.001, 0.001]),
        arrivals_s=np.array([[0.001, 0.009]] * 3),
        computes_s=np.array([[0.002, 0.002]] * 3),
        damaged=0,
        compared=1,
    )
    row = pipeline_row(Compute.SLEEP, Transport.SHM, rounds, layer_bytes=5)
    assert row.checked
    assert (row.layers, row.samples, row.layer_bytes) == (2, 3, 5)
    assert row.total_ms == pytest.approx(12.0)
    assert row.exposed_ms == pytest.approx(8.0)
    assert row.predicted_ms == pytest.approx(11.0)
    assert row.ratio == pytest.approx(2.25)


def test_growth_is_of_what_is_left_without_the_bytes() -> None:
    row = cpu_row(Transport.TCP, CpuCost((50e-6, 80e-6), 20e-6, damaged=0))
    assert row.growth == pytest.approx(2.0)
    assert row.checked
    assert not cpu_row(Transport.TCP, CpuCost((50e-6, 80e-6), 20e-6, damaged=1)).checked


def test_headlines_name_the_worst_distance_and_what_is_exposed() -> None:
    (line,) = layers_headlines(LAYERS_RESULT)
    assert line.startswith("shm sleep: 10.0% from the recursion at most")
    assert "2.0% of the transfer exposed" in line


def test_wrong_content_in_any_list_is_wrong_altogether() -> None:
    assert layers_json(LAYERS_RESULT, {}, seed=0)["checked"] is True
    for name in ("pipelines", "throughputs", "cpu"):
        first, *others = getattr(LAYERS_RESULT, name)
        result = replace(LAYERS_RESULT, **{name: [*others, replace(first, checked=False)]})
        assert layers_json(result, {}, seed=0)["checked"] is False


@pytest.mark.slow
def test_a_small_run_measures_every_row_and_writes_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    flags = ["--ratios", "0.5,2", "--layers", "4", "--layer-ms", "0.2", "--rounds", "2"]
    environment = dict(os.environ)
    assert main(["layers", *flags, "--footprint", "1MiB", "--seconds", "0.01", "--json", str(out)]) == 0
    assert dict(os.environ) == environment
    captured = capsys.readouterr()
    assert "[18/18]" in captured.err
    assert "from the recursion at most" in captured.out
    value = json.loads(out.read_text())
    assert value["checked"] is True
    rows = value["rows"]
    assert len({(row["compute"], row["transport"]) for row in rows}) == 4
    assert len(rows) == 8
    for row in rows:
        assert row["checked"] is True
        assert row["layers"] == 4
        assert 0 < row["first_layer_ms"] <= row["transfer_ms"]
        assert row["compute_ms"] > 0
        assert row["predicted_ms"] > 0
        assert row["exposed_ms"] == pytest.approx(row["total_ms"] - row["compute_ms"])
        assert row["ratio"] == pytest.approx(row["transfer_ms"] / row["compute_ms"])
    throughput = value["throughput"]
    assert len({(row["shape"], row["block_tokens"], row["transport"]) for row in throughput}) == len(throughput) == 8
    assert all(row["checked"] and row["stream_gib_s"] > 0 and row["get_into_gib_s"] > 0 for row in throughput)
    assert [row["transport"] for row in value["cpu"]] == ["shm", "tcp"]
    assert all(row["checked"] and row["blocks"] == [16, 512] for row in value["cpu"])
