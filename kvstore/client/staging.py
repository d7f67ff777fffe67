"""The way between a device and a store that can't be reached from it directly: through host memory of our own.

What is put always goes this way (`kvstore.transport.device_side` says why), and what is read over TCP, or checked, or
layer by layer (`landing`). The memory is registered with the device, so the device's half of the way runs at the link's
speed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError
from kvstore.device.base import COPY_WAIT_S_MIN, Copies, Device, Memory, host_memory
from kvstore.transport.buffers import Region
from kvstore.transport.channel import Deadline
from kvstore.transport.device_blocks import DeviceBlocks
from kvstore.transport.memory import prefault, private_arena

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

log = logging.getLogger("kvstore")

STAGING_BYTES = 64 << 20  # or one block, where that is larger; what needs more goes in turns
_IDLE_MAX = 2  # pieces of it that nobody uses just now


class StagingMemory:
    """Host memory registered with a device, handed out and used again: to register it takes longer than to fill it.
    Threads may share it.

    Args:
        device: the client's.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._idle: list[U8] = []
        self._open = True

    def take(self, size_bytes: int) -> U8:
        """At least that many bytes, content undefined, until `give_back` or `keep`."""
        with self._lock:
            found = next((memory for memory in self._idle if len(memory) >= size_bytes), None)
            if found is not None:
                self._idle = [memory for memory in self._idle if memory is not found]
                return found
        fresh = private_arena(max(size_bytes, STAGING_BYTES))
        prefault(fresh)
        try:
            self.device.register(host_memory(fresh))
        except DeviceError as error:
            log.warning("staging memory is not registered with the device, copies are slower: %s", error)
        return fresh

    def give_back(self, memory: U8) -> None:
        """No copy names it any more."""
        with self._lock:
            if self._open:
                self._idle.append(memory)
                self._idle.sort(key=len)
            surplus = self._idle[:-_IDLE_MAX] if self._open else [memory]
            self._idle = self._idle[-_IDLE_MAX:]
        for smaller in surplus:
            self._drop(smaller)

    def keep(self, memory: U8) -> None:
        """A copy may go on in it: nobody gets it again, and it stays registered and mapped."""
        _kept.append(memory)

    def close(self) -> None:
        """Let go of what is idle now, and of the rest as it comes back."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for memory in idle:
            self._drop(memory)

    def _drop(self, memory: U8) -> None:
        try:
            self.device.unregister(host_memory(memory))
        except DeviceError:  # the device is closed, or broken
            self.keep(memory)


class Staging:
    """See the module. Threads may share it: they go in turns, each within its deadline.

    Args:
        memory: of the client's device.
    """

    def __init__(self, memory: StagingMemory) -> None:
        self._device = memory.device
        self._staging = memory
        self._using = threading.Lock()
        self._memory: U8 = np.zeros(0, dtype=np.uint8)  # of whose turn it is

    def send(
        self, blocks: DeviceBlocks, size_bytes: int, deadline: Deadline, use: Callable[[I64, Region], None]
    ) -> None:
        """Call `use` with the rows and bytes of some blocks at a time, until all were used or the deadline is over.

        Raises:
            DeviceError: the device failed, or did not end in time.
        """
        with self._turn(size_bytes, deadline) as step:
            for rows in _parts(len(blocks), step, deadline):
                region = self._region(rows, size_bytes)
                copies = Copies.of_blocks(region.offsets, blocks.offsets[rows], size_bytes)
                self._copy(host_memory(region.memory), blocks.memory, copies, deadline)
                use(rows, region)

    def receive(
        self, blocks: DeviceBlocks, size_bytes: int, deadline: Deadline, fill: Callable[[I64, Region], Mask]
    ) -> Mask:
        """Call `fill` with the rows and place of some blocks at a time; which blocks it said it has filled, and so are
        in the device's memory.

        Raises:
            DeviceError: as above; the target may still be written.
        """
        filled = np.zeros(len(blocks), dtype=np.bool_)
        with self._turn(size_bytes, deadline) as step:
            for rows in _parts(len(blocks), step, deadline):
                region = self._region(rows, size_bytes)
                good = fill(rows, region)
                copies = Copies.of_blocks(blocks.offsets[rows[good]], region.offsets[good], size_bytes)
                self._copy(blocks.memory, host_memory(region.memory), copies, deadline)
                filled[rows] = good
        return filled

    @contextlib.contextmanager
    def _turn(self, size_bytes: int, deadline: Deadline) -> Iterator[int]:
        """The memory is ours: how many blocks of that size fit; 0 when others had it until the deadline."""
        if not self._using.acquire(timeout=max(deadline.left_s(), 0)):
            yield 0
            return
        try:
            self._memory = self._staging.take(size_bytes)
            yield len(self._memory) // size_bytes
        finally:
            if len(self._memory):
                self._staging.give_back(self._memory)
            self._memory = np.zeros(0, dtype=np.uint8)
            self._using.release()

    def _region(self, rows: I64, size_bytes: int) -> Region:
        return Region(self._memory, (rows - rows[0]) * size_bytes)

    def _copy(self, target: Memory, source: Memory, copies: Copies, deadline: Deadline) -> None:
        try:
            self._device.copy(target, source, copies).wait(max(deadline.left_s(), COPY_WAIT_S_MIN))
        except BaseException:  # Ctrl-C too: the copy goes on
            self._staging.keep(self._memory)
            self._memory = np.zeros(0, dtype=np.uint8)
            raise


def _parts(count: int, step: int, deadline: Deadline) -> Iterator[I64]:
    """Rows of a few blocks at a time, for as long as there is time."""
    for first in range(0, count if step else 0, step or 1):
        if deadline.left_s() <= 0:
            return
        yield np.arange(first, min(first + step, count))


_kept: list[U8] = []  # for as long as the process lives: a device may still use it
