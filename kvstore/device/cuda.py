"""CUDA devices, through the driver's own interface: package `cuda-bindings` (the extra `cuda`), imported on first use.

The driver, not the runtime: with `cuCtxPushCurrent` and `cuCtxPopCurrent` a call leaves the caller's thread as it was.
`cudaSetDevice` would have to be undone by another `cudaSetDevice`, which makes a context, a few hundred MiB, on a
device that nobody has asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvstore.core.errors import ConfigError, DeviceError
from kvstore.device.base import Copies, Export, Memory

log = logging.getLogger("kvstore")

IPC_HANDLE_BYTES = 64
_BATCH_DRIVER_VERSION = 12080  # the first that has cuMemcpyBatchAsync
_SPIN_S = 200e-6  # a batch of a few blocks ends in about this time; sleeping would double it
_SLEEP_S = 50e-6


def require_cuda(ordinal: int) -> Any:
    """The driver's interface, once it is clear that it has this device. Takes none of its memory.

    Raises:
        ConfigError: one line says what is missing.
    """
    asked = f'device "cuda:{ordinal}" asked for, but'
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as cause:
        raise ConfigError(f"{asked} cuda-bindings is not installed; pip install 'kvstore-llm[cuda]'") from cause
    try:
        _require_device(driver, ordinal, asked)
    except RuntimeError as cause:  # the bindings load the driver's library at the first call
        raise ConfigError(f"{asked} the NVIDIA driver can't be loaded: {_one_line(cause)}") from cause
    return driver


def _require_device(driver: Any, ordinal: int, asked: str) -> None:
    (status,) = driver.cuInit(0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"{asked} the NVIDIA driver says: {_text(driver, status)}")
    status, count = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS or ordinal >= count:
        raise ConfigError(f"{asked} this process sees {count or 0} CUDA devices")


class CudaTicket:
    """See `Ticket`."""

    def __init__(self, device: CudaDevice, number: int) -> None:
        self._device = device
        self._number = number

    def done(self) -> bool:
        return self._device.has_ended(self._number)

    def wait(self, timeout_s: float) -> None:
        started_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                raise DeviceError(f"{self._device.name}: copies did not end within {timeout_s:g} s")
            if waited_s > _SPIN_S:
                time.sleep(_SLEEP_S)  # between looks: the driver's own wait has no deadline

    def precede(self, stream: int, timeout_s: float) -> None:
        del timeout_s  # nothing waits here but the stream
        self._device.hold_back(stream, self._number)


class CudaDevice:
    """See `Device`.

    Args:
        ordinal: among the devices that this process sees.
        driver: `cuda.bindings.driver`, or something that behaves like it.

    Raises:
        ConfigError: no such device.
        DeviceError: the driver refuses.
    """

    def __init__(self, ordinal: int, driver: Any = None) -> None:
        self.name = f"cuda:{ordinal}"
        self._driver: Any = require_cuda(ordinal) if driver is None else driver
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}  # address: bytes, of host memory
        self._asked = 0  # batches so far; they end in this order
        self._ended = 0
        # Number and event of each batch that may not have ended, and the memory that must not go before it has.
        self._under_way: deque[tuple[int, Any, Memory, Memory]] = deque()
        self._idle_events: list[Any] = []
        self._number = self._ask("cuDeviceGet", ordinal)
        self._context = self._ask("cuDevicePrimaryCtxRetain", self._number)  # the one that the engine computes in
        self._open = True
        self._batched = self._ask("cuDriverGetVersion") >= _BATCH_DRIVER_VERSION and hasattr(
            self._driver, "cuMemcpyBatchAsync"
        )
        with self._current():
            # Not blocking: the default stream, on which engines compute, neither waits for it nor is waited for.
            flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            self._side_stream = self._ask("cuStreamCreate", flags)

    def allocate(self, nbytes: int) -> Memory:
        with self._current():
            return Memory(int(self._ask("cuMemAlloc", nbytes)), nbytes, on_device=True)

    def free(self, memory: Memory) -> None:
        with self._current():
            self._ask("cuMemFree", self._driver.CUdeviceptr(memory.address))

    def allocate_shared(self, nbytes: int) -> tuple[Memory, Export]:
        memory = self.allocate(nbytes)
        with self._current():
            handle = self._ask("cuIpcGetMemHandle", self._driver.CUdeviceptr(memory.address))
        # By address: versions of the package differ in what the handle's field is called.
        return memory, Export(nbytes, handle=ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES))

    def open_shared(self, export: Export) -> Memory:
        if len(export.handle) != IPC_HANDLE_BYTES:
            raise DeviceError(f"{self.name}: an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(export.handle)}")
        handle = self._driver.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), export.handle, IPC_HANDLE_BYTES)
        # Between two devices of one host this turns on peer access.
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)
        with self._current():
            return Memory(int(self._ask("cuIpcOpenMemHandle", handle, flags)), export.nbytes, on_device=True)

    def close_shared(self, memory: Memory) -> None:
        with self._current():
            self._ask("cuIpcCloseMemHandle", self._driver.CUdeviceptr(memory.address))

    def register(self, memory: Memory) -> None:
        with self._current():
            self._ask("cuMemHostRegister", memory.address, memory.nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)
        with self._lock:
            self._registered[memory.address] = memory.nbytes

    def unregister(self, memory: Memory) -> None:
        with self._lock:
            if self._registered.pop(memory.address, None) is None:
                return
        with self._current():
            self._ask("cuMemHostUnregister", memory.address)

    def copy(self, target: Memory, source: Memory, copies: Copies) -> CudaTicket:
        copies.check(target, source)
        merged = copies.merged()
        with self._lock, self._current():
            self._note_ended()
            self._submit(target, source, merged)
            event = self._take_event()
            self._ask("cuEventRecord", event, self._side_stream)
            self._asked += 1
            self._under_way.append((self._asked, event, target, source))
            return CudaTicket(self, self._asked)

    def follow(self, stream: int) -> None:
        with self._lock, self._current():
            event = self._take_event()
            self._ask("cuEventRecord", event, self._driver.CUstream(stream))
            self._ask("cuStreamWaitEvent", self._side_stream, event, 0)
            self._idle_events.append(event)  # the wait is for what it recorded now, whatever it records later

    def idle(self) -> bool:
        with self._lock, self._current():
            return self._settled("cuStreamQuery", self._side_stream)

    def array(self, memory: Memory, shape: tuple[int, ...]) -> CudaArray:
        return CudaArray(memory, shape)

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._open:
                return
            with self._current():
                self._ask("cuStreamDestroy", self._side_stream)  # the driver does so once its work has ended
            self._open = False
        self._ask("cuDevicePrimaryCtxRelease", self._number)  # the engine in this process may go on using it

    def has_ended(self, number: int) -> bool:
        """For tickets: whether that batch has ended.

        Raises:
            DeviceError: it has failed.
        """
        if number > self._ended:
            with self._lock, self._current():
                self._note_ended()
        return number <= self._ended

    def hold_back(self, stream: int, number: int) -> None:
        """For tickets: what is put on that stream from now on starts after that batch.

        Raises:
            DeviceError: it has failed.
        """
        with self._lock, self._current():
            self._note_ended()
            # Not the newest event: the engine would wait for later layers' copies, too.
            event = next((event for batch, event, *_ in self._under_way if batch == number), None)
            if event is not None:
                self._ask("cuStreamWaitEvent", self._driver.CUstream(stream), event, 0)

    def _submit(self, target: Memory, source: Memory, copies: Copies) -> None:
        targets = (target.address + copies.target_offsets).tolist()
        sources = (source.address + copies.source_offsets).tolist()
        sizes: list[int] = copies.sizes.tolist()
        if len(sizes) > 1 and self._batched and self._is_fixed(target) and self._is_fixed(source):
            if self._submit_batch(targets, sources, sizes):
                return
            log.warning("%s: cuMemcpyBatchAsync is refused here; blocks are copied one by one", self.name)
            self._batched = False
        pointer = self._driver.CUdeviceptr
        for to, start, size in zip(targets, sources, sizes, strict=True):
            self._ask("cuMemcpyAsync", pointer(to), pointer(start), size, self._side_stream)

    def _submit_batch(self, targets: list[int], sources: list[int], sizes: list[int]) -> bool:
        driver = self._driver
        pointer = driver.CUdeviceptr
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # The answer of CUDA 12 has a second part, which copy failed; that of CUDA 13 has not.
        status, *_ = driver.cuMemcpyBatchAsync(
            [pointer(address) for address in targets],
            [pointer(address) for address in sources],
            sizes,
            len(sizes),
            [attributes],
            [0],
            1,
            self._side_stream,
        )
        refusals = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)
        if status in refusals:
            return False
        self._require(status, "cuMemcpyBatchAsync")
        return True

    def _is_fixed(self, memory: Memory) -> bool:
        """On the device, or in host memory that does not move: only such memory is named in a batch."""
        if memory.on_device:
            return True
        end = memory.address + memory.nbytes
        return any(start <= memory.address and end <= start + size for start, size in self._registered.items())

    def _note_ended(self) -> None:
        while self._under_way and self._settled("cuEventQuery", self._under_way[0][1]):
            self._ended, event, *_ = self._under_way.popleft()
            self._idle_events.append(event)

    def _take_event(self) -> Any:
        if self._idle_events:
            return self._idle_events.pop()
        return self._ask("cuEventCreate", int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context is this thread's for the time being."""
        if self._pid != os.getpid():
            raise DeviceError(f"{self.name}: a device does not survive a fork; open it in the child")
        if not self._open:
            raise DeviceError(f"{self.name}: the device is closed")
        self._ask("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent")

    def _settled(self, function: str, what: Any) -> bool:
        (status,) = getattr(self._driver, function)(what)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._require(status, function)
        return True

    def _ask(self, function: str, *arguments: Any) -> Any:
        status, *answer = getattr(self._driver, function)(*arguments)
        self._require(status, function)
        return answer[0] if answer else None

    def _require(self, status: Any, function: str) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{self.name}: {function}: {_text(self._driver, status)}")


class CudaArray:
    """Device memory as torch (`torch.as_tensor(array, device="cuda")`) and cupy take it in, without a copy."""

    def __init__(self, memory: Memory, shape: tuple[int, ...]) -> None:
        self._memory = memory
        # No stream: whoever made the memory's content known has waited for it.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


def _text(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return text.decode(errors="replace") if text else str(status)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
