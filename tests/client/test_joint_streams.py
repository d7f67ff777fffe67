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


def gauge(server: ServerProcess, name: str) -> int:
    return sum(shard["gauges"][name] for shard in server.status()["shards"])


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


def test_a_reader_follows_the_layers_that_all_ranks_have_written(server: ServerProcess, transports: list[str]) -> None:
    shares = split(4)
    with Ranks(server, transports, 4) as ranks:
        keys, data = prompt(ranks.reader, 21), content(21)
        ranks.reader.delete(keys)
        streams = [c.publish_stream(keys, heads=heads) for c, heads in zip(ranks.clients[:3], shares[:3], strict=True)]
        into = [np.full((BLOCKS, 4, data.shape[3]), 0xAB, np.uint8) for _ in range(LAYERS)]
        with ranks.reader.layer_stream(keys, into, heads=(2, 6)) as following:
            for stream, heads in zip(streams, shares[:3], strict=True):
                stream.write(0, of(data, 0, heads))
            assert not following.ready(0), "its own heads are there, but nobody writes the last ones yet"
            streams.append(ranks.clients[3].publish_stream(keys, heads=shares[3]))
            for layer in range(LAYERS):
                for rank in (3, 1, 2, 0)[: 4 if layer else 1]:
                    assert not following.ready(layer)
                    streams[rank].write(layer, of(data, layer, shares[rank]))
                assert following.wait(layer).all()
                np.testing.assert_array_equal(into[layer], data[:, layer, 2:6])
            for stream in streams:
                assert stream.commit().stored == BLOCKS


@pytest.mark.parametrize("end", ["abort", "leave", "die"])
def test_a_rank_that_ends_early_is_a_missing_tail_for_readers_and_a_failed_put_for_the_others(
    server: ServerProcess, transports: list[str], end: str
) -> None:
    with Ranks(server, transports, 2) as ranks:
        keys, data = prompt(ranks.reader, 22), content(22)
        ranks.reader.delete(keys)
        shares = split(2)
        failing, going_on = (c.publish_stream(keys, heads=h) for c, h in zip(ranks.clients, shares, strict=True))
        into = np.full_like(data, 0xAB).reshape(BLOCKS, LAYERS, -1)
        with ranks.reader.layer_stream(keys, into) as following:
            failing.write(0, of(data, 0, shares[0]))
            going_on.write(0, of(data, 0, shares[1]))
            going_on.write(1, of(data, 1, shares[1]))
            assert following.wait(0).all()
            match end:
                case "abort":
                    failing.abort()
                case "leave":
                    with failing:
                        pass
                case _:
                    ranks.clients[0].close()
            for layer in range(1, LAYERS):
                assert not following.wait(layer).any()
        np.testing.assert_array_equal(into[:, 0], data[:, 0].reshape(BLOCKS, -1))
        assert (into[:, 1:] == 0xAB).all()
        until(lambda: not ranks.reader.lookup(keys).states.any(), what="the end of the reservation")
        assert gauge(server, "quarantined_blocks") == BLOCKS, "the other rank may still be writing"
        again = content(23)
        assert ranks.reader.put(keys, again.reshape(BLOCKS, -1)).stored == BLOCKS
        going_on.write(2, of(data, 2, shares[1]))
        result = going_on.commit()
        assert result.stored == 0
        assert (result.statuses == PutStatus.FAILED).all()
        assert gauge(server, "quarantined_blocks") == 0
        np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(1)), again)


def test_a_rank_that_never_comes_costs_the_others_their_blocks_after_the_time_and_nothing_else(
    server: ServerProcess, transports: list[str]
) -> None:
    with Ranks(server, transports, 2) as ranks:
        keys, data = prompt(ranks.reader, 24), content(24)
        ranks.reader.delete(keys)
        alone = ranks.clients[0].publish_stream(keys, heads=(0, 4), ttl_s=1.0)
        for layer in range(LAYERS):
            alone.write(layer, of(data, layer, (0, 4)))
        assert alone.commit().stored == BLOCKS
        assert (ranks.reader.lookup(keys).states == BlockState.RESERVED).all()
        until(lambda: not ranks.reader.lookup(keys).states.any(), what="the end of the wait for the other rank")
        until(lambda: gauge(server, "reserved_blocks_now") == 0)
        assert gauge(server, "quarantined_blocks") == 0, "its only writer has reported"
        write_jointly(ranks.clients, keys, data, split(2))
        np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(2)), data)


def test_heads_that_another_stream_writes_are_pending_whatever_the_split(
    server: ServerProcess, transports: list[str]
) -> None:
    with Ranks(server, transports, 4) as ranks:
        keys, data = prompt(ranks.reader, 25), content(25)
        ranks.reader.delete(keys)
        streams = [ranks.clients[0].publish_stream(keys, heads=(0, 4))]
        for heads in ((0, 4), (0, 2), (3, 5), None):  # the same part, others that overlap, whole blocks
            with ranks.clients[1].publish_stream(keys, heads=heads) as refused:
                assert (refused.statuses == PutStatus.PENDING).all()
        # Two engines of different sizes that compute one prompt complete it together.
        streams += [ranks.clients[rank].publish_stream(keys, heads=split(4)[rank]) for rank in (3, 2)]
        for layer in range(LAYERS):
            for stream, heads in zip(streams, ((0, 4), (6, 8), (4, 6)), strict=True):
                stream.write(layer, of(data, layer, heads))
        assert [stream.commit().stored for stream in streams] == [BLOCKS] * 3
        np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(2)), data)
        with ranks.clients[1].publish_stream(keys, heads=(0, 4)) as late:
            assert (late.statuses == PutStatus.EXISTS).all()


