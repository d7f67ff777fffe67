"""Request and reply over a connected stream socket, with a deadline on every wait.

The socket stays blocking and the kernel bounds each wait (SO_RCVTIMEO, SO_SNDTIMEO): one system call moves as much as
there is, and the GIL is free meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NoReturn

from kvstore.core.errors import (
    BlockTooLarge,
    DeadlineExceeded,
    KvStoreError,
    LeaseExpired,
    NamespaceMismatch,
    ProtocolError,
    Unavailable,
    UsageError,
)
from kvstore.wire.frames import HEADER_BYTES, NO_REPLY, Frame, Op, Status, decode_header, encode

# Measured on loopback: larger sends leave the processor's cache between sender and receiver and run at half the speed
# (docs/adr/0004).
SEND_BYTES_MAX = 1 << 20
RECEIVE_BYTES_MAX = 256 << 10
RECEIVE_BUFFER_BYTES = 2 << 20  # asked for; the kernel doubles it for its own bookkeeping
_IOVECS_MAX = 512
_SMALL_READ_BYTES = 16 << 10
# How often a small reply is looked for before the thread goes to sleep: 0.2 ms in all. Falling asleep and
# waking up, with what that does to the caches, costs more than a shard needs for its answer (docs/adr/0004). Not
# where the shard would have to wait for the very core that looks.
_SPINS = 150 if len(os.sched_getaffinity(0)) > 1 else 0
_WAIT_S_MIN = 0.001
_SLACK = 0.1  # of the time left: how far a bound in force may be off
_TIMED_OUT = -1
_TIMEVAL = struct.Struct("@ll")

_ERRORS: dict[int, type[KvStoreError]] = {
    Status.BAD_REQUEST: UsageError,
    Status.UNAUTHENTICATED: Unavailable,
    Status.NAMESPACE_MISMATCH: NamespaceMismatch,
    Status.TOO_LARGE: BlockTooLarge,
    Status.EXPIRED: LeaseExpired,
    Status.BUSY: Unavailable,
}


class Deadline:
    """A point in time that several waits share."""

    __slots__ = ("_at_s", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left; never below zero."""
        return max(0.0, self._at_s - time.monotonic())

    def check(self, what: str) -> float:
        """Seconds left.

        Raises:
            DeadlineExceeded: none.
        """
        left_s = self.left_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"{what}: no answer within {self.timeout_s:g} s")
        return left_s


