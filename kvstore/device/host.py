"""The host's memory as a device: the same promises, kept by one thread that copies. What runs on it runs on a GPU.

The thread stands for the side stream: copies end later than they were asked for, as on a GPU, so a caller that does not
wait is found out by tests that need no GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.core.errors import DeviceError
from kvstore.device.base import Bytes, Copies, Export, Memory


class HostTicket:
    """See `Ticket`."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> None:
        if not self.ended.wait(timeout_s):
            raise DeviceError(f"host: copies did not end within {timeout_s:g} s")

    def precede(self, stream: int, timeout_s: float) -> None:
        """What reads the target is the caller itself, so it waits."""
        del stream
        self.wait(timeout_s)


class _Batch:
    """One entry of the stream; it keeps both memories alive until it was copied."""

    def __init__(self, target: Memory, source: Memory, copies: Copies, ticket: HostTicket) -> None:
        self.target, self.source, self.copies, self.ticket = target, source, copies, ticket


class HostDevice:
    """See `Device`.

    Args:
        begin: called on the stream before each batch; with it tests hold copies back, as a busy device does.
    """

    name = "host"

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._starting = threading.Lock()
        self._pid = -1
        self._closed = False
        self._batches: queue.SimpleQueue[_Batch | None]

    def allocate(self, nbytes: int) -> Memory:
        try:
            return _memory(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)
        except (OSError, ValueError, OverflowError) as cause:
            raise DeviceError(f"host: no {nbytes} bytes of memory: {cause}") from cause

    def free(self, memory: Memory) -> None:
        """Nothing to do: the memory goes with the last reference to it."""

    def allocate_shared(self, nbytes: int) -> tuple[Memory, Export]:
        try:
            fd = os.memfd_create("kvstore-device", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        except OSError as cause:
            raise DeviceError(f"host: no shared memory: {cause.strerror}") from cause
        return self.open_shared(Export(nbytes, fd=fd)), Export(nbytes, fd=fd)

    def open_shared(self, export: Export) -> Memory:
        try:
            return _memory(mmap.mmap(export.fd, export.nbytes, flags=mmap.MAP_SHARED), export.nbytes)
        except (OSError, ValueError) as cause:
            raise DeviceError(f"host: a shared segment can't be mapped: {cause}") from cause

    def close_shared(self, memory: Memory) -> None:
        """Nothing to do: it is unmapped with the last reference to it."""

    def register(self, memory: Memory) -> None:
        """Nothing to do: host memory is as near as it gets."""

    def unregister(self, memory: Memory) -> None:
        """Nothing to do."""

    def copy(self, target: Memory, source: Memory, copies: Copies) -> HostTicket:
        copies.check(target, source)
        ticket = HostTicket()
        self._stream().put(_Batch(target, source, copies.merged(), ticket))
        return ticket

    def follow(self, stream: int) -> None:
        """Nothing to do: what a processor has computed is there."""

    def idle(self) -> bool:
        nothing = np.zeros(0, dtype=np.int64)
        # In the stream's order, whatever was asked for before an empty batch has ended with it.
        here = Memory(0, 0, on_device=True)
        ticket = self.copy(here, here, Copies(nothing, nothing, nothing))
        return ticket.ended.wait(0.01)

    def array(self, memory: Memory, shape: tuple[int, ...]) -> Bytes:
        return np.asarray(_Exposed(memory, shape))

    def close(self) -> None:
        with self._starting:
            if self._pid == os.getpid() and not self._closed:
                self._batches.put(None)
            self._closed = True

    def _stream(self) -> queue.SimpleQueue[_Batch | None]:
        with self._starting:
            if self._closed:
                raise DeviceError("host: the device is closed")
            if self._pid != os.getpid():  # the first copy here, or a fork, which threads don't survive
                self._batches = queue.SimpleQueue()
                stream = threading.Thread(target=_copy_all, args=(self._batches, self._begin), daemon=True)
                stream.name = "kvstore-device"
                stream.start()
                self._pid = os.getpid()
            return self._batches


class _Exposed:
    """Memory as numpy takes it in; what numpy makes of it keeps this object, and so the memory."""

    def __init__(self, memory: Memory, shape: tuple[int, ...]) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _memory(mapping: mmap.mmap, nbytes: int) -> Memory:
    array = np.frombuffer(mapping, dtype=np.uint8)
    return Memory(array.ctypes.data, nbytes, on_device=True, keep=array)


def _copy_all(batches: queue.SimpleQueue[_Batch | None], begin: Callable[[], object]) -> None:
    while (batch := batches.get()) is not None:
        begin()
        to, start, copies = batch.target.address, batch.source.address, batch.copies
        for target, source, size in zip(
            copies.target_offsets.tolist(), copies.source_offsets.tolist(), copies.sizes.tolist(), strict=True
        ):
            ctypes.memmove(to + target, start + source, size)
        batch.ticket.ended.set()
        del batch  # before waiting for the next one: it keeps memory alive
