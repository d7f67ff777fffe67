"""The link over shared memory: probe and copy without asking anyone, a local socket for what changes state.

A read asks the index, copies, and asks again whether the entry still stands. Only when it lost that race does it look
up once more; a second loss is a miss.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.device.base import COPY_WAIT_S_MIN, Device
from kvstore.index import IndexReader, Probe
from kvstore.index.layout import POOL_UNIT_BYTES
from kvstore.transport.base import U8, Keys, LinkMeter, Lookup, Mask, Part, Wanted
from kvstore.transport.buffers import Blocks, LayerMemory, Region
from kvstore.transport.chains import ChainLog
from kvstore.transport.channel import Channel, Deadline, Stream
from kvstore.transport.copying import copy_blocks
from kvstore.transport.device_blocks import DeviceBlocks
from kvstore.transport.device_side import DeviceSide, attach_segment
from kvstore.transport.holding import PROMOTION_SHARE
from kvstore.transport.memory import map_pool, map_segment, prefault
from kvstore.transport.shm_layers import SharedLayerSink, SharedLayerSource
from kvstore.transport.trailer import read_trailers, sums_of, write_trailers
from kvstore.wire.frames import PROTOCOL_VERSION, Op
from kvstore.wire.messages import (
    FINISH_ROW,
    KEYS_MAX,
    LOOKUP_ROW,
    RESERVE_ROW,
    KeyRequest,
    LeaseRequest,
    RefRequest,
    decode_json,
    decode_rows,
    encode_json,
)

RESERVATION_TTL_S = 30.0
RELEASES_WAITING_MAX = 256
READS_MAX = 3  # looks at a block: it may be on the SSD, and it may lose a race
# Blocks come from the SSD in pieces, so that one is copied while the next ones are read. What is under way for one call
# is a quarter of the pool at most: what has come is not pushed out by what comes next before it was copied.
PROMOTION_PIECE_BYTES = 8 << 20
PROMOTION_PIECES = 8  # under way for one call, the one that is being copied included
_PIECE_SHARE = 4 * PROMOTION_PIECES
_PIECE_BLOCKS_MAX = 512  # all pieces together are what a shard loads at once
RELEASE_TIMEOUT_S = 1.0
_FDS = 4
_PEER_CREDENTIALS = struct.Struct("3i")
# Touch-board ticks of 2**20 ns, about a millisecond. A read shows by a tick that differs from the one before, which may
# be that of another block in the same place, so ticks are short; that they come round after 52 days is no harm.
_TICK_SHIFT = 20
_WARM_PIECE_BYTES = 16 << 20
_WARM_PAUSE_S = 0.2
# Elsewhere than on x86-64 loads may be seen out of order, and a generation read after the bytes proves nothing.
ORDERED_LOADS = platform.machine() in {"x86_64", "AMD64"}


def connect_local(socket_path: str, deadline: Deadline) -> Channel:
    """A session with a shard of this host.

    Raises:
        Unavailable: no such socket, nobody listens, or it belongs to another user.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as cause:  # out of descriptors
        raise Unavailable(f"local shard {socket_path}: {cause.strerror}") from cause
    try:
        sock.settimeout(max(deadline.left_s(), 0.001))
        sock.connect(socket_path)
        sock.settimeout(None)
        _, uid, _ = _PEER_CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
    except OSError as cause:
        sock.close()
        raise Unavailable(f"local shard {socket_path}: {cause.strerror or cause}") from cause
    if uid not in (0, os.geteuid()):
        sock.close()
        raise Unavailable(f"local shard {socket_path} belongs to user {uid}, not to us or root: not trusted")
    return Channel(Stream(sock, f"local shard {Path(socket_path).name}"))


