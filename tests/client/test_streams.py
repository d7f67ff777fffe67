"""Layer streams: layers in order into any memory, writers that are followed, and what is late or lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.client.layer_memory import Shape, layer_memory
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.base import Wanted
from kvstore.transport.copying import CopyPlan
from kvstore.transport.shm import SharedMemoryLink

LAYERS, HEADS, BLOCKS = 6, 4, 10
SPACE = kvstore.Namespace(
    model="stream", revision="1", dtype="float16", block_tokens=16, layout=kvstore.CanonicalLayout(LAYERS, HEADS, 32)
)
OPAQUE = kvstore.Namespace(
    model="stream", revision="1", dtype="uint8", block_tokens=16, layout=kvstore.OpaqueLayout("t", LAYERS, 5000)
)
U8 = NDArray[np.uint8]


@pytest.fixture(scope="module", params=[1, 3], ids=["one shard", "three shards"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(dram="192MiB", shards=request.param) as server:
        yield server


@pytest.fixture(params=["shm", "tcp"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[kvstore.Client]:
    with connect(server, request.param) as client:
        yield client
        client.delete(prompt(client, 0))


def connect(server: ServerProcess, transport: str, space: kvstore.Namespace = SPACE) -> kvstore.Client:
    return kvstore.connect(server.address, namespace=space, transport=transport, timeout_s=5.0)


def prompt(client: kvstore.Client, number: int, blocks: int = BLOCKS) -> kvstore.BlockKeys:
    return client.keys(np.arange(blocks * 16) + number * 100_000)


def content(space: kvstore.Namespace = SPACE, blocks: int = BLOCKS, seed: int = 0) -> U8:
    """Blocks, shape (blocks, layers, bytes of a layer)."""
    shape = (blocks, space.layers, space.layer_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def stored(client: kvstore.Client, number: int = 0) -> tuple[kvstore.BlockKeys, U8]:
    keys, data = prompt(client, number), content()
    client.delete(keys)
    assert client.put(keys, data).stored == BLOCKS
    return keys, data


def test_layers_arrive_in_order_in_one_buffer_of_whole_blocks(client: kvstore.Client) -> None:
    keys, data = stored(client)
    into = np.zeros_like(data)
    with client.layer_stream(keys, into) as stream:
        for layer in stream.layers:
            assert stream.wait(layer).all()
            np.testing.assert_array_equal(into[:, layer], data[:, layer])
        assert all(stream.ready(layer) for layer in stream.layers)
        assert stream.arrived_s == sorted(stream.arrived_s)
    assert stream.ok.all()


def test_a_range_of_layers_and_heads_goes_to_scattered_slots_of_paged_memory(client: kvstore.Client) -> None:
    keys, data = stored(client)
    size = SPACE.layer_bytes // HEADS * 2
    pages = [np.full((40, size), 0xAB, np.uint8) for _ in range(3)]
    slots = np.random.default_rng(1).permutation(40)[:BLOCKS]
    with client.layer_stream(keys, pages, layers=(2, 5), heads=(1, 3), slots=slots) as stream:
        assert list(stream.layers) == [2, 3, 4]
        for layer in stream.layers:
            assert stream.wait(layer).all()
    heads = data.reshape(BLOCKS, LAYERS, HEADS, -1)[:, :, 1:3].reshape(BLOCKS, LAYERS, -1)
    for layer, page in zip(range(2, 5), pages, strict=True):
        np.testing.assert_array_equal(page[slots], heads[:, layer])
        assert (np.delete(page, slots, axis=0) == 0xAB).all(), "bytes beside the slots were touched"


def test_what_is_not_there_is_told_block_by_block(client: kvstore.Client) -> None:
    keys, data = stored(client)
    client.delete(keys[4:6])
    into = np.zeros_like(data)
    with client.layer_stream(keys, into) as stream:
        for layer in stream.layers:
            assert stream.wait(layer).tolist() == [row not in {4, 5} for row in range(BLOCKS)]
    np.testing.assert_array_equal(into[[0, 3, 6, 9]], data[[0, 3, 6, 9]])


def test_nothing_at_all_is_an_answer_too(client: kvstore.Client) -> None:
    with client.layer_stream(prompt(client, 77), np.zeros((BLOCKS, SPACE.block_bytes), np.uint8)) as stream:
        assert not stream.wait(LAYERS - 1).any()
    empty = client.keys([])
    with client.layer_stream(empty, np.zeros((0, SPACE.block_bytes), np.uint8)) as stream:
        assert all(stream.ready(layer) for layer in stream.layers)
        assert stream.wait(0).shape == (0,)


def test_a_reader_follows_a_writer_layer_by_layer(server: ServerProcess, client: kvstore.Client) -> None:
    keys, data = prompt(client, 5), content(seed=5)
    client.delete(keys)
    into = np.zeros_like(data)
    with connect(server, "shm") as writer, writer.publish_stream(keys) as publishing:
        assert publishing.mine.tolist() == list(range(BLOCKS))
        with client.layer_stream(keys, into) as stream:
            assert not client.lookup(keys).hit_blocks
            for layer in range(LAYERS):
                assert not stream.ready(layer)
                publishing.write(layer, np.ascontiguousarray(data[:, layer]))
                assert stream.wait(layer).all()
                np.testing.assert_array_equal(into[:, layer], data[:, layer])
            assert publishing.commit().stored == BLOCKS
    assert client.get_into(keys, into).ok.all()
    np.testing.assert_array_equal(into, data)


def test_a_stream_that_begins_in_the_middle_of_the_writing_gets_all_layers(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys, data = prompt(client, 6), content(seed=6)
    client.delete(keys)
    into = np.zeros_like(data)
    pages = np.zeros((50, SPACE.layer_bytes), np.uint8)
    slots = np.arange(BLOCKS) * 5
    with connect(server, "tcp") as writer, writer.publish_stream(keys) as publishing:
        for layer in range(3):
            pages[slots] = data[:, layer]
            publishing.write(layer, pages, slots=slots)
        with client.layer_stream(keys, into) as stream:
            assert stream.wait(2).all()
            assert not stream.ready(3)
            for layer in range(3, LAYERS):
                pages[slots] = data[:, layer]
                publishing.write(layer, pages, slots=slots)
            assert publishing.commit().stored == BLOCKS
            assert stream.wait(LAYERS - 1).all()
    np.testing.assert_array_equal(into, data)


@pytest.mark.parametrize("end", ["abort", "leave", "die"])
def test_an_abort_reaches_a_reader_as_a_missing_tail_never_as_bytes(
    server: ServerProcess, client: kvstore.Client, end: str
) -> None:
    keys, data = prompt(client, 7), content(seed=7)
    client.delete(keys)
    into = np.full_like(data, 0xAB)
    with connect(server, "shm") as writer:
        publishing = writer.publish_stream(keys)
        publishing.write(0, np.ascontiguousarray(data[:, 0]))
        with client.layer_stream(keys, into) as stream:
            assert stream.wait(0).all()
            match end:
                case "abort":
                    publishing.abort()
                case "leave":
                    with publishing:
                        pass
                case _:
                    writer.close()
            for layer in range(1, LAYERS):
                assert not stream.wait(layer).any()
        np.testing.assert_array_equal(into[:, 0], data[:, 0])
        assert (into[:, 1:] == 0xAB).all()
    until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
    assert client.put(keys, data).stored == BLOCKS


def test_a_late_layer_ends_the_wait_and_the_stream(server: ServerProcess, client: kvstore.Client) -> None:
    keys, data = prompt(client, 8), content(seed=8)
    client.delete(keys)
    into = np.full_like(data, 0xAB)
    with connect(server, "shm") as writer, writer.publish_stream(keys) as publishing:
        publishing.write(0, np.ascontiguousarray(data[:, 0]))
        with client.layer_stream(keys, into) as stream:
            assert stream.wait(0).all()
            began_s = time.monotonic()
            assert not stream.wait(1, timeout_s=0.1).any()
            assert time.monotonic() - began_s < 2.0
            for layer in range(1, LAYERS):
                publishing.write(layer, np.ascontiguousarray(data[:, layer]))
            assert not stream.wait(2).any()
            assert (into[:, 1:] == 0xAB).all(), "the caller has the memory for itself by now"


def test_a_writer_that_goes_on_publishing_keeps_its_reservation(server: ServerProcess, client: kvstore.Client) -> None:
    keys, data = prompt(client, 9), content(seed=9)
    client.delete(keys)
    with client.publish_stream(keys, ttl_s=0.6) as publishing:
        began_s = time.monotonic()
        for layer in range(LAYERS):
            publishing.write(layer, np.ascontiguousarray(data[:, layer]))
            until(lambda layer=layer: time.monotonic() > began_s + 0.3 * (layer + 1), what="the next layer")
        assert publishing.commit().stored == BLOCKS
    assert client.lookup(keys).hit_blocks == BLOCKS


def test_a_writer_that_stops_loses_its_reservation(client: kvstore.Client) -> None:
    keys, data = prompt(client, 10), content(seed=10)
    client.delete(keys)
    with client.publish_stream(keys, ttl_s=0.2) as publishing:
        publishing.write(0, np.ascontiguousarray(data[:, 0]))
        until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
        for layer in range(1, LAYERS):
            publishing.write(layer, np.ascontiguousarray(data[:, layer]))
        result = publishing.commit()
    assert result.stored == 0
    assert (result.statuses == kvstore.PutStatus.FAILED).all()


def test_only_blocks_that_nobody_has_are_published(client: kvstore.Client) -> None:
    keys, data = stored(client, 11)
    client.delete(keys[7:])
    with client.publish_stream(keys) as publishing:
        assert publishing.mine.tolist() == [7, 8, 9]
        with client.publish_stream(keys) as second:
            assert not len(second.mine)
            assert second.statuses.tolist() == [1] * 7 + [2] * 3
        for layer in range(LAYERS):
            publishing.write(layer, np.ascontiguousarray(data[:, layer]))
        assert publishing.commit().stored == 3
    got = client.get(keys)
    assert got.ok.all()
    np.testing.assert_array_equal(np.stack([np.asarray(block) for block in got.blocks]), data.reshape(BLOCKS, -1))


def test_blocks_are_held_until_the_stream_ends(server: ServerProcess) -> None:
    with connect(server, "shm") as client:
        keys, data = stored(client, 12)
        stream = client.layer_stream(keys, np.zeros_like(data))
        stream.wait(LAYERS - 1)
        stream.cancel()
        held = sum(shard["gauges"]["leases_now"] for shard in server.status()["shards"])
        assert held == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_dies_in_the_middle_costs_the_rest_of_the_layers(transport: str) -> None:
    with (
        ServerProcess(dram="64MiB") as server,
        connect(server, "shm") as writer,
        connect(server, transport) as client,
    ):
        keys, data = prompt(client, 1), content()
        publishing = writer.publish_stream(keys)
        publishing.write(0, np.ascontiguousarray(data[:, 0]))
        with client.layer_stream(keys, np.zeros_like(data)) as stream:
            assert stream.wait(0).all()
            server.kill()
            began_s = time.monotonic()
            assert not stream.wait(1).any()
            assert time.monotonic() - began_s < 6.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_frozen_server_costs_the_deadline(transport: str) -> None:
    with (
        ServerProcess(dram="64MiB") as server,
        connect(server, "shm") as writer,
        connect(server, transport) as client,
    ):
        keys, data = prompt(client, 1), content()
        publishing = writer.publish_stream(keys)
        publishing.write(0, np.ascontiguousarray(data[:, 0]))
        with client.layer_stream(keys, np.zeros_like(data)) as stream:
            assert stream.wait(0).all()
            server.freeze()
            try:
                began_s = time.monotonic()
                assert not stream.wait(1, timeout_s=0.3).any()
                assert time.monotonic() - began_s < 1.5
            finally:
                server.thaw()


def test_cancel_from_another_thread_ends_a_wait(server: ServerProcess, client: kvstore.Client) -> None:
    keys, data = prompt(client, 13), content()
    client.delete(keys)
    with connect(server, "shm") as writer, writer.publish_stream(keys):
        stream = client.layer_stream(keys, np.zeros_like(data))
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(kvstore.StreamClosed):
            stream.wait(0)
        with pytest.raises(kvstore.StreamClosed, match="cancelled"):
            stream.wait(0)


LARGE = kvstore.Namespace(
    model="stream", revision="1", dtype="uint8", block_tokens=16, layout=kvstore.OpaqueLayout("t", 7, 1 << 20)
)


@pytest.mark.parametrize(("space", "blocks"), [(SPACE, BLOCKS), (LARGE, 2)], ids=["small blocks", "large blocks"])
def test_blocks_come_from_the_ssd_too(space: kvstore.Namespace, blocks: int) -> None:
    """Small ones as a whole, large ones some layers at a time."""
    with (
        ServerProcess(dram="64MiB", disk="512MiB", admission="always") as server,
        connect(server, "shm", space) as client,
    ):
        data = content(space, blocks)
        count = (128 << 20) // data.nbytes
        for number in range(count):
            assert client.put(prompt(client, number, blocks), data ^ np.uint8(number % 251)).stored == blocks
            until(lambda: not server.status()["shards"][0]["disk"]["queued_bytes"], what="write-behind")
        assert server.status()["shards"][0]["gauges"]["disk_blocks"]
        for transport in ("shm", "tcp"):
            with connect(server, transport, space) as reader:
                for number in (0, 1, count - 1):
                    into = np.zeros_like(data)
                    with reader.layer_stream(prompt(reader, number, blocks), into) as stream:
                        for layer in stream.layers:
                            assert stream.wait(layer).all()
                            np.testing.assert_array_equal(into[:, layer], data[:, layer] ^ np.uint8(number % 251))


def test_a_stream_is_counted_and_noted_as_one_request(server: ServerProcess, client: kvstore.Client) -> None:
    keys, data = stored(client, 14)

    def noted() -> int:
        return sum(shard["counters"]["noted_requests"] for shard in server.status()["shards"])

    client.lookup(prompt(client, 99, 1))  # another request, which ends what was noted of the puts
    before = [sum(link[name] for link in client.stats()["links"]) for name in ("read_blocks", "read_bytes")]
    noted_before, parts = noted(), len(client.stats()["links"])
    with client.layer_stream(keys, np.zeros_like(data)) as stream:
        assert stream.wait(LAYERS - 1).all()
    after = [sum(link[name] for link in client.stats()["links"]) for name in ("read_blocks", "read_bytes")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [BLOCKS, BLOCKS * SPACE.block_bytes]
    until(lambda: noted() > noted_before, what="the note of the request")
    assert noted() - noted_before <= 2 * parts


def test_blocks_are_held_while_they_are_copied_and_nothing_is_copied_afterwards(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives up a stream may use its memory at once, and a copy under way must not outlive its lease."""
    with connect(server, "shm") as client:
        keys, data = stored(client, 15)
        links = client._nodes[0].links  # pyright: ignore[reportPrivateUsage] -- the copy is held up inside
        link = next(link for link in links if link is not None and link.lookup(keys.array[:1], 5.0).states[0])
        assert isinstance(link, SharedMemoryLink)
        monkeypatch.setattr("kvstore.transport.shm_layers.STEP_BYTES", 1)  # a step is a layer
        into = np.zeros_like(data[:1])
        shape = Shape(count=1, layers=LAYERS, size=SPACE.layer_bytes, dtype="uint8")
        memory = layer_memory(into, None, shape, name="into", writable=True)
        source = link.layers(keys.array[:1], Wanted(0, LAYERS, 0, SPACE.layer_bytes), memory, 10.0, 5.0)
        inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()
        copy = CopyPlan.copy

        def slowly(*arguments: Any) -> None:
            inside.set()
            assert go_on.wait(10.0)
            copy(*arguments)

        monkeypatch.setattr(CopyPlan, "copy", slowly)
        reading = threading.Thread(target=source.advance, args=(5.0,))
        reading.start()
        assert inside.wait(10.0)
        closing = threading.Thread(target=lambda: (source.close(abandon=True), closed.set()))
        closing.start()
        assert not closed.wait(0.2)
        assert sum(shard["gauges"]["leases_now"] for shard in server.status()["shards"]) == 1
        go_on.set()
        for thread in (reading, closing):
            thread.join()
        np.testing.assert_array_equal(into[0, :2], data[0, :2])
        assert sum(shard["gauges"]["leases_now"] for shard in server.status()["shards"]) == 0
        with pytest.raises(kvstore.Unavailable, match="given up"):
            source.advance(5.0)
        assert not into[0, 2:].any()


