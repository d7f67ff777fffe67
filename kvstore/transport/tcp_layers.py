"""Layers over TCP, on a connection of their own: the next request goes out before the answer to the last one has come.

A reader has the server hold its blocks, and asks for as many layers at a time as keep the link busy. The answer comes
layer by layer, straight into the caller's memory, and every slice is verified.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import KvStoreError, ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LinkMeter, Mask, Part, Wanted
from kvstore.transport.buffers import LayerMemory, Region
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.receiving import ReceivePlan
from kvstore.transport.trailer import sums_of
from kvstore.wire.frames import HEADER_BYTES, NO_REPLY, Op, Status, decode_header, encode
from kvstore.wire.messages import (
    RESERVE_ROW,
    Found,
    KeyRequest,
    LayersAnswer,
    LayersRequest,
    RefRequest,
    decode_rows,
)

I64 = NDArray[np.int64]

_REQUESTS = 2  # under way: one being received, one on its way to the server
_WINDOW_BYTES_MIN = 2 << 20
_WINDOW_BYTES_MAX = 64 << 20
_WINDOW_S = 0.02  # of what the link carries, at least: a request costs both sides some 0.2 ms
_WAIT_S = 0.02  # of the server for a writer, before it says that nothing has come
GROUP_PIECE_BYTES = 128 << 10
GROUP_BYTES_SOON = 1 << 20  # of all blocks, for a caller that computes between layers
GROUPS_MIN = 5  # of a whole stream, for one that only collects
_NEW_SHARE = 0.25  # of a new measurement in the estimate
_SUMS_MAX = 64 << 10  # in one answer: 512 KiB of its body


class Pace:
    """What a link is seen to carry, and so how much a request asks for: the link must not run dry before the next.

    The bandwidth-delay product, twice over; both are exponentially weighted means of what streams met.
    """

    def __init__(self) -> None:
        self._bytes_per_s = 0.0
        self._delay_s = 0.0

    @property
    def window_bytes(self) -> int:
        """Bytes of one request."""
        wanted = self._bytes_per_s * max(_WINDOW_S, 2 * self._delay_s)
        return int(min(max(wanted, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX))

    def saw_delay(self, seconds: float) -> None:
        """A request without payload took so long."""
        self._delay_s = _mean(self._delay_s, seconds)

    def saw_bytes(self, count: int, seconds: float) -> None:
        """So many bytes came in so long, without a gap."""
        if seconds > 0:
            self._bytes_per_s = _mean(self._bytes_per_s, count / seconds)


def _mean(known: float, new: float) -> float:
    return new if not known else known + _NEW_SHARE * (new - known)


@dataclass(slots=True)
class _Request:
    number: int
    rows: I64
    first: int  # layer of the block
    end: int
    found: I64  # of the rows, those that are on their way
    sums: NDArray[np.uint64]  # expected, shape (layers on their way, rows on their way)
    group: int = 1  # layers that come together
    plan: ReceivePlan | None = None
    in_step: bool = False  # these are all blocks that still lack layers, and all lack the same
    next: int = -1  # layer that comes next; -1 until the answer has begun
    began_s: float = 0.0


_NO_ROWS = np.zeros(0, dtype=np.int64)
_NO_SUMS = np.zeros((0, 0), dtype=np.uint64)


class TcpLayerSource:
    """`LayerSource` over TCP.

    Args:
        channel: this source's alone until `close`.
        wanted, into: what to read, and where it goes.
        give_back: takes the channel at the end, and whether it can be used again.
        damaged: told of blocks whose bytes did not match their sums.
        meter, pace: the link's.
    """

    def __init__(
        self,
        channel: Channel,
        number: int,
        namespace: Namespace,
        keys: Keys,
        wanted: Wanted,
        into: LayerMemory,
        *,
        ttl_s: float,
        timeout_s: float,
        give_back: Callable[[Channel, bool], None],
        damaged: Callable[[Keys], None],
        meter: LinkMeter,
        pace: Pace,
    ) -> None:
        self._channel, self._namespace = channel, namespace
        self._keys, self._wanted, self._into = keys, wanted, into
        self._timeout_s = timeout_s
        self._give_back, self._damaged = give_back, damaged
        self._meter, self._pace = meter, pace
        self._lock = threading.Lock()  # of the end, which may come from another thread
        self._stepping = threading.Lock()  # held while the socket is used and the caller's memory is written to
        self._closed = False
        self._last = 0
        self._soon = True  # the next layer is wanted soon
        self._requests: deque[_Request] = deque()
        self._held_back = False  # the memory has no room for all layers yet
        self._asked: I64 = np.full(len(keys), wanted.first, dtype=np.int64)  # layer of the block asked for next
        self._alive: Mask = np.ones(len(keys), dtype=np.bool_)
        self.arrived: I64 = np.zeros(len(keys), dtype=np.int64)
        self.settled = 0 if len(keys) else wanted.layers
        self._asked_at_s = time.monotonic()
        self._hold_answered = False
        hold = KeyRequest(number, keys, ttl_ms=max(1, int(ttl_s * 1000)))
        self._send(Op.HOLD, hold.encode(), Deadline(timeout_s))
        self._ask(Deadline(timeout_s), layers_max=1)

    def advance(self, timeout_s: float, *, soon: bool = True) -> bool:
        with self._stepping:
            self._soon = soon
            if self.settled == self._wanted.layers:
                return False
            if self._closed:
                raise Unavailable("the stream was given up")
            deadline = Deadline(timeout_s)
            if self._held_back and len(self._requests) < _REQUESTS:
                self._ask(deadline)
            if not self._requests:
                return False
            request = self._requests[0]
            moved = True
            if request.next < 0:
                moved = self._begin(request, deadline)
            else:
                self._receive_layer(request, deadline)
            if request.next == request.end:
                self._requests.popleft()
                self._ask(deadline)
            return moved

    def fileno(self) -> int:
        return self._channel.stream.sock.fileno() if self._requests else -1

    def renew(self, now_s: float) -> None:
        """The server does it, with every request."""

    def close(self, *, abandon: bool = False) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            with self._stepping:
                return
        # What is still on its way would be taken for the answer to somebody else's request.
        usable = not abandon and not self._requests and self._hold_answered and self._channel.usable
        if usable:
            with contextlib.suppress(KvStoreError):
                nothing = KeyRequest(0, self._keys[:0]).encode()
                self._send(Op.HOLD, nothing, Deadline(self._timeout_s), flags=NO_REPLY)
        else:
            self._channel.stream.interrupt()
        # Nobody is in the middle of a step any more: what the kernel had already still went where it should, and the
        # descriptor can be another connection's.
        with self._stepping:
            self._give_back(self._channel, usable)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, deadline: Deadline, layers_max: int = 1 << 16) -> None:
        """Keep requests under way, for the blocks that are furthest behind first."""
        wanted = self._wanted
        limit = min(wanted.end, wanted.first + self._into.limit())
        self._held_back = limit < wanted.end
        if not self._requests:  # what came out of order did not count, and is asked for again
            self._asked = self.arrived + wanted.first
        while len(self._requests) < _REQUESTS:
            missing = self._alive & (self._asked < limit)
            if not missing.any():
                return
            first = int(self._asked[missing].min())
            rows = np.flatnonzero(missing & (self._asked == first))
            window = min(self._pace.window_bytes // max(1, len(rows) * wanted.size), _SUMS_MAX // len(rows))
            end = min(limit, first + max(1, min(window, layers_max)))
            # Who waits for a writer keeps everybody behind it waiting, too: only where that is nobody.
            wait_s = _WAIT_S if not self._requests and len(rows) == np.count_nonzero(missing) else 0.0
            self._last = (self._last + 1) & 0xFFFFFFFF
            group = self._group(len(rows), end - first)
            body = LayersRequest(
                rows.astype(np.uint32), (first, end), wanted.start, wanted.size, int(wait_s * 1000), group
            ).encode()
            self._send(Op.LAYERS, body, deadline, self._last)
            self._asked[rows] = end
            self._requests.append(_Request(self._last, rows, first, end, _NO_ROWS, _NO_SUMS, group))
            layers_max = 1 << 16

    def _group(self, rows: int, layers: int) -> int:
        """How many layers of a block should come together, where they lie behind one another here too: small slices one
        by one cost both sides more than their bytes do.
        """
        size = self._wanted.size
        if not self._into.gapless or size != self._namespace.layer_bytes:
            return 1
        at_once = GROUP_BYTES_SOON // (rows * size) if self._soon else -(-self._wanted.layers // GROUPS_MIN)
        return max(1, min(at_once, layers, GROUP_PIECE_BYTES // size))

    def _send(self, op: Op, body: bytes, deadline: Deadline, number: int = 0, flags: int = 0) -> None:
        self._channel.stream.send([encode(op, number, body, flags=flags)], deadline)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _begin(self, request: _Request, deadline: Deadline) -> bool:
        """Read what the server says of the blocks; whether some of them follow."""
        if not self._hold_answered:
            self._reply(Op.HOLD, 0, deadline)
            self._hold_answered = True
            self._pace.saw_delay(time.monotonic() - self._asked_at_s)
        body, payload_bytes = self._reply(Op.LAYERS, request.number, deadline)
        answer = LayersAnswer.decode(body, len(request.rows), request.first, request.end)
        if payload_bytes != answer.sums.size * self._wanted.size:
            raise ProtocolError(
                f"{answer.sums.size} slices of {self._wanted.size} bytes came with {payload_bytes} bytes"
            )
        self._alive[request.rows[answer.found == Found.MISS]] = False
        # What is not there yet is asked for again from where it stopped.
        late = request.rows[(answer.found == Found.LATER) | (answer.found == Found.UNFINISHED)]
        self._asked[late] = self.arrived[late] + self._wanted.first
        request.found = request.rows[answer.found == Found.HERE]
        short = request.found[self._asked[request.found] == request.end]
        self._asked[short] = answer.end
        request.sums, request.end = answer.sums, answer.end
        request.next, request.began_s = request.first, time.monotonic()
        if not request.sums.size:
            request.next = request.end
            self._settle()
        size, found = self._wanted.size, request.found
        request.group = min(request.group, max(1, request.end - request.first))
        request.plan = ReceivePlan(self._into.offsets[found], size * request.group, size)
        missing = self._alive & (self.arrived < self._wanted.layers)
        behind = request.first - self._wanted.first
        request.in_step = len(found) == np.count_nonzero(missing) and bool((self.arrived[found] == behind).all())
        return bool(request.sums.size) or len(late) < len(request.rows)

    def _receive_layer(self, request: _Request, deadline: Deadline) -> None:
        layer, rows, size = request.next, request.found, self._wanted.size
        place = layer - self._wanted.first
        count = min(request.group, request.end - layer)
        stream = self._channel.stream

        def receive(targets: Sequence[memoryview]) -> None:
            if self._closed:
                raise Unavailable("the stream was given up")
            stream.receive_all(targets, deadline)

        assert request.plan is not None
        if count < request.group:  # the last ones
            request.plan = ReceivePlan(self._into.offsets[rows], size * count, size)
        received = request.plan.receive(receive, memoryview(self._into.memories[place]), self._into.shifts[place])
        expected = request.sums[layer - request.first :][:count].T
        request.next += count
        if request.next == request.end:
            self._pace.saw_bytes(request.sums.size * size, time.monotonic() - request.began_s)
        if received != expected.reshape(-1).tolist():
            wrong = (np.array(received, dtype=np.uint64).reshape(expected.shape) != expected).any(axis=1)
            self._alive[rows[wrong]] = False
            self._damaged(self._keys[rows[wrong]])
            request.in_step = False
        if request.in_step:
            self.arrived[rows] = self.settled = place + count
        else:
            # What was asked for twice, lacks an earlier layer, or is damaged does not count.
            rows = rows[(self.arrived[rows] == place) & self._alive[rows]]
            self.arrived[rows] = place + count
            self._settle()
        self._meter.add(read_blocks=len(rows) * (place == 0), read_bytes=len(rows) * size * count)

    def _reply(self, op: Op, number: int, deadline: Deadline) -> tuple[bytes, int]:
        stream = self._channel.stream
        frame = decode_header(bytes(stream.receive(HEADER_BYTES, deadline)))
        body = bytes(stream.receive(frame.body_bytes, deadline))
        if frame.op != op or frame.request != number:
            raise ProtocolError(f"{stream.peer} answered request {frame.request} instead of {number}")
        if frame.status != Status.OK:
            raise Unavailable(f"{stream.peer}: {body.decode(errors='replace')}")
        return body, frame.payload_bytes

    def _settle(self) -> None:
        alive = self.arrived[self._alive]
        self.settled = int(alive.min()) if len(alive) else self._wanted.layers


class RemoteLayerSink:
    """What sinks behind a data port have in common: the server knows the reservation by its connection, which is the
    sink's alone until `commit` or `abort`.

    Args:
        give_back: takes the connection at the end, and whether it can be used again.
        meter: the link's.
        part: of each layer, where others write the rest.
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
        give_back: Callable[[bool], None],
        meter: LinkMeter,
        part: Part | None = None,
    ) -> None:
        self._channel, self._number, self._namespace = channel, number, namespace
        self._part = part or Part(0, namespace.layer_bytes)
        self._give_back, self._meter = give_back, meter
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._open = True
        request = KeyRequest(number, keys, ttl_ms=self._ttl_ms, size_bytes=namespace.block_bytes)
        answer = channel.call(*Part.reserve(request, part), Deadline(timeout_s))
        rows = decode_rows(answer, RESERVE_ROW, len(keys))
        self.statuses: U8 = rows["status"].copy()
        self._mine = np.flatnonzero(self.statuses == PutStatus.STORED)
        self._rows = rows[self._mine]

    def commit(self, timeout_s: float) -> Mask:
        """See `LayerSink`."""
        done = np.zeros(len(self.statuses), dtype=np.bool_)
        done[self._mine] = self._settle(Op.COMMIT, timeout_s)
        written = int(np.count_nonzero(done))
        self._meter.add(written_blocks=written, written_bytes=written * self._namespace.layers * self._part.size)
        return done

    def abort(self, timeout_s: float) -> None:
        """See `LayerSink`."""
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
                self._give_back(self._channel.usable)

    def _named(self, layers_ready: int) -> RefRequest:
        return RefRequest.of(self._rows["handle"], self._rows["generation"], self._number, layers_ready, self._ttl_ms)


class TcpLayerSink(RemoteLayerSink):
    """`LayerSink` over TCP."""

    def write(self, layer: int, blocks: Region, timeout_s: float) -> None:
        """See `LayerSink`."""
        if not len(self._mine):
            return
        size = self._part.size

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