def test_two_ranks_may_share_one_client_and_paged_memory(server: ServerProcess, transports: list[str]) -> None:
    with Ranks(server, transports, 1) as ranks:
        client = ranks.clients[0]
        keys, data = prompt(client, 26), content(26)
        client.delete(keys)
        slots = np.random.default_rng(5).permutation(30)[:BLOCKS]
        shares = split(2)
        streams = [client.publish_stream(keys, heads=heads) for heads in shares]
        for layer in range(LAYERS):
            for stream, heads in zip(streams, shares, strict=True):
                pages = np.zeros((30, 4, data.shape[3]), np.uint8)
                pages[slots] = of(data, layer, heads)
                stream.write(layer, pages, slots=slots)
        for stream in streams:
            result = stream.commit()
            assert (result.stored, result.bytes) == (BLOCKS, BLOCKS * SPACE.block_bytes // 2)
        np.testing.assert_array_equal(read_jointly(client, keys, split(4)), data)


def test_ranks_may_publish_from_the_memory_of_a_device(server: ServerProcess) -> None:
    with (
        kvstore.connect(server.address, namespace=SPACE, transport="shm", device="host") as near,
        kvstore.connect(server.address, namespace=SPACE, transport="tcp", device="host") as far,
    ):
        keys, data = prompt(near, 31), content(31)
        near.delete(keys)
        write_jointly([near, far], keys, data, split(2))
        np.testing.assert_array_equal(read_jointly(far, keys, split(4)), data)


def test_a_stream_of_all_heads_is_a_stream_of_whole_blocks(server: ServerProcess, transports: list[str]) -> None:
    with Ranks(server, transports, 1) as ranks:
        keys, data = prompt(ranks.reader, 27), content(27)
        ranks.reader.delete(keys)
        write_jointly(ranks.clients, keys, data, [(0, HEADS)])
        np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(1)), data)


@pytest.mark.parametrize("heads", [(0, 9), (4, 4), (5, 3), (-1, 2), (0.5, 2), "ab", 3])
def test_heads_that_are_none_are_one_clear_line_and_reserve_nothing(
    server: ServerProcess, transports: list[str], heads: object
) -> None:
    with Ranks(server, transports, 1) as ranks:
        keys = prompt(ranks.reader, 28)
        with one_line(kvstore.UsageError, f"heads={heads!r}", "within 0 to 8"):
            ranks.clients[0].publish_stream(keys, heads=heads)  # pyright: ignore[reportArgumentType]
        assert not ranks.reader.lookup(keys).states.any()


def test_blocks_of_an_opaque_layout_have_one_writer(server: ServerProcess) -> None:
    with (
        kvstore.connect(server.address, namespace=OPAQUE, transport="shm") as client,
        one_line(kvstore.UsageError, "heads=(0, 4)", "opaque"),
    ):
        client.publish_stream(prompt(client, 29), heads=(0, 4))


def test_slices_of_another_size_than_the_heads_are_refused_and_publish_nothing(
    server: ServerProcess, transports: list[str]
) -> None:
    with Ranks(server, transports, 1) as ranks:
        keys = prompt(ranks.reader, 30)
        with ranks.clients[0].publish_stream(keys, heads=(0, 2)) as stream:
            with pytest.raises(kvstore.LayoutMismatch, match=r"blocks\[0\]: .* for 10 slices of 4096 bytes"):
                stream.write(0, np.zeros((BLOCKS, SPACE.layer_bytes), np.uint8))
            stream.write(0, np.zeros((BLOCKS, SPACE.layer_bytes // 4), np.uint8))


def test_joint_blocks_go_to_the_ssd_and_come_back(transports: list[str]) -> None:
    with (
        ServerProcess(dram="64MiB", disk="512MiB", admission="always") as server,
        Ranks(server, transports, 2) as ranks,
    ):
        count = (128 << 20) // (100 * SPACE.block_bytes)
        for number in range(count):
            write_jointly(ranks.clients, prompt(ranks.reader, number, 100), content(number, 100), split(2))
            until(lambda: not server.status()["shards"][0]["disk"]["queued_bytes"], what="write-behind")
        assert gauge(server, "disk_blocks")
        for number in (0, count // 2, count - 1):
            keys = prompt(ranks.reader, number, 100)
            np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(4)), content(number, 100))


def test_joint_blocks_are_there_after_a_restart() -> None:
    with ServerProcess(dram="32MiB", disk="128MiB", admission="always") as server:
        with Ranks(server, ["shm", "tcp"], 2) as ranks:
            keys, data = prompt(ranks.reader, 1), content(1)
            write_jointly(ranks.clients, keys, data, split(2))
            until(lambda: gauge(server, "durable_blocks") == BLOCKS, what="write-behind")
        server.kill()
        server.start()
        with Ranks(server, ["tcp"], 1) as ranks:
            until(lambda: ranks.reader.lookup(keys).hit_blocks == BLOCKS, what="the scan")
            np.testing.assert_array_equal(read_jointly(ranks.reader, keys, split(2)), data)
