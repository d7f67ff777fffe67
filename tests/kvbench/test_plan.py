"""Which rows a run measures, and what it refuses."""

import pytest

from kvbench.plan import (
    KIB,
    MIB,
    Case,
    Op,
    TransferPlan,
    Transport,
    crossed_cases,
    default_cases,
    groups,
    layers_of,
)
from kvstore.core.errors import UsageError


def test_a_run_without_flags_covers_every_promised_figure() -> None:
    promised = {
        Case(op, Transport.SHM, size, 64) for op in (Op.GET_INTO, Op.PUT, Op.VIEW) for size in (1 * MIB, 4 * MIB)
    } | {Case(Op.GET_INTO, Transport.TCP, 1 * MIB, 64), Case(Op.GET, Transport.SHM, 4 * KIB, 1)}
    assert promised <= set(default_cases())


def test_a_run_without_flags_spreads_from_64_kib_to_16_mib() -> None:
    sizes = {case.block_bytes for case in default_cases()}
    assert {64 * KIB, 16 * MIB} <= sizes


def test_a_run_without_flags_fits_in_six_gib() -> None:
    assert TransferPlan(cases=default_cases()).memory_bytes < 6 << 30


def test_puts_come_first_in_their_group_so_that_reads_find_what_they_wrote() -> None:
    for group in groups(TransferPlan(cases=default_cases())):
        is_put = [case.op is Op.PUT for case in group.cases]
        assert is_put == sorted(is_put, reverse=True)


def test_every_case_is_measured_exactly_once() -> None:
    cases = default_cases()
    measured = [case for group in groups(TransferPlan(cases=cases)) for case in group.cases]
    assert sorted(measured) == sorted(set(cases))


def test_a_group_holds_whole_batches_within_the_footprint() -> None:
    cases = crossed_cases([Op.GET], [Transport.SHM], [1 * MIB], [1, 48])
    (group,) = groups(TransferPlan(cases=cases, footprint_bytes=100 * MIB))
    assert group.blocks == 96


def test_one_batch_larger_than_the_footprint_is_still_measured() -> None:
    (group,) = groups(TransferPlan(cases=(Case(Op.GET, Transport.SHM, 4 * MIB, 8),), footprint_bytes=MIB))
    assert group.blocks == 8


def test_a_view_is_never_asked_of_tcp() -> None:
    cases = crossed_cases([Op.VIEW, Op.GET], [Transport.SHM, Transport.TCP], [MIB], [1])
    assert Case(Op.VIEW, Transport.TCP, MIB, 1) not in cases
    assert len(cases) == 3


@pytest.mark.parametrize(("block_bytes", "layers"), [(4 * KIB, 1), (64 * KIB, 16), (1 * MIB, 32), (12 * KIB, 3)])
def test_layers_are_equal_parts_of_at_least_a_page(block_bytes: int, layers: int) -> None:
    assert layers_of(block_bytes, 32) == layers


@pytest.mark.parametrize(
    ("size", "batch", "culprit"),
    [(5000, 1, "--sizes: 5KB"), (0, 1, "--sizes: 0B"), (2 << 30, 1, "--sizes: 2GiB"), (MIB, 5000, "--batch: 5000")],
)
def test_a_size_or_batch_out_of_range_is_named_with_what_is_allowed(size: int, batch: int, culprit: str) -> None:
    with pytest.raises(UsageError, match=f"^{culprit}.*allowed: "):
        crossed_cases([Op.GET], [Transport.SHM], [size], [batch])


def test_without_a_batch_large_blocks_move_at_most_256_mib_a_call() -> None:
    cases = crossed_cases([Op.GET], [Transport.SHM], [64 * KIB, 16 * MIB, 1024 * MIB], None)
    assert [case.batch for case in cases] == [64, 16, 1]


def test_views_over_tcp_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="over tcp a view is a copy, as a get is; allowed: --transport shm"):
        crossed_cases([Op.VIEW], [Transport.TCP], [MIB], [1])
