"""The process of one shard: memory, local socket, clock. `python -m kvstore.server.shard.process`, started by the node.

The configuration comes as one JSON line on standard input; end of input means that the node is gone, and the shard
ends. One thread runs the loop and owns the `Shard`; a second one only makes the pool's pages present.
"""

from __future__ import annotations

import array
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import BlockTooLarge, NamespaceMismatch, ProtocolError, Unavailable, UsageError
from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.server.children import read_configuration, say_ready
from kvstore.server.eviction import POLICIES
from kvstore.server.eviction.tenants import Quota
from kvstore.server.shard.blocks import NamespaceInfo
from kvstore.server.shard.gpu import GpuSide
from kvstore.server.shard.shard import IndexSegment, Session, Shard
from kvstore.server.shard.tiering import Admission
from kvstore.server.tiers.disk.client import DiskLink, start_disk_worker
from kvstore.transport.memory import create_pool, create_segment, map_pool, map_segment, prefault, read_only
from kvstore.wire.frames import NO_REPLY, PROTOCOL_VERSION, Frame, FrameReader, Op, Status, encode
from kvstore.wire.messages import (
    REPORT_FIELDS,
    U64,
    Chains,
    KeyRequest,
    LeaseRequest,
    PartRequest,
    RefRequest,
    decode_json,
    decode_rows,
    encode_json,
)

_ATTACH = int(Op.ATTACH)
SESSIONS_MAX = 4096
LABEL_CHARS_MAX = 200
TENANTS_TOLD_MAX = 1024
TENANT_PATTERN = "[0-9a-z-]{1,32}"
VALUE_MIN = 1e-6  # of a byte of a namespace, relative to others
NAMESPACES_TOLD_MAX = 256  # the largest ones: an answer has to fit into one message
BACKLOG_BYTES_MAX = 8 << 20  # unread replies; a client that lets more pile up is disconnected
TICK_S = 0.1
BOARD_SCAN_S = 1.0
RESTART_PAUSE_S = 1.0
READ_BYTES = 1 << 18


Later: TypeAlias = Callable[[bytes], None]  # how a handler answers when it has not answered at once
Handler: TypeAlias = Callable[[Session, bytes, float, Later], bytes | None]


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """What the node tells a shard."""

    shard: int
    boot_id: str
    socket_path: str
    pool_bytes: int
    chunk_bytes: int
    policy: str  # a name of `POLICIES`
    disk_dir: str = ""  # of this shard's SSD tier
    disk_bytes: int = 0  # its capacity; 0 = none
    admission: str = Admission.SECOND.value
    watermark_bytes: int = 0
    quotas: dict[str, tuple[int, int, int, int]] = field(default_factory=dict[str, tuple[int, int, int, int]])
    gpu: str = ""  # device of this shard's segment
    gpu_bytes: int = 0  # the segment's size


class Pool:
    """The pool and the touch board: shared memory of this shard that clients map."""

    def __init__(self, config: ShardConfig) -> None:
        self.fd = create_pool(f"kvstore-pool-{config.shard}", config.pool_bytes)
        self.memory = map_pool(self.fd, writable=True)
        self.read_only_fd = read_only(self.fd)
        # One word per possible block. Only the pages of handles in use ever take memory.
        self.touch_fd = create_segment(
            f"kvstore-touch-{config.shard}", (config.pool_bytes + config.disk_bytes) // 4096 * 4
        )
        self.touch_board: NDArray[np.uint32] = map_segment(self.touch_fd, writable=True).view(np.uint32)
        self.warm_bytes = 0

    def warm_up(self, piece_bytes: int = 16 << 20) -> None:
        """Make the pages present from the start on, which is the order in which slots are first given out."""
        # On a host with few cores this must not compete with requests.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        for start in range(0, len(self.memory), piece_bytes):
            prefault(self.memory[start : start + piece_bytes])
            self.warm_bytes = min(start + piece_bytes, len(self.memory))


class _Connection:
    """One client on the local socket."""

    __slots__ = ("backlog", "open", "reader", "session", "sock")

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.session = session
        self.reader = FrameReader()
        self.backlog = bytearray()
        self.open = True


