"""Blocks that several tensor-parallel ranks write together, each its own heads, and any number of ranks reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.core.states import BlockState, PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.sdk import one_line

LAYERS, HEADS, BLOCKS = 3, 8, 10
SPACE = kvstore.Namespace(
    model="joint", revision="1", dtype="float16", block_tokens=16, layout=kvstore.CanonicalLayout(LAYERS, HEADS, 32)
)
OPAQUE = kvstore.Namespace(
    model="joint", revision="1", dtype="uint8", block_tokens=16, layout=kvstore.OpaqueLayout("t", LAYERS, 4096)
)
U8 = NDArray[np.uint8]
Heads = tuple[int, int]


@pytest.fixture(scope="module", params=[1, 3], ids=["one shard", "three shards"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(dram="192MiB", shards=request.param) as server:
        yield server


@pytest.fixture(params=["shm", "tcp", "mixed"])
def transports(request: pytest.FixtureRequest) -> list[str]:
    """Those of the ranks, in turns: they may be on different hosts."""
    return ["shm", "tcp"] if request.param == "mixed" else [request.param]


class Ranks:
    """Clients of ranks, and one that reads."""

    def __init__(self, server: ServerProcess, transports: list[str], number: int) -> None:
        self._stack = ExitStack()
        self.clients = [self.connect(server, transports[rank % len(transports)]) for rank in range(number)]
        self.reader = self.connect(server, transports[0])

    def connect(self, server: ServerProcess, transport: str) -> kvstore.Client:
        client = kvstore.connect(server.address, namespace=SPACE, transport=transport, timeout_s=10.0)
        return self._stack.enter_context(client)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def prompt(client: kvstore.Client, number: int, blocks: int = BLOCKS) -> kvstore.BlockKeys:
    return client.keys(np.arange(blocks * 16) + number * 100_000)


def content(seed: int, blocks: int = BLOCKS) -> U8:
    """Blocks, shape (blocks, layers, heads, bytes of a head)."""
    shape = (blocks, LAYERS, HEADS, SPACE.layer_bytes // HEADS)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def split(ranks: int) -> list[Heads]:
    return [(rank * HEADS // ranks, (rank + 1) * HEADS // ranks) for rank in range(ranks)]


def of(data: U8, layer: int, heads: Heads) -> U8:
    return np.ascontiguousarray(data[:, layer, heads[0] : heads[1]])


def write_jointly(
    clients: Sequence[kvstore.Client], keys: kvstore.BlockKeys, data: U8, shares: Sequence[Heads]
) -> None:
    """All ranks publish and commit."""
    streams = [client.publish_stream(keys, heads=heads) for client, heads in zip(clients, shares, strict=True)]
    for layer in range(LAYERS):
        for stream, heads in zip(streams, shares, strict=True):
            stream.write(layer, of(data, layer, heads))
    for stream in streams:
        assert stream.commit().stored == len(keys)


def read_jointly(client: kvstore.Client, keys: kvstore.BlockKeys, shares: Sequence[Heads]) -> U8:
    """What ranks with these heads read, put together: shape of `content`. Each has its own order of slots."""
    got = np.zeros((len(keys), LAYERS, HEADS, SPACE.layer_bytes // HEADS), np.uint8)
    for number, (first, end) in enumerate(shares):
        slots = np.random.default_rng(number).permutation(2 * len(keys))[: len(keys)]
        pages = [np.zeros((2 * len(keys), end - first, got.shape[3]), np.uint8) for _ in range(LAYERS)]
        with client.layer_stream(keys, pages, heads=(first, end), slots=slots) as stream:
            for layer in range(LAYERS):
                assert stream.wait(layer).all()
                got[:, layer, first:end] = pages[layer][slots]
    return got


@pytest.mark.parametrize("writers", [1, 2, 4, 8])
def test_blocks_that_any_number_of_ranks_wrote_are_read_by_any_number(
    server: ServerProcess, transports: list[str], writers: int
) -> None:
    with Ranks(server, transports, writers) as ranks:
        keys, data = prompt(ranks.reader, writers), content(writers)
        ranks.reader.delete(keys)
        write_jointly(ranks.clients, keys, data, split(writers))
        assert ranks.reader.lookup(keys).hit_blocks == BLOCKS
        for readers in (1, 2, 4):
            np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(readers)), data)
        whole = np.zeros((BLOCKS, SPACE.block_bytes), np.uint8)
        assert ranks.reader.get_into(keys, whole).ok.all()
        np.testing.assert_array_equal(whole, data.reshape(BLOCKS, -1))


def test_a_block_is_visible_once_the_last_part_is_committed(server: ServerProcess, transports: list[str]) -> None:
    with Ranks(server, transports, 2) as ranks:
        keys, data = prompt(ranks.reader, 20), content(20)
        ranks.reader.delete(keys)
        first, second = (
            client.publish_stream(keys, heads=heads) for client, heads in zip(ranks.clients, split(2), strict=True)
        )
        for layer in range(LAYERS):
            first.write(layer, of(data, layer, (0, 4)))
        assert first.commit().stored == BLOCKS
        found = ranks.reader.lookup(keys)
        assert (found.states == BlockState.RESERVED).all()
        assert not found.hit_blocks
        assert not found.layers_ready.any(), "no layer is whole yet"
        assert not ranks.reader.get(keys).ok.any()
        for layer in range(LAYERS):
            second.write(layer, of(data, layer, (4, 8)))
            assert (ranks.reader.lookup(keys).layers_ready == layer + 1).all()
        assert not ranks.reader.lookup(keys).hit_blocks
        assert second.commit().stored == BLOCKS
        assert ranks.reader.get(keys).hit_blocks == BLOCKS
