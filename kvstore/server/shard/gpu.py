"""The shard's device as its loop sees it: opened, offered to clients, opened again after a fault."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError, DeviceError
from kvstore.device.base import Device, Export, Memory, host_memory
from kvstore.device.opening import open_device
from kvstore.index.device_board import ROW_BYTES, DeviceBoard
from kvstore.server.shard.device_tier import DeviceTier
from kvstore.server.shard.shard import Shard
from kvstore.transport.memory import create_segment, map_segment, read_only

log = logging.getLogger("kvstore")

RETRY_S = 5.0
CHUNKS_MIN = 8
_MIB = 1 << 20


class GpuSide:
    """See the module.

    Args:
        name: of the device, as `open_device` takes it.
        segment_bytes: how much of its memory this shard uses.
        pool: the shard's pool.
        touch_board: one word per handle.
        chunk_bytes: of the pool; the segment's are no larger.
    """

    def __init__(
        self,
        shard: Shard,
        name: str,
        segment_bytes: int,
        pool: NDArray[np.uint8],
        touch_board: NDArray[np.uint32],
        chunk_bytes: int,
    ) -> None:
        self._shard = shard
        self._name = name
        self._chunk_bytes = min(chunk_bytes, max(segment_bytes // CHUNKS_MIN // _MIB, 1) * _MIB)
        self._segment_bytes = segment_bytes // self._chunk_bytes * self._chunk_bytes
        self._pool = pool
        self._touch_board = touch_board
        self._device: Device | None = None
        self._export = Export(0)
        self._board_fd = -1
        self._retry_at_s = 0.0
        self._pool_is_warm = False
        self._start()

    def register_pool(self) -> None:
        """Make copies from the pool run at the link's speed. Takes long for much memory: called from a thread of its
        own, once the pool is present.
        """
        self._pool_is_warm = True
        device = self._device
        if device is None:
            return  # `_start` comes back to it
        try:
            device.register(host_memory(self._pool))
        except DeviceError as error:
            log.warning("the pool is not registered with %s, copies from it are slower: %s", self._name, error)

    def tick(self, now_s: float) -> None:
        """What is due by time."""
        tier = self._shard.device_tier
        if tier is not None:
            tier.tick(now_s)
        elif now_s >= self._retry_at_s:
            self._start()

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """What a client needs to open the segment: a description, and descriptors that are the caller's to close."""
        if self._shard.device_tier is None:
            return {}, []
        described = {"device": self._name, "segment_bytes": self._export.nbytes, "handle": self._export.handle.hex()}
        fds = [read_only(self._board_fd)]
        if self._export.fd >= 0:
            fds.append(os.dup(self._export.fd))
        return described, fds

    def stats(self) -> dict[str, Any]:
        """For `/status`."""
        tier = self._shard.device_tier
        if tier is None:
            return {"device": self._name, "up": False, "segment_bytes": self._segment_bytes}
        return {
            "device": self._name,
            "up": tier.up,
            "segment_bytes": self._segment_bytes,
            **tier.stats(),
            "counters": asdict(tier.counters),
        }

    def _start(self) -> None:
        """The segment is never freed: clients may have it open, and it goes with the last process that has."""
        try:
            self._device = open_device(self._name) if self._device is None else self._device
            segment, self._export = self._device.allocate_shared(self._segment_bytes)
        except (ConfigError, DeviceError) as error:
            # A predecessor's clients may still have its segment open, and let go of it only now.
            log.warning("no device segment for now, trying again in %g s: %s", RETRY_S, error)
            self._retry_at_s = time.monotonic() + RETRY_S
            return
        self._shard.device_tier = self._tier(self._device, segment)
        if self._pool_is_warm:
            threading.Thread(target=self.register_pool, name="register", daemon=True).start()

    def _tier(self, device: Device, segment: Memory) -> DeviceTier:
        self._board_fd = create_segment("kvstore-device-board", len(self._touch_board) * ROW_BYTES)
        return DeviceTier(
            self._shard.blocks,
            host_memory(self._pool),
            device,
            segment,
            DeviceBoard(map_segment(self._board_fd, writable=True)),
            self._touch_board,
            hold=self._shard.hold,
            unhold=self._shard.unhold,
            chunk_bytes=self._chunk_bytes,
        )
