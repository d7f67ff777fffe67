"""The way between a device and a store that can't be reached from it directly: through host memory of our own.

What is put always goes this way (`kvstore.transport.device_side` says why), and what is read over TCP, or checked. The
memory is registered with the device, so the device's half of the way runs at the link's speed.
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
Mask = NDArray[np.bool_]

log = logging.getLogger("kvstore")

STAGING_BYTES = 64 << 20  # or one block, where that is larger; what needs more goes in turns


class Staging:
    """See the module. Threads may share it: they go in turns, each within its deadline.

    Args:
        device: the client's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._using = threading.Lock()
        self._memory: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)

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

    def close(self) -> None:
        """Let go of the memory, once nobody's turn is on."""
        with self._using:
            self._drop()

    @contextlib.contextmanager
    def _turn(self, size_bytes: int, deadline: Deadline) -> Iterator[int]:
        """The memory is ours: how many blocks of that size fit; 0 when others had it until the deadline."""
        if not self._using.acquire(timeout=max(deadline.left_s(), 0)):
            yield 0
            return
        try:
            self._reach(size_bytes)
            yield len(self._memory) // size_bytes
        finally:
            self._using.release()

    def _region(self, rows: I64, size_bytes: int) -> Region:
        return Region(self._memory, (rows - rows[0]) * size_bytes)

    def _reach(self, size_bytes: int) -> None:
        if len(self._memory) >= size_bytes:
            return
        self._drop()
        self._memory = private_arena(max(size_bytes, STAGING_BYTES))
        prefault(self._memory)
        try:
            self._device.register(host_memory(self._memory))
        except DeviceError as error:
            log.warning("staging memory is not registered with the device, copies are slower: %s", error)

    def _drop(self) -> None:
        if len(self._memory):
            try:
                self._device.unregister(host_memory(self._memory))
            except DeviceError:  # the device is closed, or broken
                _kept.append(self._memory)
            self._memory = np.zeros(0, dtype=np.uint8)

    def _copy(self, target: Memory, source: Memory, copies: Copies, deadline: Deadline) -> None:
        try:
            self._device.copy(target, source, copies).wait(max(deadline.left_s(), COPY_WAIT_S_MIN))
        except DeviceError:
            # The copy may go on: nobody gets this memory again, and it stays registered and mapped.
            _kept.append(self._memory)
            self._memory = np.zeros(0, dtype=np.uint8)
            raise


def _parts(count: int, step: int, deadline: Deadline) -> Iterator[I64]:
    """Rows of a few blocks at a time, for as long as there is time."""
    for first in range(0, count if step else 0, step or 1):
        if deadline.left_s() <= 0:
            return
        yield np.arange(first, min(first + step, count))


_kept: list[NDArray[np.uint8]] = []  # for as long as the process lives: a device may still use it
