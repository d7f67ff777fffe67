"""The way between a device and a store that can't be reached from it directly: through host memory of our own.

What is put always goes this way (`kvstore.transport.device_side` says why), and what is read over TCP, or checked. The
memory is registered with the device, so the device's half of the way runs at the link's speed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError
from kvstore.device.base import Copies, Device, host_memory
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
        self._turn = threading.Lock()
        self._memory: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)

    def send(
        self, blocks: DeviceBlocks, size_bytes: int, deadline: Deadline, use: Callable[[I64, Region], None]
    ) -> None:
        """Call `use` with the rows and bytes of some blocks at a time, until all were used or the deadline is over.

        Raises:
            DeviceError: the device failed, or did not end in time.
        """
        for rows, region in self._turns(len(blocks), size_bytes, deadline):
            copies = Copies.of_blocks(region.offsets, blocks.offsets[rows], size_bytes)
            self._finish(
                lambda region=region, copies=copies: self._device.copy(
                    host_memory(region.memory), blocks.memory, copies
                ).wait(deadline.left_s())
            )
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
        for rows, region in self._turns(len(blocks), size_bytes, deadline):
            good = fill(rows, region)
            copies = Copies.of_blocks(blocks.offsets[rows[good]], region.offsets[good], size_bytes)
            self._finish(
                lambda region=region, copies=copies: self._device.copy(
                    blocks.memory, host_memory(region.memory), copies
                ).wait(deadline.left_s())
            )
            filled[rows] = good
        return filled

    def close(self) -> None:
        """Let go of the memory, once nobody's turn is on."""
        with self._turn:
            self._drop()

    def _turns(self, count: int, size_bytes: int, deadline: Deadline) -> Iterator[tuple[I64, Region]]:
        if not self._turn.acquire(timeout=max(deadline.left_s(), 0)):
            return
        try:
            self._reach(size_bytes)
            step = len(self._memory) // size_bytes
            for first in range(0, count, step):
                if deadline.left_s() <= 0:
                    return
                rows = np.arange(first, min(first + step, count))
                yield rows, Region(self._memory, (rows - first) * size_bytes)
        finally:
            self._turn.release()

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

    def _finish(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except DeviceError:
            # The copy may go on: nobody gets this memory again, and it stays registered and mapped.
            _kept.append(self._memory)
            self._memory = np.zeros(0, dtype=np.uint8)
            raise


_kept: list[NDArray[np.uint8]] = []  # for as long as the process lives: a device may still use it
