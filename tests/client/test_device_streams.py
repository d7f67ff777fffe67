"""Layer streams into device memory and out of it: over a ring of host memory that may be smaller than the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.device.base import LEGACY_STREAM
from kvstore.device.cuda import CudaDevice
from kvstore.device.host import HostDevice
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.device_targets import Target, Tensor, device_of
from tests.client.sdk import Bytes, one_line
from tests.device.fake_driver import FakeDriver
from tests.device.gpus import DEVICES, usable

LAYERS, HEADS, BLOCKS = 6, 4, 10
SPACE = kvstore.Namespace(
    model="stream", revision="1", dtype="float16", block_tokens=16, layout=kvstore.CanonicalLayout(LAYERS, HEADS, 32)
)
SIZE = SPACE.layer_bytes

Connect = Callable[..., kvstore.Client]


@pytest.fixture(scope="module", params=[1, 2], ids=["one shard", "two shards"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(dram="160MiB", shards=request.param) as server:
        yield server


@pytest.fixture(params=["shm", "tcp"])
def connect(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Connect]:
    clients: list[kvstore.Client] = []

    def new(device: Any, **options: Any) -> kvstore.Client:
        settings: dict[str, Any] = {"namespace": SPACE, "timeout_s": 10.0, "transport": request.param, **options}
        clients.append(kvstore.connect(server.address, device=device, **settings))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


@pytest.fixture(params=DEVICES)
def client(connect: Connect, request: pytest.FixtureRequest) -> Iterator[kvstore.Client]:
    with usable(request.param) as name:
        yield connect(name)


@pytest.fixture(params=[False, True], ids=["whole ring", "two layers"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the stream, or for two of its layers."""
    if request.param:
        monkeypatch.setattr("kvstore.client.landing.STAGING_BYTES", 1)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def prompt(client: kvstore.Client, number: int = 0) -> kvstore.BlockKeys:
    return client.keys(np.arange(BLOCKS * 16) + number * 100_000)


def content(seed: int = 0) -> Bytes:
    """Blocks, shape (blocks, layers, bytes of a layer)."""
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYERS, SIZE), dtype=np.uint8)


def stored(client: kvstore.Client, number: int = 0) -> tuple[kvstore.BlockKeys, Bytes]:
    keys, data = prompt(client, number), content(number)
    client.delete(keys)
    assert client.put(keys, data).stored == BLOCKS
    return keys, data


def layer_targets(client: kvstore.Client, slices: int = BLOCKS, size: int = SIZE, layers: int = LAYERS) -> list[Target]:
    """Zeros, one target a layer."""
    targets = [Target(device_of(client), slices, size) for _ in range(layers)]
    for target in targets:
        target.fill(np.zeros((slices, size), np.uint8))
    return targets


@pytest.mark.usefixtures("ring")
def test_layers_arrive_in_order_in_one_tensor_of_whole_blocks(client: kvstore.Client) -> None:
    keys, data = stored(client)
    target = Target(device_of(client), BLOCKS, SPACE.block_bytes)
    with client.layer_stream(keys, target.tensor) as stream:
        for layer in stream.layers:
            assert stream.wait(layer).all()
            seen = target.bytes().reshape(data.shape)  # copies of one device end in order
            np.testing.assert_array_equal(seen[:, : layer + 1], data[:, : layer + 1])
    assert stream.ok.all()


@pytest.mark.usefixtures("ring")
def test_a_range_of_layers_and_heads_goes_to_scattered_slots_of_paged_tensors(client: kvstore.Client) -> None:
    keys, data = stored(client)
    size = SIZE // HEADS * 2
    targets = layer_targets(client, slices=40, size=size, layers=3)
    slots = np.random.default_rng(1).permutation(40)[:BLOCKS]
    tensors = [target.tensor for target in targets]
    with client.layer_stream(keys, tensors, layers=(2, 5), heads=(1, 3), slots=slots) as stream:
        assert stream.wait(4).all()
    heads = data.reshape(BLOCKS, LAYERS, HEADS, -1)[:, :, 1:3].reshape(BLOCKS, LAYERS, -1)
    for layer, target in zip(range(2, 5), targets, strict=True):
        page = target.bytes()
        np.testing.assert_array_equal(page[slots], heads[:, layer])
        assert not np.delete(page, slots, axis=0).any(), "bytes beside the slots were touched"