class Stream:
    """Whole reads and writes on a blocking socket. Any error leaves it unusable: close it."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self._timeouts: dict[int, float] = {}

    def alive(self) -> bool:
        """False once the peer has closed or died."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True  # nothing to read, and no end either
        except OSError:
            return False

    def send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send all parts in order: bytes, or views of bytes."""
        if len(parts) == 1 and len(parts[0]) <= _SMALL_READ_BYTES:
            self._bound(socket.SO_SNDTIMEO, deadline)
            sent = self._call(self.sock.send, parts[0])
            if sent == len(parts[0]):
                return
            parts = [memoryview(parts[0])[max(0, sent) :]]
        pending = (
            [piece for part in parts for piece in _pieces(part)] if max(map(len, parts)) > SEND_BYTES_MAX else parts
        )
        ends = list(accumulate(map(len, pending)))
        first = sent = 0
        while sent < ends[-1]:
            self._bound(socket.SO_SNDTIMEO, deadline)
            last = min(bisect_left(ends, sent + SEND_BYTES_MAX, first) + 1, first + _IOVECS_MAX)
            batch = list(pending[first:last])
            begun = sent - (ends[first - 1] if first else 0)
            if begun:
                batch[0] = memoryview(batch[0])[begun:]
            sent += max(0, self._call(self.sock.sendmsg, batch))
            first = bisect_right(ends, sent, first)

    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill the target."""
        while len(target):
            self._bound(socket.SO_RCVTIMEO, deadline)
            got = self._call(self.sock.recv_into, target, min(len(target), RECEIVE_BYTES_MAX), socket.MSG_WAITALL)
            if got == _TIMED_OUT:
                continue
            if not got:
                self._ended()
            target = target[got:]

    def receive_all(self, targets: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill the targets, one after the other; small ones with one system call for many."""
        first = 0
        while first < len(targets):
            batch = targets[first : first + _IOVECS_MAX]
            first += len(batch)
            if len(batch) > 1:
                self._bound(socket.SO_RCVTIMEO, deadline)
                got = self._call(_receive_message, self.sock, batch)
                if not got:
                    self._ended()
                batch = _behind(batch, max(0, got))
            for target in batch:
                self.receive_into(target, deadline)

    def receive_some(self, deadline: Deadline) -> bytes:
        """What has arrived, at least one byte; a small message in one piece."""
        for _ in range(_SPINS):
            try:
                return self.sock.recv(_SMALL_READ_BYTES, socket.MSG_DONTWAIT) or self._ended()
            except BlockingIOError:
                pass
            except OSError as cause:
                raise Unavailable(f"{self.peer}: {cause.strerror or cause}") from cause
        while True:
            self._bound(socket.SO_RCVTIMEO, deadline)
            try:
                return self.sock.recv(_SMALL_READ_BYTES) or self._ended()
            except BlockingIOError:
                continue
            except OSError as cause:
                raise Unavailable(f"{self.peer}: {cause.strerror or cause}") from cause

    def _ended(self) -> NoReturn:
        raise Unavailable(f"{self.peer} closed the connection")

    def receive(self, size_bytes: int, deadline: Deadline) -> bytearray:
        """That many bytes. For heads and bodies, whose size has been checked."""
        data = bytearray(size_bytes)
        self.receive_into(memoryview(data), deadline)
        return data

    def receive_with_fds(self, size_bytes: int, fds_max: int, deadline: Deadline) -> tuple[bytes, list[int]]:
        """The first bytes of a message that carries descriptors, and those. Local sockets only."""
        self._bound(socket.SO_RCVTIMEO, deadline)
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, size_bytes, fds_max)
        except BlockingIOError:
            raise DeadlineExceeded(f"{self.peer}: no answer within {deadline.timeout_s:g} s") from None
        except OSError as cause:
            raise Unavailable(f"{self.peer}: {cause.strerror or cause}") from cause
        return data, fds

    def interrupt(self) -> None:
        """Wake up a thread that waits in it: it finds the end. The descriptor stays ours until `close`."""
        with contextlib.suppress(OSError):  # the peer was first
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; wakes up a thread that waits in it."""
        self.interrupt()
        self.sock.close()

    def _bound(self, option: int, deadline: Deadline) -> None:
        left_s = max(deadline.check(self.peer), _WAIT_S_MIN)
        known = self._timeouts.get(option)
        if known is not None and abs(known - left_s) <= _SLACK * left_s:
            return  # tight enough; a system call saved
        seconds = int(left_s)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, int((left_s - seconds) * 1e6)))
        except OSError as cause:  # closed meanwhile by another thread
            raise Unavailable(f"{self.peer}: {cause.strerror or cause}") from cause
        self._timeouts[option] = left_s

    def _call(self, function: Callable[..., int], *arguments: object) -> int:
        """One system call. `_TIMED_OUT` when the kernel's bound was reached: the caller's loop then meets the
        deadline.
        """
        try:
            return function(*arguments)
        except BlockingIOError:
            return _TIMED_OUT
        except OSError as cause:
            raise Unavailable(f"{self.peer}: {cause.strerror or cause}") from cause


class Channel:
    """One request at a time over a stream, from any thread. A failure closes it for good.

    Args:
        stream: connected socket.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        self._request = 0
        self._open = True
        self._ending = threading.Lock()
        self._keepers = 0

    @property
    def usable(self) -> bool:
        """False once the peer has gone or a call has failed."""
        return self._open and self.stream.alive()

    def call(self, op: Op, body: bytes, deadline: Deadline) -> bytes:
        """Send a request without payload, return the body of its reply.

        Raises:
            UsageError, NamespaceMismatch, BlockTooLarge, LeaseExpired: the peer's answer; the channel stays usable.
            Unavailable, DeadlineExceeded, ProtocolError: the channel is closed.
        """
        with self.exchange(deadline) as exchange:
            exchange.send(op, body)
            return exchange.whole_reply()

    def post(self, op: Op, body: bytes, deadline: Deadline) -> None:
        """Send a request that nobody answers.

        Raises:
            Unavailable, DeadlineExceeded: the channel is closed.
        """
        with self.exchange(deadline) as exchange:
            exchange.send(op, body, flags=NO_REPLY)

    def exchange(self, deadline: Deadline) -> Exchange:
        """A request whose parts the caller sends and receives itself, as a context manager that holds the channel."""
        return Exchange(self, deadline)

    def close(self) -> None:
        """Close the socket, once nobody keeps it. Waiting calls fail, then; others at once."""
        with self._ending:
            self._open = False
            kept = self._keepers > 0
        if not kept:
            self.stream.close()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The socket stays open meanwhile, whatever fails elsewhere: to the peer its end means that we write no more to
        the memory that it gave us.

        Raises:
            Unavailable: it was closed before.
        """
        with self._ending:
            if not self._open:
                raise Unavailable(f"{self.stream.peer}: the connection is closed")
            self._keepers += 1
        try:
            yield
        finally:
            with self._ending:
                self._keepers -= 1
                last = not (self._open or self._keepers)
            if last:
                self.stream.close()

    def acquire(self, deadline: Deadline) -> int:
        """Take the channel for one exchange; its request number. `Exchange` does this."""
        if not self._lock.acquire(timeout=max(deadline.left_s(), _WAIT_S_MIN)):
            raise DeadlineExceeded(f"{self.stream.peer}: other requests took the whole {deadline.timeout_s:g} s")
        if not self._open:
            self._lock.release()
            raise Unavailable(f"{self.stream.peer}: the connection is closed")
        self._request = (self._request + 1) & 0xFFFFFFFF
        return self._request

    def release(self) -> None:
        """Let the next exchange have the channel. `Exchange` does this."""
        self._lock.release()


