"""Every device passes the same suite; the CUDA one also over a stand-in for its driver."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, DeviceError
from kvstore.device.base import LEGACY_STREAM, Copies, Device, host_memory
from kvstore.device.host import HostDevice
from kvstore.device.opening import open_device, require_device
from kvstore.testing.conformance import DeviceConformance
from tests.device.gpus import CUDA, STAND_IN, needs_gpu, usable


class TestHost(DeviceConformance):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = HostDevice()
        yield device
        device.close()


@pytest.mark.gpu
@needs_gpu
class TestCuda(DeviceConformance):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = open_device(CUDA)
        yield device
        device.close()


class TestCudaOverAStandIn(DeviceConformance):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with usable(STAND_IN) as name:
            device = open_device(name)
            yield device
            device.close()


@pytest.mark.parametrize("name", ["", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "gpu", "Host"])
def test_a_name_that_means_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed is host, or cuda"):
        require_device(name)


def test_the_host_is_always_there() -> None:
    require_device("host")


def test_closing_a_shared_segment_unmaps_it() -> None:
    device = HostDevice()
    memory, export = device.allocate_shared(1 << 20)
    opened = device.open_shared(export)
    assert _mappings() == 2
    device.close_shared(opened)
    del opened
    gc.collect()
    assert _mappings() == 1
    del memory
    os.close(export.fd)


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvstore-device")


def test_a_device_works_in_a_forked_child() -> None:
    """Threads don't survive a fork: the child gets a stream of its own."""
    device = HostDevice()
    memory, export = device.allocate_shared(4096)
    source = host_memory(np.full(4096, 7, dtype=np.uint8))
    whole = Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 4096))
    device.copy(memory, source, whole).wait(10)
    child = os.fork()
    if not child:
        try:
            device.copy(memory, host_memory(np.full(4096, 9, dtype=np.uint8)), whole).wait(10)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must never return into pytest
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.asarray(device.array(memory, (4096,)))[0] == 9
    device.close()
    os.close(export.fd)


def test_memory_is_kept_for_as_long_as_somebody_sees_it() -> None:
    device = HostDevice()
    seen = np.asarray(device.array(device.allocate(1 << 20), (1 << 20,)))
    gc.collect()
    seen[:] = 5
    assert seen.sum() == 5 << 20


def test_a_copy_that_does_not_end_in_time_is_an_error_and_may_still_end() -> None:
    gate = threading.Event()
    device = HostDevice(begin=gate.wait)
    memory = device.allocate(4096)
    source = host_memory(np.full(4096, 3, dtype=np.uint8))
    ticket = device.copy(memory, source, Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 4096)))
    with pytest.raises(DeviceError, match=r"did not end within 0\.01 s"):
        ticket.wait(0.01)
    assert not ticket.done()
    assert not device.idle()
    gate.set()
    ticket.wait(10)
    assert np.asarray(device.array(memory, (4096,))).tolist() == [3] * 4096
    device.close()


def test_the_host_itself_waits_for_copies_that_precede_its_work() -> None:
    gate = threading.Event()
    device = HostDevice(begin=gate.wait)
    memory = device.allocate(4096)
    source = host_memory(np.full(4096, 3, dtype=np.uint8))
    ticket = device.copy(memory, source, Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 4096)))
    with pytest.raises(DeviceError, match=r"did not end within 0\.01 s"):
        ticket.precede(LEGACY_STREAM, 0.01)
    gate.set()
    ticket.precede(LEGACY_STREAM, 10)
    assert np.asarray(device.array(memory, (4096,))).tolist() == [3] * 4096
    device.close()


def test_copies_keep_the_memory_that_they_are_about() -> None:
    gate = threading.Event()
    device = HostDevice(begin=gate.wait)
    source = np.full(1 << 20, 3, dtype=np.uint8)
    gone = weakref.ref(source)
    memory = device.allocate(1 << 20)
    whole = Copies(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 1 << 20))
    ticket = device.copy(memory, host_memory(source), whole)
    del source
    gc.collect()
    assert gone() is not None
    gate.set()
    ticket.wait(10)
    device.copy(memory, memory, whole).wait(10)  # the stream has let go of the batch before
    gc.collect()
    assert gone() is None
    device.close()