@pytest.mark.usefixtures("ring")
def test_only_blocks_that_are_there_are_written(client: kvstore.Client) -> None:
    keys, data = stored(client)
    client.delete(keys[4:6])
    targets = layer_targets(client)
    there = np.array([row not in {4, 5} for row in range(BLOCKS)])
    with client.layer_stream(keys, [target.tensor for target in targets]) as stream:
        for layer in stream.layers:
            assert stream.wait(layer).tolist() == there.tolist()
    for layer, target in enumerate(targets):
        np.testing.assert_array_equal(target.bytes()[there], data[there, layer])
        assert not target.bytes()[~there].any()


@pytest.mark.usefixtures("ring")
def test_device_to_device_layer_by_layer_over_an_unfinished_block(client: kvstore.Client) -> None:
    keys, data = prompt(client, 5), content(5)
    client.delete(keys)
    sources = layer_targets(client, slices=2 * BLOCKS)
    targets = layer_targets(client)
    slots = np.arange(BLOCKS) * 2
    with client.publish_stream(keys) as publishing:
        with client.layer_stream(keys, [target.tensor for target in targets]) as stream:
            for layer in range(LAYERS):
                assert not stream.ready(layer)
                sources[layer].fill(np.repeat(data[:, layer], 2, axis=0))
                publishing.write(layer, sources[layer].tensor, slots=slots)
                assert stream.wait(layer).all()
                np.testing.assert_array_equal(targets[layer].bytes(), data[:, layer])
        assert publishing.commit().stored == BLOCKS


def test_a_late_layer_ends_the_stream_and_what_has_arrived_of_it_is_told(
    server: ServerProcess, connect: Connect
) -> None:
    """One block's writer is late; the other blocks have the layer."""
    client = connect("host")
    keys, data = stored(client, 8)
    client.delete(keys[3:4])
    into = np.zeros_like(data)
    with (
        kvstore.connect(server.address, namespace=SPACE) as writer,
        writer.publish_stream(keys[3:4]) as publishing,
    ):
        publishing.write(0, np.ascontiguousarray(data[3:4, 0]))
        with client.layer_stream(keys, into) as stream:
            assert stream.wait(0).all()
            arrived = stream.wait(1, timeout_s=1.0)
            assert arrived.tolist() == [row != 3 for row in range(BLOCKS)]
            into[3] = 0xAB  # the caller has that memory for itself by now
            publishing.write(1, np.ascontiguousarray(data[3:4, 1]))
            assert not stream.wait(2)[3]
    np.testing.assert_array_equal(into[arrived, :2], data[arrived, :2])
    assert (into[3] == 0xAB).all()


