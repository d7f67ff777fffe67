"""Ranks that write blocks together, one of which dies or freezes, and what damage to such blocks comes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

import kvstore
from kvstore.core.errors import ProtocolError, Unavailable
from kvstore.core.states import PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.base import Part
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.shm import describe
from kvstore.transport.tcp import connect_data_port
from kvstore.wire.frames import Op, encode
from kvstore.wire.messages import RESERVE_ROW, KeyRequest, RefRequest, decode_rows, encode_json
from tests.chaos.blocks import HEADED, HEADS, LAYERS, content, has_all, keys_of, put_all, wrong
from tests.chaos.processes import Puppet, hear_all
from tests.chaos.roles import local_session
from tests.chaos.sight import gauges, hello, is_conserved

BLOCKS = 6
HALVES = [[0, HEADS // 2], [HEADS // 2, HEADS]]
POOL = 16 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram=str(POOL)) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=HEADED, transport="shm", timeout_s=10.0) as client:
        yield client
        client.delete(keys_of(client, 1, BLOCKS))


@pytest.fixture(params=[("shm", "shm"), ("tcp", "tcp"), ("shm", "tcp"), ("tcp", "shm")], ids="-".join)
def transports(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Of the rank that is hurt, and of the other one."""
    return request.param


def start_ranks(
    stack: ExitStack, server: ServerProcess, transports: tuple[str, str], ttls_s: tuple[float, float] = (60.0, 60.0)
) -> list[Puppet]:
    """Two ranks that have reserved their halves of the blocks of prompt 1."""
    ranks = [
        stack.enter_context(
            Puppet(
                "rank",
                address=server.address,
                transport=transport,
                prompt=1,
                blocks=BLOCKS,
                heads=heads,
                ttl_s=ttl_s,
            )
        )
        for transport, heads, ttl_s in zip(transports, HALVES, ttls_s, strict=True)
    ]
    assert hear_all(ranks) == [[PutStatus.STORED] * BLOCKS] * 2
    return ranks


def next_step(ranks: list[Puppet]) -> list[object]:
    """All of them write a layer, or commit."""
    for rank in ranks:
        rank.tell()
    return hear_all(ranks)


def crowd(client: kvstore.Client, prompts: range) -> None:
    """Fill the pool several times: every slot that is free becomes another block's."""
    for prompt in prompts:
        keys = keys_of(client, prompt, 64)
        put_all(client, keys)
        assert wrong(keys, client.get(keys), HEADED) == 0


def test_ranks_in_processes_of_their_own_write_one_block(
    server: ServerProcess, client: kvstore.Client, transports: tuple[str, str]
) -> None:
    keys = keys_of(client, 1, BLOCKS)
    with ExitStack() as stack:
        ranks = start_ranks(stack, server, transports)
        for layer in range(LAYERS):
            assert next_step(ranks) == [layer] * 2
            assert (client.lookup(keys).layers_ready == layer + 1).all()
        assert next_step(ranks) == [BLOCKS] * 2
        assert client.lookup(keys).hit_blocks == BLOCKS
        assert has_all(client, keys)


@pytest.mark.parametrize("layers", [0, 2, LAYERS])
def test_when_a_rank_is_killed_the_block_is_gone_and_the_slot_waits_for_the_other_rank(
    server: ServerProcess, client: kvstore.Client, transports: tuple[str, str], layers: int
) -> None:
    keys = keys_of(client, 1, BLOCKS)
    with ExitStack() as stack:
        ranks = start_ranks(stack, server, transports)
        for layer in range(layers):
            assert next_step(ranks) == [layer] * 2
        into = np.zeros((BLOCKS, HEADED.block_bytes), np.uint8)
        with client.layer_stream(keys, into) as following:
            if layers:
                assert following.wait(layers - 1).all()
            ranks[0].kill()
            if layers < LAYERS:
                assert not following.wait(LAYERS - 1).any()
        until(lambda: not client.lookup(keys).states.any(), what="the end of the blocks")
        assert gauges(server)["quarantined_blocks"] == BLOCKS
        crowd(client, range(100, 120))
        put_all(client, keys)
        for layer in range(layers, LAYERS):  # the other rank goes on, where nobody else's bytes are
            assert next_step(ranks[1:]) == [layer]
        assert has_all(client, keys)
        assert next_step(ranks[1:]) == [0], "its commit comes to nothing"
        until(lambda: gauges(server)["quarantined_blocks"] == 0, what="the end of the quarantine")
    assert is_conserved(server)


