"""A whole server under pressure: what was used stays, what was not goes, and readers follow an index that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.wire.control import ControlClient

Connect = Callable[[ServerProcess, kvstore.Namespace, str], kvstore.Client]


POOL_BYTES = 16 << 20
SUM_BYTES = 16  # of a block of one layer


def namespace(block_bytes: int, model: str = "pressure") -> kvstore.Namespace:
    return kvstore.Namespace(
        model=model,
        revision="1",
        dtype="uint8",
        block_tokens=1,
        layout=kvstore.OpaqueLayout(tag="t", layers=1, layer_bytes_per_block=block_bytes),
    )


# With their sums these fill slots of 64 and 256 KiB, of which the pool holds a whole number.
SMALL, LARGE, TINY = namespace((64 << 10) - SUM_BYTES), namespace((256 << 10) - SUM_BYTES), namespace(8)


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect(server: ServerProcess, space: kvstore.Namespace, transport: str) -> kvstore.Client:
            client = kvstore.connect(server.address, namespace=space, transport=transport, timeout_s=20.0)
            return stack.enter_context(client)

        yield connect


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram=str(POOL_BYTES), watermark=0, policy="lru") as server:
        yield server


def put(client: kvstore.Client, first_token: int, blocks: int) -> kvstore.BlockKeys:
    keys = client.keys(np.arange(blocks, dtype=np.int32) + first_token)
    assert client.put(keys, np.ones((blocks, client.namespace.block_bytes), dtype=np.uint8)).stored == blocks
    return keys


def read(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    assert client.get(keys).hit_blocks == len(keys)


def read_one_by_one(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    for row in range(len(keys)):
        read(client, keys[row : row + 1])


def view(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    with client.view(keys) as viewed:
        assert viewed.hit_blocks == len(keys)


def prefetch(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    assert client.prefetch(keys) == len(keys)


USES = {"get": read, "get one by one": read_one_by_one, "view": view, "prefetch": prefetch}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("space", [SMALL, LARGE], ids=["small", "large"])
def test_blocks_that_were_read_outlive_blocks_that_were_not(
    server: ServerProcess, connect: Connect, space: kvstore.Namespace, use: str, transport: str
) -> None:
    with ControlClient(server.address) as control:
        control.flush(None)
    client, reader = connect(server, space, "shm"), connect(server, space, transport)
    capacity = POOL_BYTES // (space.block_bytes + SUM_BYTES)
    part = capacity // 4
    used, unused = put(client, 0, part), put(client, 100_000, part)
    USES[use](reader, used)
    put(connect(server, namespace(space.block_bytes, "others"), "shm"), 0, capacity - part)  # one part too many
    assert client.lookup(used).hit_blocks == part
    assert not client.lookup(unused).hit.any()


def test_a_change_of_block_size_finds_room_each_time(server: ServerProcess, connect: Connect) -> None:
    for round_number in range(5):
        for space in (TINY, LARGE, SMALL, namespace(1_000_000)):
            client = connect(server, space, "shm")
            keys = put(client, 500_000 + 1000 * round_number, 10)
            read(client, keys)
    books = server.status()["shards"][0]["bytes"]
    assert books["free"] + books["reserved"] + books["committed"] == books["capacity"]


@pytest.mark.slow
def test_readers_follow_the_index_when_it_moves_to_a_larger_table(connect: Connect) -> None:
    with ServerProcess(dram="312MiB", watermark=0) as server:
        writer, local, remote = (connect(server, TINY, transport) for transport in ("shm", "shm", "tcp"))
        first = put(writer, 0, 4096)
        for reader in (local, remote):
            read(reader, first)
        blocks = 4096
        with local.view(first[:8]) as held:
            while not server.status()["shards"][0]["counters"]["index_resizes"]:
                assert blocks < 77_000, "the index did not grow"
                put(writer, 1_000_000 + blocks, 8192)
                blocks += 8192
            assert held.ok.all()
        for reader in (local, remote):
            read(reader, first)
            assert reader.lookup(first).hit_blocks == len(first)
            read(reader, put(reader, 5_000_000 if reader is local else 6_000_000, 10))
        assert server.status()["shards"][0]["gauges"]["resident_blocks"] == blocks + 20
