"""What `CudaDevice` makes of its driver, and what it says when there is none."""

# ruff: noqa: N802, N803 - names are the package's

import importlib
import inspect
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, DeviceError
from kvstore.device.base import LEGACY_STREAM, Copies, Device, Export, Memory, host_memory
from kvstore.device.cuda import CudaDevice
from kvstore.device.opening import open_device, require_device
from tests.device.fake_driver import FakeDriver, Status
from tests.device.gpus import CUDA, needs_gpu

BLOCK = 4096


def driver_module(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    """`cuda.bindings.driver` is this object."""
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def scattered(blocks: int) -> Copies:
    """Copies of which no two are neighbours."""
    places = np.arange(blocks, dtype=np.int64) * 2 * BLOCK
    return Copies.of_blocks(places, places[::-1].copy(), BLOCK)


def host(blocks: int) -> Memory:
    return host_memory(np.random.default_rng(0).integers(0, 256, 2 * blocks * BLOCK, dtype=np.uint8))


# --- without it -------------------------------------------------------------------------------------------------------


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = importlib.import_module

    def without_cuda(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, package)

    monkeypatch.setattr(importlib, "import_module", without_cuda)
    with pytest.raises(ConfigError) as refused:
        open_device("cuda:0")
    assert str(refused.value) == (
        "device \"cuda:0\" asked for, but cuda-bindings is not installed; pip install 'kvstore-llm[cuda]'"
    )


def test_without_a_driver_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(FakeDriver):
        def cuInit(self, Flags: int) -> Any:
            raise RuntimeError("libcuda.so.1\n  not found")

    driver_module(monkeypatch, NoDriver())
    with pytest.raises(ConfigError) as refused:
        require_device("cuda:1")
    message = 'device "cuda:1" asked for, but the NVIDIA driver can\'t be loaded: libcuda.so.1 not found'
    assert str(refused.value) == message


def test_a_driver_that_has_no_device_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDevice(FakeDriver):
        def cuInit(self, Flags: int) -> Any:
            return (Status.CUDA_ERROR_NO_DEVICE,)

    driver_module(monkeypatch, NoDevice())
    with pytest.raises(ConfigError, match=r'"cuda:0" asked for, but the NVIDIA driver says: cuda error no device$'):
        require_device("cuda:0")


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_module(monkeypatch, FakeDriver(devices=2))
    require_device("cuda:1")
    with pytest.raises(ConfigError, match=r'^device "cuda:2" asked for, but this process sees 2 CUDA devices$'):
        require_device("cuda:2")


def test_asking_whether_a_device_is_there_makes_no_context_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver_module(monkeypatch, driver)
    require_device("cuda:0")
    assert driver.calls == []


def test_the_store_is_imported_without_cuda() -> None:
    program = "import sys, kvstore, kvstore.device.opening; sys.exit('cuda.bindings' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- with it ----------------------------------------------------------------------------------------------------------


def test_a_thread_s_own_context_is_left_as_it_was() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    driver.contexts.append(123)
    memory = device.allocate(8 * BLOCK)
    device.copy(memory, host(4), scattered(4)).wait(1)
    device.follow(LEGACY_STREAM)
    with pytest.raises(DeviceError):
        device.allocate(1 << 50)
    assert driver.contexts == [123]


def test_scattered_blocks_of_registered_memory_are_one_call() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    memory, pool = device.allocate(32 * BLOCK), host(16)
    device.register(pool)
    device.copy(memory, pool, scattered(16)).wait(1)
    assert driver.calls.count("cuMemcpyBatchAsync") == 1
    assert "cuMemcpyAsync" not in driver.calls


def test_blocks_in_memory_that_may_move_are_copied_one_by_one() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    device.copy(device.allocate(32 * BLOCK), host(16), scattered(16)).wait(1)
    assert driver.calls.count("cuMemcpyAsync") == 16
    assert "cuMemcpyBatchAsync" not in driver.calls


def test_neighbouring_blocks_are_one_copy() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    places = np.arange(16, dtype=np.int64) * BLOCK
    device.copy(device.allocate(16 * BLOCK), host(16), Copies.of_blocks(places, places, BLOCK)).wait(1)
    assert driver.calls.count("cuMemcpyAsync") == 1


@pytest.mark.parametrize("driver", [FakeDriver(version=12070), FakeDriver(version=12080, fail_index=True)])
def test_drivers_before_and_after_batches_came_give_the_same_bytes(driver: FakeDriver) -> None:
    device = CudaDevice(0, driver)
    memory, source = device.allocate(8 * BLOCK), host(4)
    device.register(source)
    device.copy(memory, source, scattered(4)).wait(1)
    got, sent = driver.allocated[memory.address].reshape(8, BLOCK), np.asarray(source.keep).reshape(8, BLOCK)
    assert np.array_equal(got[[0, 2, 4, 6]], sent[[6, 4, 2, 0]])


def test_a_driver_that_refuses_batches_is_asked_block_by_block_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(refuse_batches=Status.CUDA_ERROR_NOT_SUPPORTED)
    device = CudaDevice(0, driver)
    memory, source = device.allocate(8 * BLOCK), host(4)
    device.register(source)
    for _ in range(2):
        device.copy(memory, source, scattered(4)).wait(1)
    assert driver.calls.count("cuMemcpyAsync") == 8
    assert caplog.text.count("cuMemcpyBatchAsync is refused here") == 1


def test_a_batch_that_meets_a_broken_device_is_an_error_and_not_a_second_try() -> None:
    driver = FakeDriver(refuse_batches=Status.CUDA_ERROR_ILLEGAL_ADDRESS)
    device = CudaDevice(0, driver)
    source = host(4)
    device.register(source)
    with pytest.raises(DeviceError, match="cuMemcpyBatchAsync: cuda error illegal address"):
        device.copy(device.allocate(8 * BLOCK), source, scattered(4))
    assert "cuMemcpyAsync" not in driver.calls


def test_a_fault_of_the_device_is_told_to_whoever_waits() -> None:
    driver = FakeDriver()
    driver.stuck = True
    device = CudaDevice(0, driver)
    ticket = device.copy(device.allocate(8 * BLOCK), host(4), scattered(4))
    with pytest.raises(DeviceError, match=r"^cuda:0: copies did not end within 0\.001 s$"):
        ticket.wait(0.001)
    driver.broken = True
    with pytest.raises(DeviceError, match=r"^cuda:0: .*illegal address$"):
        ticket.wait(1)


def test_it_is_the_engine_s_stream_that_waits_for_one_batch_and_not_for_later_ones() -> None:
    driver = FakeDriver()
    driver.stuck = True
    device = CudaDevice(0, driver)
    memory, engine = device.allocate(8 * BLOCK), 1234
    tickets = [device.copy(memory, host(4), scattered(4)) for _ in range(3)]
    tickets[1].precede(engine, 0.0)
    assert driver.waits == [(engine, driver.recorded[1][1])]
    assert len({event for _, event in driver.recorded}) == 3


def test_nobody_waits_for_a_batch_that_has_ended() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    ticket = device.copy(device.allocate(8 * BLOCK), host(4), scattered(4))
    ticket.wait(1)
    ticket.precede(LEGACY_STREAM, 1)
    assert not driver.waits


def test_a_fault_of_the_device_is_told_before_the_engine_waits() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    ticket = device.copy(device.allocate(8 * BLOCK), host(4), scattered(4))
    driver.broken = True
    with pytest.raises(DeviceError, match="illegal address"):
        ticket.precede(LEGACY_STREAM, 1)


@pytest.mark.gpu
@needs_gpu
def test_an_engine_s_own_stream_reads_what_precedes_it() -> None:
    """A stream that is ordered with nothing else, and copies that take longer than to ask for them."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    nbytes = 256 << 20
    sent, received = (np.full(nbytes, value, dtype=np.uint8) for value in (7, 0))
    device = CudaDevice(int(CUDA.removeprefix("cuda:")))
    memory = device.allocate(nbytes)
    for array in (sent, received):
        device.register(host_memory(array))
    whole = Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, nbytes))
    device.copy(memory, host_memory(received), whole).wait(30)
    status, context = driver.cuDevicePrimaryCtxRetain(int(CUDA.removeprefix("cuda:")))
    assert status == driver.CUresult.CUDA_SUCCESS
    driver.cuCtxPushCurrent(context)
    try:
        status, engine = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
        assert status == driver.CUresult.CUDA_SUCCESS
        device.copy(memory, host_memory(sent), whole).precede(int(engine), 0.0)
        driver.cuMemcpyDtoHAsync(received.ctypes.data, driver.CUdeviceptr(memory.address), nbytes, engine)
        assert driver.cuStreamSynchronize(engine)[0] == driver.CUresult.CUDA_SUCCESS
        assert np.array_equal(received, sent)
        driver.cuStreamDestroy(engine)
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(int(CUDA.removeprefix("cuda:")))
    device.free(memory)
    device.close()


def test_events_are_used_again() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver)
    memory = device.allocate(8 * BLOCK)
    for _ in range(100):
        device.follow(LEGACY_STREAM)
        device.copy(memory, host(4), scattered(4)).wait(1)
    assert driver.events <= 2


def test_a_handle_of_another_length_is_refused() -> None:
    with pytest.raises(DeviceError, match="64 bytes, not 3"):
        CudaDevice(0, FakeDriver()).open_shared(Export(10, handle=b"abc"))


def test_a_device_is_not_used_in_a_forked_child() -> None:
    device: Device = CudaDevice(0, FakeDriver())
    child = os.fork()
    if not child:
        try:
            device.allocate(10)
        except DeviceError as error:
            os._exit(0 if "does not survive a fork" in str(error) else 1)
        except BaseException:  # noqa: BLE001 - a forked child must never return into pytest
            os._exit(2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0


def test_torch_and_cupy_see_the_memory_where_it_is() -> None:
    device = CudaDevice(0, FakeDriver())
    memory = device.allocate(4 * BLOCK)
    shown = device.array(memory, (4, BLOCK)).__cuda_array_interface__
    assert shown["data"] == (memory.address, False)
    assert shown["shape"] == (4, BLOCK)
    assert (shown["typestr"], shown["version"]) == ("|u1", 3)


def test_the_stand_in_is_called_as_the_real_package_is() -> None:
    """Names and order of the parameters, from the first line of what each function says of itself."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name, function in inspect.getmembers(FakeDriver, inspect.isfunction):
        if name.startswith("cu"):
            signature = getattr(real, name).__doc__.splitlines()[0]
            inner = signature[signature.index("(") + 1 : signature.rindex(")")]
            while "[" in inner:  # types have commas of their own
                inner = re.sub(r"\[[^\[\]]*\]", "", inner)
            names = [part.split(":")[0].split()[-1] for part in inner.split(",") if part]
            assert names == list(inspect.signature(function).parameters)[1:], signature
