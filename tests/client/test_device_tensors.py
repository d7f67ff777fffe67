"""Which tensors a client of a device takes, and what becomes of faults: over a stand-in for CUDA's driver, in memory
that the test can look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.device.cuda import CudaDevice
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.device_targets import SIZE, SPACE, Target, Tensor, device_of, heat
from tests.client.sdk import fresh_keys, one_line, stored
from tests.device.fake_driver import FakeDriver


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as server:
        yield server


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def cuda(server: ServerProcess, driver: FakeDriver) -> Iterator[kvstore.Client]:
    """A client of the stand-in."""
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


def test_closing_the_client_takes_the_registration_back(server: ServerProcess, driver: FakeDriver) -> None:
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
    server: ServerProcess, driver: FakeDriver
) -> None:
    """Not a miss: who gets a miss uses the memory for something else, and the copies may still come."""
    with kvstore.connect(server.address, namespace=SPACE, timeout_s=2.0, device=CudaDevice(0, driver)) as client:
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


def test_an_error_in_one_call_keeps_the_staging_memory_from_nobody(server: ServerProcess, driver: FakeDriver) -> None:
    """Also while somebody still looks at the error."""
    with kvstore.connect(server.address, namespace=SPACE, timeout_s=2.0, device=CudaDevice(0, driver)) as client:
        memory = device_of(client).allocate(2 * SIZE)
        driver.stuck = True
        with pytest.raises(kvstore.DeviceError) as kept:
            client.put(fresh_keys(client, 2), Tensor(memory))
        driver.stuck = False
        assert client.put(fresh_keys(client, 2), Tensor(memory)).stored == 2
        assert kept.value.__traceback__ is not None


def test_the_memory_of_dead_shards_is_let_go_of() -> None:
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
