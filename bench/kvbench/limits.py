"""The speeds of light that transfers are compared with: one thread's memcpy, and raw sockets between two processes.

Both move the same number of blocks of the same size as the operation beside them, through as many bytes of memory.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import BenchError

U8 = NDArray[np.uint8]

# Measured on the project's machine: larger sends and larger receives are up to 2x slower on loopback.
SEND_PIECE_BYTES: Final = 1 << 20
RECEIVE_PIECE_BYTES: Final = 256 << 10
RECEIVE_BUFFER_BYTES: Final = 2 << 20

_REQUEST: Final = struct.Struct("<QQQ")  # what, offset in the far arena, bytes
_DOWNLOAD: Final = 1
_UPLOAD: Final = 2
_ACK: Final = b"received"
_TIMEOUT_S: Final = 30.0


class MemcpyLimit:
    """One `numpy.copyto` per block between two arenas.

    Args:
        source, destination: prefaulted uint8 memory of at least blocks x block_bytes bytes.
    """

    def __init__(self, source: U8, destination: U8, *, block_bytes: int, blocks: int, batch: int) -> None:
        shape = (blocks, block_bytes)
        self._source = source[: blocks * block_bytes].reshape(shape)
        self._destination = destination[: blocks * block_bytes].reshape(shape)
        self._batch = batch
        self._turns = blocks // batch

    def __call__(self, turn: int) -> float:
        first = turn % self._turns * self._batch
        rows = range(first, first + self._batch)
        pairs = [(self._destination[row], self._source[row]) for row in rows]
        begin = time.perf_counter()
        for destination, source in pairs:
            np.copyto(destination, source)
        return time.perf_counter() - begin


class SocketLimit:
    """A batch of payload over plain sockets to or from a `RawPeer` in another process, equal parts on each connection.

    Args:
        port: where the peer listens on loopback.
        near: prefaulted uint8 memory of this process.
        upload: send to the peer (as a put does) and wait for its acknowledgement; else receive from it.
    """

    def __init__(
        self, port: int, near: U8, *, block_bytes: int, blocks: int, batch: int, connections: int, upload: bool
    ) -> None:
        self._near = memoryview(near)
        self._batch_bytes = block_bytes * batch
        self._turns = blocks // batch
        self._run = _upload if upload else _download
        self._sockets = [_connect(port) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(max_workers=connections)

    def __call__(self, turn: int) -> float:
        first = turn % self._turns * self._batch_bytes
        parts = _split(first, self._batch_bytes, len(self._sockets))
        begin = time.perf_counter()
        # The caller's thread drives the first connection itself, as a client with one connection would.
        rest = [
            self._threads.submit(self._run, stream, self._near, *part)
            for stream, part in zip(self._sockets[1:], parts[1:], strict=True)
        ]
        self._run(self._sockets[0], self._near, *parts[0])
        for future in rest:
            future.result()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for stream in self._sockets:
            stream.close()


class RawPeer:
    """The far end of `SocketLimit`: a thread per connection, nothing but sends and receives, in its own process."""

    def __init__(self, far: U8) -> None:
        self._far = memoryview(far)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening. Connections end with their clients."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(stream,), daemon=True).start()

    def _answer(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = memoryview(bytearray(_REQUEST.size))
        with stream:
            while _receive(stream, request):
                what, offset, length = _REQUEST.unpack(request)
                payload = self._far[offset : offset + length]
                if what == _DOWNLOAD:
                    _send(stream, payload)
                elif _receive(stream, payload):
                    stream.sendall(_ACK)


def _connect(port: int) -> socket.socket:
    stream = socket.socket()
    stream.settimeout(_TIMEOUT_S)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # only counts before connect
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.connect(("127.0.0.1", port))
    return stream


def _split(first: int, length: int, parts: int) -> list[tuple[int, int]]:
    """(offset, bytes) of near-equal parts."""
    edges = [first + length * part // parts for part in range(parts + 1)]
    return [(low, high - low) for low, high in pairwise(edges)]


def _download(stream: socket.socket, near: memoryview, offset: int, length: int) -> None:
    stream.sendall(_REQUEST.pack(_DOWNLOAD, offset, length))
    if not _receive(stream, near[offset : offset + length]):
        raise BenchError("the raw-socket peer closed its connection")


def _upload(stream: socket.socket, near: memoryview, offset: int, length: int) -> None:
    stream.sendall(_REQUEST.pack(_UPLOAD, offset, length))
    _send(stream, near[offset : offset + length])
    ack = memoryview(bytearray(len(_ACK)))
    if not _receive(stream, ack) or ack != _ACK:
        raise BenchError("the raw-socket peer did not acknowledge what it was sent")


def _send(stream: socket.socket, payload: memoryview) -> None:
    for offset in range(0, len(payload), SEND_PIECE_BYTES):
        stream.sendall(payload[offset : offset + SEND_PIECE_BYTES])


def _receive(stream: socket.socket, into: memoryview) -> bool:
    """Fill `into`; False if the other side closed first."""
    done = 0
    while done < len(into):
        got = stream.recv_into(into[done : done + RECEIVE_PIECE_BYTES])
        if not got:
            return False
        done += got
    return True
