"""Readers in three other processes race the writer and check every answer; and the proof that this check bites.

`KVSTORE_RACE_SECONDS` sets how long the main race takes; 20 unless given.
"""

import os

import pytest

from tests.index.racing import Mistakes, Race, Report, SlowWriter

RACE_S = float(os.environ.get("KVSTORE_RACE_SECONDS", "20"))
PLANTED_S = 60.0  # at most; a planted mistake shows within seconds


def in_all(reports: list[Report]) -> Report:
    total = Report()
    for report in reports:
        total.answers += report.answers
        total.accepted += report.accepted
        total.lost += report.lost
        total.permanent_misses += report.permanent_misses
        total.violations += report.violations
    return total


@pytest.mark.slow
def test_readers_racing_the_writer_never_accept_a_torn_or_stale_entry() -> None:
    with Race() as race:
        seen = in_all(race.run(RACE_S))
        assert race.churn.rounds > 100 * RACE_S
    assert seen.violations == []
    assert seen.accepted > 1000 * RACE_S
    assert seen.lost > 0, "no race took place"
    # A block that is there may be missed while it changes its place, and only then.
    assert seen.permanent_misses <= seen.answers / 1000


def test_readers_racing_a_writer_whose_stores_arrive_in_any_order_never_accept_a_torn_entry() -> None:
    with Race(writer=SlowWriter) as race:
        seen = in_all(race.run(min(RACE_S, 3)))
    assert seen.violations == []
    assert seen.accepted > 0


def test_readers_that_skip_the_checksum_are_caught_by_this_race() -> None:
    with Race(writer=SlowWriter, blind=True) as race:
        assert in_all(race.run(PLANTED_S)).violations


@pytest.mark.parametrize("mistake", [Mistakes(recycle_early=True), Mistakes(publish_early=True)], ids=str)
def test_a_writer_that_shows_bytes_too_early_or_takes_them_too_soon_is_caught_by_this_race(mistake: Mistakes) -> None:
    with Race(mistakes=mistake) as race:
        assert in_all(race.run(PLANTED_S)).violations
