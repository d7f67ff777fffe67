"""The link over Mooncake's engine: control messages over the data port, payload by one-sided reads and writes.

A get asks where its blocks lie, while the server holds them, and reads them from the shard's pool into memory shared
with the transfer process; every layer slice is verified there and then copied to the caller. A put goes the other way,
into landing space, from where the server takes it. The caller's own memory is never handed to the engine: a transfer
that was given up may still arrive (docs/adr/0009-mooncake.md).
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LayerSink, LayerSource, Lookup, Mask, Part, Wanted
from kvstore.transport.buffers import Blocks, LayerMemory, Region
from kvstore.transport.channel import Channel, Deadline
from kvstore.transport.copying import copy_blocks
from kvstore.transport.holding import PROMOTION_SHARE
from kvstore.transport.mooncake_lanes import BAY_BYTES, BAYS, LANE_BYTES, LANES, Lane, Lanes
from kvstore.transport.mooncake_layers import MooncakeLayerSink, MooncakeLayerSource
from kvstore.transport.mooncake_plan import Piece, Verifier, pieces_of
from kvstore.transport.mooncake_process import TransferProcess
from kvstore.transport.mooncake_writing import Landing
from kvstore.transport.shm import RESERVATION_TTL_S, describe
from kvstore.transport.tcp import SUMS_PER_MESSAGE, CopiedBlocks, TcpLink, connect_data_port
from kvstore.wire.fabric import FabricInfo, LocateAnswer
from kvstore.wire.frames import Op
from kvstore.wire.messages import (
    KEYS_MAX,
    RESERVE_ROW,
    Found,
    KeyRequest,
    LayersRequest,
    RefRequest,
    decode_rows,
    encode_json,
)

I64 = NDArray[np.int64]

_CONTACT_BYTES = 64
_WAIT_MS = 20  # of the server, where none of the blocks can be read yet


class _Door:
    """The data port of one shard, and how its fabric is reached: the same for as long as the link lasts."""

    def __init__(self, host: str, port: int, token: str, shard: int, boot_id: str) -> None:
        self._address = (host, port, token, shard)
        self._boot_id = boot_id
        self.namespace: Namespace | None = None
        self.fabric: FabricInfo | None = None

    def connect(self, deadline: Deadline) -> tuple[Channel, FabricInfo]:
        """A connection with landing space. Whoever answers has just asked the fabric worker: that does not hang."""
        channel, boot_id = connect_data_port(*self._address, deadline)
        try:
            if boot_id != self._boot_id:
                raise Unavailable(f"shard {self._address[3]} of {channel.stream.peer} was restarted")
            info = FabricInfo.decode(channel.call(Op.FABRIC, encode_json({"landing": LANE_BYTES}), deadline))
            known = self.fabric or info
            if (known.segment, known.pool) != (info.segment, info.pool):
                raise Unavailable(f"the fabric worker of {channel.stream.peer} was restarted")
            self.fabric = known
            if self.namespace is not None:
                self.open_on(channel, self.namespace, deadline)
        except BaseException:
            channel.close()
            raise
        return channel, info

    def open_on(self, channel: Channel, namespace: Namespace, deadline: Deadline) -> int:
        """Announce the namespace; its number."""
        return int.from_bytes(channel.call(Op.OPEN, encode_json(describe(namespace)), deadline), "little")


class MooncakeLink:
    """`ShardLink` by one-sided transfers.

    Args:
        host, port: the data port.
        token: session token from the control plane.
        shard: number of the shard on that node.
        pool_bytes: of that shard.
        device: network card of the engine; empty: all.

    Raises:
        Unavailable: the server has no fabric, its fabric worker does not answer, or there is no engine here.
    """

    transport = "mooncake"

    def __init__(
        self, host: str, port: int, *, token: str, shard: int, pool_bytes: int, timeout_s: float, device: str = ""
    ) -> None:
        deadline = Deadline(timeout_s)
        self._pool_bytes = pool_bytes
        self._number = 0
        self._tcp = TcpLink(host, port, token=token, shard=shard, timeout_s=timeout_s)
        self.meter = self._tcp.meter
        self.boot_id = self._tcp.boot_id
        try:
            self._door = _Door(host, port, token, shard, self.boot_id)
            channel, info = self._door.connect(deadline)
            self._pool = info.pool
            try:
                ours: str = channel.stream.sock.getsockname()[0]
                process = TransferProcess(
                    ours,
                    info.protocol,
                    device,
                    info.segment,
                    lanes=LANES,
                    lane_bytes=LANE_BYTES,
                    timeout_s=deadline.left_s(),
                )
            finally:
                channel.close()
            self._lanes = Lanes(process, self._door.connect)
        except BaseException:  # Ctrl-C too: nobody has the link yet
            self._tcp.close()
            raise
        try:
            with self._lanes.one(deadline) as lane:
                first = np.zeros(1, dtype=np.int64)
                lane.wait(lane.read(0, first, self._theirs(first), first + _CONTACT_BYTES), deadline)
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        return self._lanes.usable and self._tcp.usable

    def open(self, namespace: Namespace, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        self._tcp.open(namespace, timeout_s)
        with self._lanes.one(deadline) as lane:
            self._number = self._door.open_on(_channel(lane), namespace, deadline)
        self._door.namespace = namespace

    def lookup(self, keys: Keys, timeout_s: float) -> Lookup:
        return self._tcp.lookup(keys, timeout_s)

    def fetch(self, keys: Keys, into: Blocks, layers: tuple[int, int], timeout_s: float) -> Mask:
        namespace, deadline = self._opened(), Deadline(timeout_s)
        filled = np.zeros(len(keys), dtype=np.bool_)
        each = min(KEYS_MAX, max(1, SUMS_PER_MESSAGE // (layers[1] - layers[0])))
        damaged: list[Keys] = []
        for first in range(0, len(keys), each):
            part = np.arange(first, min(first + each, len(keys)))
            with self._lanes.one(deadline) as lane:
                good, wrong = self._fetch(lane, keys[part], into.take(part), layers, deadline)
            filled[part] = good
            if wrong.any():
                damaged.append(keys[part[wrong]])
        for wrong_keys in damaged:
            self._drop_damaged(wrong_keys, deadline.left_s())
        good_blocks = int(np.count_nonzero(filled))
        size = (layers[1] - layers[0]) * namespace.layer_bytes
        self.meter.add(read_blocks=good_blocks, read_bytes=good_blocks * size)
        return filled

    def store(self, keys: Keys, blocks: Blocks, timeout_s: float) -> U8:
        namespace, deadline = self._opened(), Deadline(timeout_s)
        statuses = np.empty(len(keys), dtype=np.uint8)
        with self._lanes.one(deadline) as lane:
            landing = Landing(lane, self._number, namespace)
            if landing.has_room:
                for first in range(0, len(keys), KEYS_MAX):
                    part = np.arange(first, min(first + KEYS_MAX, len(keys)))
                    statuses[part] = self._store(lane, landing, keys[part], blocks.take(part), deadline)
        if not landing.has_room:  # others have all landing space, or a layer is larger than what there is
            return self._tcp.store(keys, blocks, deadline.left_s())
        written = int(np.count_nonzero(statuses == PutStatus.STORED))
        self.meter.add(written_blocks=written, written_bytes=written * namespace.block_bytes)
        return statuses

    def lease(self, keys: Keys, ttl_s: float, timeout_s: float) -> CopiedBlocks:
        """The bytes come over here and belong to the caller, so there is nothing to hold on the server, and no
        `ttl_s`.
        """
        del ttl_s
        namespace = self._opened()
        return CopiedBlocks.read(
            len(keys),
            namespace.block_bytes,
            lambda into: self.fetch(keys, into, (0, namespace.layers), timeout_s),
        )

    def layers(self, keys: Keys, wanted: Wanted, into: LayerMemory, ttl_s: float, timeout_s: float) -> LayerSource:
        namespace = self._opened()
        lane = self._lanes.borrow(Deadline(timeout_s))
        if lane is None:
            return self._tcp.layers(keys, wanted, into, ttl_s, timeout_s)
        try:
            return MooncakeLayerSource(
                lane,
                self._number,
                namespace,
                keys,
                wanted,
                into,
                pool=self._pool,
                pool_bytes=self._pool_bytes,
                ttl_s=ttl_s,
                timeout_s=timeout_s,
                give_back=self._lanes.give_back,
                damaged=lambda wrong: self._drop_damaged(wrong, timeout_s),
                meter=self.meter,
            )
        except BaseException:
            self._lanes.give_back(lane, usable=False)
            raise

    def publish(self, keys: Keys, ttl_s: float, timeout_s: float, part: Part | None = None) -> LayerSink:
        namespace = self._opened()
        if part is not None:  # what lands is whole layers
            return self._tcp.publish(keys, ttl_s, timeout_s, part)
        lane = self._lanes.borrow(Deadline(timeout_s))
        landing = None if lane is None else Landing(lane, self._number, namespace)
        if lane is None or landing is None or not landing.has_room:
            if lane is not None:
                self._lanes.give_back(lane, usable=True)
            return self._tcp.publish(keys, ttl_s, timeout_s)
        try:
            return MooncakeLayerSink(
                lane,
                landing,
                self._number,
                namespace,
                keys,
                ttl_s=ttl_s,
                timeout_s=timeout_s,
                give_back=self._lanes.give_back,
                meter=self.meter,
            )
        except BaseException:
            self._lanes.give_back(lane, usable=False)
            raise

    def delete(self, keys: Keys, timeout_s: float) -> Mask:
        return self._tcp.delete(keys, timeout_s)

    def pin(self, keys: Keys, on: bool, timeout_s: float) -> Mask:
        return self._tcp.pin(keys, on, timeout_s)

    def touch(self, keys: Keys, timeout_s: float) -> Mask:
        return self._tcp.touch(keys, timeout_s)

    def tidy(self, timeout_s: float) -> None:
        """Nothing waits here."""

    def report(self, timeout_s: float) -> None:
        self._tcp.report(timeout_s)

    def close(self) -> None:
        self._lanes.close()
        self._tcp.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _fetch(
        self, lane: Lane, keys: Keys, into: Blocks, layers: tuple[int, int], deadline: Deadline
    ) -> tuple[Mask, Mask]:
        """Which blocks were filled, and which arrived damaged."""
        wait = Deadline(deadline.left_s() * PROMOTION_SHARE)
        good, wrong = (np.zeros(len(keys), dtype=np.bool_) for _ in range(2))
        channel = _channel(lane)
        hold = KeyRequest(self._number, keys, ttl_ms=max(1, int(wait.left_s() * 1000)))
        channel.post(Op.HOLD, hold.encode(), deadline)
        rows, wait_ms = np.arange(len(keys)), 0
        while len(rows):
            filled, damaged, rows = self._read(lane, rows, into, layers, wait_ms, deadline)
            good[filled], wrong[damaged] = True, True
            wait_ms = _WAIT_MS
            if wait.left_s() <= 0:  # a disk that is too slow costs this get its blocks, not the link
                break
        channel.post(Op.HOLD, KeyRequest(0, keys[:0]).encode(), deadline)
        return good, wrong

    def _read(
        self, lane: Lane, rows: I64, into: Blocks, layers: tuple[int, int], wait_ms: int, deadline: Deadline
    ) -> tuple[I64, I64, I64]:
        """Of these rows on hold, those that were read whole, those that arrived damaged, and those to ask for again:
        they are on their way from the SSD.
        """
        first, end = layers
        damaged = later = rows[:0]
        while first < end and len(rows):
            request = LayersRequest(rows.astype(np.uint32), (first, end), 0, self._opened().layer_bytes, wait_ms)
            body = _channel(lane).call(Op.LOCATE, request.encode(), deadline)
            answer = LocateAnswer.decode(body, len(rows), first, end, self._pool_bytes)
            found = answer.layers.found
            later = np.append(later, rows[found == Found.LATER])
            rows = rows[found == Found.HERE]
            matching = self._read_located(lane, answer, rows, into, (first, layers[0]), deadline)
            damaged = np.append(damaged, rows[~matching])
            rows = rows[matching]
            # A block that is still being written shortens the answer for all: the others go on from there.
            first = answer.layers.end
        return rows, damaged, later

    def _read_located(
        self, lane: Lane, answer: LocateAnswer, rows: I64, into: Blocks, begin: tuple[int, int], deadline: Deadline
    ) -> Mask:
        """Read what was located, verify it and copy it to the caller; which of the rows match their sums."""
        layer_bytes = self._opened().layer_bytes
        first, origin = begin
        size = (answer.layers.end - first) * layer_bytes
        shift = (first - origin) * layer_bytes  # in the caller's blocks
        verifier = Verifier(layer_bytes, answer.layers.sums.T)
        under_way: deque[tuple[int, int, Piece]] = deque()

        def take() -> None:
            ticket, bay, piece = under_way.popleft()
            lane.wait(ticket, deadline)
            memory = lane.bay(bay)
            verifier.look(piece, memory)
            _deliver(into, rows[piece.rows], shift + piece.start, piece, memory)

        for number, piece in enumerate(pieces_of(answer.offsets, size, layer_bytes, BAY_BYTES)):
            if len(under_way) == BAYS:
                take()
            bay = number % BAYS
            theirs = self._theirs(piece.theirs + first * layer_bytes)
            under_way.append((lane.read(bay * BAY_BYTES, piece.ours, theirs, piece.sizes), bay, piece))
        while under_way:
            take()
        return verifier.matching

    def _theirs(self, places: I64) -> NDArray[np.uint64]:
        """Addresses of places in the pool."""
        return places.astype(np.uint64) + np.uint64(self._pool)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _store(self, lane: Lane, landing: Landing, keys: Keys, blocks: Blocks, deadline: Deadline) -> U8:
        size = self._opened().block_bytes
        request = KeyRequest(self._number, keys, ttl_ms=int(RESERVATION_TTL_S * 1000), size_bytes=size)
        rows = decode_rows(_channel(lane).call(Op.RESERVE, request.encode(), deadline), RESERVE_ROW, len(keys))
        statuses = rows["status"].copy()
        mine = np.flatnonzero(statuses == PutStatus.STORED)
        if not len(mine):
            return statuses
        landing.land(rows[mine], blocks.take(mine), (0, self._opened().layers), deadline)
        request = RefRequest.of(rows["handle"][mine], rows["generation"][mine], self._number)
        answer = _channel(lane).call(Op.COMMIT, request.encode(), deadline)
        done = np.frombuffer(answer, dtype=np.bool_, count=len(mine))
        statuses[mine[~done]] = PutStatus.FAILED
        return statuses

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _drop_damaged(self, keys: Keys, timeout_s: float) -> None:
        # It would stay a miss for every reader and EXISTS for every writer. Gone, it can be written again.
        self.meter.add(checksum_failures=len(keys))
        self.delete(keys, timeout_s)

    def _opened(self) -> Namespace:
        if self._door.namespace is None:
            raise ProtocolError("open a namespace before anything else")
        return self._door.namespace


def _channel(lane: Lane) -> Channel:
    assert lane.channel is not None, "a lane in use is connected"
    return lane.channel


def _deliver(into: Blocks, rows: I64, start: int, piece: Piece, memory: NDArray[np.uint8]) -> None:
    """Copy what has come to bytes [start, start + size) of the caller's blocks."""
    if isinstance(into, Region):
        copy_blocks(into.memory, into.offsets[rows] + start, memory, piece.places, piece.size)
        return
    numbers: list[int] = rows.tolist()
    for row, place in zip(numbers, piece.places.tolist(), strict=True):
        np.copyto(into.memories[row][start : start + piece.size], memory[place : place + piece.size])
