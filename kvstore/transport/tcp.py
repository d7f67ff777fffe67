"""The link over TCP: one round trip for a get, payload straight into the caller's memory, every layer slice verified.

One connection carries a whole batch: on loopback and on fast networks a second one for the same batch gains nothing
and costs cache (docs/adr/0004). Calls from several threads use several connections.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeadlineExceeded, ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LinkMeter, Lookup, Mask, Part, Wanted
from kvstore.transport.buffers import Blocks, LayerMemory, Region
from kvstore.transport.channel import (
    RECEIVE_BUFFER_BYTES,
    SEND_BYTES_MAX,
    Channel,
    Deadline,
    Exchange,
    Stream,
)
from kvstore.transport.holding import PROMOTION_SHARE
from kvstore.transport.receiving import receive_verified
from kvstore.transport.shm import RESERVATION_TTL_S, describe
from kvstore.transport.tcp_layers import Pace, TcpLayerSink, TcpLayerSource
from kvstore.transport.trailer import sums_of
from kvstore.wire.frames import PROTOCOL_VERSION, Op
from kvstore.wire.messages import (
    FETCH_ROW,
    KEYS_MAX,
    LOOKUP_ROW,
    RESERVE_ROW,
    U64,
    Found,
    KeyRequest,
    RefRequest,
    decode_json,
    decode_prefix,
    decode_rows,
    encode_json,
)

SUMS_PER_MESSAGE = 64 << 10  # checksums in one reply: 512 KiB of its body at most
CONNECTIONS_MAX = 4


def connect_data_port(host: str, port: int, token: str, shard: int, deadline: Deadline) -> tuple[Channel, str]:
    """An authenticated connection to a shard's data port, and the boot id of that shard.

    Raises:
        Unavailable: nobody there, or the token is not accepted.
    """
    peer = f"{host}:{port}"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(address[0], address[1])
    except OSError as cause:
        raise Unavailable(f"{peer}: {cause.strerror or cause}") from cause
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.settimeout(max(deadline.left_s(), 0.001))
        sock.connect(address[4])
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as cause:
        sock.close()
        raise Unavailable(f"{peer}: {cause.strerror or cause}") from cause
    channel = Channel(Stream(sock, peer))
    try:
        hello = encode_json({"version": PROTOCOL_VERSION, "token": token, "shard": shard})
        answer = decode_json(channel.call(Op.HELLO, hello, deadline))
    except BaseException:
        channel.close()
        raise
    return channel, str(answer.get("boot_id", ""))


class TcpLink:
    """`ShardLink` over the data port.

    Args:
        host, port: the data port.
        token: session token from the control plane.
        shard: number of the shard on that node.
        connections: how many callers may be served at the same time.
    """

    transport = "tcp"

    def __init__(
        self, host: str, port: int, *, token: str, shard: int, timeout_s: float, connections: int = CONNECTIONS_MAX
    ) -> None:
        self._address = (host, port, token, shard)
        self._limit = connections
        self._free = threading.Condition()
        self._idle: list[Channel] = []
        self._borrowed: set[Channel] = set()  # by streams of layers
        self._made = 0
        self._broken = False
        self._namespace: Namespace | None = None
        self._number = 0
        self._pace = Pace()
        self.meter = LinkMeter()
        self.boot_id = ""
        first = self._connect(Deadline(timeout_s))
        self._made = 1
        self._idle.append(first)

    @property
    def usable(self) -> bool:
        return not self._broken and all(channel.usable for channel in tuple(self._idle))

    def open(self, namespace: Namespace, timeout_s: float) -> None:
        with self._exchange(Deadline(timeout_s)) as exchange:
            exchange.send(Op.OPEN, encode_json(describe(namespace)))
            self._number = int.from_bytes(exchange.whole_reply(), "little")
        self._namespace = namespace

    def lookup(self, keys: Keys, timeout_s: float) -> Lookup:
        deadline = Deadline(timeout_s)
        answers = [
            decode_rows(self._call(Op.LOOKUP, KeyRequest(self._number, part), deadline), LOOKUP_ROW, len(part))
            for part in _split(keys, KEYS_MAX)
        ]
        rows = np.concatenate(answers) if answers else np.zeros(0, dtype=LOOKUP_ROW)
        self.meter.add(lookup_blocks=len(keys), hit_blocks=int(np.count_nonzero(rows["state"])))
        return Lookup(rows["state"].copy(), rows["layers_ready"].copy(), rows["tier"].copy())

    def fetch(self, keys: Keys, into: Blocks, layers: tuple[int, int], timeout_s: float) -> Mask:
        deadline, wait = Deadline(timeout_s), Deadline(timeout_s * PROMOTION_SHARE)
        filled = np.zeros(len(keys), dtype=np.bool_)
        each = min(KEYS_MAX, max(1, SUMS_PER_MESSAGE // (layers[1] - layers[0])))
        for first in range(0, len(keys), each):
            part = np.arange(first, min(first + each, len(keys)))
            while len(part):
                with self._exchange(deadline) as exchange:
                    found, matching, later = self._fetch(exchange, keys[part], into.take(part), layers, wait)
                filled[part[found[matching]]] = True
                damaged = part[found[~matching]]
                if len(damaged):
                    # It would stay a miss for every reader and EXISTS for every writer. Gone, it can be written again.
                    self.meter.add(checksum_failures=len(damaged))
                    self.delete(keys[damaged], deadline.left_s())
                # A disk that is too slow costs this get its blocks, not the link.
                part = part[later] if wait.left_s() > 0 else part[:0]
        good = int(np.count_nonzero(filled))
        size = (layers[1] - layers[0]) * self._opened().layer_bytes
        self.meter.add(read_blocks=good, read_bytes=good * size)
        return filled

    def store(self, keys: Keys, blocks: Blocks, timeout_s: float) -> U8:
        deadline = Deadline(timeout_s)
        statuses = np.empty(len(keys), dtype=np.uint8)
        for first in range(0, len(keys), KEYS_MAX):
            part = np.arange(first, min(first + KEYS_MAX, len(keys)))
            with self._exchange(deadline) as exchange:
                statuses[part] = self._store(exchange, keys[part], blocks.take(part))
        written = int(np.count_nonzero(statuses == PutStatus.STORED))
        self.meter.add(written_blocks=written, written_bytes=written * self._opened().block_bytes)
        return statuses

    def lease(self, keys: Keys, ttl_s: float, timeout_s: float) -> CopiedBlocks:
        """The bytes come over here and belong to the caller, so there is nothing to hold on the server, and no
        `ttl_s`.
        """
        del ttl_s
        namespace = self._opened()
        everything = (0, namespace.layers)
        return CopiedBlocks.read(
            len(keys), namespace.block_bytes, lambda into: self.fetch(keys, into, everything, timeout_s)
        )

    def layers(self, keys: Keys, wanted: Wanted, into: LayerMemory, ttl_s: float, timeout_s: float) -> TcpLayerSource:
        def damaged(wrong: Keys) -> None:
            # It would stay a miss for every reader and EXISTS for every writer. Gone, it can be written again.
            self.meter.add(checksum_failures=len(wrong))
            self.delete(wrong, timeout_s)

        channel = self._borrow(Deadline(timeout_s))
        try:
            return TcpLayerSource(
                channel,
                self._number,
                self._opened(),
                keys,
                wanted,
                into,
                ttl_s=ttl_s,
                timeout_s=timeout_s,
                give_back=self._give_back,
                damaged=damaged,
                meter=self.meter,
                pace=self._pace,
            )
        except BaseException:
            self._give_back(channel, channel.usable)
            raise

    def publish(self, keys: Keys, ttl_s: float, timeout_s: float, part: Part | None = None) -> TcpLayerSink:
        channel = self._borrow(Deadline(timeout_s))
        try:
            return TcpLayerSink(
                channel,
                self._number,
                self._opened(),
                keys,
                ttl_s=ttl_s,
                timeout_s=timeout_s,
                give_back=lambda usable: self._give_back(channel, usable),
                meter=self.meter,
                part=part,
            )
        except BaseException:
            self._give_back(channel, channel.usable)
            raise

    def delete(self, keys: Keys, timeout_s: float) -> Mask:
        return self._ask(Op.DELETE, KeyRequest(self._number, keys), timeout_s)

    def pin(self, keys: Keys, on: bool, timeout_s: float) -> Mask:
        return self._ask(Op.PIN, KeyRequest(self._number, keys, flag=int(on)), timeout_s)

    def touch(self, keys: Keys, timeout_s: float) -> Mask:
        return self._ask(Op.TOUCH, KeyRequest(self._number, keys), timeout_s)

    def tidy(self, timeout_s: float) -> None:
        """Nothing waits here."""

    def report(self, timeout_s: float) -> None:
        with self._exchange(Deadline(timeout_s)) as exchange:
            exchange.send(Op.REPORT, self.meter.take_report())
            exchange.whole_reply()

    def close(self) -> None:
        with self._free:
            self._broken = True
            idle, self._idle = [*self._idle, *self._borrowed], []
            self._free.notify_all()
        for channel in idle:
            channel.close()

    def _fetch(
        self, exchange: Exchange, keys: Keys, into: Blocks, layers: tuple[int, int], wait: Deadline
    ) -> tuple[NDArray[np.int64], Mask, NDArray[np.int64]]:
        """Rows that were received, which of them match their sums, and rows to ask for again: on their way from the
        SSD.
        """
        namespace = self._opened()
        size = (layers[1] - layers[0]) * namespace.layer_bytes
        ttl_ms = max(1, int(wait.left_s() * 1000))
        exchange.send(Op.FETCH, KeyRequest(self._number, keys, ttl_ms=ttl_ms, layers=layers).encode())
        frame, body = exchange.reply()
        answer = decode_prefix(body, FETCH_ROW, len(keys))
        found, later = (np.flatnonzero(answer["found"] == state) for state in (Found.HERE, Found.LATER))
        sums = decode_rows(body, U64, len(found) * (layers[1] - layers[0]), offset=answer.nbytes)
        if frame.payload_bytes != len(found) * size or (answer["bytes"][found] != size).any():
            raise ProtocolError(f"{len(found)} blocks of {size} bytes were announced with {frame.payload_bytes} bytes")
        sums = sums.reshape(len(found), layers[1] - layers[0])
        matching = receive_verified(exchange.receive_into, found, into, size, namespace.layer_bytes, sums)
        return found, matching, later

    def _store(self, exchange: Exchange, keys: Keys, blocks: Blocks) -> U8:
        size = self._opened().block_bytes
        request = KeyRequest(self._number, keys, ttl_ms=int(RESERVATION_TTL_S * 1000), size_bytes=size)
        exchange.send(Op.RESERVE, request.encode())
        rows = decode_rows(exchange.whole_reply(), RESERVE_ROW, len(keys))
        statuses = rows["status"].copy()
        mine = np.flatnonzero(statuses == PutStatus.STORED)
        if not len(mine):
            return statuses
        request = RefRequest.of(rows["handle"][mine], rows["generation"][mine], self._number)
        exchange.send_payload(Op.WRITE, request.encode(), *self._payload(mine, blocks, size))
        done = np.frombuffer(exchange.whole_reply(), dtype=np.bool_, count=len(mine))
        statuses[mine[~done]] = PutStatus.FAILED
        return statuses

    def _payload(self, rows: NDArray[np.int64], blocks: Blocks, size: int) -> tuple[int, Iterator[memoryview]]:
        """Bytes in all, and the pieces: the blocks, then the sums, which are computed while the blocks are being
        sent.
        """
        namespace = self._opened()
        layer_bytes = namespace.layer_bytes
        step = max(1, SEND_BYTES_MAX // layer_bytes) * layer_bytes

        def pieces() -> Iterator[memoryview]:
            sums: list[int] = []
            for row in rows.tolist():
                block = blocks.piece(row, size)
                for start in range(0, size, step):
                    piece = block[start : start + step]
                    sums.extend(sums_of(piece, layer_bytes))
                    yield piece
            yield memoryview(np.array(sums, dtype=np.uint64)).cast("B")

        return len(rows) * (size + namespace.layers * 8), pieces()

    def _ask(self, op: Op, request: KeyRequest, timeout_s: float) -> Mask:
        return np.frombuffer(self._call(op, request, Deadline(timeout_s)), dtype=np.bool_, count=len(request.keys))

    def _call(self, op: Op, request: KeyRequest, deadline: Deadline) -> bytes:
        with self._exchange(deadline) as exchange:
            exchange.send(op, request.encode())
            return exchange.whole_reply()

    @contextmanager
    def _exchange(self, deadline: Deadline) -> Iterator[Exchange]:
        """A connection for one request: an idle one, a new one, or the next that another caller gives back."""
        channel = self._take(deadline)
        try:
            with channel.exchange(deadline) as exchange:
                yield exchange
        finally:
            with self._free:
                if channel.usable and not self._broken:
                    self._idle.append(channel)
                else:
                    self._made -= 1
                    self._broken = True  # one lost connection means that the peer is in trouble: make a new link
                    channel.close()
                self._free.notify()

    def _borrow(self, deadline: Deadline) -> Channel:
        """A connection for a stream of layers, which may last: it is not one of those that calls wait for."""
        with self._free:
            channel = self._idle.pop() if self._idle else None
            self._made -= channel is not None
        channel = channel or self._connect(deadline)
        with self._free:
            self._borrowed.add(channel)
        return channel

    def _give_back(self, channel: Channel, usable: bool) -> None:
        """The end of such a stream. A connection that it gave up says nothing about the others."""
        with self._free:
            self._borrowed.discard(channel)
            if usable and not self._broken and self._made < self._limit:
                self._made += 1
                self._idle.append(channel)
                self._free.notify()
                return
        channel.close()

    def _take(self, deadline: Deadline) -> Channel:
        with self._free:
            while not self._broken and not self._idle and self._made >= self._limit:
                if not self._free.wait(deadline.left_s()):
                    raise DeadlineExceeded(f"{self._limit} requests were under way for all of {deadline.timeout_s:g} s")
            if self._broken:
                raise Unavailable(f"{self._address[0]}:{self._address[1]}: the connection is lost")
            if self._idle:
                return self._idle.pop()
            self._made += 1
        try:
            return self._connect(deadline)
        except BaseException:
            with self._free:
                self._made -= 1
                self._broken = True
                self._free.notify()
            raise

    def _connect(self, deadline: Deadline) -> Channel:
        channel, boot_id = connect_data_port(*self._address, deadline)
        if self.boot_id and boot_id != self.boot_id:
            channel.close()
            raise Unavailable(f"shard {self._address[3]} of {self._address[0]}:{self._address[1]} was restarted")
        self.boot_id = boot_id
        if self._namespace is not None:
            channel.call(Op.OPEN, encode_json(describe(self._namespace)), deadline)
        return channel

    def _opened(self) -> Namespace:
        if self._namespace is None:
            raise ProtocolError("open a namespace before anything else")
        return self._namespace


class CopiedBlocks:
    """Blocks that were copied to this process: held for as long as the object lives."""

    def __init__(self, blocks: list[NDArray[np.uint8] | None], held: Mask) -> None:
        self.blocks = blocks
        self.held = held

    @classmethod
    def read(cls, count: int, block_bytes: int, fetch: Callable[[Region], Mask]) -> CopiedBlocks:
        """Those blocks that `fetch` fills."""
        memory = np.empty(count * block_bytes, dtype=np.uint8)
        held = fetch(Region(memory, np.arange(count, dtype=np.int64) * block_bytes))
        memory.flags.writeable = False
        rows = memory.reshape(count, block_bytes)
        return cls([row if good else None for row, good in zip(rows, held.tolist(), strict=True)], held)

    def valid(self) -> bool:
        return True

    def renew(self, ttl_s: float, timeout_s: float) -> None:
        """Nothing to prolong: the bytes are ours."""

    def release(self) -> None:
        """Nothing to give back."""


def _split(keys: Keys, each: int) -> Iterator[Keys]:
    for first in range(0, len(keys), each):
        yield keys[first : first + each]
