"""The fabric's messages on the data port, sent by whoever has a token and means no good: refused or disconnected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.core.errors import KvStoreError, Unavailable, UsageError
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.channel import Deadline
from kvstore.transport.shm import describe
from kvstore.transport.tcp import connect_data_port
from kvstore.wire.fabric import LANDED_ROW, FabricInfo, LandedRequest
from kvstore.wire.frames import Op
from kvstore.wire.messages import RESERVE_ROW, KeyRequest, LayersRequest, RefRequest, decode_rows, encode_json
from tests.chaos.blocks import LARGE, SMALL, content, has_all, keys_of, put_all
from tests.chaos.sight import Holdings, hello, is_conserved
from tests.transport.fabrics import needs_mooncake

pytestmark = needs_mooncake
DEADLINE_S = 10.0
LANDING_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB", fabric="tcp", fabric_landing="16MiB") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=SMALL, transport="mooncake") as client:
        put_all(client, keys_of(client, 1, 8))
        yield client


@pytest.fixture(autouse=True)
def nothing_is_lost(server: ServerProcess, client: kvstore.Client) -> Iterator[None]:
    """After each test the same processes run, hold what they held before, and serve."""
    keys = keys_of(client, 1, 8)
    assert has_all(client, keys)
    held, pids = Holdings(server), server.pids()
    yield
    held.are_back()
    assert server.pids() == pids
    assert has_all(client, keys)
    assert is_conserved(server)


class Session:
    """A connection with landing space and two namespaces open."""

    def __init__(self, server: ServerProcess, wanted_bytes: int = LANDING_BYTES) -> None:
        info = hello(server)
        self.channel, _ = connect_data_port(info.data_host, info.data_port, info.token, 0, Deadline(DEADLINE_S))
        self.small, self.large = (
            int.from_bytes(self.call(Op.OPEN, encode_json(describe(space))), "little") for space in (SMALL, LARGE)
        )
        self.fabric = FabricInfo.decode(self.call(Op.FABRIC, encode_json({"landing": wanted_bytes})))

    def call(self, op: Op, body: bytes) -> bytes:
        return self.channel.call(op, body, Deadline(DEADLINE_S))

    def call_with_payload(self, op: Op, body: bytes, payload: bytes) -> bytes:
        with self.channel.exchange(Deadline(DEADLINE_S)) as exchange:
            exchange.send_payload(op, body, len(payload), [memoryview(payload)] if payload else [])
            return exchange.whole_reply()

    def reserve(self, keys: kvstore.BlockKeys) -> NDArray[np.void]:
        request = KeyRequest(self.small, keys.array, ttl_ms=60_000, size_bytes=SMALL.block_bytes)
        return decode_rows(self.call(Op.RESERVE, request.encode()), RESERVE_ROW, len(keys))

    def close(self) -> None:
        self.channel.close()


def landed(
    rows: NDArray[np.void], number: int, *, at: int = 0, layers: tuple[int, int] = (0, SMALL.layers)
) -> LandedRequest:
    named = np.zeros(len(rows), LANDED_ROW)
    named["handle"], named["generation"], named["at"] = rows["handle"], rows["generation"], at
    return LandedRequest(number, layers, named, np.zeros((len(rows), layers[1] - layers[0]), np.uint64))


def test_what_was_not_reserved_here_or_lies_outside_of_the_grant_ends_the_connection(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 50, 2)
    with closing(Session(server)) as owner:
        rows = owner.reserve(keys)
        assert (rows["status"] == kvstore.PutStatus.STORED).all()
        for not_theirs in (np.zeros(1, RESERVE_ROW), rows):
            with closing(Session(server)) as thief, pytest.raises(Unavailable):
                thief.call(Op.LANDED, landed(not_theirs, thief.small).encode())
    for at, layers in (
        (LANDING_BYTES - SMALL.block_bytes + 1, (0, SMALL.layers)),
        ((1 << 64) - 1, (0, SMALL.layers)),
        (0, (0, SMALL.layers + 1)),
        (0, (SMALL.layers, SMALL.layers + 1)),
    ):
        until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
        with closing(Session(server)) as session, pytest.raises(Unavailable):
            session.call(Op.LANDED, landed(session.reserve(keys), session.small, at=at, layers=layers).encode())
    until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")


@pytest.mark.parametrize("op", [Op.LANDED, Op.WRITE, Op.WRITE_LAYER])
def test_a_reservation_can_not_be_filled_as_a_larger_block_of_another_namespace(
    server: ServerProcess, client: kvstore.Client, op: Op
) -> None:
    keys = keys_of(client, 60, 2)
    with closing(Session(server)) as session:
        rows = session.reserve(keys)
        refs = RefRequest.of(rows["handle"], rows["generation"], session.large, layers_ready=1)
        body = landed(rows, session.large).encode() if op is Op.LANDED else refs.encode()
        bytes_each = LARGE.block_bytes + 8 * LARGE.layers if op is Op.WRITE else LARGE.layer_bytes + 8
        payload = b"" if op is Op.LANDED else bytes(2 * bytes_each)
        with pytest.raises(Unavailable):
            session.call_with_payload(op, body, payload)
    until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")


def test_what_does_not_match_its_sums_is_dropped_and_can_be_put_by_others(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 70, 2)
    with closing(Session(server)) as session:
        rows = session.reserve(keys)
        assert session.call(Op.LANDED, landed(rows, session.small).encode()) == bytes(2)
        refs = RefRequest.of(rows["handle"], rows["generation"], session.small)
        assert session.call(Op.COMMIT, refs.encode()) == bytes(2)
        assert not client.lookup(keys).states.any()
        assert client.put(keys, content(keys, SMALL)).stored == 2
        assert session.call(Op.LANDED, landed(rows[:0], session.small).encode()) == b""
    assert has_all(client, keys)
    client.delete(keys)


def test_places_are_told_of_blocks_on_hold_only(server: ServerProcess, client: kvstore.Client) -> None:
    keys = keys_of(client, 1, 8)
    with closing(Session(server)) as session:
        row = np.zeros(1, np.uint32)
        with pytest.raises(UsageError, match="not on hold"):
            session.call(Op.LOCATE, LayersRequest(row, (0, 1), 0, SMALL.layer_bytes).encode())
        session.call(Op.HOLD, KeyRequest(session.small, keys.array, ttl_ms=1000).encode())
        for layers, start, size in (
            ((0, SMALL.layers + 1), 0, SMALL.layer_bytes),
            ((2, 1), 0, SMALL.layer_bytes),
            ((0, 1), 1, SMALL.layer_bytes),
            ((0, 1), 0, 0),
        ):
            with pytest.raises(UsageError, match="of layers"):
                session.call(Op.LOCATE, LayersRequest(row, layers, start, size).encode())
        rows = np.zeros(16_000, np.uint32)
        with pytest.raises(UsageError, match="at once; at most"):
            session.call(Op.LOCATE, LayersRequest(rows, (0, 0xFFFF), 0, SMALL.layer_bytes).encode())
        with pytest.raises(UsageError, match="not on hold"):
            session.call(Op.LOCATE, LayersRequest(row + 8, (0, 1), 0, SMALL.layer_bytes).encode())
        assert len(session.call(Op.LOCATE, LayersRequest(row, (0, 4), 0, SMALL.layer_bytes).encode())) == 8 * 7


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"landing": -1}', b'{"landing": "1"}', b'{"landing": 1e99}'])
def test_a_wrong_wish_for_landing_space_is_refused(server: ServerProcess, body: bytes) -> None:
    with closing(Session(server)) as session, pytest.raises(KvStoreError):
        session.call(Op.FABRIC, body)


def test_landing_space_that_is_gone_is_told_as_none_and_comes_back_with_its_connection(
    server: ServerProcess, client: kvstore.Client
) -> None:
    with ExitStack() as stack:
        hoard = [stack.enter_context(closing(Session(server, 1 << 40))) for _ in range(6)]
        granted = [session.fabric.landing_bytes for session in hoard]
        assert sum(granted) <= 16 << 20
        assert 0 in granted
        assert len({session.fabric.landing for session in hoard if session.fabric.landing_bytes}) == sum(
            size > 0 for size in granted
        )
        keys = keys_of(client, 80, 2)
        put_all(client, keys)  # by TCP, if need be
        client.delete(keys)

    def granted_again() -> bool:
        with closing(Session(server)) as session:
            return session.fabric.landing_bytes > 0

    until(granted_again, what="landing space")


def test_without_a_fabric_its_messages_are_refused() -> None:
    with ServerProcess(dram="16MiB") as plain:
        info = hello(plain)
        channel, _ = connect_data_port(info.data_host, info.data_port, info.token, 0, Deadline(DEADLINE_S))
        with closing(channel), pytest.raises(UsageError, match="this server has no fabric"):
            channel.call(Op.FABRIC, encode_json({"landing": 4096}), Deadline(DEADLINE_S))
