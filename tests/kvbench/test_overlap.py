"""The recursion of transfer behind compute, and which pipelines a run measures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.overlap import CPU_BLOCKS, DEFAULT_RATIOS, Compute, LayersPlan, finish_s
from kvbench.plan import MIB
from kvstore.core.errors import UsageError

SECONDS = st.floats(0.0, 10.0)
LAYERS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=40)


def split(layers: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [transfer for transfer, _ in layers], [compute for _, compute in layers]


@given(LAYERS)
def test_a_pipeline_takes_at_least_the_longer_part_and_at_most_both_one_after_the_other(
    layers: list[tuple[float, float]],
) -> None:
    transfer, compute = split(layers)
    total = finish_s(transfer, compute)
    assert total >= max(transfer[0] + sum(compute), sum(transfer) + compute[-1]) - 1e-9
    assert total <= sum(transfer) + sum(compute) + 1e-9


@given(LAYERS)
def test_the_finish_is_the_latest_of_all_moments_from_which_on_it_only_computes(
    layers: list[tuple[float, float]],
) -> None:
    transfer, compute = split(layers)
    latest = max(sum(transfer[: place + 1]) + sum(compute[place:]) for place in range(len(layers)))
    assert finish_s(transfer, compute) == pytest.approx(latest)


@given(st.integers(1, 80), SECONDS, SECONDS)
def test_equal_layers_take_what_the_closed_form_says(layers: int, transfer: float, compute: float) -> None:
    closed = layers * compute + transfer + (layers - 1) * max(0.0, transfer - compute)
    assert finish_s([transfer] * layers, [compute] * layers) == pytest.approx(closed)


@given(LAYERS, st.integers(0, 39), st.floats(0.0, 5.0))
def test_a_slower_layer_never_makes_it_finish_earlier(
    layers: list[tuple[float, float]], place: int, more: float
) -> None:
    transfer, compute = split(layers)
    before = finish_s(transfer, compute)
    transfer[place % len(layers)] += more
    assert finish_s(transfer, compute) >= before


def test_no_layers_take_no_time() -> None:
    assert finish_s([], []) == 0.0


FLOP_S = 156e12
# KV bytes of a token and layer, and parameters of a layer.
MODELS = {"LLaMA-13B": (20_480, 317.2e6), "Llama-3.1-8B": (4096, 218.1e6), "Qwen2.5-7B": (2048, 233.06e6)}


@pytest.mark.parametrize(
    ("model", "hit_rate", "gbit_s"),
    [
        (model, hit_rate, gbit_s)
        for model, column in {
            "LLaMA-13B": (17, 40, 94, 363),
            "Llama-3.1-8B": (5, 12, 27, 106),
            "Qwen2.5-7B": (2.4, 5.5, 13, 49),
        }.items()
        for hit_rate, gbit_s in zip((0.3, 0.5, 0.7, 0.9), column, strict=True)
    ],
)
def test_from_the_known_bandwidth_on_all_but_the_first_layer_is_hidden(
    model: str, hit_rate: float, gbit_s: float
) -> None:
    kv_bytes, parameters = MODELS[model]
    tokens, layers = 4096, 32
    compute = (1 - hit_rate) * tokens * 2 * parameters / FLOP_S

    def exposed(gbit_s: float) -> float:
        """Seconds beyond the first layer."""
        transfer = hit_rate * tokens * kv_bytes / (gbit_s * 1e9 / 8)
        return finish_s([transfer] * layers, [compute] * layers) - layers * compute - transfer

    assert exposed(gbit_s * 1.05) == pytest.approx(0.0, abs=1e-9)
    assert exposed(gbit_s * 0.95) > 0.0


def test_a_run_without_flags_has_20_ratios_from_a_tenth_to_four_over_every_transport() -> None:
    plan = LayersPlan()
    assert len(DEFAULT_RATIOS) == len(set(DEFAULT_RATIOS)) == 20
    assert (DEFAULT_RATIOS[0], DEFAULT_RATIOS[-1]) == (0.1, 4.0)
    assert plan.ratios_of(Compute.SLEEP) == DEFAULT_RATIOS
    assert len(plan.ratios_of(Compute.MATMUL)) == 5
    assert plan.steps == 2 * (20 + 5 + 4 + 1)


def test_ratios_that_are_asked_for_are_those_of_both_kinds() -> None:
    plan = LayersPlan(ratios=(0.5, 2.0), computes=(Compute.MATMUL, Compute.SLEEP))
    assert plan.ratios_of(Compute.MATMUL) == plan.ratios_of(Compute.SLEEP) == (0.5, 2.0)


def test_transfer_and_compute_both_change_with_the_ratio() -> None:
    plan = LayersPlan(layer_ms=2.0)
    for ratio in (0.25, 1.0, 4.0):
        transfer_s = plan.transfer_s(ratio)
        assert (transfer_s * (transfer_s / ratio)) ** 0.5 == pytest.approx(0.002)


def test_streams_are_bounded_and_fit_into_the_arena() -> None:
    plan = LayersPlan(footprint_bytes=256 * MIB)
    for shape, blocks in plan.throughputs("run"):
        assert blocks.namespace.layers == shape.layers
        assert 0.8 * 256 * MIB < blocks.total_bytes <= 256 * MIB
    few, many = plan.cpu_sets("run")
    assert (few.blocks, many.blocks) == CPU_BLOCKS
    assert few.total_bytes == many.total_bytes
    assert plan.pipeline("run").total_bytes <= plan.arena_bytes < plan.pool_bytes < plan.memory_bytes < 4 << 30


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"ratios": (1.0, 0.0)}, "--ratios: 0"),
        ({"ratios": (float("nan"),)}, "--ratios: nan"),
        ({"layers": 300}, "--layers: 300"),
        ({"layer_ms": 0.0}, "--layer-ms: 0"),
        ({"rounds": 0}, "--rounds: 0"),
        ({"seconds": 0.0}, "--seconds: 0"),
        ({"footprint_bytes": 1}, "--footprint: 1B"),
    ],
)
def test_a_number_out_of_range_is_named_with_what_is_allowed(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError, match=f"^{culprit}.*allowed: "):
        LayersPlan(**arguments)