class ShardServer:
    """Serves one shard on its local socket until the node closes standard input."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._pool = Pool(config)
        self._shard = Shard(
            pool_bytes=config.pool_bytes,
            chunk_bytes=config.chunk_bytes,
            new_segment=IndexMemory().new_segment,
            make_policy=lambda: POLICIES[config.policy](self._pool.touch_board),
            disk_bytes=config.disk_bytes,
            watermark_bytes=config.watermark_bytes,
        )
        self._shard.set_quotas(*_quotas(config.quotas))
        self._disk: DiskSide | None = None
        if config.disk_bytes:
            self._disk = DiskSide(config, self._pool, self._shard)
        self._gpu: GpuSide | None = None
        if config.gpu:
            self._gpu = GpuSide(
                self._shard, config.gpu, config.gpu_bytes, self._pool.memory, self._pool.touch_board, config.chunk_bytes
            )
        self._handlers = self._answers()
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(config.socket_path)
        Path(config.socket_path).chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections = 0

    def run(self, control: int) -> None:
        """Serve until `control` (a pipe from the node) is closed."""
        threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()
        self._selector.register(control, selectors.EVENT_READ)
        next_tick_s = 0.0
        while True:
            if self._disk is not None:
                self._disk.register(self._selector)
            for key, events in self._selector.select(TICK_S):
                if key.fileobj == control:
                    if not os.read(control, 4096):
                        return
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    assert self._disk is not None
                    self._disk.serve()
                else:
                    self._serve(key.data, events)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._shard.tick(now_s)
                self._shard.note_warm(self._pool.warm_bytes)
                if self._disk is not None:
                    self._disk.tick(now_s)
                if self._gpu is not None:
                    self._gpu.tick(now_s)

    def close(self) -> None:
        """Remove the socket file; the kernel takes the memory back with the process."""
        if self._disk is not None:
            self._disk.close()
        self._listener.close()
        Path(self._config.socket_path).unlink(missing_ok=True)

    def _warm_up(self) -> None:
        self._pool.warm_up()
        if self._gpu is not None:
            self._gpu.register_pool()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # out of descriptors, or the client has left already: those who are here are served on
        if self._connections >= SESSIONS_MAX:
            text = f"this shard serves {SESSIONS_MAX} clients already, its limit".encode()
            sock.send(encode(Op.ATTACH, 0, text, status=Status.BUSY))
            sock.close()
            return
        sock.setblocking(False)
        self._connections += 1
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock, self._shard.open_session()))

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection, b"")
            if events & selectors.EVENT_READ:
                size = connection.sock.recv_into(self._read_buffer)
                if not size:
                    raise ConnectionError("closed by the client")
                for frame, body in connection.reader.feed(self._read_buffer[:size]):
                    self._handle(connection, frame, body)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            # A client that left, that does not speak the protocol, or that there are no descriptors for: the same end
            # for its session.
            self._disconnect(connection)

    def _disconnect(self, connection: _Connection) -> None:
        connection.open = False
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._connections -= 1
        self._shard.close_session(connection.session)

    def _handle(self, connection: _Connection, frame: Frame, body: bytes) -> None:
        try:
            if frame.op == _ATTACH:
                self._attach(connection, frame, body)
                return
            handler = self._handlers.get(frame.op)
            if handler is None:
                raise ProtocolError(f"operation {frame.op} is not for the local socket")
            later = partial(self._reply_later, connection, frame)
            answer, status = handler(connection.session, body, time.monotonic(), later), 0
            if answer is None:
                return
        except BlockTooLarge as error:
            answer, status = str(error).encode(), Status.TOO_LARGE
        except NamespaceMismatch as error:
            answer, status = str(error).encode(), Status.NAMESPACE_MISMATCH
        except UsageError as error:
            answer, status = str(error).encode(), Status.BAD_REQUEST
        if not frame.flags & NO_REPLY:
            self._send(connection, encode(frame.op, frame.request, answer, status=status))

    def _reply_later(self, connection: _Connection, frame: Frame, answer: bytes) -> None:
        if not connection.open or frame.flags & NO_REPLY:
            return
        try:
            self._send(connection, encode(frame.op, frame.request, answer))
        except ConnectionError:
            self._disconnect(connection)

    def _answers(self) -> dict[int, Handler]:
        """What a client can ask, as one table. A handler that answers None has been given the means to answer later."""
        shard = self._shard

        def lease(session: Session, body: bytes, now_s: float, _: Later) -> bytes:
            request = RefRequest.decode(body)
            number, held = shard.lease(session, request.refs, request.ttl_ms, now_s)
            return number.to_bytes(8, "little") + held.tobytes()

        def renew(session: Session, body: bytes, now_s: float, _: Later) -> bytes:
            request = LeaseRequest.decode(body)
            return shard.renew(session, request.leases, request.ttl_ms, now_s).tobytes()

        def publish(session: Session, body: bytes, now_s: float, _: Later) -> bytes:
            request = RefRequest.decode(body)
            return shard.publish(session, request.refs, request.layers_ready, request.ttl_ms, now_s).tobytes()

        def promote(_: Session, body: bytes, now_s: float, later: Later) -> None:
            shard.promote(KeyRequest.decode(body), now_s, lambda: later(b""))

        def delete(_: Session, body: bytes, __: float, later: Later) -> None:
            request = KeyRequest.decode(body)
            answers = shard.delete(request).tobytes()
            shard.delete_on_disk(request.keys, lambda: later(answers))

        def flush(_: Session, body: bytes, __: float, later: Later) -> None:
            answer = shard.flush(body).to_bytes(8, "little")
            shard.flush_on_disk(body, lambda: later(answer))

        def quotas(_: Session, body: bytes, __: float, ___: Later) -> bytes:
            shard.set_quotas(*_quotas(decode_json(body)))
            return b""

        def report(_: Session, body: bytes, __: float, ___: Later) -> bytes:
            amounts = decode_rows(body, U64, len(REPORT_FIELDS)).tolist()
            shard.note_report(dict(zip(REPORT_FIELDS, amounts, strict=True)))
            return b""

        def note_chains(_: Session, body: bytes, __: float, ___: Later) -> bytes:
            shard.note_chains(Chains.decode(body).chains)
            return b""

        return {
            int(Op.OPEN): lambda _, body, __, ___: shard.open_namespace(_namespace_info(decode_json(body))).to_bytes(
                2, "little"
            ),
            int(Op.LOOKUP): lambda _, body, __, ___: shard.lookup(KeyRequest.decode(body)).tobytes(),
            int(Op.RESERVE): lambda session, body, now_s, _: shard.reserve(
                session, KeyRequest.decode(body), now_s
            ).tobytes(),
            int(Op.RESERVE_PART): lambda session, body, now_s, _: shard.reserve_part(
                session, PartRequest.decode(body), now_s
            ).tobytes(),
            int(Op.PUBLISH): publish,
            int(Op.COMMIT): lambda session, body, _, __: shard.commit(session, RefRequest.decode(body).refs).tobytes(),
            int(Op.FINISH): lambda session, body, _, __: shard.finish(session, RefRequest.decode(body).refs).tobytes(),
            int(Op.ABORT): lambda session, body, _, __: shard.abort(session, RefRequest.decode(body).refs).tobytes(),
            int(Op.LEASE): lease,
            int(Op.RENEW): renew,
            int(Op.RELEASE): lambda session, body, now_s, _: shard.release(
                session, LeaseRequest.decode(body).leases, now_s
            ).tobytes(),
            int(Op.DELETE): delete,
            int(Op.PIN): lambda _, body, __, ___: shard.pin(KeyRequest.decode(body)).tobytes(),
            int(Op.TOUCH): lambda _, body, __, ___: shard.touch(KeyRequest.decode(body)).tobytes(),
            int(Op.PROMOTE): promote,
            int(Op.FLUSH): flush,
            int(Op.STATS): lambda _, __, ___, ____: encode_json(self._stats()),
            int(Op.REPORT): report,
            int(Op.QUOTAS): quotas,
            int(Op.CHAINS): note_chains,
        }

    def _attach(self, connection: _Connection, frame: Frame, asked: bytes) -> None:
        """Descriptors go with the reply: index (read-only), pool (read-only), pool (writable), touch board
        (writable). To who asks for the device: its board (read-only), and its segment where that is a descriptor.
        """
        if asked and decode_json(asked).get("device"):
            described, device_fds = ({}, []) if self._gpu is None else self._gpu.offer()
            self._send_with_fds(connection, encode(Op.ATTACH, frame.request, encode_json(described)), device_fds)
            return
        body = encode_json(
            {
                "version": PROTOCOL_VERSION,
                "boot_id": self._config.boot_id,
                "shard": self._config.shard,
                "pool_bytes": self._config.pool_bytes,
            }
        )
        index_fd = read_only(self._shard.index_fd)
        fds = array.array("i", [index_fd, self._pool.read_only_fd, self._pool.fd, self._pool.touch_fd])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        try:
            connection.sock.sendmsg([encode(Op.ATTACH, frame.request, body)], rights)
        finally:
            os.close(index_fd)

    def _send_with_fds(self, connection: _Connection, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            connection.sock.sendmsg([data], rights)
        finally:
            for fd in fds:
                os.close(fd)

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Send now what goes, keep the rest for when the client reads."""
        backlog = connection.backlog
        if not backlog:
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return  # the usual case
            data = data[sent:]
        backlog += data
        if len(backlog) > BACKLOG_BYTES_MAX:
            raise ConnectionError("the client does not read its replies")
        try:
            sent = connection.sock.send(backlog)
            del backlog[:sent]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if backlog else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _stats(self) -> dict[str, Any]:
        shard = self._shard
        return {
            "shard": self._config.shard,
            "boot_id": self._config.boot_id,
            "pool_bytes": self._config.pool_bytes,
            "warm_bytes": self._pool.warm_bytes,
            "bytes": shard.accounting(),
            "gauges": {**shard.gauges(), "sessions": self._connections},
            "counters": asdict(shard.counters),
            "namespaces": sorted(shard.namespaces(), key=lambda space: -int(space["bytes"]))[:NAMESPACES_TOLD_MAX],
            "quotas": _told(shard.tenants.describe()),
            **({} if self._disk is None else {"disk": self._disk.stats()}),
            **({} if self._gpu is None else {"gpu": self._gpu.stats()}),
        }