def test_a_block_that_arrives_damaged_is_dropped_and_its_next_layers_go_nowhere(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server, "tcp") as client, connect(server, "shm") as other:
        keys, data, wrong = prompt(client, 16), content(seed=16), content(seed=17)
        with client.publish_stream(keys) as publishing:

            def no_sum(*_: object) -> list[int]:
                return [0]

            with monkeypatch.context() as patched:
                patched.setattr("kvstore.transport.tcp_layers.sums_of", no_sum)
                publishing.write(0, np.ascontiguousarray(wrong[:, 0]))
            until(lambda: not other.lookup(keys).states.any(), what="the end of the reservations")
            assert other.put(keys, data).stored == BLOCKS  # into the same slots, as they were freed last
            for layer in range(1, LAYERS):
                publishing.write(layer, np.ascontiguousarray(wrong[:, layer]))
            assert publishing.commit().stored == 0
        got = np.zeros_like(data)
        assert other.get_into(keys, got).ok.all()
        np.testing.assert_array_equal(got, data)


def buffers(count: int = LAYERS, size: int = SPACE.layer_bytes * BLOCKS) -> list[U8]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


WHOLE = np.zeros((BLOCKS, SPACE.block_bytes), np.uint8)


@pytest.mark.parametrize(
    ("into", "arguments", "culprit"),
    [
        (buffers(), {"layers": (3, 9)}, r"layers=\(3, 9\)"),
        (buffers(), {"heads": (0, 5)}, r"heads=\(0, 5\).*0 to 4"),
        (buffers(4), {}, "4 buffers for 6 layers"),
        (buffers(size=7), {}, r"into\[0\]: 7 bytes for 10 slices"),
        (np.zeros(9, np.uint8), {}, "into: 9 bytes"),
        ([np.zeros((4, 4), np.int32)] * LAYERS, {}, "dtype int32"),
        ([b"x" * 40960] * LAYERS, {}, "read-only"),
        (buffers(), {"slots": [0] * BLOCKS}, "named twice"),
        (buffers(), {"slots": range(1, 11)}, "slot 10 is outside"),
        (buffers(), {"slots": "abc"}, "slots of shape"),
        (WHOLE, {"slots": range(10)}, "slots= goes with one buffer a layer"),
        (buffers(), {"ttl_s": 0}, "ttl_s=0"),
    ],
)
def test_memory_or_ranges_that_do_not_fit_are_one_clear_line(
    client: kvstore.Client, into: object, arguments: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(kvstore.UsageError, match=culprit):
        client.layer_stream(prompt(client, 20), into, **arguments)


def test_layers_that_are_published_out_of_order_or_in_part_are_refused(client: kvstore.Client) -> None:
    with client.publish_stream(prompt(client, 20)) as publishing:
        with pytest.raises(kvstore.UsageError, match=r"layer 1: .* 0 is the next"):
            publishing.write(1, buffers()[0])
        with pytest.raises(kvstore.LayoutMismatch, match=r"blocks\[0\]: 5 bytes"):
            publishing.write(0, buffers(1, 5)[0])
        publishing.write(0, buffers()[0])
        with pytest.raises(kvstore.UsageError, match="1 of 6 layers"):
            publishing.commit()
    with pytest.raises(kvstore.UsageError, match="ttl_s=-1"):
        client.publish_stream(prompt(client, 20), ttl_s=-1)


def test_an_opaque_layout_streams_layers_but_no_heads(server: ServerProcess) -> None:
    with connect(server, "shm", OPAQUE) as client:
        keys, data = prompt(client, 1), content(OPAQUE)
        assert client.put(keys, data).stored == BLOCKS
        into = np.zeros_like(data)
        with client.layer_stream(keys, into) as stream:
            assert stream.wait(LAYERS - 1).all()
        np.testing.assert_array_equal(into, data)
        with pytest.raises(kvstore.UsageError, match="opaque"):
            client.layer_stream(keys, into, heads=(0, 1))


def test_a_stream_is_not_used_after_its_end(client: kvstore.Client) -> None:
    keys, data = stored(client)
    stream = client.layer_stream(keys, np.zeros_like(data))
    with stream, pytest.raises(kvstore.UsageError, match="layer 6"):
        stream.wait(6)
    with pytest.raises(kvstore.StreamClosed):
        stream.wait(0)
    with client.publish_stream(prompt(client, 21)) as publishing:
        pass
    with pytest.raises(kvstore.StreamClosed):
        publishing.write(0, np.zeros((BLOCKS, SPACE.layer_bytes), np.uint8))
    with pytest.raises(kvstore.StreamClosed):
        publishing.commit()