class Gate:
    """A device whose copies begin when they are let, one batch each."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)
        self.device = HostDevice(begin=self._begin)

    def let(self, batches: int) -> None:
        self._open.release(batches)

    def _begin(self) -> None:
        assert self._open.acquire(timeout=30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let(1000)
    gate.device.close()


@pytest.fixture
def blocks(server: ServerProcess) -> Bytes:
    """What is stored as the first prompt, by a client without a device."""
    with kvstore.connect(server.address, namespace=SPACE) as plain:
        return stored(plain)[1]


def test_sources_run_no_further_ahead_of_a_slow_device_than_the_ring_has_places(
    connect: Connect, gate: Gate, blocks: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.landing.STAGING_BYTES", 1)
    client = connect(gate.device)
    into = np.zeros_like(blocks)
    with client.layer_stream(prompt(client), into) as stream:
        for copied in range(LAYERS - 2):
            until(lambda copied=copied: stream.ready(copied + 1), what="two layers in the ring")
            assert not stream.ready(copied + 2)
            with one_line(kvstore.DeviceError, "host: copies did not end within"):
                stream.wait(copied, timeout_s=0.0)
            gate.let(1)
            assert stream.wait(copied).all()
            np.testing.assert_array_equal(into[:, copied], blocks[:, copied])
        gate.let(2)
        assert stream.wait(LAYERS - 1).all()
    np.testing.assert_array_equal(into, blocks)


def test_who_leaves_in_the_middle_waits_for_the_copies_that_were_asked_for(
    connect: Connect, gate: Gate, blocks: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.landing.STAGING_BYTES", 1)
    client = connect(gate.device)
    into = np.zeros_like(blocks)
    stream = client.layer_stream(prompt(client), into)
    until(lambda: stream.ready(1), what="two layers in the ring")
    left = threading.Event()
    leaving = threading.Thread(target=lambda: (stream.cancel(), left.set()))
    leaving.start()
    assert not left.wait(0.2)
    gate.let(2)
    assert left.wait(10.0)
    leaving.join()
    np.testing.assert_array_equal(into[:, :2], blocks[:, :2])
    assert not into[:, 2:].any()
    gate.let(1)
    assert gate.device.idle()
    with pytest.raises(kvstore.StreamClosed):
        stream.wait(0)


def test_a_device_that_does_not_end_is_an_error_and_its_ring_is_nobody_s_any_more(
    connect: Connect, gate: Gate, blocks: Bytes
) -> None:
    client = connect(gate.device, timeout_s=1.0)
    keys, late, into = prompt(client), np.zeros_like(blocks), np.zeros_like(blocks)
    with one_line(kvstore.DeviceError, "host: copies did not end within"), client.layer_stream(keys, late) as stream:
        until(lambda: stream.ready(LAYERS - 1), what="all layers in the ring")
    gate.let(1000)
    with client.layer_stream(keys, into) as stream:  # while the first one's copies come late
        assert stream.wait(LAYERS - 1).all()
    np.testing.assert_array_equal(into, blocks)
    np.testing.assert_array_equal(late, blocks)


def test_a_ring_is_used_again_and_given_back_at_the_end(connect: Connect, driver: FakeDriver, blocks: Bytes) -> None:
    client = connect(CudaDevice(0, driver))
    target = Target(device_of(client), BLOCKS, SPACE.block_bytes)

    def rings() -> int:
        return len([size for size in driver.registered.values() if size == 64 << 20])

    for _ in range(3):
        with client.layer_stream(prompt(client), target.tensor) as stream:
            assert stream.wait(LAYERS - 1).all()
            client.get_into(prompt(client), target.tensor)
        assert rings() <= 2
    assert rings()
    np.testing.assert_array_equal(target.bytes().reshape(blocks.shape), blocks)
    client.close()
    assert not driver.registered


def test_the_host_does_not_wait_for_the_device_but_the_engine_s_stream_does(
    connect: Connect, driver: FakeDriver, blocks: Bytes
) -> None:
    client = connect(CudaDevice(0, driver))
    engine, memory = 1234, device_of(client).allocate(blocks.nbytes)
    given: list[tuple[dict[str, Any], int]] = [({"stream": engine}, engine), ({}, LEGACY_STREAM)]
    for options, named in given:
        driver.stuck = True
        driver.waits.clear()
        stream = client.layer_stream(prompt(client), Tensor(memory), **options)
        followed, of_engine = [event for at, event in driver.waits if at != named], driver.recorded
        assert any((named, event) in of_engine for event in followed), "copies start after the engine's work"
        for layer in stream.layers:
            assert stream.wait(layer).all()
        events = [event for at, event in driver.waits if at == named]
        assert len(set(events)) == len(events) == LAYERS
        driver.stuck = False
        stream.cancel()
        assert np.array_equal(driver.allocated[memory.address].reshape(blocks.shape), blocks)


@pytest.mark.usefixtures("blocks")
def test_a_broken_device_ends_a_stream_with_an_error(connect: Connect, driver: FakeDriver) -> None:
    client = connect(CudaDevice(0, driver), timeout_s=2.0)
    keys, tensor = prompt(client), Tensor(device_of(client).allocate(BLOCKS * SPACE.block_bytes))
    driver.stuck = True
    stream = client.layer_stream(keys, tensor)
    driver.broken = True
    with one_line(kvstore.DeviceError, "illegal address"):
        stream.wait(LAYERS - 1)
    with one_line(kvstore.DeviceError, "illegal address"):
        stream.cancel()
    driver.stuck = driver.broken = False
    with client.layer_stream(keys, tensor) as stream:
        assert stream.wait(LAYERS - 1).all()


def test_a_layer_that_the_device_does_not_hand_out_is_not_published(connect: Connect, driver: FakeDriver) -> None:
    client = connect(CudaDevice(0, driver), timeout_s=1.0)
    keys, data = prompt(client, 9), content(9)
    client.delete(keys)
    memory = device_of(client).allocate(BLOCKS * SIZE)
    with client.publish_stream(keys) as publishing:
        driver.stuck = True
        with one_line(kvstore.DeviceError, "cuda:0: copies did not end within"):
            publishing.write(0, Tensor(memory))
        assert not client.lookup(keys).layers_ready.any()
        driver.stuck = False
        for layer in range(LAYERS):
            driver.allocated[memory.address][:] = data[:, layer].reshape(-1)
            publishing.write(layer, Tensor(memory))
        assert publishing.commit().stored == BLOCKS
    got = client.get(keys)
    np.testing.assert_array_equal(np.stack([np.asarray(block) for block in got.blocks]), data.reshape(BLOCKS, -1))


def test_tensors_that_do_not_fit_are_refused_in_one_line(connect: Connect, driver: FakeDriver) -> None:
    client = connect(CudaDevice(0, driver))
    device, keys = device_of(client), prompt(client)
    whole, layer = device.allocate(BLOCKS * SPACE.block_bytes), device.allocate(BLOCKS * SIZE)
    host = np.zeros((BLOCKS, SIZE), np.uint8)
    good = [Tensor(layer)] * LAYERS
    cases: list[tuple[type[kvstore.KvStoreError], object, dict[str, Any], str]] = [
        (kvstore.UsageError, Tensor(whole, index=1), {}, "into: a tensor on cuda:1; this client's device is cuda:0"),
        (kvstore.LayoutMismatch, Tensor(whole, contiguous=False), {}, "into: the tensor is not contiguous"),
        (kvstore.LayoutMismatch, Tensor(whole, dtype="float32"), {}, "into: dtype float32"),
        (kvstore.LayoutMismatch, Tensor(layer), {}, f"into: {BLOCKS * SIZE} bytes for 10 blocks of 6 layers"),
        (kvstore.LayoutMismatch, good[:5], {}, "into: 5 buffers for 6 layers"),
        (kvstore.LayoutMismatch, [*good[:5], Tensor(whole)], {}, "into[5]: 491520 bytes for 10 slices"),
        (kvstore.UsageError, [*good[:5], Tensor(layer, index=1)], {}, "into[5]: a tensor on cuda:1"),
        (kvstore.UsageError, [*good[:5], host], {}, "into[5]: ndarray in host memory, among tensors on cuda:0"),
        (kvstore.UsageError, [host, *good[:5]], {}, "into[0]: ndarray in host memory, among tensors on cuda:0"),
        (kvstore.UsageError, good, {"slots": range(1, 11)}, "into[0]: slot 10 is outside"),
        (kvstore.UsageError, good, {"stream": "3"}, "stream='3': allowed is a CUDA stream's handle"),
        (kvstore.UsageError, [host] * LAYERS, {"stream": 3}, "stream=3: goes with tensors of the client's device"),
    ]
    for error, into, options, culprit in cases:
        with one_line(error, culprit):
            client.layer_stream(keys, into, **options)
    client.delete(keys)
    with client.publish_stream(keys) as publishing:
        with one_line(kvstore.LayoutMismatch, "blocks[0]: the tensor is not contiguous"):
            publishing.write(0, Tensor(layer, contiguous=False))
        with one_line(kvstore.UsageError, "blocks[0]: a tensor on cuda:1"):
            publishing.write(0, Tensor(layer, index=1))
        publishing.write(0, Tensor(layer))
