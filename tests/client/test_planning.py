"""Fetch or recompute: the plan follows what was seen, and is never worse than doing the one or the other altogether."""

from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.client.planning import (
    PROBE_SHARE,
    STALE_S,
    Action,
    ComputeModel,
    FetchPlan,
    Hit,
    Planner,
    Route,
    TransferModel,
    overlapped_seconds,
    plan_fetch,
)
from kvstore.core.clock import Clock
from kvstore.core.states import Tier
from kvstore.testing.clock import FakeClock
from tests.client.sdk import BLOCK_TOKENS, one_line, stored

seconds = st.floats(1e-6, 10.0)
LAYERS = 32
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A prompt of which `blocks` are cached; what fetching one and computing one costs, and computing the rest."""

    blocks: int
    block_s: float
    compute_s: float
    rest_s: float

    def plan(self, *, overlap: bool = True, faster: float = 1.0) -> FetchPlan:
        counts = np.arange(self.blocks + 1)
        return plan_fetch(
            counts * np.float64(self.block_s / faster),
            (self.blocks - counts) * np.float64(self.compute_s) + self.rest_s,
            blocks=self.blocks,
            layers=LAYERS,
            overlap=overlap,
        )


cases = st.builds(Case, st.integers(1, 200), seconds, seconds, seconds)


def total_s(plan: FetchPlan) -> float:
    return plan.fetch_s + plan.compute_s - plan.hidden_s


def in_steps(transfer_s: np.ndarray, compute_s: np.ndarray) -> float:
    """The recursion, one layer after the other."""
    arrives_s = ends_s = 0.0
    for transfer, compute in zip(transfer_s, compute_s, strict=True):
        arrives_s += transfer
        ends_s = max(ends_s, arrives_s) + compute
    return ends_s


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=40))
def test_the_pipeline_takes_what_the_recursion_says(layers: list[tuple[float, float]]) -> None:
    transfer_s, compute_s = np.array(layers).T
    assert overlapped_seconds(transfer_s, compute_s) == pytest.approx(in_steps(transfer_s, compute_s))


@given(cases, st.booleans())
def test_a_plan_is_never_worse_than_fetching_all_or_nothing(case: Case, overlap: bool) -> None:
    plan = case.plan(overlap=overlap)
    each = np.full(LAYERS, 1 / LAYERS)
    fetch_s, rest_s = case.blocks * case.block_s, case.rest_s
    all_s = in_steps(each * fetch_s, each * rest_s) if overlap else fetch_s + rest_s
    assert total_s(plan) <= min(all_s, plan.recompute_s) * (1 + 1e-9)
    assert 0 <= plan.hidden_s <= plan.fetch_s
    assert (plan.hidden_s == 0) or overlap


@given(cases, st.booleans(), st.floats(1.01, 100))
def test_a_faster_link_never_makes_it_fetch_less_or_take_longer(case: Case, overlap: bool, faster: float) -> None:
    slow, fast = case.plan(overlap=overlap), case.plan(overlap=overlap, faster=faster)
    assert fast.fetch_blocks >= slow.fetch_blocks
    assert total_s(fast) <= total_s(slow) * (1 + 1e-9)


@given(cases)
def test_overlap_never_makes_it_take_longer(case: Case) -> None:
    assert total_s(case.plan()) <= total_s(case.plan(overlap=False)) * (1 + 1e-9)


def test_the_action_says_how_much_and_why_says_it_in_one_line() -> None:
    fetch = Case(blocks=100, block_s=1e-4, compute_s=1e-2, rest_s=0.1)
    prefix = replace(fetch, block_s=1e-2)
    recompute = replace(fetch, block_s=1.0)
    plans = [case.plan() for case in (fetch, prefix)] + [recompute.plan(overlap=False)]
    assert [plan.action for plan in plans] == [Action.FETCH, Action.FETCH_PREFIX, Action.RECOMPUTE]
    assert (plans[0].fetch_blocks, plans[2].fetch_blocks) == (100, 0)
    assert 30 < plans[1].fetch_blocks < 70  # the transfer of the one half hides behind the computing of the other
    assert [plan.why.partition(":")[0] for plan in plans] == [
        "fetch all 100 blocks",
        f"fetch {plans[1].fetch_blocks} of 100 blocks",
        "recompute",
    ]
    assert all("\n" not in plan.why for plan in plans)


FLOPS = 156e12


@pytest.mark.parametrize(
    ("kv_bytes", "parameters", "gbps"),
    [
        pytest.param(2 * 5120 * 2, 4 * 5120**2 + 3 * 5120 * 13824, (17, 40, 94, 363), id="LLaMA-13B"),
        pytest.param(
            2 * 1024 * 2, 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336, (5, 12, 27, 106), id="Llama-3.1-8B"
        ),
        pytest.param(2 * 512 * 2, 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944, (2.4, 5.5, 13, 49), id="Qwen2.5-7B"),
    ],
)
def test_the_bandwidth_that_hides_the_transfer_is_that_of_the_published_table(
    kv_bytes: int, parameters: int, gbps: tuple[float, ...]
) -> None:
    """`B_min = r kappa F / ((1 - r) 2 P_l)`: above it only the first layer shows, below it more does."""
    tokens = 4096
    for hit_rate, published in zip((0.3, 0.5, 0.7, 0.9), gbps, strict=True):
        blocks = round(tokens * hit_rate / 16)
        compute_s = (tokens - 16 * blocks) * LAYERS * 2 * parameters / FLOPS

        def shown_layers(bandwidth: float, blocks: int = blocks, compute_s: float = compute_s) -> float:
            fetch_s = np.array([0, 16 * blocks * LAYERS * kv_bytes / bandwidth])
            plan = plan_fetch(fetch_s, np.array([1e9, compute_s]), blocks=1, layers=LAYERS, overlap=True)
            return (plan.fetch_s - plan.hidden_s) / plan.fetch_s * LAYERS

        bandwidth = published * 1e9 / 8
        assert shown_layers(bandwidth * 1.08) == pytest.approx(1)  # the table is rounded
        assert shown_layers(bandwidth * 0.92) > 1.01


def test_a_transfer_model_follows_what_it_sees_by_route_and_size() -> None:
    model = TransferModel()
    dram, disk = Route("tcp", Tier.DRAM), Route("tcp", Tier.DISK)
    sizes = np.array([0, MIB // 2, MIB, 8 * MIB, 64 * MIB, 128 * MIB])
    assert model.seconds(dram, sizes) is None
    model.observe(dram, MIB, 0.002)
    model.observe(dram, 64 * MIB, 0.065)
    estimate = model.seconds(dram, sizes)
    assert estimate is not None
    assert estimate == pytest.approx([0, 0.001, 0.002, 0.009, 0.065, 0.13])
    assert model.seconds(disk, sizes) is None
    for _ in range(20):
        model.observe(dram, 64 * MIB, 0.65)
    later = model.seconds(dram, sizes)
    assert later is not None
    assert later[4] == pytest.approx(0.65, rel=0.01)
    assert later[2] == pytest.approx(0.002)


@given(st.lists(st.tuples(st.integers(1, 10**9), seconds), min_size=1, max_size=30))
def test_more_bytes_never_seem_to_take_less_time(samples: list[tuple[int, float]]) -> None:
    model = TransferModel()
    route = Route("shm", Tier.DRAM)
    for size, took_s in samples:
        model.observe(route, size, took_s)
    estimate = model.seconds(route, np.arange(0, 2 * 10**9, 10**7))
    assert estimate is not None
    assert estimate[0] == 0
    assert (np.diff(estimate) >= -1e-12).all()


def test_one_fresh_sample_says_more_than_all_that_are_old() -> None:
    clock = FakeClock()
    model = TransferModel(clock)
    route = Route("tcp", Tier.DRAM)
    for _ in range(5):
        model.observe(route, 64 * MIB, 10.0)
    clock.advance(STALE_S + 1)
    assert not model.fresh(route)
    assert model.seconds(route, np.array([64 * MIB])) == pytest.approx([10.0])
    model.observe(route, MIB, 0.001)
    assert model.fresh(route)
    assert model.seconds(route, np.array([64 * MIB])) == pytest.approx([0.064])


def test_what_moved_nothing_teaches_nothing() -> None:
    transfers, computing = TransferModel(), ComputeModel()
    transfers.observe(Route("tcp", Tier.DRAM), 0, 1.0)
    computing.observe(0, 1.0)
    assert transfers.seconds(Route("tcp", Tier.DRAM), np.array([1])) is None
    assert computing.seconds(np.array([1])) is None


def a_planner(clock: Clock) -> Planner:
    return Planner(layers=LAYERS, block_bytes=MIB, block_tokens=16, to_device=False, clock=clock)


def a_hit(blocks: int, transport: str = "tcp", tier: Tier = Tier.DRAM) -> Hit:
    return Hit(transport, np.arange(blocks), np.full(blocks, tier, dtype=np.uint8))


def test_without_samples_everything_is_fetched_and_the_plan_says_what_is_not_known() -> None:
    planner = a_planner(FakeClock())
    plan = planner.plan([a_hit(8)], 8, 200, overlap=True)
    assert (plan.action, plan.fetch_blocks) == (Action.FETCH, 8)
    assert isnan(plan.fetch_s)
    assert isnan(plan.recompute_s)
    assert "nothing has come over tcp from DRAM yet" in plan.why
    assert "how fast the engine computes" in plan.why


def test_a_link_that_was_too_slow_is_tried_with_a_few_blocks_after_a_time() -> None:
    clock = FakeClock()
    planner = a_planner(clock)
    planner.computing.observe(1000, 1.0)
    keys = np.arange(64, dtype=np.uint64)
    planner.observe_fetch("tcp", keys, 64 * MIB, 60.0, to_device=False)
    assert planner.plan([a_hit(64)], 64, 1024, overlap=False).action == Action.RECOMPUTE
    clock.advance(STALE_S + 1)
    probe = planner.plan([a_hit(64)], 64, 1024, overlap=False)
    assert (probe.action, probe.fetch_blocks) == (Action.FETCH_PREFIX, 64 // PROBE_SHARE)
    assert "tcp from DRAM is still so slow" in probe.why
    planner.observe_fetch("tcp", keys[:4], 4 * MIB, 0.004, to_device=False)
    assert planner.plan([a_hit(64)], 64, 1024, overlap=False).action == Action.FETCH


def test_blocks_on_the_ssd_are_judged_by_what_came_from_there() -> None:
    planner = a_planner(FakeClock())
    planner.computing.observe(1000, 1.0)
    keys = np.arange(64, dtype=np.uint64)
    planner.observe_fetch("shm", keys, 64 * MIB, 0.01, to_device=False)
    planner.note_tiers(keys, np.full(64, Tier.DISK, dtype=np.uint8))
    planner.observe_fetch("shm", keys, 64 * MIB, 30.0, to_device=False)
    assert planner.plan([a_hit(64, "shm", Tier.DISK)], 64, 1024, overlap=False).action == Action.RECOMPUTE
    assert planner.plan([a_hit(64, "shm")], 64, 1024, overlap=False).action == Action.FETCH
    half = np.repeat(np.array([Tier.DRAM, Tier.DISK], dtype=np.uint8), 32)
    mixed = planner.plan([Hit("shm", np.arange(64), half)], 64, 1024, overlap=False)
    assert mixed.fetch_blocks == 32


def test_links_over_sockets_work_side_by_side_and_those_over_memory_in_turn() -> None:
    planner = a_planner(FakeClock())
    planner.computing.observe(1000, 1.0)
    for transport in ("tcp", "shm"):
        planner.observe_fetch(transport, np.arange(4, dtype=np.uint64), 4 * MIB, 0.004, to_device=False)

    def fetch_s(transport: str) -> float:
        tiers = np.zeros(32, dtype=np.uint8)
        hits = [Hit(transport, np.arange(first, 64, 2), tiers) for first in (0, 1)]
        return planner.plan(hits, 64, 1024, overlap=False).fetch_s

    assert fetch_s("tcp") == pytest.approx(0.032)
    assert fetch_s("shm") == pytest.approx(0.064)


def test_a_lookup_plans_by_what_the_client_has_seen(client: kvstore.Client) -> None:
    keys, data = stored(client, 32)
    into = np.empty_like(data)
    first = client.lookup(keys, plan=True)
    assert first.plan is not None
    assert (first.plan.action, first.plan.fetch_blocks) == (Action.FETCH, 32)
    assert client.lookup(keys).plan is None

    client.get_into(keys, into)
    client.observe_compute(32 * BLOCK_TOKENS, 1000.0)
    slow_engine = client.lookup(keys, plan=True).plan
    assert slow_engine is not None
    assert slow_engine.action == Action.FETCH
    assert 0 < slow_engine.fetch_s < slow_engine.recompute_s == pytest.approx(1000.0)
    for _ in range(50):
        client.observe_compute(32 * BLOCK_TOKENS, 1e-9)
    fast_engine = client.lookup(keys, plan=True, prompt_tokens=33 * BLOCK_TOKENS).plan
    assert fast_engine is not None
    assert fast_engine.action == Action.RECOMPUTE


def test_a_plan_for_a_prompt_shorter_than_its_keys_and_a_speed_of_nothing_are_refused(client: kvstore.Client) -> None:
    keys, _ = stored(client, 2)
    with one_line(kvstore.UsageError, "prompt_tokens=7", "2 keys stand for 8"):
        client.lookup(keys, plan=True, prompt_tokens=7)
    for tokens, took_s in ((0, 1.0), (1, 0.0), (1, float("nan")), (1, float("inf"))):
        with one_line(kvstore.UsageError, f"tokens={tokens}", "allowed is"):
            client.observe_compute(tokens, took_s)
