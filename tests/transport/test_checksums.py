"""Who writes checksums, who trusts them, and whose they are. What damage does is in tests/chaos/test_damage.py."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.transport.channel import Deadline
from kvstore.transport.shm import LocalSession, SharedShard, connect_local
from kvstore.transport.trailer import read_trailers
from kvstore.wire.control import ControlClient

LAYERS = 4


SMALL = kvstore.Namespace(  # small enough that a get over TCP copies and checks, and holds nothing meanwhile
    model="checksums",
    revision="1",
    dtype="uint8",
    block_tokens=4,
    layout=kvstore.OpaqueLayout(tag="t", layers=LAYERS, layer_bytes_per_block=500),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB") as server:
        yield server


@pytest.fixture
def session(server: ServerProcess) -> Iterator[LocalSession]:
    """The shard's memory, below the SDK."""
    with ControlClient(server.address) as control:
        path = control.hello("tests").shards[0].socket_path
    channel = connect_local(path, Deadline(10))
    yield LocalSession(channel, SharedShard(channel, Deadline(10)))
    channel.close()


def connect(server: ServerProcess, transport: str, *, checksums: bool = False) -> kvstore.Client:
    return kvstore.connect(server.address, namespace=SMALL, transport=transport, checksums=checksums, timeout_s=10.0)


def stored(client: kvstore.Client, prompt: int, blocks: int = 3) -> tuple[kvstore.BlockKeys, NDArray[np.uint8]]:
    keys = client.keys(np.arange(blocks * 4, dtype=np.int32) + prompt * 1000)
    client.delete(keys)
    data = np.random.default_rng(prompt).integers(0, 256, (blocks, client.namespace.block_bytes), dtype=np.uint8)
    assert client.put(keys, data).stored == blocks
    return keys, data


def flip(session: LocalSession, keys: kvstore.BlockKeys, block: int, byte: int) -> None:
    """Change one bit of a stored block, as a bad memory chip would."""
    found = session.shared.index.probe(keys.array)
    session.shared.pool[int(found.offsets[block]) + byte] ^= 1


def same(got: kvstore.GetResult, data: NDArray[np.uint8]) -> bool:
    return all(block is not None and np.array_equal(block, row) for block, row in zip(got.blocks, data, strict=True))


def failures(client: kvstore.Client) -> int:
    return client.stats()["links"][0]["checksum_failures"]


def test_a_reader_that_holds_no_lease_never_writes_into_the_pool(server: ServerProcess, session: LocalSession) -> None:
    """Between its look at the index and its write the slot could be another block's: of another size, even."""
    with connect(server, "shm") as source, connect(server, "tcp") as sink:
        keys, _ = stored(source, 3)
        found = session.shared.index.probe(keys.array)
        before = read_trailers(session.shared.pool, found.offsets, SMALL.block_bytes, LAYERS)
        assert sink.get(keys).ok.all()
        assert sink.get(keys[:1]).ok.all()
        assert np.array_equal(read_trailers(session.shared.pool, found.offsets, SMALL.block_bytes, LAYERS), before)


def test_shared_memory_without_checksums_trusts_the_memory(server: ServerProcess, session: LocalSession) -> None:
    with connect(server, "shm") as client:
        keys, data = stored(client, 4)
        flip(session, keys, 0, 0)
        got = client.get(keys)
        assert got.ok.all()
        assert got.blocks[0] is not None
        assert got.blocks[0][0] == data[0, 0] ^ 1


def test_sums_of_a_slots_former_block_are_never_taken_for_the_new_ones(server: ServerProcess) -> None:
    with connect(server, "tcp") as summed, connect(server, "shm") as plain:
        for prompt in range(5, 10):
            keys, _ = stored(summed, prompt)
            summed.delete(keys)
            keys, data = stored(plain, prompt + 100)  # in the same slots, without sums
            with connect(server, "shm", checksums=True) as checking:
                got = checking.get(keys)
                assert same(got, data)
                assert failures(checking) == 0
            plain.delete(keys)
