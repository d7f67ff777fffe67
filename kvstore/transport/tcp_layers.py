"""Layers over TCP, on a connection of their own: requests for the next layers go out before the last ones have come.

A reader holds the blocks by one lease on the server. Each layer is one request and one answer, received straight into
the caller's memory, and every slice is verified.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import KvStoreError, ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LinkMeter, Mask, Part, SliceStatus
from kvstore.transport.buffers import Blocks
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.receiving import receive_verified
from kvstore.transport.trailer import sums_of
from kvstore.wire.frames import HEADER_BYTES, NO_REPLY, Op, Status, decode_header, encode
from kvstore.wire.messages import (
    FETCH_ROW,
    OF_STREAM,
    RESERVE_ROW,
    U64,
    Found,
    KeyRequest,
    LeaseRequest,
    RefRequest,
    decode_prefix,
    decode_rows,
)

I64 = NDArray[np.int64]

_STATUS_OF = np.zeros(1 + max(Found), dtype=np.uint8)
_STATUS_OF[Found.MISS] = SliceStatus.GONE
_STATUS_OF[Found.HERE] = SliceStatus.READY


class _Request(NamedTuple):
    number: int
    layer: int
    rows: I64


class TcpLayerSource:
    """`LayerSource` over TCP.

    Args:
        channel: this source's alone until `close`.
        give_back: takes the channel at the end, and whether it can be used again.
        damaged: told of blocks whose bytes did not match their sums.
        meter: the link's.
    """

    depth = 3  # one being received, one being sent, one on its way to the server

    def __init__(
        self,
        channel: Channel,
        number: int,
        namespace: Namespace,
        keys: Keys,
        part: Part,
        *,
        ttl_s: float,
        timeout_s: float,
        give_back: Callable[[Channel, bool], None],
        damaged: Callable[[Keys], None],
        meter: LinkMeter,
    ) -> None:
        self._channel, self._number, self._namespace = channel, number, namespace
        self._keys, self._part, self._ttl_s = keys, part, ttl_s
        self._timeout_s = timeout_s
        self._give_back, self._damaged = give_back, damaged
        self._requests: deque[_Request] = deque()
        self._meter = meter
        self._counted = np.zeros(len(keys), dtype=np.bool_)  # blocks of which something was read
        self._lock = threading.Lock()  # of the end, which may come from another thread
        self._writing = threading.Lock()  # held while the caller's memory is written to
        self._closed = False
        self._last = 0
        self._wanted = (0, 0) if part.size == namespace.layer_bytes else (part.start, part.size)
        request = KeyRequest(number, keys, ttl_ms=max(1, int(ttl_s * 1000)))
        answer = channel.call(Op.HOLD, request.encode(), Deadline(timeout_s))
        self._lease = int.from_bytes(answer[:8], "little")
        self._renew_at_s = time.monotonic() + ttl_s / 3

    def send(self, layer: int, rows: I64) -> None:
        self._last = (self._last + 1) & 0xFFFFFFFF
        if not len(rows):
            self._requests.append(_Request(0, layer, rows))
            return
        ttl_ms = max(1, int(self._timeout_s * 1000))
        request = KeyRequest(
            self._number, self._keys[rows], (layer, layer + 1), flag=OF_STREAM, ttl_ms=ttl_ms, part=self._wanted
        )
        deadline = Deadline(self._timeout_s)
        self._channel.stream.send([encode(Op.FETCH, self._last, request.encode())], deadline)
        self._requests.append(_Request(self._last, layer, rows))

    def receive(self, into: Blocks, timeout_s: float) -> U8:
        request = self._requests.popleft()
        if not len(request.rows):
            return np.zeros(0, dtype=np.uint8)
        self._renew(time.monotonic())
        deadline = Deadline(timeout_s)
        stream, size = self._channel.stream, self._part.size
        frame = decode_header(bytes(stream.receive(HEADER_BYTES, deadline)))
        body = bytes(stream.receive(frame.body_bytes, deadline))
        if frame.op != Op.FETCH or frame.request != request.number:
            raise ProtocolError(f"{stream.peer} answered request {frame.request} instead of {request.number}")
        if frame.status != Status.OK:
            raise Unavailable(f"{stream.peer}: {body.decode(errors='replace')}")
        answer = decode_prefix(body, FETCH_ROW, len(request.rows))
        found = np.flatnonzero(answer["found"] == Found.HERE)
        sums = decode_rows(body, U64, len(found), offset=answer.nbytes).reshape(-1, 1)
        if frame.payload_bytes != len(found) * size or int(answer["found"].max()) > max(Found):
            raise ProtocolError(f"{len(found)} slices of {size} bytes came with {frame.payload_bytes} bytes")

        def receive_into(target: memoryview) -> None:
            with self._writing:
                if self._closed:
                    raise Unavailable("the stream was given up")
                stream.receive_into(target, deadline)

        matching = receive_verified(receive_into, found, into, size, size, sums)
        statuses = _STATUS_OF[answer["found"]]
        read = request.rows[found[matching]]
        self._meter.add(read_blocks=int(np.count_nonzero(~self._counted[read])), read_bytes=len(read) * size)
        self._counted[read] = True
        if not matching.all():
            statuses[found[~matching]] = SliceStatus.GONE
            self._damaged(self._keys[request.rows[found[~matching]]])
        return statuses

    def renew(self, now_s: float) -> None:
        """Nothing from outside: the connection is busy. `receive` renews, and a request holds its blocks by itself."""

    def close(self, *, abandon: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # What is still on its way would be taken for the answer to somebody else's request.
        usable = not abandon and not self._requests and self._channel.usable
        if usable:
            with contextlib.suppress(KvStoreError):
                release = LeaseRequest(np.array([self._lease], dtype=np.uint64)).encode()
                self._channel.post(Op.RELEASE, release, Deadline(self._timeout_s))
        self._give_back(self._channel, usable)
        # Closing the socket has woken up whoever receives. What the kernel had already still goes where it should.
        with self._writing:
            pass

    def _renew(self, now_s: float) -> None:
        """Prolong the lease between two answers, when nothing else is under way on the connection."""
        if now_s < self._renew_at_s:
            return
        self._renew_at_s = now_s + self._ttl_s / 3
        renewal = LeaseRequest(np.array([self._lease], dtype=np.uint64), max(1, int(self._ttl_s * 1000)))
        self._channel.stream.send(
            [encode(Op.RENEW, 0, renewal.encode(), flags=NO_REPLY)], Deadline(self._timeout_s)
        )  # a hold that was lost shows as a block that is gone


class TcpLayerSink:
    """`LayerSink` over TCP.

    Args:
        channel: this sink's alone until `commit` or `abort`: the server knows the reservation by its connection.
        give_back: takes the channel at the end, and whether it can be used again.
        meter: the link's.
    """

    def __init__(
        self,
        channel: Channel,
        number: int,
        namespace: Namespace,
        keys: Keys,
        *,
        ttl_s: float,
        timeout_s: float,
        give_back: Callable[[Channel, bool], None],
        meter: LinkMeter,
    ) -> None:
        self._channel, self._number, self._namespace = channel, number, namespace
        self._meter = meter
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._give_back = give_back
        self._open = True
        request = KeyRequest(number, keys, ttl_ms=self._ttl_ms, size_bytes=namespace.block_bytes)
        answer = channel.call(Op.RESERVE, request.encode(), Deadline(timeout_s))
        rows = decode_rows(answer, RESERVE_ROW, len(keys))
        self.statuses: U8 = rows["status"].copy()
        self._mine = np.flatnonzero(self.statuses == PutStatus.STORED)
        self._rows = rows[self._mine]

    def write(self, layer: int, blocks: Blocks, timeout_s: float) -> None:
        if not len(self._mine):
            return
        size = self._namespace.layer_bytes

        def pieces() -> Iterator[memoryview]:
            sums: list[int] = []
            for row in range(len(self._mine)):
                piece = blocks.piece(row, size)
                sums += sums_of(piece, size)
                yield piece
            yield memoryview(np.array(sums, dtype=np.uint64)).cast("B")

        named = self._named(layer + 1)
        with self._channel.exchange(Deadline(timeout_s)) as exchange:
            exchange.send_payload(Op.WRITE_LAYER, named.encode(), len(self._mine) * (size + 8), pieces())
            exchange.whole_reply()

    def commit(self, timeout_s: float) -> Mask:
        done = np.zeros(len(self.statuses), dtype=np.bool_)
        done[self._mine] = self._settle(Op.COMMIT, timeout_s)
        written = int(np.count_nonzero(done))
        self._meter.add(written_blocks=written, written_bytes=written * self._namespace.block_bytes)
        return done

    def abort(self, timeout_s: float) -> None:
        self._settle(Op.ABORT, timeout_s)

    def _settle(self, op: Op, timeout_s: float) -> Mask:
        try:
            if not len(self._mine):
                return np.zeros(0, dtype=np.bool_)
            answer = self._channel.call(op, self._named(0).encode(), Deadline(timeout_s))
            return np.frombuffer(answer, dtype=np.bool_, count=len(self._mine))
        finally:
            if self._open:
                self._open = False
                self._give_back(self._channel, self._channel.usable)

    def _named(self, layers_ready: int) -> RefRequest:
        return RefRequest.of(self._rows["handle"], self._rows["generation"], self._number, layers_ready, self._ttl_ms)
