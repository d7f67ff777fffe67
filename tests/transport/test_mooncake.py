"""One-sided transfers: how reads are planned and verified, large blocks, what is written from afar, what comes late."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import Namespace
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.base import Wanted
from kvstore.transport.buffers import LayerMemory, Pieces, Region
from kvstore.transport.channel import Deadline
from kvstore.transport.mooncake import MooncakeLink
from kvstore.transport.mooncake_engine import engine_problem
from kvstore.transport.mooncake_lanes import BAY_BYTES, LANE_BYTES, Lane
from kvstore.transport.mooncake_plan import Piece, Verifier, pieces_of
from kvstore.transport.mooncake_process import TransferProcess
from kvstore.transport.shm import SharedMemoryLink
from kvstore.transport.tcp import connect_data_port
from kvstore.transport.trailer import sums_of
from kvstore.wire.control import ControlClient, NodeInfo
from kvstore.wire.fabric import FabricInfo
from kvstore.wire.frames import Op
from kvstore.wire.messages import encode_json
from tests.client.sdk import content, fresh_keys, space, stored
from tests.transport.fabrics import needs_mooncake

TIMEOUT_S = 10.0


# --- plans -----------------------------------------------------------------------------------------------------------


def brought(piece: Piece, pool: np.ndarray) -> np.ndarray:
    """What the transfers of a piece make of its memory."""
    memory = np.zeros(int((piece.ours + piece.sizes).max()), dtype=np.uint8)
    for ours, theirs, size in zip(piece.ours.tolist(), piece.theirs.tolist(), piece.sizes.tolist(), strict=True):
        memory[ours : ours + size] = pool[theirs : theirs + size]
    return memory


@given(
    slots=st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True),
    slices=st.integers(1, 5),
    slice_bytes=st.sampled_from([8, 100, 3000, 9000]),
    gap=st.sampled_from([0, 48, 5000]),
    piece_bytes=st.sampled_from([4096, 16384, 100_000]),
)
def test_every_byte_of_every_block_is_brought_once_and_to_its_place(
    slots: list[int], slices: int, slice_bytes: int, gap: int, piece_bytes: int
) -> None:
    size = slices * slice_bytes
    offsets = np.array(slots, dtype=np.int64) * (size + gap)
    pool = np.random.default_rng(0).integers(0, 256, 61 * (size + gap), dtype=np.uint8)
    got = np.zeros((len(slots), size), dtype=np.uint8)
    times = np.zeros((len(slots), size), dtype=np.int64)
    sums = np.array([sums_of(memoryview(pool[at : at + size]), slice_bytes) for at in offsets.tolist()], np.uint64)
    verifier = Verifier(slice_bytes, sums)
    for piece in pieces_of(offsets, size, slice_bytes, piece_bytes):
        memory = brought(piece, pool)
        assert len(memory) <= piece_bytes
        verifier.look(piece, memory)
        for row, place in zip(piece.rows.tolist(), piece.places.tolist(), strict=True):
            got[row, piece.start : piece.start + piece.size] = memory[place : place + piece.size]
            times[row, piece.start : piece.start + piece.size] += 1
    assert (times == 1).all()
    assert np.array_equal(got, np.stack([pool[at : at + size] for at in offsets.tolist()]))
    assert verifier.matching.all()


@pytest.mark.parametrize("piece_bytes", [4096, 100_000], ids=["slices in several pieces", "whole slices"])
def test_one_wrong_byte_marks_its_block_and_no_other(piece_bytes: int) -> None:
    size, slice_bytes = 20_000, 10_000
    pool = np.random.default_rng(1).integers(0, 256, 3 * size, dtype=np.uint8)
    offsets = np.arange(3) * size
    sums = np.array([sums_of(memoryview(pool[at : at + size]), slice_bytes) for at in offsets.tolist()], np.uint64)
    pool[size + 15_000] ^= 1
    verifier = Verifier(slice_bytes, sums)
    for piece in pieces_of(offsets, size, slice_bytes, piece_bytes):
        verifier.look(piece, brought(piece, pool))
    assert verifier.matching.tolist() == [True, False, True]


def test_blocks_side_by_side_come_in_one_transfer_and_others_in_their_own() -> None:
    together = next(pieces_of(np.array([0, 4136, 8272]), 4096, 1024, BAY_BYTES))
    assert together.sizes.tolist() == [2 * 4136 + 4096]
    apart = next(pieces_of(np.array([0, 90_000, 8272]), 4096, 1024, BAY_BYTES))
    assert apart.sizes.tolist() == [4096] * 3


# --- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> Iterator[ServerProcess]:
    if engine_problem():
        pytest.skip(engine_problem())
    with ServerProcess(dram="512MiB", fabric="tcp") as server:
        yield server


def connect(store: ServerProcess, namespace: Namespace, timeout_s: float = TIMEOUT_S) -> kvstore.Client:
    return kvstore.connect(store.address, namespace=namespace, transport="mooncake", timeout_s=timeout_s)


def hello(store: ServerProcess) -> NodeInfo:
    with ControlClient(store.address, timeout_s=TIMEOUT_S) as control:
        return control.hello("tests")


def link_to(store: ServerProcess, namespace: Namespace, timeout_s: float = TIMEOUT_S) -> MooncakeLink:
    node = hello(store)
    pool_bytes = node.shards[0].pool_bytes
    address = (node.data_host, node.data_port)
    link = MooncakeLink(*address, token=node.token, shard=0, pool_bytes=pool_bytes, timeout_s=timeout_s)
    link.open(namespace, timeout_s)
    return link


@needs_mooncake
@pytest.mark.parametrize(
    ("layer_bytes", "layers", "blocks"),
    [
        (1 << 20, 12, 5),  # larger than a piece of a lane's memory
        (BAY_BYTES + 4096, 3, 3),  # a layer is larger than that
        (LANE_BYTES + 8, 1, 2),  # than a lane's memory and all landing space: such a put goes over TCP
        (1000, 3, 700),  # small and many, not aligned
    ],
)
def test_blocks_of_any_size_come_back_as_they_were_put(
    store: ServerProcess, layer_bytes: int, layers: int, blocks: int
) -> None:
    namespace = space(layer_bytes, layers)
    with connect(store, namespace) as client:
        keys, data = stored(client, blocks)
        into = np.zeros_like(data)
        assert client.get_into(keys, into).ok.all()
        assert np.array_equal(into, data)
        middle = np.zeros((blocks, layer_bytes), dtype=np.uint8)
        assert client.get_into(keys, middle, layers=(layers // 2, layers // 2 + 1)).ok.all()
        assert np.array_equal(middle, data.reshape(blocks, layers, -1)[:, layers // 2])
        scattered = [np.zeros(namespace.block_bytes, dtype=np.uint8) for _ in range(blocks)]
        assert client.get_into(keys[::-1], scattered).ok.all()
        assert all(np.array_equal(block, data[-1 - row]) for row, block in enumerate(scattered))
        paged = [np.zeros((blocks, layer_bytes), dtype=np.uint8) for _ in range(layers)]
        with client.layer_stream(keys, paged, slots=np.arange(blocks)[::-1]) as stream:
            assert stream.wait(layers - 1).all()
        assert np.array_equal(np.stack(paged, axis=1)[::-1], data.reshape(blocks, layers, -1))
        assert client.delete(keys) == blocks


@needs_mooncake
def test_heads_of_layers_are_read_from_where_they_lie(store: ServerProcess) -> None:
    layout = kvstore.CanonicalLayout(3, 4, 64)
    namespace = Namespace(model="heads", revision="1", dtype="float16", block_tokens=16, layout=layout)
    with connect(store, namespace) as client:
        keys = client.keys(np.arange(16 * 20, dtype=np.int32))
        data = np.random.default_rng(3).integers(0, 256, (20, namespace.block_bytes), dtype=np.uint8)
        assert client.put(keys, data).stored == 20
        heads = data.reshape(20, 3, 4, -1)[:, 1:, 1:3]
        into = np.zeros(heads.shape, dtype=np.uint8)
        with client.layer_stream(keys, into, layers=(1, 3), heads=(1, 3)) as stream:
            assert stream.wait(2).all()
        assert np.array_equal(into, heads)
        client.delete(keys)


@needs_mooncake
def test_without_landing_space_blocks_are_put_over_tcp_and_read_by_one_side() -> None:
    with (
        ServerProcess(dram="32MiB", fabric="tcp", fabric_landing=0) as server,
        connect(server, space()) as client,
    ):
        keys, data = stored(client, 9)
        with client.publish_stream(fresh_keys(client, 2)) as stream:
            stream.write(0, np.zeros((2, 4096), np.uint8))
            stream.write(1, np.zeros((2, 4096), np.uint8))
            assert stream.commit().stored == 2
        into = np.zeros_like(data)
        assert client.get_into(keys, into).ok.all()
        assert np.array_equal(into, data)
        assert client.stats()["links"][0]["transport"] == "mooncake"


@needs_mooncake
def test_blocks_that_went_to_the_ssd_come_back() -> None:
    with (
        ServerProcess(dram="16MiB", disk="256MiB", admission="always", fabric="tcp") as server,
        connect(server, space(64 << 10)) as client,
    ):
        batches = [fresh_keys(client, 16) for _ in range(16)]  # 32 MiB
        for keys in batches:
            until(lambda keys=keys: client.put(keys, content(keys, client.namespace)).present == 16, what="room")
        until(lambda: client.lookup(batches[0]).hit_blocks == 16, what="the first blocks on the SSD")
        for keys in batches:
            into = np.zeros((16, client.namespace.block_bytes), dtype=np.uint8)
            assert client.get_into(keys, into).ok.all()
            assert np.array_equal(into, content(keys, client.namespace))
        into = np.zeros((16, client.namespace.block_bytes), dtype=np.uint8)
        with client.layer_stream(batches[0], into) as stream:
            assert stream.wait(1).all()
        assert np.array_equal(into, content(batches[0], client.namespace))


@needs_mooncake
def test_a_write_to_the_pool_from_afar_fails_and_changes_nothing(store: ServerProcess) -> None:
    node = hello(store)
    with connect(store, space()) as client:
        keys, data = stored(client, 4)
        fabric = store.fabric_pids()
        channel, _ = connect_data_port(node.data_host, node.data_port, node.token, 0, Deadline(TIMEOUT_S))
        with closing(channel):
            info = FabricInfo.decode(channel.call(Op.FABRIC, encode_json({"landing": 0}), Deadline(TIMEOUT_S)))
        process = TransferProcess(
            "127.0.0.1", "tcp", "", info.segment, lanes=1, lane_bytes=LANE_BYTES, timeout_s=TIMEOUT_S
        )
        try:
            lane = Lane(process, 0)
            lane.memory[:] = 0xEE
            with pytest.raises(Unavailable):
                lane.wait(lane.write(0, info.pool, LANE_BYTES), Deadline(TIMEOUT_S))
        finally:
            process.kill()
        into = np.zeros_like(data)
        assert client.get_into(keys, into).ok.all()
        assert np.array_equal(into, data)
        assert store.fabric_pids() == fabric


@needs_mooncake
def test_what_a_frozen_peer_sends_late_reaches_no_callers_memory(store: ServerProcess) -> None:
    namespace = space(1 << 20)
    with connect(store, namespace) as client:
        keys, data = stored(client, 8)
        with connect(store, namespace, timeout_s=2.0) as hasty:
            (fabric,) = store.fabric_pids()
            into = np.zeros_like(data)
            os.kill(fabric, signal.SIGSTOP)
            try:
                assert not hasty.get_into(keys, into).ok.any()
                into[:] = 0xAB  # the caller's again
            finally:
                os.kill(fabric, signal.SIGCONT)
            again = np.zeros_like(data)
            until(lambda: bool(hasty.get_into(keys, again).ok.all()), what="recovery")
            assert np.array_equal(again, data)
            assert (into == 0xAB).all()
        client.delete(keys)


@needs_mooncake
def test_a_stream_that_is_cancelled_costs_nobody_the_link_and_writes_no_more(store: ServerProcess) -> None:
    namespace = space(1 << 20, 8)
    with connect(store, namespace) as client:
        keys, data = stored(client, 8)
        for _ in range(6):  # more streams than there are lanes for them
            into = np.zeros_like(data)
            stream = client.layer_stream(keys, into)
            stream.wait(0)
            stream.cancel()
            into[:] = 0xAB
            again = np.zeros_like(data)
            assert client.get_into(keys, again).ok.all()
            assert np.array_equal(again, data)
            assert (into == 0xAB).all()
        assert client.stats()["links"][0]["up"]
        client.delete(keys)


@needs_mooncake
def test_more_streams_than_lanes_go_over_tcp(store: ServerProcess) -> None:
    namespace = space(64 << 10, 4)
    with ExitStack() as stack:
        link = stack.enter_context(closing(link_to(store, namespace)))
        client = stack.enter_context(connect(store, namespace))
        keys, data = stored(client, 4)
        wanted = Wanted(0, 4, 0, namespace.layer_bytes)
        memories = [np.zeros_like(data) for _ in range(6)]
        offsets = np.arange(4) * namespace.block_bytes
        shifts = tuple(range(0, namespace.block_bytes, namespace.layer_bytes))
        sources = [
            stack.enter_context(
                closing(
                    link.layers(
                        keys.array,
                        wanted,
                        LayerMemory((memory.reshape(-1),) * 4, shifts, offsets, gapless=True),
                        30.0,
                        TIMEOUT_S,
                    )
                )
            )
            for memory in memories
        ]
        assert {type(source).__name__ for source in sources} == {"MooncakeLayerSource", "TcpLayerSource"}
        for source, memory in zip(sources, memories, strict=True):
            while source.settled < 4:
                source.advance(TIMEOUT_S)
            assert np.array_equal(memory, data)
        single = Pieces(tuple(np.zeros(namespace.block_bytes, np.uint8) for _ in range(4)))
        assert link.fetch(keys.array, single, (0, 4), TIMEOUT_S).all(), "calls find a lane all the same"


@needs_mooncake
def test_a_damaged_block_is_a_miss_and_can_be_put_again(store: ServerProcess) -> None:
    namespace = space()
    with (
        connect(store, namespace) as client,
        kvstore.connect(store.address, namespace=namespace, transport="shm", checksums=True) as local,
    ):
        keys, data = stored(client, 3)
        with local.view(keys[1:2]) as view:
            block = view[0]
            assert block is not None
            shared = next(link for node in local._nodes for link in node.links)  # pyright: ignore[reportPrivateUsage]
            assert isinstance(shared, SharedMemoryLink)
            memory = shared._shared  # pyright: ignore[reportPrivateUsage]
            memory.pool[block.ctypes.data - memory.pool_read_only.ctypes.data] ^= 1
        into = np.zeros_like(data)
        assert client.get_into(keys, into).ok.tolist() == [True, False, True]
        assert client.stats()["links"][0]["checksum_failures"] == 1
        assert client.put(keys, data).stored == 1
        assert client.get_into(keys, into).ok.all()
        assert np.array_equal(into, data)


@needs_mooncake
def test_threads_share_a_link_and_its_lanes(store: ServerProcess) -> None:
    namespace = space(256 << 10)
    with connect(store, namespace) as client:
        wrong: list[int] = []

        def work() -> None:
            keys, data = stored(client, 8)
            for _ in range(5):
                into = np.zeros_like(data)
                if not client.get_into(keys, into).ok.all() or not np.array_equal(into, data):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@needs_mooncake
def test_a_region_far_into_a_large_buffer_is_filled_where_it_was_asked(store: ServerProcess) -> None:
    namespace = space()
    with connect(store, namespace) as client, closing(link_to(store, namespace)) as link:
        keys, data = stored(client, 3)
        buffer = np.zeros(100_000, dtype=np.uint8)
        offsets = np.array([50_000, 7, 20_001])
        assert link.fetch(keys.array, Region(buffer, offsets), (0, 2), TIMEOUT_S).all()
        for row, offset in enumerate(offsets.tolist()):
            assert np.array_equal(buffer[offset : offset + namespace.block_bytes], data[row])
        assert np.count_nonzero(buffer) <= data.size
