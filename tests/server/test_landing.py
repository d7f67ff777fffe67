"""Landing space is granted in pieces that don't overlap; one that was given back rests for as long as it can."""

import itertools

from kvstore.server.landing import GRANT_BYTES_MAX, LandingSpace
from kvstore.transport.memory import create_segment


def space(size_bytes: int, start: int = 0) -> LandingSpace:
    return LandingSpace(create_segment("landing", start + size_bytes), start, size_bytes)


def test_grants_don_t_overlap_and_end_with_the_space() -> None:
    landing = space(3 * GRANT_BYTES_MAX + 5000, start=GRANT_BYTES_MAX)
    grants = [landing.grant(1 << 40) for _ in range(4)]
    assert [len(grant.memory) for grant in grants] == [GRANT_BYTES_MAX] * 3 + [0]
    starts = sorted(grant.start for grant in grants[:3])
    assert starts[0] >= GRANT_BYTES_MAX
    assert all(after - before >= GRANT_BYTES_MAX for before, after in itertools.pairwise(starts))


def test_a_grant_is_what_was_wanted_at_most() -> None:
    grant = space(1 << 20).grant(8192)
    assert len(grant.memory) == 8192


def test_what_was_given_back_is_granted_last() -> None:
    landing = space(4 * GRANT_BYTES_MAX)
    first = landing.grant(GRANT_BYTES_MAX)
    landing.take_back(first)
    later = [landing.grant(GRANT_BYTES_MAX).start for _ in range(4)]
    assert later[-1] == first.start
    assert len(set(later)) == 4


def test_no_space_grants_nothing() -> None:
    landing = space(4096)
    assert len(LandingSpace(create_segment("none", 4096), 0, 0).grant(1 << 20).memory) == 0
    grant = landing.grant(100)
    assert len(grant.memory) == 0
    landing.take_back(grant)
    assert len(landing.grant(4096).memory) == 4096