class SharedShard:
    """The memory of one shard, mapped into this process: index (read-only), pool, touch board. Threads may share it."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        described, fds = _attach(channel, deadline)
        try:
            index_fd, pool_read_only_fd, pool_fd, touch_fd = fds
            self.boot_id = str(described["boot_id"])
            self.index = IndexReader(map_segment(index_fd, writable=False))
            # Two mappings of one pool: what is handed out as a view can't be written through, by the processor's own
            # check.
            self.pool_read_only = map_pool(pool_read_only_fd, writable=False)
            self.pool = map_pool(pool_fd, writable=True)
            self.touch_board: NDArray[np.uint32] = map_segment(touch_fd, writable=True).view(np.uint32)
        except OSError as cause:  # out of descriptors or of address space
            raise Unavailable(f"{channel.stream.peer}: its memory can't be mapped: {cause.strerror}") from cause
        finally:
            for fd in fds:
                os.close(fd)
        self._growing = threading.Lock()

    def current_index(self, channel: Channel, deadline: Deadline) -> IndexReader:
        """The index in force; attaches again when the shard has moved to a larger one."""
        index = self.index
        if not index.retired:
            return index
        with self._growing:
            if self.index.retired:
                _, fds = _attach(channel, deadline)
                try:
                    self.index = IndexReader(map_segment(fds[0], writable=False))
                finally:
                    for fd in fds:
                        os.close(fd)
            return self.index

    def note_use(self, handles: NDArray[np.int64] | int) -> None:
        """Leave the trace of a read that the shard never hears of."""
        self.touch_board[handles] = (time.monotonic_ns() >> _TICK_SHIFT) & 0xFFFFFFFF

    def piece_blocks(self, block_bytes: int) -> int:
        """Blocks of one piece of a promotion."""
        piece_bytes = min(PROMOTION_PIECE_BYTES, len(self.pool) // _PIECE_SHARE)
        return min(max(1, piece_bytes // block_bytes), _PIECE_BLOCKS_MAX)

    def warm_up(self, stop: threading.Event) -> None:
        """Make the pages of the mappings present as far as the shard has them, so that copies don't pay for page
        faults.

        Never ahead of the shard: the first toucher of a page is charged with it, and that should be the server.
        """
        done = 0
        while done < len(self.pool) and not stop.is_set():
            end = min(self.index.warm_bytes, done + _WARM_PIECE_BYTES)
            if end <= done:
                stop.wait(_WARM_PAUSE_S)
                continue
            prefault(self.pool_read_only[done:end])
            prefault(self.pool[done:end])
            done = end


class ShardCalls:
    """The operations of a shard, as typed calls over its local socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def open(self, namespace: dict[str, Any], deadline: Deadline) -> int:
        """Number of a namespace."""
        return int.from_bytes(self.channel.call(Op.OPEN, encode_json(namespace), deadline), "little")

    def reserve(self, request: KeyRequest, deadline: Deadline, part: Part | None = None) -> NDArray[np.void]:
        """`RESERVE_ROW` of each key: blocks, or a part of each."""
        return decode_rows(self.channel.call(*Part.reserve(request, part), deadline), RESERVE_ROW, len(request.keys))

    def settle(self, op: Op, rows: NDArray[np.void], deadline: Deadline) -> Mask:
        """COMMIT or ABORT of reserved rows; for which it came in time."""
        request = RefRequest.of(rows["handle"], rows["generation"])
        answer = self.channel.call(op, request.encode(), deadline)
        return np.frombuffer(answer, dtype=np.bool_, count=len(rows))

    def finish(self, rows: NDArray[np.void], deadline: Deadline) -> NDArray[np.void]:
        """`FINISH_ROW` of each reserved part."""
        request = RefRequest.of(rows["handle"], rows["generation"])
        return decode_rows(self.channel.call(Op.FINISH, request.encode(), deadline), FINISH_ROW, len(rows))

    def publish(self, rows: NDArray[np.void], layers_ready: int, ttl_s: float, deadline: Deadline) -> Mask:
        """Move the watermark of reserved rows, and their deadline; for which it came in time."""
        named = RefRequest.of(rows["handle"], rows["generation"], layers_ready=layers_ready, ttl_ms=_ms(ttl_s))
        return np.frombuffer(self.channel.call(Op.PUBLISH, named.encode(), deadline), dtype=np.bool_, count=len(rows))

    def lease(
        self, found: Probe, ttl_s: float, deadline: Deadline, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[int, Mask]:
        """Lease on blocks that a probe found: its number, and which are held (the others are gone).

        `meanwhile` is run while the shard works.
        """
        request = RefRequest.of(found.handles, found.generations, ttl_ms=_ms(ttl_s))
        with self.channel.exchange(deadline) as exchange:
            exchange.send(Op.LEASE, request.encode())
            meanwhile()
            answer = exchange.whole_reply()
        held = np.frombuffer(answer, dtype=np.bool_, count=len(found.entries), offset=8)
        return int.from_bytes(answer[:8], "little"), held

    def renew(self, lease: int, ttl_s: float, deadline: Deadline) -> bool:
        """Prolong; False when it had run out."""
        request = LeaseRequest(np.array([lease], dtype=np.uint64), _ms(ttl_s))
        return self.channel.call(Op.RENEW, request.encode(), deadline) == b"\x01"

    def release(self, leases: Sequence[int], deadline: Deadline) -> None:
        """Give back, without waiting for an answer."""
        self.channel.post(Op.RELEASE, LeaseRequest(np.array(leases, dtype=np.uint64)).encode(), deadline)

    def promoted(
        self, namespace: int, keys: Keys, piece_blocks: int, wait: Deadline, deadline: Deadline
    ) -> Iterator[slice]:
        """Have blocks brought back from the SSD: rows of `keys`, a piece at a time, as soon as they are there or can't
        be. The next pieces are on their way meanwhile. What is late for `wait` is left out; `deadline` is the shard's.
        """
        pieces = [slice(first, first + piece_blocks) for first in range(0, len(keys), piece_blocks)]
        begun = 0
        for place, piece in enumerate(pieces):
            for ahead in pieces[begun : place + PROMOTION_PIECES]:
                request = KeyRequest(namespace, keys[ahead], ttl_ms=_ms(wait.left_s()))
                self.channel.post(Op.PROMOTE, request.encode(), deadline)
            begun = place + PROMOTION_PIECES
            if wait.left_s() <= 0:
                return
            # Whoever asks for what is on its way waits for the same read.
            request = KeyRequest(namespace, keys[piece], ttl_ms=_ms(wait.left_s()))
            self.channel.call(Op.PROMOTE, request.encode(), deadline)
            yield piece

    def set_quotas(self, quotas: Mapping[str, Sequence[int]], deadline: Deadline) -> None:
        """What each tenant may have of this shard: limit and share of DRAM, limit and share of the SSD, in bytes."""
        self.channel.call(Op.QUOTAS, encode_json(dict(quotas)), deadline)

    def tell(self, asked: ChainLog, deadline: Deadline) -> None:
        """What readers asked for, without waiting for an answer."""
        for body in asked.take():
            self.channel.post(Op.CHAINS, body, deadline)

    def ask(self, op: Op, request: KeyRequest, deadline: Deadline) -> Mask:
        """DELETE, PIN or TOUCH: which keys were there."""
        return np.frombuffer(self.channel.call(op, request.encode(), deadline), dtype=np.bool_, count=len(request.keys))

    def lookup(self, request: KeyRequest, deadline: Deadline) -> NDArray[np.void]:
        """`LOOKUP_ROW` of each key."""
        return decode_rows(self.channel.call(Op.LOOKUP, request.encode(), deadline), LOOKUP_ROW, len(request.keys))

    def stats(self, deadline: Deadline) -> dict[str, Any]:
        """Everything the shard says about itself."""
        return decode_json(self.channel.call(Op.STATS, b"", deadline))

    def flush(self, digest: bytes, deadline: Deadline) -> int:
        """Remove a namespace's blocks, or all with an empty digest; how many."""
        return int.from_bytes(self.channel.call(Op.FLUSH, digest, deadline), "little")


class LocalSession(ShardCalls):
    """A session that also has the shard's memory: what a client's link and the workers of the data port stand on."""

    def __init__(self, channel: Channel, shared: SharedShard) -> None:
        super().__init__(channel)
        self.shared = shared

    def index(self, deadline: Deadline) -> IndexReader:
        """The index in force."""
        return self.shared.current_index(self.channel, deadline)


class SharedMemoryLink:
    """`ShardLink` over shared memory.

    Args:
        socket_path: the shard's local socket.
        checksums: also write and verify the sums of layer slices. Memory has its own protection, so this is off by
        default.
    """

    transport = "shm"

    def __init__(self, socket_path: str, *, timeout_s: float, checksums: bool = False) -> None:
        deadline = Deadline(timeout_s)
        channel = connect_local(socket_path, deadline)
        try:
            self._shared = SharedShard(channel, deadline)
        except BaseException:  # Ctrl-C too: nobody has the channel yet
            channel.close()
            raise
        self._session = LocalSession(channel, self._shared)
        self._checksums = checksums
        self._namespace: Namespace | None = None
        self._number = 0
        self._closed = threading.Event()
        self._socket_path = socket_path
        self._promoting = threading.Lock()
        self._promotions: ShardCalls | None = None
        self._to_release: list[int] = []
        self._device_side: DeviceSide | None = None
        self._asked = ChainLog()
        self.meter = LinkMeter()
        self.boot_id = self._shared.boot_id
        threading.Thread(target=self._shared.warm_up, args=(self._closed,), name="kvstore-warm-up", daemon=True).start()

    @property
    def usable(self) -> bool:
        return self._session.channel.usable

    def open(self, namespace: Namespace, timeout_s: float) -> None:
        self._number = self._session.open(describe(namespace), Deadline(timeout_s))
        self._namespace = namespace

    def use_device(self, device: Device, timeout_s: float) -> None:
        """From now on blocks can be fetched into memory of this device as well."""
        segment = attach_segment(self._session.channel, device, Deadline(timeout_s))
        self._device_side = DeviceSide(device, self._shared.pool, segment)
        register = (lambda: self._shared.index.warm_bytes, self._closed)
        threading.Thread(
            target=self._device_side.register_pool, args=register, name="kvstore-register", daemon=True
        ).start()

    @property
    def reaches_device(self) -> bool:
        """Whether `fetch` takes device memory. Bytes that are checked have to pass through the processor."""
        return self._device_side is not None and not self._checksums

    def lookup(self, keys: Keys, timeout_s: float) -> Lookup:
        self._require_usable()
        found = self._session.index(Deadline(timeout_s)).probe(keys)
        self._asked.note(keys)
        states = found.states_in(self._number)
        self.meter.add(lookup_blocks=len(keys), hit_blocks=int(np.count_nonzero(states)))
        return Lookup(states, found.layers_ready, found.tiers)

    def fetch(self, keys: Keys, into: Blocks | DeviceBlocks, layers: tuple[int, int], timeout_s: float) -> Mask:
        self._require_usable()
        deadline = Deadline(timeout_s)
        self._asked.note(keys)
        if len(keys) == 1 and ORDERED_LOADS and not self._checksums and not isinstance(into, DeviceBlocks):
            return np.array([self._read_one(keys, into, layers, deadline)])
        filled = np.zeros(len(keys), dtype=np.bool_)
        rows = np.arange(len(keys))
        for _ in range(READS_MAX):
            good, rows, cold = self._read(keys, rows, into, layers, deadline)
            filled[good] = True
            for piece in self._promoted(keys[cold], deadline):
                good, lost, still_cold = self._read(keys, cold[piece], into, layers, deadline)
                filled[good] = True
                rows = np.concatenate([rows, lost, still_cold])
            if not len(rows):
                break
        good = int(np.count_nonzero(filled))
        size = (layers[1] - layers[0]) * self._opened().layer_bytes
        self.meter.add(read_blocks=good, read_bytes=good * size, lost_races=len(rows))
        return filled

    def store(self, keys: Keys, blocks: Blocks, timeout_s: float) -> U8:
        self._require_usable()
        deadline = Deadline(timeout_s)
        # On the same socket and before the put, so that the shard hears of a request in the order of its calls.
        self._session.tell(self._asked, deadline)
        self._asked.end(keys)
        statuses = np.empty(len(keys), dtype=np.uint8)
        for first in range(0, len(keys), KEYS_MAX):
            part = np.arange(first, min(first + KEYS_MAX, len(keys)))
            statuses[part] = self._store(keys[part], blocks.take(part), deadline)
        written = int(np.count_nonzero(statuses == PutStatus.STORED))
        self.meter.add(written_blocks=written, written_bytes=written * self._opened().block_bytes)
        return statuses

    def lease(self, keys: Keys, ttl_s: float, timeout_s: float) -> SharedHeldBlocks:
        self._require_usable()
        namespace, deadline = self._opened(), Deadline(timeout_s)
        self._asked.note(keys)
        probe = self._session.index(deadline).probe(keys)
        there = np.flatnonzero(probe.readable(self._number, namespace.layers, namespace.block_bytes))
        if len(there) < len(keys):
            cold = np.flatnonzero(probe.on_disk(self._number, namespace.block_bytes))
            if len(cold):
                self._promote(keys[cold], deadline)
                probe = self._session.index(deadline).probe(keys)
                there = np.flatnonzero(probe.readable(self._number, namespace.layers, namespace.block_bytes))
        found = probe if len(there) == len(keys) else probe.take(there)
        return self._hold(len(keys), there, found, ttl_s, deadline)

    def layers(
        self, keys: Keys, wanted: Wanted, into: LayerMemory, ttl_s: float, timeout_s: float
    ) -> SharedLayerSource:
        self._require_usable()
        self._asked.note(keys)
        return SharedLayerSource(
            self._session,
            self._number,
            self._opened(),
            keys,
            wanted,
            into,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            meter=self.meter,
            damaged=(lambda wrong: self._drop_damaged(wrong, timeout_s)) if self._checksums else None,
        )

    def publish(self, keys: Keys, ttl_s: float, timeout_s: float, part: Part | None = None) -> SharedLayerSink:
        self._require_usable()
        self._session.tell(self._asked, Deadline(timeout_s))
        self._asked.end(keys)
        return SharedLayerSink(
            self._session,
            self._number,
            self._opened(),
            keys,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            checksums=self._checksums,
            meter=self.meter,
            part=part,
        )

    def delete(self, keys: Keys, timeout_s: float) -> Mask:
        return self._session.ask(Op.DELETE, KeyRequest(self._number, keys), Deadline(timeout_s))

    def _drop_damaged(self, keys: Keys, timeout_s: float) -> None:
        """It would stay a miss for every reader and EXISTS for every writer. Gone, it can be written again."""
        self.delete(keys, timeout_s)

    def pin(self, keys: Keys, on: bool, timeout_s: float) -> Mask:
        return self._session.ask(Op.PIN, KeyRequest(self._number, keys, flag=int(on)), Deadline(timeout_s))

    def touch(self, keys: Keys, timeout_s: float) -> Mask:
        return self._session.ask(Op.TOUCH, KeyRequest(self._number, keys), Deadline(timeout_s))

    def tidy(self, timeout_s: float) -> None:
        self._session.tell(self._asked, Deadline(timeout_s))
        leases, self._to_release = self._to_release, []
        if leases:
            self._session.release(leases, Deadline(timeout_s))

    def report(self, timeout_s: float) -> None:
        self._session.channel.call(Op.REPORT, self.meter.take_report(), Deadline(timeout_s))

    def close(self) -> None:
        self._closed.set()
        self._session.channel.close()
        if self._device_side is not None:
            self._device_side.close()
        if self._promotions is not None:
            self._promotions.channel.close()

    def _read(
        self,
        keys: Keys,
        rows: NDArray[np.int64],
        into: Blocks | DeviceBlocks,
        layers: tuple[int, int],
        deadline: Deadline,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Copy what is there; rows that were filled, rows that lost a race, and rows whose blocks are on the SSD."""
        namespace = self._opened()
        index = self._session.index(deadline)
        probe = index.probe(keys[rows])
        there = np.flatnonzero(probe.readable(self._number, layers[1], namespace.block_bytes))
        cold = there[:0]
        if len(there) < len(rows):
            cold = rows[probe.on_disk(self._number, namespace.block_bytes)]
        if not len(there):
            return there, there, cold
        offsets = probe.offsets[there]
        if ORDERED_LOADS:
            whole = self._copy_out(into, rows[there], probe, there, layers, deadline)
            standing = index.unchanged(probe, there) & whole
        else:
            held = self._hold(len(rows), there, probe.take(there), RESERVATION_TTL_S, deadline)
            whole = self._copy_out(into, rows[there], probe, there, layers, deadline)
            standing = held.held[there] & held.valid() & whole
            held.release()
        self._shared.note_use(probe.handles[there])
        good = there[standing]
        if self._checksums and not isinstance(into, DeviceBlocks):
            matching = self._verified(into, rows[good], offsets[standing], probe.generations[good], layers)
            if not matching.all():
                self._drop_damaged(keys[rows[good[~matching]]], deadline.left_s())
            good = good[matching]
        return rows[good], rows[there[~standing]], cold

    def _promote(self, keys: Keys, deadline: Deadline) -> None:
        """Have blocks brought back from the SSD, and wait for all of them."""
        for _ in self._promoted(keys, deadline):
            pass

    def _promoted(self, keys: Keys, deadline: Deadline) -> Iterator[slice]:
        """The same piece by piece, over a session of its own, so that other calls don't wait."""
        if not len(keys):
            return
        piece_blocks = self._shared.piece_blocks(self._opened().block_bytes)
        wait = Deadline(deadline.left_s() * PROMOTION_SHARE)
        # A disk that is too slow costs this get its blocks, not the link: the rest of the shard is well.
        with contextlib.suppress(Unavailable):
            session = self._promotion_session(deadline)
            yield from session.promoted(self._number, keys, piece_blocks, wait, deadline)

    def _promotion_session(self, deadline: Deadline) -> ShardCalls:
        with self._promoting:
            if self._promotions is None or not self._promotions.channel.usable:
                self._promotions = ShardCalls(connect_local(self._socket_path, deadline))
            return self._promotions

    def _hold(
        self, count: int, rows: NDArray[np.int64], found: Probe, ttl_s: float, deadline: Deadline
    ) -> SharedHeldBlocks:
        blocks: list[NDArray[np.uint8] | None] = [None] * count
        return SharedHeldBlocks(
            self._session, rows, found, blocks, ttl_s=ttl_s, deadline=deadline, release_later=self._release_later
        )

    def _release_later(self, lease: int) -> None:
        self._to_release.append(lease)
        if len(self._to_release) >= RELEASES_WAITING_MAX:
            with contextlib.suppress(Unavailable):  # the session is lost, and the lease with it
                self.tidy(RELEASE_TIMEOUT_S)

    def _read_one(self, keys: Keys, into: Blocks, layers: tuple[int, int], deadline: Deadline) -> bool:
        """One block, in plain integers: the fixed cost of the batch's steps would be most of the time."""
        namespace = self._opened()
        index = self._session.index(deadline)
        pool = self._shared.pool_read_only
        size = (layers[1] - layers[0]) * namespace.layer_bytes
        for _ in range(2):
            entry = index.find(*keys.item(0))
            if entry is not None and entry.on_disk:
                self._promote(keys, deadline)
                entry = index.find(*keys.item(0))
            if entry is None or not entry.readable(self._number, layers[1], namespace.block_bytes):
                return False
            start = entry.offset + layers[0] * namespace.layer_bytes
            np.copyto(into.array(0, size), pool[start : start + size])
            if index.stands(entry):
                self._shared.note_use(entry.handle)
                self.meter.add(read_blocks=1, read_bytes=size)
                return True
        self.meter.add(lost_races=1)
        return False

    def _copy_out(
        self,
        into: Blocks | DeviceBlocks,
        rows: NDArray[np.int64],
        probe: Probe,
        there: NDArray[np.int64],
        layers: tuple[int, int],
        deadline: Deadline,
    ) -> Mask | bool:
        """Copy blocks that the index has; which copies are whole, if the entries still stand."""
        layer_bytes = self._opened().layer_bytes
        start, size = layers[0] * layer_bytes, (layers[1] - layers[0]) * layer_bytes
        if isinstance(into, DeviceBlocks):
            assert self._device_side is not None, "see `reaches_device`"
            wait_s = max(deadline.left_s(), COPY_WAIT_S_MIN)
            whole, near = self._device_side.copy_out(into, rows, probe.take(there), start, size, wait_s)
            self.meter.add(segment_blocks=near)
            return whole
        pool, offsets = self._shared.pool_read_only, probe.offsets[there] + start
        if isinstance(into, Region):
            copy_blocks(into.memory, into.offsets[rows], pool, offsets, size)
            return True
        wanted: list[int] = rows.tolist()
        for row, offset in zip(wanted, offsets.tolist(), strict=True):
            np.copyto(into.memories[row][:size], pool[offset : offset + size])
        return True

    def _verified(
        self,
        into: Blocks,
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        generations: NDArray[np.uint64],
        layers: tuple[int, int],
    ) -> Mask:
        """Which of the copied blocks match their sums. Blocks without sums count as matching."""
        namespace = self._opened()
        trailers = read_trailers(self._shared.pool_read_only, offsets, namespace.block_bytes, namespace.layers)
        size = (layers[1] - layers[0]) * namespace.layer_bytes
        matching = np.ones(len(rows), dtype=np.bool_)
        for place in np.flatnonzero(trailers[:, 0] == generations).tolist():
            sums = sums_of(into.piece(int(rows[place]), size), namespace.layer_bytes)
            matching[place] = trailers[place, 1 + layers[0] : 1 + layers[1]].tolist() == sums
        self.meter.add(checksum_failures=int(np.count_nonzero(~matching)))
        return matching

    def _store(self, keys: Keys, blocks: Blocks, deadline: Deadline) -> U8:
        size = self._opened().block_bytes
        request = KeyRequest(self._number, keys, ttl_ms=_ms(RESERVATION_TTL_S), size_bytes=size)
        rows = self._session.reserve(request, deadline)
        statuses = rows["status"].copy()
        mine = np.flatnonzero(statuses == PutStatus.STORED)
        if not len(mine):
            return statuses
        try:
            with self._session.channel.kept():
                self._copy_in(rows[mine], blocks.take(mine))
        except BaseException:
            self._session.settle(Op.ABORT, rows[mine], deadline)
            raise
        done = self._session.settle(Op.COMMIT, rows[mine], deadline)
        statuses[mine[~done]] = PutStatus.FAILED
        return statuses

    def _copy_in(self, rows: NDArray[np.void], blocks: Blocks) -> None:
        namespace = self._opened()
        size = namespace.block_bytes
        pool = self._shared.pool
        offsets = rows["offset"].astype(np.int64)
        if isinstance(blocks, Region):
            copy_blocks(pool, offsets, blocks.memory, blocks.offsets, size)
        else:
            for memory, offset in zip(blocks.memories, offsets.tolist(), strict=True):
                np.copyto(pool[offset : offset + size], memory)
        if self._checksums:
            sums = [sums_of(blocks.piece(row, size), namespace.layer_bytes) for row in range(len(rows))]
            write_trailers(pool, offsets, size, rows["generation"], np.array(sums, dtype=np.uint64))

    def _require_usable(self) -> None:
        # Committed blocks of a dead shard would still be readable here. They are not served: its successor knows
        # better.
        if not self.usable:
            raise Unavailable(f"{self._session.channel.stream.peer} is gone")

    def _opened(self) -> Namespace:
        if self._namespace is None:
            raise ProtocolError("open a namespace before anything else")
        return self._namespace


class SharedHeldBlocks:
    """Blocks under a lease, in the shard's own memory.

    The lease is valid for at least its time from the moment we *asked* for it, since the shard counts from the moment
    it heard us. So our own clock, and a session that is still open, prove that nothing was given away. Giving it back
    needs no answer and is not urgent: `release_later` takes the number of the lease, and many go in one message.
    """

    def __init__(
        self,
        session: LocalSession,
        rows: NDArray[np.int64],
        found: Probe,
        blocks: list[NDArray[np.uint8] | None],
        *,
        ttl_s: float,
        deadline: Deadline,
        release_later: Callable[[int], None],
    ) -> None:
        self._session = session
        self._release_later = release_later
        self.blocks = blocks
        self.held: Mask = np.zeros(len(blocks), dtype=np.bool_)
        self.valid_until_s = time.monotonic() + ttl_s
        self._lease, self.held[rows] = session.lease(found, ttl_s, deadline, lambda: self._lay_out(rows, found))
        for row in rows[~self.held[rows]].tolist():
            blocks[row] = None

    def valid(self) -> bool:
        return self._session.channel.usable and time.monotonic() < self.valid_until_s

    def renew(self, ttl_s: float, timeout_s: float) -> None:
        valid_until_s = time.monotonic() + ttl_s
        if self._session.renew(self._lease, ttl_s, Deadline(timeout_s)):
            self.valid_until_s = valid_until_s

    def release(self) -> None:
        self._release_later(self._lease)

    def _lay_out(self, rows: NDArray[np.int64], found: Probe) -> None:
        """A read-only array over each block, and the trace of its use."""
        if not len(rows):
            return
        # Row u of `at` is the block that starts at unit u, so each array costs one index operation.
        pool, size = self._session.shared.pool_read_only, int(found.sizes[0])
        starts = (len(pool) - size) // POOL_UNIT_BYTES + 1
        at = as_strided(pool, shape=(starts, size), strides=(POOL_UNIT_BYTES, 1), writeable=False)
        for row, unit in zip(rows.tolist(), (found.offsets // POOL_UNIT_BYTES).tolist(), strict=True):
            self.blocks[row] = at[unit]
        self._session.shared.note_use(found.handles)


def describe(namespace: Namespace) -> dict[str, Any]:
    """What a shard is told of a namespace: no salt, no token."""
    return {
        "digest": namespace.digest.hex(),
        "layers": namespace.layers,
        "layer_bytes": namespace.layer_bytes,
        "label": f"{namespace.model}@{namespace.revision} {namespace.dtype} {namespace.block_tokens} tokens",
        "tenant": namespace.tenant_id,
    }


def _attach(channel: Channel, deadline: Deadline) -> tuple[dict[str, Any], list[int]]:
    with channel.exchange(deadline) as exchange:
        exchange.send(Op.ATTACH, encode_json({"version": PROTOCOL_VERSION}))
        body, fds = exchange.reply_with_fds(_FDS)
    described = decode_json(body)
    if described.get("version") != PROTOCOL_VERSION or len(fds) != _FDS:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            f"the shard speaks protocol version {described.get('version')}, we speak {PROTOCOL_VERSION}"
        )
    return described, fds


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
