"""The part of `cuda.bindings.driver` that `CudaDevice` uses, over host memory: answers are tuples that begin with a
status, as there. So every line of it runs without a GPU, between processes too (`stand_in`); what a real driver does
with the same calls is another matter.

`test_cuda.py` compares the signatures with those of the real package where that is installed.
"""

# ruff: noqa: N802, N803, N815 - names are the package's

import ctypes
import os
import struct
import threading
from enum import Enum, IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.memory import create_segment, map_segment

IPC_HANDLE_BYTES = 64
_HANDLE = struct.Struct("<qq48x")  # process, descriptor


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class _Number:
    """A handle: an address, stream, event or context."""

    def __init__(self, value: int = 0) -> None:
        self.value = int(value)

    def __int__(self) -> int:
        return self.value


class _IpcHandle:
    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(IPC_HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class _StreamFlags(Enum):
    CU_STREAM_NON_BLOCKING = 1


class _EventFlags(Enum):
    CU_EVENT_DISABLE_TIMING = 2


class _IpcFlags(Enum):
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1


class _AccessOrder(Enum):
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class _Attributes:
    srcAccessOrder: Any = None


class FakeDriver:
    """One device. Copies are made when somebody asks whether they have ended: the latest moment there is.

    Args:
        devices: how many there are.
        version: of the driver.
        fail_index: whether batches answer with a second part, as CUDA 12's do.
        refuse_batches: the status that batches are refused with.
    """

    CUresult = Status
    CUdeviceptr = _Number
    CUstream = _Number
    CUipcMemHandle = _IpcHandle
    CUstream_flags = _StreamFlags
    CUevent_flags = _EventFlags
    CUipcMem_flags = _IpcFlags
    CUmemcpySrcAccessOrder = _AccessOrder
    CUmemcpyAttributes = _Attributes
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(
        self, *, devices: int = 1, version: int = 13000, fail_index: bool = False, refuse_batches: Status | None = None
    ) -> None:
        self._devices = devices
        self._version = version
        self._fail_index = fail_index
        self._refuse_batches = refuse_batches
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, NDArray[np.uint8]] = {}
        self._descriptors: dict[int, int] = {}
        self._opened: dict[int, NDArray[np.uint8]] = {}
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.events = 0
        self.waits: list[tuple[int, int]] = []  # stream and event of each cuStreamWaitEvent
        self.recorded: list[tuple[int, int]] = []  # the same of each cuEventRecord
        self.broken = False  # a fault that every later call meets, as on a real device
        self.stuck = False  # nothing ends
        self._work: list[tuple[int, int, int]] = []

    @property
    def contexts(self) -> list[int]:
        """The calling thread's stack of contexts."""
        return self._thread.__dict__.setdefault("contexts", [])

    def cuInit(self, Flags: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> Any:
        return Status.CUDA_SUCCESS, self._devices

    def cuDriverGetVersion(self) -> Any:
        return Status.CUDA_SUCCESS, self._version

    def cuDeviceGet(self, ordinal: int) -> Any:
        return Status.CUDA_SUCCESS, _Number(ordinal)

    def cuDevicePrimaryCtxRetain(self, dev: _Number) -> Any:
        return Status.CUDA_SUCCESS, _Number(77)

    def cuDevicePrimaryCtxRelease(self, dev: _Number) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, ctx: _Number) -> Any:
        self.contexts.append(int(ctx))
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return Status.CUDA_SUCCESS, _Number(self.contexts.pop())

    def cuStreamCreate(self, Flags: int) -> Any:
        return self._in_context("cuStreamCreate", _Number(5))

    def cuStreamDestroy(self, hStream: _Number) -> Any:
        return self._in_context("cuStreamDestroy")

    def cuMemAlloc(self, bytesize: int) -> Any:
        if bytesize > 1 << 40:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = create_segment("stand-in", bytesize)
        memory = map_segment(fd, writable=True)
        self.allocated[memory.ctypes.data], self._descriptors[memory.ctypes.data] = memory, fd
        return self._in_context("cuMemAlloc", _Number(memory.ctypes.data))

    def cuMemFree(self, dptr: _Number) -> Any:
        del self.allocated[int(dptr)]
        os.close(self._descriptors.pop(int(dptr)))
        return self._in_context("cuMemFree")

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> Any:
        self.registered[p] = bytesize
        return self._in_context("cuMemHostRegister")

    def cuMemHostUnregister(self, p: int) -> Any:
        del self.registered[p]
        return self._in_context("cuMemHostUnregister")

    def cuMemcpyAsync(self, dst: _Number, src: _Number, ByteCount: int, hStream: _Number) -> Any:
        with self._lock:
            self._work.append((int(dst), int(src), ByteCount))
        return self._in_context("cuMemcpyAsync")

    def cuMemcpyBatchAsync(
        self,
        dsts: list[_Number],
        srcs: list[_Number],
        sizes: list[int],
        count: int,
        attrs: list[_Attributes],
        attrsIdxs: list[int],
        numAttrs: int,
        hStream: _Number,
    ) -> Any:
        assert len(dsts) == len(srcs) == len(sizes) == count
        assert len(attrs) == len(attrsIdxs) == numAttrs == 1
        assert attrs[0].srcAccessOrder is not None
        if self._refuse_batches is not None:
            return (self._refuse_batches,)
        with self._lock:
            self._work += [(int(to), int(start), size) for to, start, size in zip(dsts, srcs, sizes, strict=True)]
        answer = self._in_context("cuMemcpyBatchAsync")
        return (*answer, 0) if self._fail_index else answer

    def cuEventCreate(self, Flags: int) -> Any:
        self.events += 1
        return self._in_context("cuEventCreate", _Number(self.events))

    def cuEventRecord(self, hEvent: _Number, hStream: _Number) -> Any:
        self.recorded.append((int(hStream), int(hEvent)))
        return self._in_context("cuEventRecord")

    def cuEventQuery(self, hEvent: _Number) -> Any:
        return self._settle("cuEventQuery")

    def cuStreamQuery(self, hStream: _Number) -> Any:
        return self._settle("cuStreamQuery")

    def cuStreamWaitEvent(self, hStream: _Number, hEvent: _Number, Flags: int) -> Any:
        self.waits.append((int(hStream), int(hEvent)))
        return self._in_context("cuStreamWaitEvent")

    def cuIpcGetMemHandle(self, dptr: _Number) -> Any:
        handle = _IpcHandle()
        described = _HANDLE.pack(os.getpid(), self._descriptors[int(dptr)])
        ctypes.memmove(handle.getPtr(), described, IPC_HANDLE_BYTES)
        return self._in_context("cuIpcGetMemHandle", handle)

    def cuIpcOpenMemHandle(self, handle: _IpcHandle, Flags: int) -> Any:
        process, descriptor = _HANDLE.unpack(ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES))
        if process == os.getpid():
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        memory = map_segment(fd, writable=True)
        os.close(fd)
        self._opened[memory.ctypes.data] = memory
        return self._in_context("cuIpcOpenMemHandle", _Number(memory.ctypes.data))

    def cuIpcCloseMemHandle(self, dptr: _Number) -> Any:
        del self._opened[int(dptr)]
        return self._in_context("cuIpcCloseMemHandle")

    def cuGetErrorString(self, error: Status) -> Any:
        return Status.CUDA_SUCCESS, error.name.lower().replace("_", " ").encode()

    def _in_context(self, call: str, *answer: Any) -> Any:
        assert self.contexts, f"{call} outside of a context"
        self.calls.append(call)
        return (Status.CUDA_ERROR_ILLEGAL_ADDRESS if self.broken else Status.CUDA_SUCCESS, *answer)

    def _settle(self, call: str) -> Any:
        if self.stuck and not self.broken:
            return (Status.CUDA_ERROR_NOT_READY,)
        with self._lock:
            for to, start, size in self._work:
                ctypes.memmove(to, start, size)
            self._work.clear()
        return self._in_context(call)