def test_a_rank_that_was_killed_after_its_commit_costs_nothing(
    server: ServerProcess, client: kvstore.Client, transports: tuple[str, str]
) -> None:
    keys = keys_of(client, 1, BLOCKS)
    with ExitStack() as stack:
        ranks = start_ranks(stack, server, transports)
        for _ in range(LAYERS):
            next_step(ranks)
        assert next_step(ranks[:1]) == [BLOCKS]
        ranks[0].kill()
        assert next_step(ranks[1:]) == [BLOCKS]
        assert has_all(client, keys)


def test_a_rank_that_was_frozen_beyond_its_time_spoils_nothing_when_it_wakes_up(
    server: ServerProcess, client: kvstore.Client, transports: tuple[str, str]
) -> None:
    keys = keys_of(client, 1, BLOCKS)
    with ExitStack() as stack:
        ranks = start_ranks(stack, server, transports, ttls_s=(1.0, 60.0))
        assert next_step(ranks) == [0, 0]
        ranks[0].freeze()
        until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
        assert next_step(ranks[1:]) == [1]
        for layer in range(2, LAYERS):
            assert next_step(ranks[1:]) == [layer]
        assert next_step(ranks[1:]) == [0]
        assert gauges(server)["quarantined_blocks"] == BLOCKS, "one has reported, the other one may wake up"
        put_all(client, keys)
        crowd(client, range(200, 220))
        assert gauges(server)["quarantined_blocks"] == BLOCKS
        ranks[0].thaw()
        for layer in range(1, LAYERS):
            assert next_step(ranks[:1]) == [layer]
        for prompt in range(200, 220):
            batch = keys_of(client, prompt, 64)
            assert wrong(batch, client.get(batch), HEADED) == 0
        assert next_step(ranks[:1]) == [0]
        until(lambda: gauges(server)["quarantined_blocks"] == 0, what="the end of the quarantine")
    assert is_conserved(server)


def test_the_slots_that_a_frozen_rank_keeps_are_free_again_when_it_is_killed(
    server: ServerProcess, client: kvstore.Client, transports: tuple[str, str]
) -> None:
    with ExitStack() as stack:
        ranks = start_ranks(stack, server, transports, ttls_s=(0.5, 60.0))
        ranks[0].freeze()
        until(lambda: gauges(server)["quarantined_blocks"] == BLOCKS, what="the end of the reservation")
        for _ in range(LAYERS):
            next_step(ranks[1:])
        assert next_step(ranks[1:]) == [0]
        assert gauges(server)["quarantined_blocks"] == BLOCKS
        ranks[0].kill()
        until(lambda: gauges(server)["quarantined_blocks"] == 0, what="the end of the session")
    assert server.status()["shards"][0]["bytes"]["reserved"] == 0
    assert is_conserved(server)


# --- damage ----------------------------------------------------------------------------------------------------------


def write_jointly(clients: list[kvstore.Client], keys: kvstore.BlockKeys) -> None:
    layers = content(keys, HEADED).reshape(len(keys), LAYERS, HEADS, -1)
    streams = [c.publish_stream(keys, heads=(a, b)) for c, (a, b) in zip(clients, HALVES, strict=True)]
    for layer in range(LAYERS):
        for stream, (first, end) in zip(streams, HALVES, strict=True):
            stream.write(layer, np.ascontiguousarray(layers[:, layer, first:end]))
    for stream in streams:
        assert stream.commit().stored == len(keys)


