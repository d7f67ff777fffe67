"""The process of one shard: memory, local socket, clock. `python -m kvstore.server.shard.process`, started by the node.

The configuration comes as one JSON line on standard input; end of input means that the node is gone, and the shard
ends. One thread runs the loop and owns the `Shard`; a second one only makes the pool's pages present.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import BlockTooLarge, NamespaceMismatch, ProtocolError, UsageError
from kvstore.server.children import read_configuration, say_ready
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.shard.shard import IndexSegment, NamespaceInfo, Session, Shard
from kvstore.transport.memory import create_segment, map_segment, prefault, read_only
from kvstore.wire.frames import NO_REPLY, PROTOCOL_VERSION, Frame, FrameReader, Op, Status, encode
from kvstore.wire.messages import (
    REPORT_FIELDS,
    U64,
    KeyRequest,
    LeaseRequest,
    RefRequest,
    decode_json,
    decode_rows,
    encode_json,
)

_ATTACH = int(Op.ATTACH)
SESSIONS_MAX = 4096
LABEL_CHARS_MAX = 200
NAMESPACES_TOLD_MAX = 256  # the largest ones: an answer has to fit into one message
BACKLOG_BYTES_MAX = 8 << 20  # unread replies; a client that lets more pile up is disconnected
TICK_S = 0.1
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """What the node tells a shard."""

    shard: int
    boot_id: str
    socket_path: str
    pool_bytes: int
    chunk_bytes: int


class Pool:
    """The pool and the touch board: shared memory of this shard that clients map."""

    def __init__(self, config: ShardConfig) -> None:
        self.fd = create_segment(f"kvstore-pool-{config.shard}", config.pool_bytes)
        self.memory = map_segment(self.fd, writable=True)
        self.read_only_fd = read_only(self.fd)
        # One word per possible block. Only the pages of handles in use ever take memory.
        self.touch_fd = create_segment(f"kvstore-touch-{config.shard}", config.pool_bytes // 4096 * 4)
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

    __slots__ = ("backlog", "reader", "session", "sock")

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.session = session
        self.reader = FrameReader()
        self.backlog = bytearray()


class ShardServer:
    """Serves one shard on its local socket until the node closes standard input."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._pool = Pool(config)
        self._shard = Shard(
            pool_bytes=config.pool_bytes,
            chunk_bytes=config.chunk_bytes,
            new_segment=IndexMemory().new_segment,
            policy=LruPolicy(self._pool.touch_board),
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
        threading.Thread(target=self._pool.warm_up, name="warm-up", daemon=True).start()
        self._selector.register(control, selectors.EVENT_READ)
        next_tick_s = 0.0
        while True:
            for key, events in self._selector.select(TICK_S):
                if key.fileobj == control:
                    if not os.read(control, 4096):
                        return
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._shard.expire(now_s)
                self._shard.note_warm(self._pool.warm_bytes)

    def close(self) -> None:
        """Remove the socket file; the kernel takes the memory back with the process."""
        self._listener.close()
        Path(self._config.socket_path).unlink(missing_ok=True)

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
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._connections -= 1
        self._shard.close_session(connection.session)

    def _handle(self, connection: _Connection, frame: Frame, body: bytes) -> None:
        try:
            if frame.op == _ATTACH:
                self._attach(connection, frame)
                return
            handler = self._handlers.get(frame.op)
            if handler is None:
                raise ProtocolError(f"operation {frame.op} is not for the local socket")
            answer, status = handler(connection.session, body, time.monotonic()), 0
        except BlockTooLarge as error:
            answer, status = str(error).encode(), Status.TOO_LARGE
        except NamespaceMismatch as error:
            answer, status = str(error).encode(), Status.NAMESPACE_MISMATCH
        except UsageError as error:
            answer, status = str(error).encode(), Status.BAD_REQUEST
        if not frame.flags & NO_REPLY:
            self._send(connection, encode(frame.op, frame.request, answer, status=status))

    def _answers(self) -> dict[int, Callable[[Session, bytes, float], bytes]]:
        """What a client can ask, as one table."""
        shard = self._shard

        def lease(session: Session, body: bytes, now_s: float) -> bytes:
            request = RefRequest.decode(body)
            number, held = shard.lease(session, request.refs, request.ttl_ms, now_s)
            return number.to_bytes(8, "little") + held.tobytes()

        def renew(session: Session, body: bytes, now_s: float) -> bytes:
            request = LeaseRequest.decode(body)
            return shard.renew(session, request.leases, request.ttl_ms, now_s).tobytes()

        def publish(session: Session, body: bytes, _: float) -> bytes:
            request = RefRequest.decode(body)
            return shard.publish(session, request.refs, request.layers_ready).tobytes()

        def report(_: Session, body: bytes, __: float) -> bytes:
            amounts = decode_rows(body, U64, len(REPORT_FIELDS)).tolist()
            shard.note_report(dict(zip(REPORT_FIELDS, amounts, strict=True)))
            return b""

        return {
            int(Op.OPEN): lambda _, body, __: shard.open_namespace(_namespace_info(decode_json(body))).to_bytes(
                2, "little"
            ),
            int(Op.LOOKUP): lambda _, body, __: shard.lookup(KeyRequest.decode(body)).tobytes(),
            int(Op.RESERVE): lambda session, body, now_s: shard.reserve(
                session, KeyRequest.decode(body), now_s
            ).tobytes(),
            int(Op.PUBLISH): publish,
            int(Op.COMMIT): lambda session, body, _: shard.commit(session, RefRequest.decode(body).refs).tobytes(),
            int(Op.ABORT): lambda session, body, _: shard.abort(session, RefRequest.decode(body).refs).tobytes(),
            int(Op.LEASE): lease,
            int(Op.RENEW): renew,
            int(Op.RELEASE): lambda session, body, now_s: shard.release(
                session, LeaseRequest.decode(body).leases, now_s
            ).tobytes(),
            int(Op.DELETE): lambda _, body, __: shard.delete(KeyRequest.decode(body)).tobytes(),
            int(Op.PIN): lambda _, body, __: shard.pin(KeyRequest.decode(body)).tobytes(),
            int(Op.TOUCH): lambda _, body, __: shard.touch(KeyRequest.decode(body)).tobytes(),
            int(Op.FLUSH): lambda _, body, __: shard.flush(body).to_bytes(8, "little"),
            int(Op.STATS): lambda _, __, ___: encode_json(self._stats()),
            int(Op.REPORT): report,
        }

    def _attach(self, connection: _Connection, frame: Frame) -> None:
        """Descriptors go with the reply: index (read-only), pool (read-only), pool (writable), touch board
        (writable).
        """
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
        }


def _namespace_info(description: dict[str, Any]) -> NamespaceInfo:
    try:
        info = NamespaceInfo(
            digest=bytes.fromhex(description["digest"]),
            layers=int(description["layers"]),
            layer_bytes=int(description["layer_bytes"]),
            label=_printable(str(description.get("label", ""))[:LABEL_CHARS_MAX]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as cause:  # JSON knows infinity
        raise UsageError("a namespace is announced as digest (hex), layers, layer_bytes, label") from cause
    if len(info.digest) != 16 or not 1 <= info.layers <= 4096 or info.layer_bytes < 1:
        raise UsageError("a namespace has a digest of 16 bytes, 1 to 4096 layers and at least one byte per layer")
    return info


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
