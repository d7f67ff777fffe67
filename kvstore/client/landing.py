"""Layers into a device's memory, and out of it: over a ring of registered host memory, each layer one batch of copies.

Sources fill the ring ahead of the device, as far as it has room: layer l lies in place l % depth, and a place is free
again once the copies out of it have ended. So neither the host nor the engine's own work waits for the link: a layer
that has landed is asked for at once, and the engine's stream waits for its copies by an event.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.client.layer_memory import DeviceLayers
from kvstore.client.staging import STAGING_BYTES, StagingMemory
from kvstore.core.errors import DeviceError
from kvstore.device.base import COPY_WAIT_S_MIN, Copies, Ticket, host_memory
from kvstore.transport.buffers import LayerMemory

I64 = NDArray[np.int64]

DEPTH_MIN = 2  # one layer is on its way to the device while the next one lands


class Landing:
    """One layer stream's way into a device's memory. Layers are counted from the stream's first.

    Whoever moves the stream calls `make_room` and `forward`; `precede` and `close` may come from other threads.

    Args:
        staging: gives the ring, and has it back once no copy names it.
        target: where the layers go.
        size: bytes of a slice.
    """

    def __init__(self, staging: StagingMemory, target: DeviceLayers, size: int) -> None:
        for stream in target.follows:  # the engine may still use what lies in the target
            target.device.follow(stream)
        count, layers = len(target.offsets), len(target.memories)
        place_bytes = max(1, count * size)
        self._depth = min(layers, max(DEPTH_MIN, STAGING_BYTES // place_bytes))
        self._staging, self._target, self._size = staging, target, size
        self._ring = staging.take(self._depth * place_bytes)
        self._source = host_memory(self._ring)
        self._offsets = np.arange(count, dtype=np.int64) * size
        self._shifts = tuple(layer % self._depth * place_bytes for layer in range(layers))
        self._tickets: list[Ticket | None] = []  # of each layer that was asked for; None: nothing of it arrived
        self._ended = 0  # layers of which all copies have
        self._asking = threading.Lock()
        self._closed = False
        self._ending = threading.Lock()
        self._over = False  # the ring is no longer ours
        self._failure = ""  # of the device
        self.sent: I64 = np.zeros(count, dtype=np.int64)
        """How many layers of each block were asked for, shape (n,)."""

    @property
    def memory(self) -> LayerMemory:
        """Where the sources write."""
        ring = (self._ring,) * len(self._shifts)
        return LayerMemory(ring, self._shifts, self._offsets, gapless=False, limit=self._limit)

    def make_room(self) -> None:
        """See which places of the ring are free again.

        Raises:
            DeviceError: the device failed.
        """
        try:
            while self._ended < len(self._tickets):
                ticket = self._tickets[self._ended]
                if ticket is not None and not ticket.done():
                    return
                self._ended += 1
        except DeviceError as error:
            self._failure = str(error)
            raise

    def forward(self, settled: int, arrived: I64) -> None:
        """Ask for the copies of all layers before `settled`, of the blocks that have them.

        Args:
            settled: so far.
            arrived: how many layers of each block are in the ring, shape (n,).

        Raises:
            DeviceError: the device failed.
        """
        with self._asking:
            if not self._closed:
                self._forward(settled, arrived)

    def precede(self, layer: int, timeout_s: float) -> None:
        """The engine's work from now on starts once this layer is there.

        Raises:
            DeviceError: the device failed, or copies did not end where the host has to wait for them.
        """
        if self._failure:
            raise DeviceError(self._failure)
        ticket = self._tickets[layer] if layer < len(self._tickets) else None
        if ticket is not None:
            ticket.precede(self._target.streams[layer], timeout_s)

    def close(self, rest: I64 | None, timeout_s: float) -> None:
        """When this returns nothing is copied to the device's memory any more. Idempotent. Sources must have ended.

        Args:
            rest: how many layers of each block are in the ring: what was not asked for yet is copied, too. None: it is
            dropped.
            timeout_s: for the copies.

        Raises:
            DeviceError: the device failed or took too long: it may still be writing to the target.
        """
        with self._asking:
            if rest is not None and not self._closed and not self._failure:
                with contextlib.suppress(DeviceError):  # which is told below
                    self._forward(int(rest.max(initial=0)), rest)
            self._closed = True
        if not self._ending.acquire(timeout=timeout_s):
            raise DeviceError(f"{self._target.device.name}: copies did not end within {timeout_s:g} s")
        try:
            if not self._over:
                self._end(timeout_s)
            if self._failure:
                raise DeviceError(self._failure)
        finally:
            self._ending.release()

    def _limit(self) -> int:
        return self._ended + self._depth

    def _forward(self, end: int, arrived: I64) -> None:
        for layer in range(len(self._tickets), end):
            rows = np.flatnonzero(arrived > layer)
            try:
                self._tickets.append(self._copy(layer, rows) if len(rows) else None)
            except DeviceError as error:
                self._failure = str(error)
                raise
            self.sent[rows] = layer + 1

    def _copy(self, layer: int, rows: I64) -> Ticket:
        target = self._target
        copies = Copies.of_blocks(
            target.offsets[rows] + target.shifts[layer], self._offsets[rows] + self._shifts[layer], self._size
        )
        return target.device.copy(target.memories[layer], self._source, copies)

    def _end(self, timeout_s: float) -> None:
        self._over = True
        try:
            # Copies of one device end in order, so the last one's end is the end of all.
            last = next((ticket for ticket in reversed(self._tickets) if ticket is not None), None)
            if last is not None and not self._failure:
                last.wait(timeout_s)
        except DeviceError as error:
            self._failure = str(error)
        except BaseException:  # Ctrl-C: copies go on
            self._failure = f"{self._target.device.name}: nobody waited for the end of the copies"
            raise
        finally:
            if self._failure:
                self._staging.keep(self._ring)
            else:
                self._staging.give_back(self._ring)


@contextlib.contextmanager
def lifted(
    staging: StagingMemory, source: DeviceLayers, rows: I64, size: int, timeout_s: float
) -> Iterator[LayerMemory]:
    """One layer of blocks in a device's memory, in host memory for the time being.

    Args:
        staging: of the device.
        source: the layer.
        rows: of the blocks that are needed.
        size: bytes of a slice.
        timeout_s: for the copies.

    Raises:
        DeviceError: the device failed, or did not end in time.
    """
    device = source.device
    offsets = np.arange(len(source.offsets), dtype=np.int64) * size
    memory = staging.take(max(1, len(offsets) * size))
    try:
        for stream in source.follows:
            device.follow(stream)
        copies = Copies.of_blocks(offsets[rows], source.offsets[rows] + source.shifts[0], size)
        device.copy(host_memory(memory), source.memories[0], copies).wait(max(timeout_s, COPY_WAIT_S_MIN))
    except BaseException:  # Ctrl-C too: the copies may go on
        staging.keep(memory)
        raise
    try:
        yield LayerMemory((memory,), (0,), offsets, gapless=False)
    finally:
        staging.give_back(memory)
