"""Messages about one-sided transfers: they come back as they went, and nothing but `ProtocolError` for others."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import ProtocolError
from kvstore.wire.fabric import LANDED_ROW, FabricInfo, LandedRequest, LocateAnswer
from kvstore.wire.messages import KEYS_MAX, Found, LayersAnswer, encode_json

POOL_BYTES = 1 << 30
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def located(draw: st.DrawFn) -> tuple[LocateAnswer, int, int, int]:
    """An answer, the rows that were asked for, and the layers."""
    found = draw(st.lists(st.sampled_from(list(Found)), min_size=1, max_size=20))
    here = sum(state == Found.HERE for state in found)
    first, layers = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    came = draw(st.integers(1, layers)) if here else 0
    sums = np.array(draw(st.lists(u64, min_size=came * here, max_size=came * here)), np.uint64).reshape(came, here)
    offsets = draw(st.lists(st.integers(0, POOL_BYTES - 1), min_size=here, max_size=here))
    answer = LayersAnswer(first + came, np.array(found, np.uint8), sums)
    return LocateAnswer(answer, np.array(offsets, np.int64)), len(found), first, first + layers


@st.composite
def landed(draw: st.DrawFn) -> LandedRequest:
    rows = draw(st.lists(st.tuples(u64, u64, u64), max_size=20))
    first, layers = draw(st.integers(0, 1000)), draw(st.integers(1, 6))
    count = len(rows) * layers
    sums = np.array(draw(st.lists(u64, min_size=count, max_size=count)), np.uint64).reshape(len(rows), layers)
    array = np.array(rows, dtype=LANDED_ROW)
    return LandedRequest(draw(u16), (first, first + layers), array, sums, draw(st.booleans()), draw(u32))


@given(located())
def test_places_come_back_as_they_went(sent: tuple[LocateAnswer, int, int, int]) -> None:
    answer, rows, first, end = sent
    got = LocateAnswer.decode(answer.encode(), rows, first, end, POOL_BYTES)
    assert got.layers.end == answer.layers.end
    assert np.array_equal(got.layers.found, answer.layers.found)
    assert np.array_equal(got.layers.sums, answer.layers.sums)
    assert np.array_equal(got.offsets, answer.offsets)


@given(landed())
def test_what_has_landed_comes_back_as_it_went(sent: LandedRequest) -> None:
    got = LandedRequest.decode(sent.encode())
    assert (got.namespace, got.layers, got.publish, got.ttl_ms) == (
        sent.namespace,
        sent.layers,
        sent.publish,
        sent.ttl_ms,
    )
    assert np.array_equal(got.rows, sent.rows)
    assert np.array_equal(got.sums, sent.sums)


@given(u64, u64, u64)
def test_where_a_fabric_is_comes_back_as_it_went(pool: int, landing: int, landing_bytes: int) -> None:
    info = FabricInfo("rdma", "10.0.0.7:15000", pool, landing, landing_bytes)
    assert FabricInfo.decode(info.encode()) == info


DECODERS: list[Callable[[bytes], object]] = [
    LandedRequest.decode,
    FabricInfo.decode,
    lambda body: LocateAnswer.decode(body, 3, 1, 4, POOL_BYTES),
]


@pytest.mark.parametrize("decode", DECODERS, ids=["landed", "fabric", "locate"])
@given(body=st.binary(max_size=200))
def test_random_bodies_are_protocol_errors_or_fit(decode: Callable[[bytes], object], body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(body)


@given(landed(), st.integers(1, 40))
def test_a_request_that_is_cut_short_or_too_long_is_refused(sent: LandedRequest, count: int) -> None:
    body = sent.encode()
    for wrong in (body[:-count], body + bytes(count)):
        with pytest.raises(ProtocolError):
            LandedRequest.decode(wrong)


def test_more_blocks_than_a_message_may_have_or_no_layers_are_refused() -> None:
    many = np.zeros(KEYS_MAX + 1, LANDED_ROW)
    for request in (
        LandedRequest(0, (0, 1), many, np.zeros((len(many), 1), np.uint64)),
        LandedRequest(0, (2, 2), many[:1], np.zeros((1, 0), np.uint64)),
        LandedRequest(0, (2, 1), many[:0], np.zeros((0, 1), np.uint64)),
    ):
        with pytest.raises(ProtocolError, match="have not landed"):
            LandedRequest.decode(request.encode())


def test_a_place_outside_of_the_pool_is_refused() -> None:
    answer = LayersAnswer(1, np.array([Found.HERE], np.uint8), np.array([[7]], np.uint64))
    for place in (-1, POOL_BYTES):
        with pytest.raises(ProtocolError, match=f"places {place} to {place} in a pool of"):
            LocateAnswer.decode(LocateAnswer(answer, np.array([place])).encode(), 1, 0, 1, POOL_BYTES)


@pytest.mark.parametrize(
    "body",
    [{}, {"protocol": "tcp"}, {"protocol": 1, "segment": "a", "pool": 1, "landing": 1, "landing_bytes": 1}],
)
def test_an_answer_about_a_fabric_that_lacks_something_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        FabricInfo.decode(encode_json(body))