class DiskSide:
    """The shard's disk worker as the loop sees it: started, watched, started again when it dies."""

    def __init__(self, config: ShardConfig, pool: Pool, shard: Shard) -> None:
        self._config = config
        self._pool = pool
        self._shard = shard
        self._next_board_scan_s = 0.0
        self._retry_at_s = 0.0
        self._registered: tuple[DiskLink, int] | None = None
        self._start()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Watch the link, and for sending only while there is something to send."""
        now = None if self._link is None else (self._link, self._link.events)
        if now == self._registered:
            return
        if self._registered is not None and (now is None or now[0] is not self._registered[0]):
            selector.unregister(self._registered[0])
            self._registered = None
        if now is not None:
            change = selector.register if self._registered is None else selector.modify
            change(now[0], now[1], None)
        self._registered = now

    def serve(self) -> None:
        """Take what the worker has answered."""
        if self._link is None or self._shard.tiering is None:
            return
        try:
            for answer in self._link.drain():
                self._shard.tiering.take(answer)
        except (Unavailable, ProtocolError):
            self._lost()

    def tick(self, now_s: float) -> None:
        """What is due by time."""
        tiering = self._shard.tiering
        if self._link is None:
            if now_s >= self._retry_at_s:
                self._start()
        elif tiering is not None:
            tiering.expire(now_s)
            if now_s >= self._next_board_scan_s:
                self._next_board_scan_s = now_s + BOARD_SCAN_S
                tiering.scan_board()
                self._link.submit_stats()

    def stats(self) -> dict[str, Any]:
        """For `/status`."""
        tiering = self._shard.tiering
        assert tiering is not None
        return {
            "up": self._link is not None,
            "scan_complete": tiering.scan_complete,
            "queued_bytes": 0 if self._link is None else self._link.store_bytes,
            "counters": asdict(tiering.counters),
            "worker": {name: value for name, value in tiering.disk_stats.items() if name != "quotas"},
            "quotas": _told(tiering.disk_stats.get("quotas", [])),
        }

    def close(self) -> None:
        """End the worker; what it has under way it finishes."""
        if self._link is not None:
            self._link.close()
        self._child.stop()

    def _start(self) -> None:
        config = self._config
        self._child, self._link = start_disk_worker(
            config.shard, Path(config.disk_dir), config.disk_bytes, self._pool.fd, config.pool_bytes, config.boot_id
        )
        self._shard.use_disk(self._link, self._pool.touch_board, Admission(config.admission))

    def _lost(self) -> None:
        """The worker is gone. Only once its process has ended are the slots that it was filling ours again."""
        self._child.stop(0.0)
        assert self._link is not None
        self._link.close()
        self._link = None
        self._retry_at_s = time.monotonic() + RESTART_PAUSE_S
        if self._shard.tiering is not None:
            self._shard.tiering.worker_died()


def _namespace_info(description: dict[str, Any]) -> NamespaceInfo:
    try:
        info = NamespaceInfo(
            digest=bytes.fromhex(description["digest"]),
            layers=int(description["layers"]),
            layer_bytes=int(description["layer_bytes"]),
            label=_printable(str(description.get("label", ""))[:LABEL_CHARS_MAX]),
            tenant=str(description.get("tenant", DEFAULT_TENANT)),
            value=float(description.get("value", 1.0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as cause:  # JSON knows infinity
        raise UsageError("a namespace is announced as digest (hex), layers, layer_bytes, label") from cause
    if len(info.digest) != 16 or not 1 <= info.layers <= 4096 or info.layer_bytes < 1:
        raise UsageError("a namespace has a digest of 16 bytes, 1 to 4096 layers and at least one byte per layer")
    if not re.fullmatch(TENANT_PATTERN, info.tenant):
        raise UsageError(f"tenant {info.tenant[:40]!r}: allowed are {TENANT_PATTERN}")
    if not VALUE_MIN <= info.value <= 1 / VALUE_MIN:  # false of NaN too
        raise UsageError(f"a namespace's value is {VALUE_MIN:g} to {1 / VALUE_MIN:g}")
    return info


def _quotas(told: dict[str, Any]) -> tuple[dict[str, Quota], dict[str, Quota]]:
    """Quotas of DRAM and of the SSD, by tenant."""
    dram = {tenant: Quota(limit=amounts[0], share=amounts[1]) for tenant, amounts in told.items()}
    return dram, {tenant: Quota(limit=amounts[2], share=amounts[3]) for tenant, amounts in told.items()}


def _told(tenants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a quota and the largest of the others: an answer has to fit into one message."""
    most = sorted(tenants, key=lambda tenant: (not (tenant["limit"] or tenant["share"]), -tenant["used"]))
    return most[:TENANTS_TOLD_MAX]


def _printable(text: str) -> str:
    """One line that can be encoded: JSON knows line breaks and halves of characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


class IndexMemory:
    """Makes the index segments of a shard and keeps one descriptor: that of the newest."""

    def __init__(self) -> None:
        self._fd = -1

    def new_segment(self, size_bytes: int) -> IndexSegment:
        """Zeroed shared memory, present, so that no insert pays for page faults."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = create_segment("kvstore-index", size_bytes)
        memory = map_segment(self._fd, writable=True)
        prefault(memory)
        return IndexSegment(self._fd, memory)


def main() -> None:
    """Entry point of the process."""
    server = ShardServer(ShardConfig(**read_configuration()))
    say_ready()
    try:
        server.run(control=0)
    finally:
        server.close()


if __name__ == "__main__":
    main()
