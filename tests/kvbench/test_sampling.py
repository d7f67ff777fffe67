"""Timing an operation and its limit in alternation."""

import numpy as np
import pytest

from kvbench.sampling import Samples, alternate


def test_the_two_take_turns_at_going_first() -> None:
    calls: list[str] = []

    def timed(name: str) -> float:
        calls.append(name)
        return 1.0

    alternate(lambda _: timed("op"), lambda _: timed("limit"), seconds=1e-9)
    assert calls[:8] == ["op", "limit", "limit", "op", "op", "limit", "limit", "op"]


def test_warm_up_turns_do_not_count_and_five_turns_always_do() -> None:
    samples = alternate(float, lambda turn: 10.0 + turn, seconds=1e-9)
    assert samples.op_s.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert samples.limit_s is not None
    assert samples.limit_s.tolist() == [12.0, 13.0, 14.0, 15.0, 16.0]


def test_an_operation_without_a_limit_has_no_limit_rate() -> None:
    samples = alternate(lambda _: 1.0, None, seconds=1e-9)
    assert samples.limit_rate(1.0) is None


def test_a_run_ends_in_time_however_fast_the_operation() -> None:
    assert len(alternate(lambda _: 1e-6, None, seconds=3600).op_s) == 5000


def test_rates_are_medians_of_the_turns() -> None:
    samples = Samples(np.array([1.0, 2.0, 100.0]), np.array([0.5, 1.0, 4.0]))
    assert samples.rate(4.0) == 2.0
    assert samples.limit_rate(4.0) == 4.0
    assert samples.percentile_us(50) == pytest.approx(2e6)
