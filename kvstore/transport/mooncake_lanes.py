"""Lanes: each a data port connection, with a piece of the memory that is shared with the transfer process and a piece
of the shard's landing space. One caller at a time has a lane.

What a caller leaves behind, because it ran out of patience, is waited for before the next one gets the lane: the memory
of a lane is written to by one caller's transfers only.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeadlineExceeded, LeaseExpired, Unavailable, UsageError
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.memory import prefault
from kvstore.transport.mooncake_engine import DONE, READ, WRITE
from kvstore.transport.mooncake_process import TransferProcess
from kvstore.wire.fabric import FabricInfo

I64 = NDArray[np.int64]

LANES = 8
STREAM_LANES = 4  # of them, at the same time with streams, which may last; calls always find the others
LANE_BYTES = 16 << 20
BAYS = 4  # of a lane's memory: transfers under way while what has come is looked at
BAY_BYTES = LANE_BYTES // BAYS
_LOOK_S = 0.01  # between looks whether a wait was interrupted

Connect = Callable[[Deadline], tuple[Channel, FabricInfo]]


class Lane:
    """See the module."""

    def __init__(self, process: TransferProcess, number: int) -> None:
        self._process = process
        self._socket: socket.socket = process.sockets[number]
        self._base = number * LANE_BYTES
        self.memory = np.frombuffer(process.memory, dtype=np.uint8)[self._base : self._base + LANE_BYTES]
        self._interrupted = False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._ticket = 0
        self._open: set[int] = set()
        self._warm = False
        self.channel: Channel | None = None
        self.landing = 0  # address of this lane's landing space
        self.landing_bytes = 0

    def fileno(self) -> int:
        """Readable when transfers have ended."""
        return self._socket.fileno()

    def bay(self, number: int) -> NDArray[np.uint8]:
        """A part of the memory."""
        return self.memory[number * BAY_BYTES : (number + 1) * BAY_BYTES]

    def read(self, at: int, ours: I64, theirs: NDArray[np.uint64], sizes: I64) -> int:
        """Begin to read; a ticket. `ours` are places behind byte `at` of the lane's memory."""
        return self._send(READ, ours + (self._base + at), theirs, sizes)

    def write(self, at: int, theirs: int, size: int) -> int:
        """Begin to write; a ticket."""
        place, address, count = (np.array([number], dtype=np.uint64) for number in (self._base + at, theirs, size))
        return self._send(WRITE, place, address, count)

    def wait(self, ticket: int, deadline: Deadline) -> None:
        """Until these transfers have ended.

        Raises:
            Unavailable: they failed, did not end in time, or `interrupt` was called.
        """
        while ticket in self._open:
            left_s = deadline.check(f"mooncake {self._process.peer}")
            if self._interrupted:
                raise Unavailable("the stream was given up")
            if self._poll.poll(1000 * min(left_s, _LOOK_S)):
                self._hear()

    def interrupt(self) -> None:
        """End a `wait` in another thread."""
        self._interrupted = True

    def make_ready(self, connect: Connect, deadline: Deadline) -> None:
        """For the next caller: connected, nothing of the last one under way, all pages present."""
        if self.channel is None or not self.channel.usable:
            if self.channel is not None:
                self.channel.close()
            self.channel, info = connect(deadline)
            self.landing, self.landing_bytes = info.landing, info.landing_bytes
        self._interrupted = False
        for ticket in list(self._open):
            self.wait(ticket, deadline)
        if not self._warm:
            prefault(self.memory)
            self._warm = True

    def disconnect(self) -> None:
        """Give up the connection: bytes of this caller may still be on their way on it."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _send(
        self, kind: int, ours: NDArray[np.generic], theirs: NDArray[np.uint64], sizes: NDArray[np.generic]
    ) -> int:
        self._ticket += 1
        numbers = np.empty(2 + 3 * len(ours), dtype=np.uint64)
        numbers[:2] = self._ticket, kind
        numbers[2::3], numbers[3::3], numbers[4::3] = ours, theirs, sizes
        try:
            self._socket.send(numbers.tobytes(), socket.MSG_DONTWAIT)
        except OSError as cause:  # it has ended, or does not read any more
            raise Unavailable(f"mooncake {self._process.peer}: {cause.strerror}") from cause
        self._open.add(self._ticket)
        return self._ticket

    def _hear(self) -> None:
        try:
            message = self._socket.recv(DONE.size)
        except OSError as cause:
            raise Unavailable(f"mooncake {self._process.peer}: {cause.strerror}") from cause
        if len(message) != DONE.size:
            raise Unavailable(f"mooncake {self._process.peer}: a transfer failed")
        self._open.discard(DONE.unpack(message)[0])


class Lanes:
    """All lanes of a link.

    Args:
        process: that moves the bytes. A lane that fails ends it, and with it the link.
        connect: a new data port connection.
    """

    def __init__(self, process: TransferProcess, connect: Connect) -> None:
        self._process, self._connect = process, connect
        self._free = threading.Condition()
        self._idle = [Lane(process, number) for number in range(LANES)][::-1]
        self._streams = 0
        self._all = tuple(self._idle)
        self._closed = False

    @property
    def usable(self) -> bool:
        """Until a failure or `close`."""
        return not self._closed and self._process.usable

    @contextmanager
    def one(self, deadline: Deadline) -> Iterator[Lane]:
        """A lane for one call."""
        lane = self._take(deadline)
        try:
            yield lane
        except (UsageError, LeaseExpired):
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._put(lane)

    def borrow(self, deadline: Deadline) -> Lane | None:
        """A lane for a stream, until `give_back`; None when other streams have them."""
        with self._free:
            if self._streams >= STREAM_LANES or not self._idle:
                return None
            self._streams += 1
        try:
            return self._take(deadline)
        except BaseException:
            with self._free:
                self._streams -= 1
            raise

    def give_back(self, lane: Lane, usable: bool) -> None:
        """The end of a stream; whether its connection can be used again."""
        if not usable:
            lane.disconnect()
        with self._free:
            self._streams -= 1
        self._put(lane)

    def close(self) -> None:
        """End everything; nobody writes to a lane's memory any more when this returns. Idempotent."""
        with self._free:
            self._closed = True
            self._free.notify_all()
        self._process.kill()
        for lane in self._all:
            lane.interrupt()
            channel = lane.channel
            if channel is not None:
                channel.close()

    def _take(self, deadline: Deadline) -> Lane:
        with self._free:
            while not self._idle and self.usable:
                if not self._free.wait(deadline.left_s()):
                    raise DeadlineExceeded(f"other requests took the whole {deadline.timeout_s:g} s")
            if not self.usable:
                raise Unavailable(f"mooncake {self._process.peer}: the link is lost")
            lane = self._idle.pop()
        try:
            lane.make_ready(self._connect, deadline)
        except BaseException:
            self.close()
            self._put(lane)
            raise
        return lane

    def _put(self, lane: Lane) -> None:
        with self._free:
            self._idle.append(lane)
            self._free.notify()
