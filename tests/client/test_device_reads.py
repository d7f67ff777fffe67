"""Blocks into device memory: from the server's segment, from its pool, over TCP; and a reader who races the shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.device.base import Copies, Device, Memory, host_memory
from kvstore.device.cuda import CudaDevice
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.sdk import content, fresh_keys, fresh_tokens, one_line, space, stored
from tests.device.fake_driver import FakeDriver
from tests.device.gpus import CUDA, needs_gpu

SPACE = space(layer_bytes=8192)
SIZE = SPACE.block_bytes
Connect = Callable[..., kvstore.Client]


class Target:
    """n blocks of device memory, as an object that engines know."""

    def __init__(self, device: Device, blocks: int, size_bytes: int = SIZE) -> None:
        self._device = device
        self._shape = (blocks, size_bytes)
        self._memory: Memory = device.allocate(blocks * size_bytes)
        self.tensor: Any = device.array(self._memory, self._shape)

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of what is there."""
        array = np.zeros(self._shape, dtype=np.uint8)
        self._device.copy(host_memory(array.reshape(-1)), self._memory, self._whole()).wait(30)
        return array

    def fill(self, data: NDArray[np.uint8]) -> None:
        self._device.copy(self._memory, host_memory(np.ascontiguousarray(data).reshape(-1)), self._whole()).wait(30)

    def _whole(self) -> Copies:
        zero = np.zeros(1, dtype=np.int64)
        return Copies(zero, zero, np.array([self._shape[0] * self._shape[1]]))


@pytest.fixture(scope="module", params=["host", pytest.param(CUDA, marks=[pytest.mark.gpu, needs_gpu])])
def name(request: pytest.FixtureRequest) -> str:
    """The device of server and client."""
    return request.param


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


def device_of(client: kvstore.Client) -> Device:
    assert client.device is not None
    return client.device


def from_segment(client: kvstore.Client) -> int:
    return client.stats()["links"][0].get("segment_blocks", 0)


