"""Frames and bodies: whatever the chunks, and nothing but `ProtocolError` for what is no message."""

import contextlib
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import ProtocolError
from kvstore.core.keys import KEY_DTYPE
from kvstore.wire.frames import (
    BODY_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    Frame,
    FrameReader,
    Op,
    decode_header,
    encode,
)
from kvstore.wire.messages import (
    KEYS_MAX,
    LOOKUP_ROW,
    REF,
    KeyRequest,
    LeaseRequest,
    RefRequest,
    decode_json,
    decode_prefix,
    decode_rows,
    encode_json,
)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
messages = st.lists(st.tuples(st.sampled_from(Op), u32, st.binary(max_size=200), st.booleans()), max_size=12)
key_arrays = st.lists(st.tuples(u64, u64, u64), max_size=20).map(lambda rows: np.array(rows, dtype=KEY_DTYPE))
ref_arrays = st.lists(st.tuples(u64, u64), max_size=20).map(lambda rows: np.array(rows, dtype=REF))
lease_arrays = st.lists(u64, max_size=20).map(lambda numbers: np.array(numbers, dtype=np.uint64))
key_requests = st.builds(
    KeyRequest,
    namespace=u16,
    keys=key_arrays,
    layers=st.tuples(u16, u16),
    flag=u16,
    ttl_ms=u32,
    size_bytes=u64,
)
ref_requests = st.builds(RefRequest, refs=ref_arrays, namespace=u16, layers_ready=u16, ttl_ms=u32)
lease_requests = st.builds(LeaseRequest, leases=lease_arrays, ttl_ms=u32)


@given(sent=messages, cuts=st.lists(st.integers(1, 90), max_size=60))
def test_frames_survive_any_chunking(sent: list[tuple[Op, int, bytes, bool]], cuts: list[int]) -> None:
    stream = b"".join(encode(op, request, body, flags=int(quiet)) for op, request, body, quiet in sent)
    reader = FrameReader()
    received: list[tuple[Frame, bytes]] = []
    for cut in cuts:
        received += reader.feed(stream[:cut])
        stream = stream[cut:]
    received += reader.feed(stream)
    assert [(f.op, f.request, body, bool(f.flags)) for f, body in received] == sent


@given(request=key_requests)
def test_a_key_request_round_trips(request: KeyRequest) -> None:
    read = KeyRequest.decode(request.encode())
    assert (read.namespace, read.layers, read.flag, read.ttl_ms, read.size_bytes) == (
        request.namespace,
        request.layers,
        request.flag,
        request.ttl_ms,
        request.size_bytes,
    )
    assert read.keys.tobytes() == request.keys.tobytes()


@given(request=ref_requests)
def test_a_ref_request_round_trips(request: RefRequest) -> None:
    read = RefRequest.decode(request.encode())
    assert (read.namespace, read.layers_ready, read.ttl_ms) == (request.namespace, request.layers_ready, request.ttl_ms)
    assert read.refs.tobytes() == request.refs.tobytes()


@given(request=lease_requests)
def test_a_lease_request_round_trips(request: LeaseRequest) -> None:
    read = LeaseRequest.decode(request.encode())
    assert (read.ttl_ms, read.leases.tolist()) == (request.ttl_ms, request.leases.tolist())


def test_refs_of_handles_and_generations_are_those() -> None:
    request = RefRequest.of(np.array([1, 2]), np.array([3, 2**63], dtype=np.uint64), namespace=4, ttl_ms=5)
    assert request.refs["handle"].tolist() == [1, 2]
    assert request.refs["generation"].tolist() == [3, 2**63]


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(value=st.dictionaries(st.text(), json_values))
def test_a_json_body_round_trips(value: dict[str, object]) -> None:
    assert decode_json(encode_json(value)) == value


DECODERS: list[Callable[[bytes], object]] = [
    KeyRequest.decode,
    RefRequest.decode,
    LeaseRequest.decode,
    decode_json,
    lambda body: decode_rows(body, LOOKUP_ROW, 3),
    lambda body: decode_prefix(body, LOOKUP_ROW, 3, offset=5),
]


@pytest.mark.parametrize("decode", DECODERS, ids=["keys", "refs", "leases", "json", "rows", "prefix"])
@given(body=st.binary(max_size=400))
def test_random_bytes_are_a_message_or_a_protocol_error(decode: Callable[[bytes], object], body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(body)


@given(
    request=key_requests | ref_requests | lease_requests,
    cut=st.integers(1, 60),
    extra=st.binary(min_size=1, max_size=9),
)
def test_a_body_with_bytes_missing_or_left_over_is_refused(
    request: KeyRequest | RefRequest | LeaseRequest, cut: int, extra: bytes
) -> None:
    body = request.encode()
    with pytest.raises(ProtocolError):
        request.decode(body[: max(0, len(body) - cut)])
    with pytest.raises(ProtocolError):
        request.decode(body + extra)


@pytest.mark.parametrize("depth", [100_000])
def test_deeply_nested_json_is_refused(depth: int) -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        decode_json(b"[" * depth)


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"7", b"null"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON object"):
        decode_json(body)


def test_more_keys_than_a_message_may_hold_are_refused_before_they_are_looked_at() -> None:
    keys = np.zeros(KEYS_MAX + 1, dtype=KEY_DTYPE)
    with pytest.raises(ProtocolError, match=f"{KEYS_MAX + 1} keys in one message"):
        KeyRequest.decode(KeyRequest(1, keys).encode())
    with pytest.raises(ProtocolError, match="blocks in one message"):
        RefRequest.decode(RefRequest(np.zeros(KEYS_MAX + 1, dtype=REF)).encode())


def header(
    magic: bytes = MAGIC, op: int = Op.LOOKUP, status: int = 0, flags: int = 0, body: int = 0, payload: int = 0
) -> bytes:
    return HEADER.pack(magic, op, status, flags, 1, body, payload)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(magic=b"HTTP"), "not a kvstore frame"),
        (header(flags=2), "not a kvstore frame"),
        (header(op=0), "unknown operation 0"),
        (header(op=200), "unknown operation 200"),
        (header(body=BODY_BYTES_MAX + 1), "over the limit"),
        (header(payload=PAYLOAD_BYTES_MAX + 1), "over the limit"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_header(data)
    with pytest.raises(ProtocolError, match=message):
        FrameReader().feed(data)


@given(data=st.binary(min_size=HEADER_BYTES, max_size=200))
def test_random_bytes_are_frames_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        FrameReader().feed(data)


def test_payload_on_a_stream_that_carries_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match="carries none"):
        FrameReader().feed(header(payload=1))
    reader = FrameReader()
    reader.feed(header(payload=1)[:10])
    with pytest.raises(ProtocolError, match="carries none"):
        reader.feed(header(payload=1)[10:])


def test_a_body_over_the_limit_is_not_even_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Op.STATS, 1, bytes(BODY_BYTES_MAX + 1))


def test_json_bodies_are_compact() -> None:
    assert encode_json({"a": [1, 2]}) == b'{"a":[1,2]}'
    assert json.loads(encode_json({"a": "ü"})) == {"a": "ü"}
