"""Blocks into device memory: from the server's segment, from its pool, over TCP; and a reader who races the shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.device.cuda import CudaDevice
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.device_targets import SIZE, SPACE, Target, device_of, from_segment, gpu, heat
from tests.client.sdk import content, fresh_keys, fresh_tokens, stored
from tests.device.fake_driver import FakeDriver
from tests.device.gpus import DEVICES, usable

Connect = Callable[..., kvstore.Client]


@pytest.fixture(scope="module", params=DEVICES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of server and client."""
    with usable(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def server(name: str) -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB", gpu=name, gpu_bytes="8MiB") as server:
        yield server


@pytest.fixture
def connect(server: ServerProcess, name: str) -> Iterator[Connect]:
    clients: list[kvstore.Client] = []

    def new(**options: object) -> kvstore.Client:
        settings: dict[str, Any] = {"namespace": SPACE, "timeout_s": 10.0, "device": name, **options}
        clients.append(kvstore.connect(server.address, **settings))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


def test_blocks_come_from_the_pool_and_once_they_are_hot_from_the_segment(connect: Connect) -> None:
    client = connect()
    keys, data = stored(client, 16)
    target = Target(device_of(client), 16)
    assert client.get_into(keys, target.tensor).ok.all()
    assert np.array_equal(target.bytes(), data)
    assert from_segment(client) == 0
    heat(client, keys)
    target.fill(np.zeros_like(data))
    assert client.get_into(keys, target.tensor).ok.all()
    assert np.array_equal(target.bytes(), data)


def test_some_from_the_segment_some_from_the_pool_and_some_from_nowhere(connect: Connect) -> None:
    client = connect()
    tokens = fresh_tokens(12)
    keys = client.keys(tokens)
    data = content(keys, SPACE)
    client.put(keys[:4], data[:4])
    client.put(keys[6:], data[6:])
    heat(client, keys[:4])
    target = Target(device_of(client), 12)
    fetched = client.get_into(keys, target.tensor)
    assert fetched.ok.tolist() == [True] * 4 + [False] * 2 + [True] * 6
    assert np.array_equal(target.bytes()[fetched.ok], data[fetched.ok])


def test_a_range_of_layers_comes_from_the_segment_too(connect: Connect) -> None:
    client = connect()
    keys, data = stored(client, 8)
    heat(client, keys)
    target, before = Target(device_of(client), 8, 8192), from_segment(client)
    assert client.get_into(keys, target.tensor, layers=(1, 2)).ok.all()
    assert np.array_equal(target.bytes(), data[:, 8192:])
    assert from_segment(client) == before + 8


def test_one_block_alone(connect: Connect) -> None:
    client = connect()
    keys, data = stored(client, 1)
    target = Target(device_of(client), 1)
    assert client.get_into(keys, target.tensor).ok.all()
    assert np.array_equal(target.bytes(), data)
    assert not client.get_into(fresh_keys(client, 1), target.tensor).ok.any()


@pytest.mark.parametrize("way", [{"transport": "tcp"}, {"checksums": True}], ids=str)
def test_what_can_not_come_directly_comes_through_host_memory(connect: Connect, way: dict[str, object]) -> None:
    client = connect(**way)
    keys, data = stored(client, 8)
    asked = kvstore.BlockKeys.concat(keys, fresh_keys(client, 2))
    target = Target(device_of(client), 10)
    assert client.get_into(asked, target.tensor).ok.tolist() == [True] * 8 + [False] * 2
    assert np.array_equal(target.bytes()[:8], data)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_are_put_from_device_memory(connect: Connect, transport: str) -> None:
    client = connect(transport=transport)
    keys = fresh_keys(client, 8)
    data = content(keys, SPACE)
    target = Target(device_of(client), 8)
    target.fill(data)
    assert client.put(keys, target.tensor).stored == 8
    plain = client.get(keys)
    assert plain.ok.all()
    for block, row in zip(plain.blocks, data, strict=True):
        assert block is not None
        assert np.array_equal(block, row)


def test_more_than_the_staging_memory_holds_goes_in_turns(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.staging.STAGING_BYTES", 3 * SIZE)
    client = connect(transport="tcp")
    keys = fresh_keys(client, 10)
    data = content(keys, SPACE)
    target = Target(device_of(client), 10)
    target.fill(data)
    assert client.put(keys, target.tensor).stored == 10
    target.fill(np.zeros_like(data))
    assert client.get_into(keys, target.tensor).ok.all()
    assert np.array_equal(target.bytes(), data)


def test_deleted_blocks_are_misses_at_once_whether_they_were_hot_or_not(connect: Connect) -> None:
    client = connect()
    keys, data = stored(client, 8)
    heat(client, keys)
    assert client.delete(keys[:4]) == 4
    target = Target(device_of(client), 8)
    assert client.get_into(keys, target.tensor).ok.tolist() == [False] * 4 + [True] * 4
    assert np.array_equal(target.bytes()[4:], data[4:])


def test_hot_blocks_that_went_to_the_ssd_come_back_right_and_get_hot_again(name: str) -> None:
    with (
        ServerProcess(dram="16MiB", disk="128MiB", admission="always", gpu=name, gpu_bytes="8MiB") as server,
        kvstore.connect(server.address, namespace=SPACE, device=name, timeout_s=10.0) as client,
    ):
        keys = client.keys(fresh_tokens(2600))  # 41 MiB
        data = content(keys, SPACE)
        client.put(keys[:32], data[:32])
        heat(client, keys[:32])
        for first in range(32, 2600, 64):
            client.put(keys[first : first + 64], data[first : first + 64])
            until(lambda: server.status()["shards"][0]["disk"]["queued_bytes"] == 0, what="write-behind")
        assert gpu(server)["counters"]["dropped_blocks"] >= 32
        target = Target(device_of(client), 32)
        assert client.get_into(keys[:32], target.tensor).ok.all()
        assert np.array_equal(target.bytes(), data[:32])
        heat(client, keys[:32])
        assert client.get_into(keys[:32], target.tensor).ok.all()
        assert np.array_equal(target.bytes(), data[:32])


def test_a_client_of_another_kind_of_device_is_served_from_the_pool(server: ServerProcess, name: str) -> None:
    device = CudaDevice(0, FakeDriver()) if name == "host" else None
    with kvstore.connect(server.address, namespace=SPACE, device=device or "host") as client:
        keys, data = stored(client, 4)
        target = Target(device_of(client), 4)
        for _ in range(20):
            assert client.get_into(keys, target.tensor).ok.all()
        assert np.array_equal(target.bytes(), data)
        assert from_segment(client) == 0


def test_a_server_without_a_gpu_tier_serves_devices_from_its_pool(name: str) -> None:
    with ServerProcess(dram="16MiB") as plain, kvstore.connect(plain.address, namespace=SPACE, device=name) as client:
        keys, data = stored(client, 4)
        target = Target(device_of(client), 4)
        assert client.get_into(keys, target.tensor).ok.all()
        assert np.array_equal(target.bytes(), data)
        assert "gpu" not in plain.status()["shards"][0]


# --- the race ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_readers_of_a_segment_that_changes_all_the_time_never_see_a_wrong_byte(
    server: ServerProcess, connect: Connect
) -> None:
    """More hot blocks than the segment holds; some are deleted and put again. Every byte handed out is checked."""
    writer = connect()
    keys = writer.keys(fresh_tokens(1200))
    data = content(keys, SPACE)
    assert writer.put(keys, data).present == 1200
    stop, begun = threading.Event(), gpu(server)["counters"]["evicted_blocks"]

    def read(seed: int) -> tuple[int, int]:
        random, client, checked = np.random.default_rng(seed), connect(), 0
        target = Target(device_of(client), 48)
        while not stop.is_set():
            # Not evenly: half of the reads are of a part that would fit, so that there is something hot.
            first = int(random.integers(0, 350 if random.integers(0, 2) else 1150))
            fetched = client.get_into(keys[first : first + 48], target.tensor)
            assert np.array_equal(target.bytes()[fetched.ok], data[first : first + 48][fetched.ok])
            checked += int(np.count_nonzero(fetched.ok))
        return checked, from_segment(client)

    def disturb() -> None:
        random = np.random.default_rng(99)
        while not stop.is_set():
            first = int(random.integers(0, 1190))
            writer.delete(keys[first : first + 8])
            writer.put(keys[first : first + 8], data[first : first + 8])

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read, seed) for seed in range(3)]
        disturber = threads.submit(disturb)
        try:
            until(
                lambda: (
                    gpu(server)["counters"]["evicted_blocks"] - begun > 800
                    or any(future.done() for future in [*readers, disturber])
                ),
                timeout_s=90,
                what="many evictions from the segment",
            )
        finally:
            stop.set()
        for future in readers:
            checked, near = future.result(30)
            assert checked > 1000
            assert near > 100, "nothing was read from the segment: no race took place"
        disturber.result(30)