@pytest.mark.parametrize("last", ["tcp", "shm with checksums"])
def test_a_bit_that_flips_after_the_last_rank_has_committed_makes_the_block_a_counted_miss(
    server: ServerProcess, client: kvstore.Client, last: str
) -> None:
    """Whose sums are in the slot, those of all heads, is the last one's matter."""
    keys = keys_of(client, 1, 4)
    with ExitStack() as stack:

        def connect(transport: str, *, checksums: bool = False) -> kvstore.Client:
            return stack.enter_context(
                kvstore.connect(server.address, namespace=HEADED, transport=transport, checksums=checksums)
            )

        remote, checking = connect("tcp"), connect("shm", checksums=True)
        for reader in (remote, checking):
            client.delete(keys)
            write_jointly([client, remote if last == "tcp" else checking], keys)
            assert has_all(remote, keys)
            assert has_all(checking, keys)
            session = local_session(hello(server).shards[0].socket_path)
            with closing(session.channel):
                offsets = session.shared.index.probe(keys.array).offsets
                for row, place in ((0, 0), (2, HEADED.block_bytes // 2 + 3), (3, HEADED.block_bytes - 1)):
                    session.shared.pool[int(offsets[row]) + place] ^= 1
            got = reader.get(keys)
            assert got.ok.tolist() == [False, True, False, False]
            assert wrong(keys, got, HEADED) == 0
            assert sum(link["checksum_failures"] for link in reader.stats()["links"]) == 3


def test_a_part_that_arrives_damaged_ends_the_block(
    server: ServerProcess, client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(client, 1, 4)
    layers = content(keys, HEADED).reshape(4, LAYERS, HEADS, -1)
    with kvstore.connect(server.address, namespace=HEADED, transport="tcp") as remote:
        local, far = client.publish_stream(keys, heads=(0, 4)), remote.publish_stream(keys, heads=(4, 8))
        local.write(0, np.ascontiguousarray(layers[:, 0, :4]))

        def no_sum(*_: object) -> list[int]:
            return [0]

        with monkeypatch.context() as patched:
            patched.setattr("kvstore.transport.tcp_layers.sums_of", no_sum)
            far.write(0, np.ascontiguousarray(layers[:, 0, 4:]))
        until(lambda: not client.lookup(keys).states.any(), what="the end of the blocks")
        assert gauges(server)["quarantined_blocks"] == 4, "the local rank may still be writing"
        put_all(client, keys)
        for layer in range(1, LAYERS):
            local.write(layer, np.ascontiguousarray(~layers[:, layer, :4]))
            far.write(layer, np.ascontiguousarray(~layers[:, layer, 4:]))
        assert local.commit().stored == far.commit().stored == 0
        assert has_all(client, keys)
        assert gauges(server)["quarantined_blocks"] == 0


# --- what no client sends --------------------------------------------------------------------------------------------


class Raw:
    """A connection to the data port, with `HEADED` opened."""

    def __init__(self, server: ServerProcess) -> None:
        info = hello(server)
        self.channel: Channel = connect_data_port(info.data_host, info.data_port, info.token, 0, Deadline(10.0))[0]
        body = encode_json(describe(HEADED))
        self.number = int.from_bytes(self.channel.call(Op.OPEN, body, Deadline(10.0)), "little")

    def reserve(self, keys: kvstore.BlockKeys, part: Part | None) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        request = KeyRequest(self.number, keys.array, ttl_ms=60_000, size_bytes=HEADED.block_bytes)
        answer = self.channel.call(*Part.reserve(request, part), Deadline(10.0))
        return decode_rows(answer, RESERVE_ROW, len(keys))

    def is_ended_by(self, op: Op, rows: np.ndarray[tuple[int], np.dtype[np.void]], payload: int) -> bool:
        """Whether the server closes the connection on this message about reserved rows."""
        refs = RefRequest.of(rows["handle"], rows["generation"], self.number, layers_ready=1, ttl_ms=60_000)
        frame = [encode(op, 7, refs.encode(), payload), bytes(payload)]
        self.channel.stream.send(frame, Deadline(10.0))
        try:
            self.channel.stream.receive(1, Deadline(10.0))
        except (Unavailable, ProtocolError):
            return True
        return False

    def close(self) -> None:
        self.channel.close()


QUARTER = HEADED.layer_bytes // 4


@pytest.mark.parametrize("message", ["whole blocks", "two parts", "another size", "a commit of two parts"])
def test_payload_that_is_not_the_part_ends_the_connection_and_touches_nothing(
    server: ServerProcess, client: kvstore.Client, message: str
) -> None:
    keys, others = keys_of(client, 1, 2), keys_of(client, 2, 40)
    client.delete(others)
    put_all(client, others)
    with closing(Raw(server)) as raw:
        rows = raw.reserve(keys, Part(0, QUARTER))
        assert (rows["status"] == PutStatus.STORED).all()
        more = np.concatenate([rows, raw.reserve(keys, Part(QUARTER, QUARTER))])
        match message:
            case "whole blocks":
                ended = raw.is_ended_by(Op.WRITE, rows, 2 * (HEADED.block_bytes + 8 * LAYERS))
            case "two parts":
                ended = raw.is_ended_by(Op.WRITE_LAYER, more, 4 * (QUARTER + 8))
            case "another size":
                ended = raw.is_ended_by(Op.WRITE_LAYER, rows, 2 * (HEADED.layer_bytes + 8))
            case _:
                ended = raw.is_ended_by(Op.COMMIT, more, 0)
        assert ended
    until(lambda: not client.lookup(keys).states.any(), what="the end of the session")
    assert has_all(client, others)
    until(lambda: gauges(server)["quarantined_blocks"] == 0)
    assert is_conserved(server)
