"""A worker of the TCP data port. `python -m kvstore.server.data_port`, started by the node.

It attaches to the node's shards like any local client and serves their pool and index from its own process, so that no
shard shares its interpreter with a socket. One thread per connection, blocking: the time goes into system calls that
move megabytes with the GIL released.

Nothing but HELLO with a valid session token is answered before it, within a few seconds. A frame that breaks a rule
ends the connection, and with it the connection's session on the shard: leases and reservations go with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import BlockTooLarge, KvStoreError, NamespaceMismatch, ProtocolError, Unavailable, UsageError
from kvstore.core.states import BlockState, PutStatus
from kvstore.index import IndexReader, Probe
from kvstore.server.children import read_configuration, say_ready
from kvstore.server.landing import Grant, LandingSpace
from kvstore.transport.base import Part
from kvstore.transport.chains import ChainLog
from kvstore.transport.channel import RECEIVE_BYTES_MAX, Deadline, Stream
from kvstore.transport.copying import copy_blocks
from kvstore.transport.holding import PROMOTION_SHARE, LayerHold
from kvstore.transport.joint import commit_summed
from kvstore.transport.shm import LocalSession, SharedShard, connect_local
from kvstore.transport.trailer import read_trailers, sums_of, write_trailers
from kvstore.wire.fabric import FabricInfo, LandedRequest, LocateAnswer
from kvstore.wire.frames import HEADER_BYTES, NO_REPLY, PROTOCOL_VERSION, Frame, Op, Status, decode_header, encode
from kvstore.wire.messages import (
    FETCH_ROW,
    LOOKUP_ROW,
    REF,
    RESERVE_ROW,
    U64,
    Found,
    KeyRequest,
    LayersAnswer,
    LayersRequest,
    PartRequest,
    RefRequest,
    decode_json,
    decode_rows,
    encode_json,
)
from kvstore.wire.tokens import token_is_valid

log = logging.getLogger("kvstore")

CONNECTIONS_MAX = 1024
ACCEPT_PAUSE_S = 0.1
HELLO_TIMEOUT_S = 5.0
HELLO_BYTES_MAX = 4096
IDLE_TIMEOUT_S = 3600.0
REQUEST_TIMEOUT_S = 30.0
SHARD_TIMEOUT_S = 5.0
HOLD_S = 60.0  # longer than a request may take
WAIT_S_MAX = 1.0  # for a writer's next layer, in one request
LOOK_S = 0.0005  # between looks at blocks that are still being written
OPTIMISTIC_BYTES_MAX = 64 << 10
KNOWN_SUMS_MAX = 1 << 16
LAYERS_SUMS_MAX = 64 << 10  # 512 KiB of an answer's body
FABRIC_TIMEOUT_S = 0.5
_FORWARDED = frozenset(
    {
        Op.PUBLISH,
        Op.COMMIT,
        Op.ABORT,
        Op.RENEW,
        Op.RELEASE,
        Op.LEASE,
        Op.DELETE,
        Op.PIN,
        Op.TOUCH,
        Op.REPORT,
        Op.RESERVE,
        Op.RESERVE_PART,
    }
)
_DROPPED = -1  # a reservation that was given back because a layer arrived damaged: nothing is written there any more
_WITH_PAYLOAD = frozenset({Op.WRITE, Op.WRITE_LAYER})


@dataclass(frozen=True, slots=True)
class DataPortConfig:
    """What the node tells a worker."""

    listener_fd: int
    boot_id: str
    token_key: str  # hex
    shard_sockets: tuple[str, ...]
    fabric_sockets: tuple[str, ...] = ()  # of each shard's fabric worker, where there is a fabric
    landing_fds: tuple[int, ...] = ()  # of each shard's landing space
    landing_start: int = 0  # of this worker's part of each
    landing_bytes: int = 0


class KnownSums:
    """Sums of blocks whose producer left them out, computed at the first send; those of the latest blocks are kept.

    Not in the pool, beside the block: who only reads a block must not write there, since a worker that is stopped for
    long enough wakes up over somebody else's.
    """

    def __init__(self, blocks_max: int = KNOWN_SUMS_MAX) -> None:
        self._blocks_max = blocks_max
        self._sums: dict[int, NDArray[np.uint64]] = {}  # by generation, which no two blocks of a shard share
        self._lock = threading.Lock()

    def get(self, generation: int) -> NDArray[np.uint64] | None:
        """The sums of all layers, shape (layers,)."""
        return self._sums.get(generation)

    def keep(self, generation: int, sums: NDArray[np.uint64]) -> None:
        """Remember them; the oldest ones are forgotten."""
        with self._lock:
            while len(self._sums) >= self._blocks_max:
                del self._sums[next(iter(self._sums))]
            self._sums[generation] = sums


class DataPort:
    """Accepts connections and keeps the shards' memory mapped."""

    def __init__(self, config: DataPortConfig) -> None:
        self.config = config
        self.token_key = bytes.fromhex(config.token_key)
        self._shared: dict[int, tuple[SharedShard, KnownSums]] = {}
        self._sharing = threading.Lock()
        self._connections = threading.Semaphore(CONNECTIONS_MAX)
        self.landing = [LandingSpace(fd, config.landing_start, config.landing_bytes) for fd in config.landing_fds]

    def serve(self, listener: socket.socket) -> None:
        """Accept for ever."""
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                # Out of descriptors, or the peer left before we came: let things ease; don't die and don't spin.
                log.warning("data port: accept failed: %s", error.strerror)
                threading.Event().wait(ACCEPT_PAUSE_S)
                continue
            if not self._connections.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._run, args=(sock, f"{address[0]}:{address[1]}"), daemon=True).start()

    def session(self, shard: int) -> tuple[LocalSession, KnownSums]:
        """A new session with a shard, over memory and sums that all connections share.

        Raises:
            Unavailable: no such shard, or it is down.
        """
        if not 0 <= shard < len(self.config.shard_sockets):
            raise Unavailable(f"this node has no shard {shard}")
        deadline = Deadline(SHARD_TIMEOUT_S)
        channel = connect_local(self.config.shard_sockets[shard], deadline)
        try:
            shared = SharedShard(channel, deadline)
            with self._sharing:
                known = self._shared.get(shard)
                if known is None or known[0].boot_id != shared.boot_id:
                    # First sight of this shard, or it was restarted: its old memory goes with the last connection.
                    known = self._shared[shard] = shared, KnownSums()
                    threading.Thread(target=shared.warm_up, args=(threading.Event(),), daemon=True).start()
            return LocalSession(channel, known[0]), known[1]
        except BaseException:  # nobody has the channel yet
            channel.close()
            raise

    def _run(self, sock: socket.socket, peer: str) -> None:
        try:
            with contextlib.closing(Stream(sock, peer)) as stream:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Connection(self, stream).serve()
        except KvStoreError:
            pass  # the peer left, was too slow or broke the protocol; its session has ended with the connection
        finally:
            self._connections.release()


