"""What readers tell the shard of their requests: each once, in order, bounded."""

import numpy as np
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.transport import chains
from kvstore.transport.chains import KEPT_MAX, MESSAGE_KEYS_MAX, ChainLog
from kvstore.wire.messages import KEYS_MAX, U64, Chains
from tests.server.shards import keys


def told(log: ChainLog) -> list[list[int]]:
    """Chains that the log gives away."""
    return [chain.tolist() for body in log.take() for chain in Chains.decode(body).chains]


def low(*numbers: int) -> list[int]:
    return keys(*numbers)["lo"].tolist()


def test_a_lookup_a_get_of_its_hits_and_a_put_are_one_request() -> None:
    log = ChainLog()
    log.note(keys(1, 2, 3))
    log.note(keys(1, 2))
    assert told(log) == [low(1, 2, 3)]
    log.end(keys(1, 2, 3))
    assert told(log) == []


def test_a_longer_look_at_the_same_chain_replaces_the_shorter_one() -> None:
    log = ChainLog()
    log.note(keys(1))
    log.note(keys(1, 2, 3))
    assert told(log) == [low(1, 2, 3)]


def test_what_was_told_already_is_not_told_again_by_a_later_call_of_the_same_request() -> None:
    log = ChainLog()
    log.note(keys(1, 2, 3))
    assert told(log) == [low(1, 2, 3)]
    log.note(keys(1, 2))
    assert told(log) == []


def test_requests_of_several_threads_may_interleave() -> None:
    log = ChainLog()
    for chain in (keys(1, 2), keys(5, 6), keys(1), keys(5, 6)):
        log.note(chain)
    assert told(log) == [low(1, 2), low(5, 6)]


def test_after_a_put_or_a_second_the_same_chain_is_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChainLog()
    log.note(keys(1, 2))
    log.end(keys(1, 2))
    log.note(keys(1, 2))
    assert told(log) == [low(1, 2)] * 2
    monkeypatch.setattr(chains, "SAME_REQUEST_S", -1.0)
    log.note(keys(1, 2))
    assert told(log) == [low(1, 2)]


def test_chains_that_nobody_takes_are_forgotten_oldest_first() -> None:
    log = ChainLog()
    for number in range(KEPT_MAX + 5):
        log.note(keys(number))
    assert told(log)[0] == low(5)


def test_long_chains_are_cut_and_go_in_several_messages() -> None:
    log = ChainLog()
    chain = keys(*range(KEYS_MAX + 1))
    for start in range(6):
        log.note(np.roll(chain, start))
    bodies = log.take()
    assert len(bodies) == 2
    assert max(map(len, bodies)) <= (MESSAGE_KEYS_MAX + 8) * 8
    assert [len(part) for body in bodies for part in Chains.decode(body).chains] == [KEYS_MAX] * 6


@pytest.mark.parametrize(
    "words", [[], [1], [2, 1, 1, 7], [1, 2, 7], [1, 1, 7, 7], [0, 7], [1 << 63, 1, 7], [1, KEYS_MAX + 1]]
)
def test_a_body_whose_lengths_do_not_fit_is_refused(words: list[int]) -> None:
    with pytest.raises(ProtocolError):
        Chains.decode(np.array(words, dtype=U64).tobytes())
    with pytest.raises(ProtocolError):
        Chains.decode(b"1234567")


def test_no_chains_are_a_message_too() -> None:
    assert Chains.decode(Chains([]).encode()).chains == []
