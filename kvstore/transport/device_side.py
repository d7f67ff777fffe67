"""A link's way into device memory: from the shard's segment where a block lies there, else from its pool.

Both are read as the pool is read into host memory: look, copy, look again. The copies of one call are one batch from
the segment and one from the pool, on the device's side stream, and the call waits for both before it looks again.

Only reads come here. A device's copy can outlive the process that asked for it by a moment, and the shard would give
the slot that it writes to somebody else by then; so what is put goes through memory of the client's own (`staging`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError, ProtocolError, Unavailable
from kvstore.device.base import Copies, Device, Export, Memory, host_memory
from kvstore.index import Probe
from kvstore.index.device_board import DeviceBoard, Placed
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.device_blocks import DeviceBlocks
from kvstore.transport.memory import map_segment
from kvstore.wire.frames import Op
from kvstore.wire.messages import decode_json, encode_json

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

log = logging.getLogger("kvstore")

_FDS_MAX = 2
_REGISTER_LOOK_S = 0.2
# As for the pool: elsewhere a board read after the copy proves nothing, and the segment is left alone.
_ORDERED_LOADS = platform.machine() in {"x86_64", "AMD64"}


class Segment:
    """A shard's segment and its board, opened here."""

    def __init__(self, device: Device, memory: Memory, board: DeviceBoard) -> None:
        self._device = device
        self.memory = memory
        self.board = board

    def close(self) -> None:
        """Let go of it: until then the memory stays taken, also when the shard is dead."""
        self._device.close_shared(self.memory)


def attach_segment(channel: Channel, device: Device, deadline: Deadline) -> Segment | None:
    """The shard's segment; None where it has none, or none that this device can open.

    Raises:
        Unavailable, ProtocolError: the shard does not answer, or not in our language.
    """
    with channel.exchange(deadline) as exchange:
        exchange.send(Op.ATTACH, encode_json({"device": True}))
        body, fds = exchange.reply_with_fds(_FDS_MAX)
    try:
        described = decode_json(body)
        if not fds or not _ORDERED_LOADS:
            return None
        if str(described.get("device")).partition(":")[0] != device.name.partition(":")[0]:
            return None
        export = Export(
            int(described["segment_bytes"]), fds[1] if len(fds) > 1 else -1, bytes.fromhex(described["handle"])
        )
        board = DeviceBoard(map_segment(fds[0], writable=False))
        return Segment(device, device.open_shared(export), board)
    except DeviceError as error:
        log.warning("the server's device segment can't be used from here, its DRAM is: %s", error)
        return None
    except (KeyError, TypeError, ValueError) as cause:
        raise ProtocolError(
            f"{channel.stream.peer} describes its device segment in another way than we know"
        ) from cause
    except OSError as cause:
        raise Unavailable(f"{channel.stream.peer}: its device board can't be mapped: {cause.strerror}") from cause
    finally:
        for fd in fds:
            os.close(fd)


class DeviceSide:
    """See the module. Threads may share it.

    Args:
        device: the client's.
        pool: the shard's pool, as this process maps it.
        segment: the shard's segment, if it has one.
    """

    def __init__(self, device: Device, pool: NDArray[np.uint8], segment: Segment | None) -> None:
        self._device = device
        self._pool = host_memory(pool)
        self._segment = segment
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._stuck = False  # a copy may still be reading what we would unmap
        self._registered = False

    def register_pool(self, warm_bytes: Callable[[], int], stop: threading.Event) -> None:
        """Register the pool once all of it is present: it takes long for much memory, and before the pages are there
        they would be charged to us. Copies work all the time.
        """
        while warm_bytes() < self._pool.nbytes:
            if stop.wait(_REGISTER_LOOK_S):
                return
        with contextlib.suppress(Unavailable), self._in_use():
            try:
                self._device.register(self._pool)
                self._registered = True
            except DeviceError as error:
                log.warning("the pool is not registered with the device, copies from it are slower: %s", error)

    def copy_out(
        self, into: DeviceBlocks, rows: I64, found: Probe, start: int, size_bytes: int, timeout_s: float
    ) -> tuple[Mask, int]:
        """Copy bytes [start, start + size) of blocks that the index has into rows of `into`: which copies are whole as
        far as the segment goes (ask the index as well), and how many came from there.

        Raises:
            DeviceError: the device failed, or did not end in time: it may still be writing.
            Unavailable: closed meanwhile.
        """
        with self._in_use():
            placed = self._placed(found)
            near = placed.placements != 0
            targets = into.offsets[rows]
            if near.any():
                assert self._segment is not None
                copies = Copies.of_blocks(targets[near], placed.offsets[near] + start, size_bytes)
                self._finish(into.memory, self._segment.memory, copies, timeout_s, wait=near.all())
            if not near.all():
                far = Copies.of_blocks(targets[~near], found.offsets[~near] + start, size_bytes)
                # Copies of one device end in order, so this one's end is the end of both.
                self._finish(into.memory, self._pool, far, timeout_s, wait=True)
            whole = np.ones(len(rows), dtype=np.bool_)
            if near.any():
                assert self._segment is not None
                whole[near] = self._segment.board.stand(found.handles[near], placed.placements[near])
            return whole, int(np.count_nonzero(whole & near))

    def close(self) -> None:
        """Let go of segment and pool as soon as no call uses them."""
        with self._lock:
            idle = not self._closed and not self._users
            self._closed = True
        if idle:
            self._release()

    def _placed(self, found: Probe) -> Placed:
        if self._segment is None:
            none = np.zeros(len(found.entries), dtype=np.uint64)
            return Placed(none, none.astype(np.int64))
        return self._segment.board.find(found.handles, found.generations)

    def _finish(self, target: Memory, source: Memory, copies: Copies, timeout_s: float, *, wait: bool) -> None:
        try:
            ticket = self._device.copy(target, source, copies)
            if wait:
                ticket.wait(timeout_s)
        except DeviceError:
            self._stuck = True
            raise

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise Unavailable("the link was closed meanwhile")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._release()

    def _release(self) -> None:
        """Unmapping memory under a copy would be a fault of the whole device, the engine's work included. So what a
        copy may still use is kept for good.
        """
        if self._stuck:
            _kept.append(self)
            return
        try:
            if self._registered:
                self._device.unregister(self._pool)
            if self._segment is not None:
                self._segment.close()
        except DeviceError:  # the device is closed, or broken
            _kept.append(self)
            return
        # Not when the link goes: something else may refer to that for a while.
        self._segment, self._pool = None, Memory(0, 0, on_device=False)


_kept: list[DeviceSide] = []  # for as long as the process lives: a device may still use their memory