class Exchange:
    """One request and its reply; see `Channel.exchange`."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self._channel = channel
        self._stream = channel.stream
        self.deadline = deadline
        self._op = 0
        self._request = 0

    def __enter__(self) -> Exchange:
        self._request = self._channel.acquire(self.deadline)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After anything but an answer of the peer, bytes of this exchange may still be on their way: it is lost.
        if error is not None and not isinstance(error, UsageError | LeaseExpired):
            self._channel.close()
        self._channel.release()

    def send(self, op: Op, body: bytes, *, flags: int = 0) -> None:
        """Send a request without payload."""
        self._op = op
        self._stream.send([encode(op, self._request, body, flags=flags)], self.deadline)

    def send_payload(self, op: Op, body: bytes, payload_bytes: int, payload: Iterable[memoryview]) -> None:
        """Send a request and its payload. Each piece is taken from the iterator when the one before has been sent."""
        self._op = op
        self._stream.send([encode(op, self._request, body, payload_bytes)], self.deadline)
        for piece in payload:
            self._stream.send([piece], self.deadline)

    def reply(self) -> tuple[Frame, bytes]:
        """Head and body of the reply. What follows as payload is the caller's to receive.

        Raises:
            the error that the reply's status stands for.
        """
        frame = decode_header(bytes(self._stream.receive(HEADER_BYTES, self.deadline)))
        return frame, self._check(frame)

    def whole_reply(self) -> bytes:
        """Body of a reply that no payload follows; mostly one system call."""
        data = self._stream.receive_some(self.deadline)
        while len(data) < HEADER_BYTES:
            data += self._stream.receive_some(self.deadline)
        frame = decode_header(data)
        missing = HEADER_BYTES + frame.body_bytes - len(data)
        if frame.payload_bytes or missing < 0:
            raise ProtocolError(f"{self._stream.peer} sent more than a reply")
        if missing:
            data += self._stream.receive(missing, self.deadline)
        return self._judge(frame, data[HEADER_BYTES:])

    def _check(self, frame: Frame) -> bytes:
        return self._judge(frame, bytes(self._stream.receive(frame.body_bytes, self.deadline)))

    def _judge(self, frame: Frame, body: bytes) -> bytes:
        if frame.request != self._request or frame.op != self._op:
            raise ProtocolError(f"{self._stream.peer} answered request {frame.request} instead of {self._request}")
        if frame.status != Status.OK:
            raise _ERRORS.get(frame.status, ProtocolError)(body.decode(errors="replace"))
        return body

    def reply_with_fds(self, fds_max: int) -> tuple[bytes, list[int]]:
        """Body of a reply that carries descriptors, which are the caller's to close."""
        head, fds = self._stream.receive_with_fds(HEADER_BYTES, fds_max, self.deadline)
        try:
            head += bytes(self._stream.receive(HEADER_BYTES - len(head), self.deadline)) if head else b""
            if not head:
                raise Unavailable(f"{self._stream.peer} closed the connection")
            return bytes(self._check(decode_header(head))), fds
        except BaseException:  # Ctrl-C too: descriptors are not garbage-collected
            for fd in fds:
                os.close(fd)
            raise

    def receive_into(self, targets: Sequence[memoryview]) -> None:
        """Receive payload."""
        self._stream.receive_all(targets, self.deadline)


def _pieces(part: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(part)
    for start in range(0, len(view), SEND_BYTES_MAX):
        yield view[start : start + SEND_BYTES_MAX]


def _receive_message(sock: socket.socket, targets: Sequence[memoryview]) -> int:
    return sock.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]


def _behind(targets: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them when the first `count` bytes have come."""
    left: list[memoryview] = []
    for target in targets:
        taken = min(count, len(target))
        count -= taken
        if taken < len(target):
            left.append(target[taken:])
    return left
