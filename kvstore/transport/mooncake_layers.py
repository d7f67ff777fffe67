"""Layers by one-sided transfers, on a lane of their own: where the next ones lie is asked while the last ones are read.

A reader has the server hold its blocks. What is located is read in pieces, several at a time, and every slice is
verified before it counts as arrived.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import KvStoreError, ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.transport.base import Keys, LinkMeter, Mask, Wanted
from kvstore.transport.buffers import LayerMemory, Region
from kvstore.transport.channel import Deadline
from kvstore.transport.copying import copy_blocks
from kvstore.transport.mooncake_lanes import BAY_BYTES, BAYS, Lane
from kvstore.transport.mooncake_plan import Piece, Verifier, pieces_of
from kvstore.transport.mooncake_writing import Landing
from kvstore.transport.tcp_layers import RemoteLayerSink
from kvstore.wire.fabric import LocateAnswer
from kvstore.wire.frames import HEADER_BYTES, NO_REPLY, Op, Status, decode_header, encode
from kvstore.wire.messages import Found, KeyRequest, LayersRequest

I64 = NDArray[np.int64]

_REQUESTS = 2  # answers to come: what is read meanwhile hides their round trip
_WINDOW_BYTES = 8 << 20  # of one request: several milliseconds of reading, a round trip takes less than one
_WAIT_S = 0.02  # of the server for a writer, before it says that nothing has come
_SUMS_MAX = 64 << 10  # in one answer: 512 KiB of its body


@dataclass(slots=True)
class _Request:
    number: int
    rows: I64
    first: int  # layer of the block
    end: int


@dataclass(slots=True)
class _Located:
    """Layers of some blocks that can be read: slices of one size, side by side in each block."""

    rows: I64
    first: int  # layer of the block
    shift: int  # of the wanted bytes in each block
    verifier: Verifier


class MooncakeLayerSource:
    """`LayerSource` by one-sided reads.

    Args:
        lane: this source's alone until `close`.
        wanted, into: what to read, and where it goes.
        pool, pool_bytes: address of the pool in the peer, and its size.
        give_back: takes the lane at the end, and whether its connection can be used again.
        damaged: told of blocks whose bytes did not match their sums.
        meter: the link's.
    """

    def __init__(
        self,
        lane: Lane,
        number: int,
        namespace: Namespace,
        keys: Keys,
        wanted: Wanted,
        into: LayerMemory,
        *,
        pool: int,
        pool_bytes: int,
        ttl_s: float,
        timeout_s: float,
        give_back: Callable[[Lane, bool], None],
        damaged: Callable[[Keys], None],
        meter: LinkMeter,
    ) -> None:
        assert lane.channel is not None, "a lane in use is connected"
        self._lane, self._channel, self._namespace = lane, lane.channel, namespace
        self._keys, self._wanted, self._into = keys, wanted, into
        self._pool, self._pool_bytes = pool, pool_bytes
        self._timeout_s = timeout_s
        self._give_back, self._damaged, self._meter = give_back, damaged, meter
        self._lock = threading.Lock()  # of the end, which may come from another thread
        self._stepping = threading.Lock()  # held during `advance`
        self._closed = False
        self._last = 0
        self._requests: deque[_Request] = deque()
        self._pieces: deque[tuple[_Located, Iterator[Piece]]] = deque()  # to be read
        self._under_way: deque[tuple[int, int, _Located, Piece]] = deque()
        self._bays = 0  # used so far, in turns
        self._piece_next = False
        count = len(keys)
        self._asked: I64 = np.full(count, wanted.first, dtype=np.int64)  # layer of the block that is asked for next
        self._located: I64 = self._asked.copy()  # layers before it have arrived or are being read
        self._alive: Mask = np.ones(count, dtype=np.bool_)
        self.arrived: I64 = np.zeros(count, dtype=np.int64)
        self.settled = 0 if count else wanted.layers
        self._ready = select.epoll()
        for descriptor in (lane.fileno(), self._channel.stream.sock.fileno()):
            self._ready.register(descriptor, select.EPOLLIN)
        deadline = Deadline(timeout_s)
        hold = KeyRequest(number, keys, ttl_ms=max(1, int(ttl_s * 1000)))
        self._send(Op.HOLD, hold.encode(), deadline, flags=NO_REPLY)
        self._ask(deadline, layers_max=1)

    def advance(self, timeout_s: float, *, soon: bool = True) -> bool:
        del soon  # a piece is a step
        with self._stepping:
            if self._closed:
                raise Unavailable("the stream was given up")
            if self.settled == self._wanted.layers:
                return False
            deadline = Deadline(timeout_s)
            self._ask(deadline)
            self._read_on()
            if not self._requests and not self._under_way:  # the memory has no room for more
                return False
            # What is being read keeps the link busy while an answer is taken; after that a piece has its turn.
            if self._under_way and (self._pieces or self._piece_next or not self._answered()):
                self._piece_next = False
                self._take_piece(deadline)
                return True
            self._piece_next = True
            return self._take_answer(deadline)

    def fileno(self) -> int:
        if not self._requests and not self._under_way:
            return -1
        try:
            return self._ready.fileno()
        except ValueError:  # closed by another thread
            return -1

    def renew(self, now_s: float) -> None:
        """The server does it, with every request."""

    def close(self, *, abandon: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lane.interrupt()
        if abandon:
            self._channel.close()
        with self._stepping:  # a step under way has been woken up; nothing is copied after it
            # What is still on its way would be taken for the answer to somebody else's request.
            usable = not abandon and not self._requests and self._channel.usable
            if usable:
                with contextlib.suppress(KvStoreError):
                    nothing = KeyRequest(0, self._keys[:0]).encode()
                    self._send(Op.HOLD, nothing, Deadline(self._timeout_s), flags=NO_REPLY)
            self._ready.close()
        self._give_back(self._lane, usable)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, deadline: Deadline, layers_max: int = 1 << 16) -> None:
        """Keep questions under way, about the blocks that are furthest behind first."""
        wanted = self._wanted
        limit = min(wanted.end, wanted.first + self._into.limit())
        while len(self._requests) + len(self._pieces) < _REQUESTS:
            missing = self._alive & (self._asked < limit)
            if not missing.any():
                return
            first = int(self._asked[missing].min())
            rows = np.flatnonzero(missing & (self._asked == first))
            window = min(_WINDOW_BYTES // max(1, len(rows) * wanted.size), _SUMS_MAX // len(rows))
            end = min(limit, first + max(1, min(window, layers_max)))
            # Who waits for a writer keeps everybody behind it waiting, too: only where that is nobody.
            alone = not self._requests and not self._under_way and len(rows) == np.count_nonzero(missing)
            self._last = (self._last + 1) & 0xFFFFFFFF
            wait_ms = int(_WAIT_S * 1000) if alone else 0
            request = LayersRequest(rows.astype(np.uint32), (first, end), wanted.start, wanted.size, wait_ms)
            self._send(Op.LOCATE, request.encode(), deadline, self._last)
            self._asked[rows] = end
            self._requests.append(_Request(self._last, rows, first, end))
            layers_max = 1 << 16

    def _send(self, op: Op, body: bytes, deadline: Deadline, number: int = 0, flags: int = 0) -> None:
        self._channel.stream.send([encode(op, number, body, flags=flags)], deadline)

    def _answered(self) -> bool:
        if not self._requests:
            return False
        poll = select.poll()
        poll.register(self._channel.stream.sock, select.POLLIN)
        return bool(poll.poll(0))

    def _take_answer(self, deadline: Deadline) -> bool:
        """See where blocks lie; whether anything has changed."""
        request = self._requests.popleft()
        stream = self._channel.stream
        frame = decode_header(bytes(stream.receive(HEADER_BYTES, deadline)))
        body = bytes(stream.receive(frame.body_bytes, deadline))
        if frame.op != Op.LOCATE or frame.request != request.number or frame.payload_bytes:
            raise ProtocolError(f"{stream.peer} answered request {frame.request} instead of {request.number}")
        if frame.status != Status.OK:
            raise Unavailable(f"{stream.peer}: {body.decode(errors='replace')}")
        answer = LocateAnswer.decode(body, len(request.rows), request.first, request.end, self._pool_bytes)
        found, end = answer.layers.found, answer.layers.end
        self._alive[request.rows[found == Found.MISS]] = False
        # What is not there yet is asked for again from where it stopped. Of a block that stopped before these layers
        # this answer says nothing: it has been asked for again already.
        in_turn = self._located[request.rows] == request.first
        late = request.rows[in_turn & ((found == Found.LATER) | (found == Found.UNFINISHED))]
        self._asked[late] = request.first
        at = np.flatnonzero(found == Found.HERE)
        mine = in_turn[at]
        here = request.rows[at[mine]]
        if len(here):
            self._located[here] = end
            if end < request.end:
                self._asked[here] = end
            self._plan(here, request.first, end, answer.offsets[mine], answer.layers.sums[:, mine])
            self._read_on()
        self._settle()
        return bool(len(here)) or bool((found == Found.MISS).any())

    # --- reading -----------------------------------------------------------------------------------------------------

    def _plan(self, rows: I64, first: int, end: int, offsets: I64, sums: NDArray[np.uint64]) -> None:
        """Whole layers of a block lie side by side; of parts, each is a place of its own."""
        wanted, layer_bytes = self._wanted, self._namespace.layer_bytes
        ranges = [(first, end)] if wanted.size == layer_bytes else [(layer, layer + 1) for layer in range(first, end)]
        for begin, stop in ranges:
            verifier = Verifier(wanted.size, sums[begin - first : stop - first].T)
            located = _Located(rows, begin, begin * layer_bytes + wanted.start, verifier)
            size = (stop - begin) * wanted.size
            self._pieces.append((located, pieces_of(offsets, size, wanted.size, BAY_BYTES)))

    def _read_on(self) -> None:
        """Keep reads under way."""
        while self._pieces and len(self._under_way) < BAYS:
            located, pieces = self._pieces[0]
            piece = next(pieces, None)
            if piece is None:
                self._pieces.popleft()
                continue
            bay = self._bays % BAYS
            self._bays += 1
            theirs = piece.theirs.astype(np.uint64) + np.uint64(self._pool + located.shift)
            ticket = self._lane.read(bay * BAY_BYTES, piece.ours, theirs, piece.sizes)
            self._under_way.append((ticket, bay, located, piece))

    def _take_piece(self, deadline: Deadline) -> None:
        """Verify and copy the piece that was begun first."""
        ticket, bay, located, piece = self._under_way[0]
        self._lane.wait(ticket, deadline)
        self._under_way.popleft()
        memory = self._lane.bay(bay)
        located.verifier.look(piece, memory)
        matching = located.verifier.matching[piece.rows]
        rows = located.rows[piece.rows]
        self._copy(located, piece, rows, memory)
        if not matching.all():
            wrong = rows[~matching & self._alive[rows]]
            self._alive[wrong] = False
            if len(wrong):
                self._damaged(self._keys[wrong])
        # Of a slice that comes in several pieces the last one counts; a part is a slice of its own.
        place = located.first - self._wanted.first
        before, after = (place + at // self._wanted.size for at in (piece.start, piece.start + piece.size))
        rows = rows[matching & self._alive[rows] & (self.arrived[rows] == before)]
        self.arrived[rows] = after
        starts = len(rows) if before == 0 and after else 0
        self._meter.add(read_blocks=starts, read_bytes=len(rows) * (after - before) * self._wanted.size)
        self._read_on()
        self._settle()

    def _copy(self, located: _Located, piece: Piece, rows: I64, memory: NDArray[np.uint8]) -> None:
        into, each = self._into, self._wanted.size
        place = located.first - self._wanted.first
        if into.gapless:
            shift = into.shifts[place] + piece.start
            copy_blocks(into.memories[place], into.offsets[rows] + shift, memory, piece.places, piece.size)
            return
        done = 0
        while done < piece.size:
            layer, within = divmod(piece.start + done, each)
            size = min(each - within, piece.size - done)
            target = into.of(place + layer, rows)
            copy_blocks(target.memory, target.offsets + within, memory, piece.places + done, size)
            done += size

    def _settle(self) -> None:
        alive = self.arrived[self._alive]
        self.settled = int(alive.min()) if len(alive) else self._wanted.layers


class MooncakeLayerSink(RemoteLayerSink):
    """`LayerSink` by one-sided writes, on a lane that is its own until `commit` or `abort`.

    Args:
        lane, landing: where it writes.
        give_back: takes the lane at the end, and whether its connection can be used again.
    """

    def __init__(
        self,
        lane: Lane,
        landing: Landing,
        number: int,
        namespace: Namespace,
        keys: Keys,
        *,
        ttl_s: float,
        timeout_s: float,
        give_back: Callable[[Lane, bool], None],
        meter: LinkMeter,
    ) -> None:
        assert lane.channel is not None, "a lane in use is connected"
        self._landing, self._ttl_s = landing, ttl_s
        super().__init__(
            lane.channel,
            number,
            namespace,
            keys,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            give_back=lambda usable: give_back(lane, usable),
            meter=meter,
        )

    def write(self, layer: int, blocks: Region, timeout_s: float) -> None:
        """See `LayerSink`."""
        if not len(self._mine):
            return
        layers = (layer, layer + 1)
        self._landing.land(self._rows, blocks, layers, Deadline(timeout_s), publish_ttl_s=self._ttl_s)