@dataclass(frozen=True, slots=True)
class _Held:
    """The blocks that a client reads layer by layer."""

    blocks: LayerHold
    request: KeyRequest
    layers: int
    layer_bytes: int


class _Connection:
    """One client."""

    def __init__(self, port: DataPort, stream: Stream) -> None:
        self._port = port
        self._stream = stream
        self._session: LocalSession = cast("LocalSession", None)
        self._known_sums: KnownSums = cast("KnownSums", None)
        self._shard = 0
        self._asked = ChainLog()
        self._held: _Held | None = None
        self._grant: Grant | None = None  # of landing space
        self._reserved: dict[int, int] = {}  # generation -> pool offset of what this connection may write, or _DROPPED
        self._space_of: dict[int, int] = {}  # generation -> namespace number of the reservation
        self._part_of: dict[int, Part] = {}  # generation -> of each layer, where others write the rest
        self._layer_sums: dict[int, NDArray[np.uint64]] = {}  # generation -> sums of the layers that have come
        self._sizes: dict[int, tuple[int, int]] = {}  # namespace number -> (layers, bytes per layer)

    def serve(self) -> None:
        """Authenticate, then answer until the client leaves."""
        self._session, self._known_sums = self._hello()
        with contextlib.closing(cast("Any", self._session.channel)), contextlib.ExitStack() as at_end:
            at_end.callback(self._give_back_landing)
            while True:
                frame = decode_header(bytes(self._stream.receive(HEADER_BYTES, Deadline(IDLE_TIMEOUT_S))))
                deadline = Deadline(REQUEST_TIMEOUT_S)
                body = bytes(self._stream.receive(frame.body_bytes, deadline))
                if frame.payload_bytes and frame.op not in _WITH_PAYLOAD:
                    raise ProtocolError("payload on an operation that carries none")
                try:
                    self._handle(frame, body, deadline)
                except UsageError as error:
                    if frame.op in _WITH_PAYLOAD:
                        raise  # its payload may not have been read
                    self._reply(frame, str(error).encode(), deadline, _status_of(error))

    def _hello(self) -> tuple[LocalSession, KnownSums]:
        deadline = Deadline(HELLO_TIMEOUT_S)
        frame = decode_header(bytes(self._stream.receive(HEADER_BYTES, deadline)))
        if frame.op != Op.HELLO or frame.body_bytes > HELLO_BYTES_MAX or frame.payload_bytes:
            raise ProtocolError("a connection begins with HELLO")
        asked = decode_json(bytes(self._stream.receive(frame.body_bytes, deadline)))
        config = self._port.config
        if not token_is_valid(self._port.token_key, config.boot_id, asked.get("token"), time.time()):
            self._reply(frame, b"the session token is missing, wrong or has run out", deadline, Status.UNAUTHENTICATED)
            raise ProtocolError("no valid session token")
        if asked.get("version") != PROTOCOL_VERSION:
            text = f"protocol version {asked.get('version')!r}; this server speaks {PROTOCOL_VERSION}"
            self._reply(frame, text.encode(), deadline, Status.BAD_REQUEST)
            raise ProtocolError(text)
        shard = asked.get("shard")
        self._shard = shard if isinstance(shard, int) else -1
        try:
            session, known_sums = self._port.session(self._shard)
        except Unavailable as error:
            self._reply(frame, str(error).encode(), deadline, Status.BUSY)
            raise
        self._reply(frame, encode_json({"boot_id": session.shared.boot_id}), deadline)
        return session, known_sums

    def _handle(self, frame: Frame, body: bytes, deadline: Deadline) -> None:
        match frame.op:
            case Op.FETCH:
                self._fetch(frame, KeyRequest.decode(body), deadline)
            case Op.WRITE:
                self._write(frame, RefRequest.decode(body), deadline)
            case Op.WRITE_LAYER:
                self._write_layer(frame, RefRequest.decode(body), deadline)
            case Op.LAYERS:
                self._layers(frame, LayersRequest.decode(body), deadline)
            case Op.LOCATE:
                self._locate(frame, LayersRequest.decode(body), deadline)
            case Op.LANDED:
                self._landed(frame, LandedRequest.decode(body), deadline)
            case Op.FABRIC:
                self._fabric(frame, body, deadline)
            case Op.HOLD:
                self._hold(frame, KeyRequest.decode(body), deadline)
            case Op.LOOKUP:
                self._lookup(frame, KeyRequest.decode(body), deadline)
            case Op.OPEN:
                self._open(frame, body, deadline)
            case op if op in _FORWARDED:
                # A client reports every few seconds, and a put has to come after its request.
                self._session.tell(self._asked, Deadline(SHARD_TIMEOUT_S))
                reserving = _reservation(op, body)
                if reserving is not None:
                    self._asked.end(reserving[0].keys)
                if op in {Op.COMMIT, Op.ABORT}:
                    request = RefRequest.decode(body)
                    if op == Op.COMMIT and not self._part_of.keys().isdisjoint(request.refs["generation"].tolist()):
                        self._commit_parts(frame, request, deadline)
                        return
                    self._settle(Op(op), request)
                if frame.flags & NO_REPLY:
                    self._session.channel.post(Op(op), body, Deadline(SHARD_TIMEOUT_S))
                    return
                answer = self._session.channel.call(Op(op), body, Deadline(SHARD_TIMEOUT_S))
                if reserving is not None:
                    self._remember(answer, *reserving)
                self._reply(frame, answer, deadline)
            case op:
                raise ProtocolError(f"operation {op} is not for the data port")

    def _open(self, frame: Frame, body: bytes, deadline: Deadline) -> None:
        described = decode_json(body)
        number = self._session.open(described, Deadline(SHARD_TIMEOUT_S))
        self._sizes[number] = (int(described["layers"]), int(described["layer_bytes"]))
        self._reply(frame, number.to_bytes(2, "little"), deadline)

    def _lookup(self, frame: Frame, request: KeyRequest, deadline: Deadline) -> None:
        self._asked.note(request.keys)
        found = self._index(Deadline(SHARD_TIMEOUT_S)).probe(request.keys)
        rows = np.zeros(len(request.keys), dtype=LOOKUP_ROW)
        rows["state"] = found.states_in(request.namespace)
        rows["tier"], rows["layers_ready"], rows["size"] = found.tiers, found.layers_ready, found.sizes
        self._reply(frame, rows.tobytes(), deadline)

    def _fetch(self, frame: Frame, request: KeyRequest, deadline: Deadline) -> None:
        layers, layer_bytes = self._geometry(request.namespace)
        self._asked.note(request.keys)
        first, end = request.layers
        if not 0 <= first < end <= layers:
            raise UsageError(f"layers {first}:{end} of a block that has {layers}")
        if len(request.keys) * (end - first) * layer_bytes <= OPTIMISTIC_BYTES_MAX:
            self._fetch_small(frame, request, layers, layer_bytes, deadline)
            return
        waited = self._bring_back(request, layers * layer_bytes)
        shard_deadline = Deadline(SHARD_TIMEOUT_S)
        probe = self._index(shard_deadline).probe(request.keys)
        found = probe.readable(request.namespace, end, layers * layer_bytes)
        rest = self._rest(probe, request, layers * layer_bytes, waited)
        there = probe.take(np.flatnonzero(found))
        lease, held = self._session.lease(there, HOLD_S, shard_deadline)
        try:
            found[found] = held
            there = there.take(np.flatnonzero(held))
            offsets, generations = there.offsets, there.generations
            self._session.shared.note_use(there.handles)
            sums = self._sums(offsets, generations, layers, layer_bytes, request.layers)
            pool = memoryview(self._session.shared.pool_read_only)
            start, size = first * layer_bytes, (end - first) * layer_bytes
            payload = [pool[offset + start : offset + start + size] for offset in offsets.tolist()]
            self._send_fetched(frame, found, rest, size, sums, payload, deadline)
        finally:
            # If the lease ran out while a slow client took its time, what was sent may be mixed up. The client sees
            # it by the sums.
            self._session.release([lease], Deadline(SHARD_TIMEOUT_S))

    def _fetch_small(
        self, frame: Frame, request: KeyRequest, layers: int, layer_bytes: int, deadline: Deadline
    ) -> None:
        """A copy that is checked afterwards costs less than asking the shard to hold the blocks."""
        waited = self._bring_back(request, layers * layer_bytes)
        shard_deadline = Deadline(SHARD_TIMEOUT_S)
        index = self._index(shard_deadline)
        probe = index.probe(request.keys)
        first, end = request.layers
        found = probe.readable(request.namespace, end, layers * layer_bytes)
        rest = self._rest(probe, request, layers * layer_bytes, waited)
        rows = np.flatnonzero(found)
        start, size = first * layer_bytes, (end - first) * layer_bytes
        copied = np.empty(len(rows) * size, dtype=np.uint8)
        places = np.arange(len(rows), dtype=np.int64) * size
        offsets = probe.offsets[rows]
        copy_blocks(copied, places, self._session.shared.pool_read_only, offsets + start, size)
        sums = self._sums(offsets, probe.generations[rows], layers, layer_bytes, request.layers)
        standing = index.unchanged(probe, rows)
        self._session.shared.note_use(probe.handles[rows])
        found[rows[~standing]] = False
        payload = [memoryview(copied)[place : place + size] for place in places[standing].tolist()]
        self._send_fetched(frame, found, rest, size, sums[standing], payload, deadline)

    def _rest(self, probe: Probe, request: KeyRequest, size: int, waited: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """What to say of blocks that can't be read now: `Found` of each."""
        later = probe.on_disk(request.namespace, size) & ~waited
        unfinished = (probe.states_in(request.namespace) == BlockState.RESERVED) & (probe.sizes == size)
        rest = np.where(later, Found.LATER, np.where(unfinished, Found.UNFINISHED, Found.MISS))
        return rest.astype(np.uint8)

    def _bring_back(self, request: KeyRequest, size: int) -> NDArray[np.bool_]:
        """Have those of the blocks that are on the SSD brought into the pool, and wait for the first piece of them, or
        until it is too late for any: for which blocks. The next pieces come while the client receives what is there.
        """
        deadline = Deadline(SHARD_TIMEOUT_S)
        waited = np.zeros(len(request.keys), dtype=np.bool_)
        cold = np.flatnonzero(self._index(deadline).probe(request.keys).on_disk(request.namespace, size))
        if len(cold):
            wait = Deadline(min(request.ttl_ms / 1000, SHARD_TIMEOUT_S * PROMOTION_SHARE))
            piece_blocks = self._session.shared.piece_blocks(size)
            pieces = self._session.promoted(request.namespace, request.keys[cold], piece_blocks, wait, deadline)
            waited[cold[next(pieces, slice(None))]] = True
        return waited

    def _send_fetched(
        self,
        frame: Frame,
        found: NDArray[np.bool_],
        rest: NDArray[np.uint8],
        size: int,
        sums: NDArray[np.uint64],
        payload: list[memoryview],
        deadline: Deadline,
    ) -> None:
        answer = np.zeros(len(found), dtype=FETCH_ROW)
        answer["found"] = np.where(found, Found.HERE, rest)
        answer["bytes"] = np.where(found, size, 0)
        body = answer.tobytes() + np.ascontiguousarray(sums).tobytes()
        head = encode(frame.op, frame.request, body, len(payload) * size)
        self._stream.send([head, *payload], deadline)

    def _sums(
        self,
        offsets: NDArray[np.int64],
        generations: NDArray[np.uint64],
        layers: int,
        layer_bytes: int,
        wanted: tuple[int, int],
    ) -> NDArray[np.uint64]:
        """Sums of the wanted layers: the producer's, or where it left them out, ours."""
        shared, known = self._session.shared, self._known_sums
        size = layers * layer_bytes
        first, end = wanted
        trailers = read_trailers(shared.pool_read_only, offsets, size, layers)
        sums = trailers[:, 1 + first : 1 + end]
        pool = memoryview(shared.pool_read_only)
        for row in np.flatnonzero(trailers[:, 0] != generations).tolist():
            offset, generation = int(offsets[row]), int(generations[row])
            before = known.get(generation)
            if before is not None:
                sums[row] = before[first:end]
                continue
            sums[row] = sums_of(pool[offset + first * layer_bytes : offset + end * layer_bytes], layer_bytes)
            if (first, end) == (0, layers):
                known.keep(generation, sums[row].copy())
        return sums

    def _remember(self, answer: bytes, request: KeyRequest, part: Part | None) -> None:
        rows = decode_rows(answer, RESERVE_ROW, len(answer) // RESERVE_ROW.itemsize)
        mine = rows[rows["status"] == PutStatus.STORED]
        generations: list[int] = mine["generation"].tolist()
        self._reserved.update(zip(generations, mine["offset"].tolist(), strict=True))
        self._space_of.update(dict.fromkeys(generations, request.namespace))
        if part is not None:
            self._part_of.update(dict.fromkeys(generations, part))

    def _places(self, refs: NDArray[np.void], namespace: int, part: Part | None = None) -> list[int | None]:
        """Where the payload of reserved blocks goes, or of that part of them; None where this connection has no such
        reservation. Blocks of another namespace may have larger payloads.
        """
        generations: list[int] = refs["generation"].tolist()
        spaces, parts = self._space_of, self._part_of
        known = [spaces.get(each) == namespace and parts.get(each) == part for each in generations]
        return [self._reserved[each] if mine else None for each, mine in zip(generations, known, strict=True)]

    def _forget(self, generation: int) -> int | None:
        """The end of a reservation: where it was."""
        self._space_of.pop(generation, None)
        self._part_of.pop(generation, None)
        return self._reserved.pop(generation, None)

    def _write(self, frame: Frame, request: RefRequest, deadline: Deadline) -> None:
        """Payload into the reserved slots, verified piece by piece, then committed. What arrives damaged is dropped."""
        offsets = self._places(request.refs, request.namespace)
        for generation in request.refs["generation"].tolist():
            self._forget(generation)
        layers, layer_bytes = self._geometry(request.namespace)
        size = layers * layer_bytes
        if {None, _DROPPED} & set(offsets) or frame.payload_bytes != len(offsets) * (size + layers * 8):
            raise ProtocolError("a WRITE for blocks that were not reserved here, or of another size")
        pool = memoryview(self._session.shared.pool)
        step = max(1, RECEIVE_BYTES_MAX // layer_bytes) * layer_bytes
        received: list[list[int]] = []
        for offset in cast("list[int]", offsets):
            sums: list[int] = []
            for start in range(0, size, step):
                piece = pool[offset + start : offset + min(start + step, size)]
                self._stream.receive_into(piece, deadline)
                sums.extend(sums_of(piece, layer_bytes))
            received.append(sums)
        told = np.frombuffer(self._stream.receive(len(offsets) * layers * 8, deadline), dtype=U64).reshape(-1, layers)
        whole = (told == np.array(received, dtype=np.uint64)).all(axis=1)
        write_trailers(
            self._session.shared.pool, np.array(offsets, dtype=np.int64), size, request.refs["generation"], told
        )
        shard_deadline = Deadline(SHARD_TIMEOUT_S)
        if not whole.all():
            self._session.settle(Op.ABORT, request.refs[~whole], shard_deadline)
        done = np.zeros(len(offsets), dtype=np.bool_)
        done[whole] = self._session.settle(Op.COMMIT, request.refs[whole], shard_deadline)
        self._reply(frame, done.tobytes(), deadline)

    def _write_layer(self, frame: Frame, request: RefRequest, deadline: Deadline) -> None:
        """One layer of reserved blocks, or their parts of it, verified, then visible."""
        layers, layer_bytes = self._geometry(request.namespace)
        part = self._part_of.get(int(request.refs["generation"][0])) if len(request.refs) else None
        offsets = self._places(request.refs, request.namespace, part)
        first, size = (0, layer_bytes) if part is None else (part.start, part.size)
        layer = request.layers_ready - 1
        if None in offsets or not 0 <= layer < layers or frame.payload_bytes != len(offsets) * (size + 8):
            raise ProtocolError("a WRITE_LAYER for blocks that were not reserved here, or of another size")
        pool = memoryview(self._session.shared.pool)
        nowhere = memoryview(bytearray(size)) if _DROPPED in offsets else pool
        received: list[int] = []
        for offset in cast("list[int]", offsets):
            start = offset + layer * layer_bytes + first
            piece = nowhere if offset == _DROPPED else pool[start : start + size]
            self._stream.receive_into(piece, deadline)
            received += sums_of(piece, size)
        told = np.frombuffer(self._stream.receive(len(offsets) * 8, deadline), dtype=U64)
        sums = np.array(received, dtype=np.uint64)
        whole = self._take_in(request.refs, offsets, layer, layers, told[:, None], sums[:, None])
        done = self._publish(request.refs, whole, request.layers_ready, request.ttl_ms)
        self._reply(frame, done.tobytes(), deadline)

    def _landed(self, frame: Frame, request: LandedRequest, deadline: Deadline) -> None:
        """Layers of reserved blocks out of the landing space, verified where they are from now on."""
        refs = np.empty(len(request.rows), dtype=REF)
        refs["handle"], refs["generation"] = request.rows["handle"], request.rows["generation"]
        offsets = self._places(refs, request.namespace)
        layers, layer_bytes = self._geometry(request.namespace)
        first, end = request.layers
        size = (end - first) * layer_bytes
        places: list[int] = request.rows["at"].tolist()
        landing = self._grant.memory if self._grant is not None else np.zeros(0, dtype=np.uint8)
        if None in offsets or end > layers or max(places, default=0) + size > len(landing):
            raise ProtocolError("LANDED of blocks that were not reserved here, or elsewhere than granted")
        pool = self._session.shared.pool
        received = np.zeros((len(places), end - first), dtype=np.uint64)
        for row, (offset, place) in enumerate(zip(cast("list[int]", offsets), places, strict=True)):
            if offset != _DROPPED:
                # Copied first: the landing space may still change under our hands, the slot can't.
                target = pool[offset + first * layer_bytes : offset + end * layer_bytes]
                np.copyto(target, landing[place : place + size])
                received[row] = sums_of(memoryview(target), layer_bytes)
        done = self._take_in(refs, offsets, first, layers, request.sums, received)
        if request.publish:
            done = self._publish(refs, done, end, request.ttl_ms)
        self._reply(frame, done.tobytes(), deadline)

    def _take_in(
        self,
        refs: NDArray[np.void],
        offsets: list[int | None],
        first: int,
        layers: int,
        told: NDArray[np.uint64],
        received: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Remember the sums that were told of some layers from `first` on, shape (n, some); which blocks match them.
        The others are dropped. `layers`: how many a block has.
        """
        alive = np.array(offsets) != _DROPPED
        whole = alive & (told == received).all(axis=1)
        for generation, sums in zip(refs["generation"].tolist(), told, strict=True):
            if generation in self._part_of:
                continue  # its sums are not those of whole slices
            known = self._layer_sums.setdefault(generation, np.zeros(layers, dtype=np.uint64))
            known[first : first + len(sums)] = sums
        damaged = refs[alive & ~whole]
        if len(damaged):
            # Their slots may be others' from now on, while the client's next layers are on their way.
            self._reserved.update(dict.fromkeys(damaged["generation"].tolist(), _DROPPED))
            self._session.settle(Op.ABORT, damaged, Deadline(SHARD_TIMEOUT_S))
        return whole

    def _publish(
        self, refs: NDArray[np.void], whole: NDArray[np.bool_], layers_ready: int, ttl_ms: int
    ) -> NDArray[np.bool_]:
        done = np.zeros(len(refs), dtype=np.bool_)
        done[whole] = self._session.publish(refs[whole], layers_ready, ttl_ms / 1000, Deadline(SHARD_TIMEOUT_S))
        return done

    def _settle(self, op: Op, request: RefRequest) -> None:
        """Blocks that were written layer by layer are about to be committed or dropped: their sums, and no more."""
        for generation in request.refs["generation"].tolist():
            space, sums = self._space_of.get(generation), self._layer_sums.pop(generation, None)
            offset = self._forget(generation)
            if op == Op.COMMIT and offset not in {None, _DROPPED} and sums is not None and space == request.namespace:
                layers, layer_bytes = len(sums), self._geometry(request.namespace)[1]
                at, written = np.array([offset]), np.array([generation], dtype=np.uint64)
                write_trailers(self._session.shared.pool, at, layers * layer_bytes, written, sums.reshape(1, layers))

    def _commit_parts(self, frame: Frame, request: RefRequest, deadline: Deadline) -> None:
        """A COMMIT on a connection that writes parts of blocks."""
        layers, layer_bytes = self._geometry(request.namespace)
        offsets = self._places(request.refs, request.namespace, self._part_of.get(int(request.refs["generation"][0])))
        if None in offsets or frame.flags & NO_REPLY:
            raise ProtocolError("a COMMIT of different parts, or of some that were not reserved here")
        for generation in request.refs["generation"].tolist():
            self._forget(generation)
        at = np.array(offsets, dtype=np.int64)  # of those that were dropped the shard knows nothing any more
        shard_deadline = Deadline(SHARD_TIMEOUT_S)
        done = commit_summed(self._session, request.refs, at, layers, layer_bytes, shard_deadline)
        self._reply(frame, done.tobytes(), deadline)

    def _hold(self, frame: Frame, request: KeyRequest, deadline: Deadline) -> None:
        """Hold blocks for LAYERS, in place of those before; without keys it is the end of a stream."""
        self._let_go()
        if len(request.keys):
            layers, layer_bytes = self._geometry(request.namespace)
            self._asked.note(request.keys)
            held = LayerHold(
                self._session, request.namespace, layers, layers * layer_bytes, request.keys, request.ttl_ms / 1000
            )
            held.take(np.arange(len(request.keys)), Deadline(SHARD_TIMEOUT_S))
            self._held = _Held(held, request, layers, layer_bytes)
        else:
            self._session.tell(self._asked, Deadline(SHARD_TIMEOUT_S))
        if not frame.flags & NO_REPLY:
            self._reply(frame, b"", deadline)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.blocks.release(Deadline(SHARD_TIMEOUT_S))
            self._held = None

    def _layers(self, frame: Frame, request: LayersRequest, deadline: Deadline) -> None:
        """Layers of blocks on hold, as far as their writers have come."""
        held, mine, answer = self._ready(request)
        first, end, sums = request.layers[0], answer.end, answer.sums
        body = answer.encode()
        pieces: list[bytes | memoryview] = [encode(frame.op, frame.request, body, sums.size * request.size)]
        pool = memoryview(self._session.shared.pool_read_only)
        for layer in range(first, end, request.group):  # the first bytes leave before the last are looked up
            size = request.size if request.group == 1 else min(request.group, end - layer) * held.layer_bytes
            starts = held.blocks.offsets[mine] + (layer * held.layer_bytes + request.start)
            pieces += [pool[start : start + size] for start in starts.tolist()]
            self._stream.send(pieces, deadline)
            pieces = []
        if pieces:
            self._stream.send(pieces, deadline)

    def _ready(self, request: LayersRequest) -> tuple[_Held, NDArray[np.int64], LayersAnswer]:
        """What there is to say of layers of blocks on hold, and the rows of the hold that have them."""
        held = self._held
        if held is None or (len(request.rows) and int(request.rows.max()) >= len(held.request.keys)):
            raise UsageError("LAYERS of blocks that are not on hold")
        if len(request.rows) * max(0, request.layers[1] - request.layers[0]) > LAYERS_SUMS_MAX:
            raise UsageError(
                f"{len(request.rows)} blocks of layers {request.layers} at once; at most {LAYERS_SUMS_MAX}"
            )
        first, end = request.layers
        if not 0 <= first < end <= held.layers or request.size < 1 or request.start + request.size > held.layer_bytes:
            raise UsageError(
                f"bytes {request.start}+{request.size} of layers {first}:{end} of {held.layers} of {held.layer_bytes} bytes"
            )
        if request.group < 1 or (request.group > 1 and request.size != held.layer_bytes):
            raise UsageError(f"groups of {request.group} layers, of {request.size} bytes of each")
        rows = request.rows.astype(np.int64)
        blocks = held.blocks
        blocks.renew(time.monotonic())
        self._wait_for(held, rows, first, request.wait_ms / 1000)
        here = (blocks.ready[rows] > first) & ~blocks.gone[rows]
        mine = rows[here]
        end = int(blocks.ready[mine].clip(max=end).min()) if len(mine) else first
        found = np.where(here, Found.HERE, np.where(blocks.gone[rows], Found.MISS, Found.UNFINISHED)).astype(np.uint8)
        sums = self._slice_sums(held, mine, first, end, request.start, request.size)
        blocks.require_valid()
        return held, mine, LayersAnswer(end, found, sums)

    def _locate(self, frame: Frame, request: LayersRequest, deadline: Deadline) -> None:
        """Where layers of blocks on hold lie, as far as their writers have come; the client reads them by itself."""
        held, mine, answer = self._ready(request)
        late = np.flatnonzero(answer.found == Found.UNFINISHED)
        if len(late):  # who wants whole blocks waits for the SSD, and not for writers
            probe = self._index(Deadline(SHARD_TIMEOUT_S)).probe(held.request.keys[request.rows[late]])
            committed = probe.states_in(held.request.namespace) == BlockState.COMMITTED
            answer.found[late[committed]] = Found.LATER  # on the SSD, or back from there by now
        self._reply(frame, LocateAnswer(answer, held.blocks.offsets[mine]).encode(), deadline)

    def _fabric(self, frame: Frame, body: bytes, deadline: Deadline) -> None:
        """How one-sided transfers reach the shard, as its fabric worker says itself: one that stands still is not to be
        touched. This connection's landing space is granted anew.
        """
        wanted = decode_json(body).get("landing")
        sockets = self._port.config.fabric_sockets
        if not sockets:
            raise UsageError("this server has no fabric: its setting `fabric` is empty")
        if not isinstance(wanted, int) or not 0 <= wanted < 1 << 62:
            raise UsageError(f"landing space of {wanted!r} bytes")
        fabric_deadline = Deadline(FABRIC_TIMEOUT_S)
        try:
            with contextlib.closing(connect_local(sockets[self._shard], fabric_deadline)) as channel:
                info = FabricInfo.decode(channel.call(Op.FABRIC, b"", fabric_deadline))
        except Unavailable as error:
            self._reply(frame, f"the fabric worker: {error}".encode(), deadline, Status.BUSY)
            return
        self._give_back_landing()
        self._grant = grant = self._port.landing[self._shard].grant(wanted)
        granted = replace(info, landing=info.landing + grant.start, landing_bytes=len(grant.memory))
        self._reply(frame, granted.encode(), deadline)

    def _give_back_landing(self) -> None:
        if self._grant is not None:
            self._port.landing[self._shard].take_back(self._grant)
            self._grant = None

    def _wait_for(self, held: _Held, rows: NDArray[np.int64], layer: int, wait_s: float) -> None:
        """Look how far the writers of these blocks are, until one of them has passed the layer, or it is too late."""
        blocks, end = held.blocks, Deadline(min(wait_s, WAIT_S_MAX))
        if not (blocks.ready[rows] < held.layers).any():
            return
        while True:
            blocks.look(rows, Deadline(SHARD_TIMEOUT_S))
            if ((blocks.ready[rows] > layer) | blocks.gone[rows]).any() or end.left_s() <= 0:
                return
            time.sleep(LOOK_S)  # a writer moves a word in shared memory, and nothing wakes its readers

    def _slice_sums(
        self, held: _Held, rows: NDArray[np.int64], first: int, end: int, start: int, size: int
    ) -> NDArray[np.uint64]:
        """Sums of what LAYERS sends, shape (layers, rows)."""
        offsets, layer_bytes = held.blocks.offsets[rows], held.layer_bytes
        if size == layer_bytes:
            generations = held.blocks.generations[rows]
            return self._sums(offsets, generations, held.layers, layer_bytes, (first, end)).T
        # Nobody else has sums of less than a layer.
        pool = memoryview(self._session.shared.pool_read_only)
        starts = np.arange(first, end)[:, None] * layer_bytes + (offsets + start)
        pieces = (pool[place : place + size] for place in starts.reshape(-1).tolist())
        sums = np.array([sums_of(piece, size)[0] for piece in pieces], dtype=np.uint64)
        return sums.reshape(end - first, len(rows))

    def _index(self, deadline: Deadline) -> IndexReader:
        """The index in force. That of a dead shard would still be readable, but is not read: its successor knows
        better.
        """
        if not self._session.channel.usable:
            raise Unavailable("the shard is gone")
        return self._session.index(deadline)

    def _geometry(self, namespace: int) -> tuple[int, int]:
        known = self._sizes.get(namespace)
        if known is None:
            raise NamespaceMismatch(f"namespace number {namespace} was not opened on this connection")
        return known

    def _reply(self, frame: Frame, body: bytes, deadline: Deadline, status: int = Status.OK) -> None:
        self._stream.send([encode(frame.op, frame.request, body, status=status)], deadline)


def _reservation(op: int, body: bytes) -> tuple[KeyRequest, Part | None] | None:
    """What a client wants to write, if that is what it asks for."""
    match op:
        case Op.RESERVE:
            return KeyRequest.decode(body), None
        case Op.RESERVE_PART:
            request = PartRequest.decode(body)
            return request.of, Part(request.start, request.size)
        case _:
            return None


def _status_of(error: UsageError) -> Status:
    match error:
        case NamespaceMismatch():
            return Status.NAMESPACE_MISMATCH
        case BlockTooLarge():
            return Status.TOO_LARGE
        case _:
            return Status.BAD_REQUEST


def main() -> None:
    """Entry point of the process."""
    described = read_configuration()
    for name in ("shard_sockets", "fabric_sockets", "landing_fds"):
        described[name] = tuple(described[name])
    config = DataPortConfig(**described)
    listener = socket.socket(fileno=config.listener_fd)
    threading.Thread(target=DataPort(config).serve, args=(listener,), daemon=True).start()
    say_ready()
    while os.read(0, 4096):
        pass  # until the node is gone


if __name__ == "__main__":
    main()
