"""Placement: every process agrees, weights are respected, and a change of members moves only what it must."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.membership import Member
from kvstore.cluster.placement import place
from kvstore.core.keys import KEY_DTYPE

COUNT = 40_000
KEYS = np.random.default_rng(3).integers(0, 1 << 63, size=(COUNT, 3), dtype=np.uint64).view(KEY_DTYPE).reshape(COUNT)
SIGMAS = 6.0  # of the binomial spread: a false alarm once in hundreds of millions


def nodes(count: int) -> list[Member]:
    return [Member(f"10.0.0.{number}:7400") for number in range(1, count + 1)]


def assert_share(found: int, share: float) -> None:
    assert abs(found - COUNT * share) < SIGMAS * (COUNT * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_members_of_equal_weight_get_equal_shares(count: int) -> None:
    for found in np.bincount(place(KEYS, nodes(count)), minlength=count).tolist():
        assert_share(found, 1 / count)


def test_a_members_share_is_its_share_of_the_weights() -> None:
    members = [Member("a:1", 1), Member("b:1", 2), Member("c:1", 5), Member("d:1", 0.5)]
    for member, found in zip(members, np.bincount(place(KEYS, members), minlength=4).tolist(), strict=True):
        assert_share(found, member.weight / 8.5)


@given(count=st.integers(1, 8), weight=st.floats(0.25, 4), position=st.integers(0, 8))
def test_a_member_that_joins_takes_its_share_and_nothing_else_moves(count: int, weight: float, position: int) -> None:
    before = nodes(count)
    joining = Member("10.9.9.9:7400", weight)
    after = [*before[:position], joining, *before[position:]]
    names_before = np.array([member.name for member in before])[place(KEYS, before)]
    names_after = np.array([member.name for member in after])[place(KEYS, after)]
    moved = names_before != names_after
    assert (names_after[moved] == joining.name).all()
    assert_share(int(np.count_nonzero(moved)), weight / (count + weight))


def test_a_member_that_leaves_gives_its_keys_to_all_others() -> None:
    before, after = nodes(5), nodes(4)
    owners_before, owners_after = place(KEYS, before), place(KEYS, after)
    stayed = owners_before < 4
    assert (owners_after[stayed] == owners_before[stayed]).all()
    orphans = np.bincount(owners_after[~stayed], minlength=4)
    assert orphans.min() > 0.8 * orphans.mean()


def test_the_shares_within_one_nodes_keys_are_equal_too() -> None:
    """Shards of a node are chosen by the same hash as the node; that must not make one of them the favourite."""
    on_first = KEYS[place(KEYS, nodes(4)) == 0]
    shards = np.bincount(place(on_first, [Member(f"10.0.0.1:7400/{number}") for number in range(4)]), minlength=4)
    assert shards.min() > 0.9 * shards.mean()


def test_a_keys_owner_does_not_depend_on_its_batch_or_fingerprint() -> None:
    members = nodes(5)
    owners = place(KEYS, members)
    for row in range(200):
        assert place(KEYS[row : row + 1], members).tolist() == [owners[row]]
    forged = KEYS.copy()
    forged["fp"] ^= np.uint64(1)
    assert (place(forged, members) == owners).all()
    assert len(place(KEYS[:0], members)) == 0


def test_all_processes_agree_whatever_their_hash_seed() -> None:
    script = (
        "import json, numpy as np\n"
        "from kvstore.cluster.membership import Member\n"
        "from kvstore.cluster.placement import place\n"
        "from tests.cluster.test_placement import KEYS, nodes\n"
        "print(json.dumps(np.bincount(place(KEYS, nodes(7)) * np.arange(len(KEYS)) % 7).tolist()))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    here = np.bincount(place(KEYS, nodes(7)) * np.arange(COUNT) % 7).tolist()
    assert [json.loads(answer) for answer in answers] == [here]


def test_the_owner_of_a_key_never_changes_between_releases() -> None:
    """Golden values: another hash would make every block unreachable for clients of the old release."""
    members = [Member("a:7400"), Member("b:7400", 2), Member("c:7400")]
    assert place(KEYS[:24], members).tolist() == GOLDEN


GOLDEN = [0, 1, 2, 1, 0, 1, 2, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