def heat(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    """Read these blocks until all of them come from the segment."""
    target = Target(device_of(client), len(keys))

    def all_near() -> bool:
        before = from_segment(client)
        assert client.get_into(keys, target.tensor).ok.all()
        return from_segment(client) - before == len(keys)

    until(all_near, timeout_s=30, what="the blocks in the segment")


def gpu(server: ServerProcess) -> dict[str, Any]:
    return server.status()["shards"][0]["gpu"]


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


# --- what may be handed in --------------------------------------------------------------------------------------------


class Tensor:
    """What a torch tensor on a CUDA device says of itself, over memory of the stand-in."""

    class Place:
        type = "cuda"

        def __init__(self, index: int) -> None:
            self.index = index

        def __str__(self) -> str:
            return f"cuda:{self.index}"

    def __init__(self, memory: Memory, *, index: int = 0, dtype: str = "uint8", contiguous: bool = True) -> None:
        self._memory, self.dtype, self._contiguous = memory, f"torch.{dtype}", contiguous
        self.device, self.shape = Tensor.Place(index), (memory.nbytes,)

    def data_ptr(self) -> int:
        return self._memory.address

    def numel(self) -> int:
        return self._memory.nbytes

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (1,)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def cuda(server: ServerProcess, name: str, driver: FakeDriver) -> Iterator[kvstore.Client]:
    """A client of the stand-in."""
    if name != "host":
        pytest.skip("the stand-in is for machines without a GPU")
    with kvstore.connect(server.address, namespace=SPACE, device=CudaDevice(0, driver)) as client:
        yield client


def test_a_torch_tensor_is_filled_after_what_is_on_its_stream(cuda: kvstore.Client, driver: FakeDriver) -> None:
    keys, data = stored(cuda, 4)
    memory = device_of(cuda).allocate(4 * SIZE)
    assert cuda.get_into(keys, Tensor(memory)).ok.all()
    assert np.array_equal(driver.allocated[memory.address].reshape(4, SIZE), data)
    assert "cuStreamWaitEvent" in driver.calls


def test_the_pool_is_registered_and_scattered_blocks_are_one_call(cuda: kvstore.Client, driver: FakeDriver) -> None:
    keys, data = stored(cuda, 8)
    until(lambda: driver.registered, timeout_s=30, what="the pool's registration")
    order = np.random.default_rng(1).permutation(8)
    memory = device_of(cuda).allocate(8 * SIZE)
    driver.calls.clear()
    assert cuda.get_into(keys, Tensor(memory), offsets=order * SIZE).ok.all()
    assert driver.calls.count("cuMemcpyBatchAsync") == 1
    assert np.array_equal(driver.allocated[memory.address].reshape(8, SIZE)[order], data)


def test_closing_the_client_takes_the_registration_back(server: ServerProcess, name: str, driver: FakeDriver) -> None:
    if name != "host":
        pytest.skip("the stand-in is for machines without a GPU")
    with kvstore.connect(server.address, namespace=SPACE, device=CudaDevice(0, driver)) as client:
        keys = stored(client, 2)[0]
        client.put(keys, Tensor(device_of(client).allocate(2 * SIZE)))
        until(lambda: len(driver.registered) == 2, timeout_s=30, what="pool and staging memory")
    assert not driver.registered


def test_tensors_that_do_not_fit_are_refused_in_one_line(cuda: kvstore.Client) -> None:
    keys = fresh_keys(cuda, 2)
    memory = device_of(cuda).allocate(2 * SIZE)
    with one_line(kvstore.UsageError, "a tensor on cuda:1", "this client's device is cuda:0"):
        cuda.get_into(keys, Tensor(memory, index=1))
    with one_line(kvstore.LayoutMismatch, "not contiguous"):
        cuda.get_into(keys, Tensor(memory, contiguous=False))
    with one_line(kvstore.LayoutMismatch, "dtype float16"):
        cuda.get_into(keys, Tensor(memory, dtype="float16"))
    with one_line(kvstore.LayoutMismatch, f"{2 * SIZE} bytes for 3 keys"):
        cuda.get_into(fresh_keys(cuda, 3), Tensor(memory))
    with one_line(kvstore.UsageError, "reach outside"):
        cuda.get_into(keys, Tensor(memory), offsets=[0, SIZE + 1])
    with one_line(kvstore.UsageError, "2 integers are needed"):
        cuda.get_into(keys, Tensor(memory), offsets=[0])


def test_arrays_with_a_cuda_interface_are_looked_at_as_closely(cuda: kvstore.Client, driver: FakeDriver) -> None:
    keys, data = stored(cuda, 2)
    memory = device_of(cuda).allocate(2 * SIZE)

    class Strided:
        def __init__(self, strides: tuple[int, int]) -> None:
            self.__cuda_array_interface__ = {
                "shape": (2, SIZE),
                "typestr": "|u1",
                "data": (memory.address, False),
                "version": 3,
                "strides": strides,
            }

    assert cuda.get_into(keys, Strided((SIZE, 1))).ok.all()
    assert np.array_equal(driver.allocated[memory.address].reshape(2, SIZE), data)
    with one_line(kvstore.LayoutMismatch, "not C-contiguous"):
        cuda.get_into(keys, Strided((2 * SIZE, 1)))


def test_without_a_device_a_tensor_of_one_is_refused_as_before(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=SPACE) as client:
        memory = CudaDevice(0, FakeDriver()).allocate(SIZE)
        with one_line(kvstore.UsageError, "a tensor on cuda:0", "only host memory"):
            client.get_into(fresh_keys(client, 1), Tensor(memory))


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_device_that_does_not_answer_is_an_error_within_the_timeout(
    server: ServerProcess, name: str, driver: FakeDriver
) -> None:
    """Not a miss: who gets a miss uses the memory for something else, and the copies may still come."""
    if name != "host":
        pytest.skip("the stand-in is for machines without a GPU")
    with kvstore.connect(server.address, namespace=SPACE, timeout_s=0.5, device=CudaDevice(0, driver)) as client:
        keys, data = stored(client, 2)
        memory = device_of(client).allocate(2 * SIZE)
        driver.stuck = True
        with one_line(kvstore.DeviceError, "cuda:0: copies did not end within"):
            client.get_into(keys, Tensor(memory))
        with one_line(kvstore.DeviceError, "cuda:0: copies did not end within"):
            client.put(fresh_keys(client, 2), Tensor(memory))
        assert client.get(keys).ok.all()  # the store is well
        driver.stuck = False
        assert client.get_into(keys, Tensor(memory)).ok.all()
        assert np.array_equal(driver.allocated[memory.address].reshape(2, SIZE), data)


def test_the_memory_of_dead_shards_is_let_go_of(name: str) -> None:
    if name != "host":
        pytest.skip("on the host, mappings can be counted")
    with ServerProcess(dram="16MiB", gpu="host", gpu_bytes="8MiB") as server:
        before = segments()
        with kvstore.connect(server.address, namespace=SPACE, device="host") as client:
            for _ in range(5):
                keys, data = stored(client, 2)
                heat(client, keys)
                target = Target(device_of(client), 2)
                assert client.get_into(keys, target.tensor).ok.all()
                assert np.array_equal(target.bytes(), data)
                boot = server.status()["shards"][0]["boot_id"]
                os.kill(server.shard_pid(), 9)
                until(lambda boot=boot: restarted(server, boot), timeout_s=30, what="the next shard")
                until(lambda: client.put(fresh_keys(client, 1), np.zeros(SIZE, np.uint8)).stored, timeout_s=30)
            assert segments() - before <= 1
        until(lambda: segments() == before, what="the last segment unmapped")


def restarted(server: ServerProcess, boot_id: str) -> bool:
    shards = server.status()["shards"]
    return bool(shards) and shards[0]["boot_id"] != boot_id


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvstore-device ")


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
