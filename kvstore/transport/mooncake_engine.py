"""Mooncake's TransferEngine, and the process in which a client runs it.

The engine has no authentication and listens on all addresses, whatever it is told. Its blocking calls keep a core busy,
and its first contact with a peer that stands still lasts a minute. So what is used here is little, and whoever uses it
does so in a process of its own (docs/adr/0009-mooncake.md).

That process runs this file alone: it needs nothing but the standard library and Mooncake, and starts in a fifth of the
time that the whole package would take.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

PROTOCOLS = ("tcp", "rdma")
PACKAGE = "mooncake-transfer-engine-non-cuda"
READ, WRITE = 0, 1
TRANSFERS_MAX = 4096  # of one request: its message then has 96 KiB, half of what a socket takes
HEAD_BYTES = 16  # ticket, READ or WRITE; then for each transfer: ours, theirs, size; uint64 each
DONE = struct.Struct("<Q")  # ticket of a request, all of whose transfers went well
_HEAD = struct.Struct("<QQ")
_MESSAGE_BYTES_MAX = HEAD_BYTES + TRANSFERS_MAX * 24
_UNDER_WAY_MAX = 256  # transfers in the engine, which refuses more than some thousand
_POLL_S = (0.00005, 0.0003)  # between looks at what is under way: the first ones, and the others
_POLLS_SHORT = 8
_LIBRARY = "libibverbs.so.1"
_LOG_LEVEL = "MC_LOG_LEVEL"
_PEERS_DIRECTLY = "P2PHANDSHAKE"  # in place of a metadata service: peers ask one another


class EngineError(Exception):
    """The engine can't be had; one line says why."""


class Engine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Addresses and sizes are bytes of this process's memory."""

    def initialize(self, host: str, metadata_server: str, protocol: str, device: str, /) -> int:
        """Begin to listen; 0 when that went well."""
        ...

    def get_rpc_port(self) -> int:
        """Where peers reach this engine."""
        ...

    def register_memory(self, address: int, capacity: int, /) -> int:
        """Let peers reach this memory; 0 when that went well."""
        ...

    def batch_transfer_async_read(
        self, peer: str, ours: list[int], theirs: list[int], sizes: list[int], /
    ) -> int:  # number of the batch; 0: refused
        """Begin to read."""
        ...

    def batch_transfer_async_write(self, peer: str, ours: list[int], theirs: list[int], sizes: list[int], /) -> int:
        """Begin to write."""
        ...

    def transfer_check_status(self, batch: int, /) -> int:
        """1: done, 0: under way, less: failed. Looks at the first transfer of a batch only, so batches have one. Unless
        it is under way the number is used up: it may be another batch's next.
        """
        ...


def engine_problem() -> str:
    """Why the engine can't be had here, in one line; empty if it can, as far as that is seen without loading it."""
    try:
        found = importlib.util.find_spec("mooncake.engine")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"the package {PACKAGE} is not installed: pip install 'kvstore-llm[mooncake]'"
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"the system library {_LIBRARY} is missing: on Debian, apt install libibverbs1"
    return ""


def open_engine(host: str, protocol: str, device: str) -> Engine:
    """An engine that peers reach under this host's address.

    Its log lines go nowhere unless `MC_LOG_LEVEL` is set: what matters of them is answered as a status.

    Raises:
        EngineError: it can't be loaded or refuses to begin.
    """
    problem = engine_problem()
    if problem:
        raise EngineError(problem)
    _quieten()
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise EngineError(f"mooncake can't be loaded: {error}") from error
    engine = cast("Engine", module.TransferEngine())
    if engine.initialize(host, _PEERS_DIRECTLY, protocol, device) != 0:
        named = f" with device {device!r}" if device else ""
        raise EngineError(f"mooncake refuses to begin on {host!r} over {protocol}{named}; MC_LOG_LEVEL=INFO shows why")
    return engine


def _quieten() -> None:
    """The engine writes its lines to descriptor 2, from C++: this process's own messages get another way there."""
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


# --- the process -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Request:
    """What one message of a lane asks for."""

    lane: socket.socket
    ticket: int
    kind: int
    numbers: Sequence[int]  # ours, theirs, size of each transfer
    begun: int = 0  # transfers
    batches: deque[int] = field(default_factory=deque[int])  # in the engine


class TransferError(Exception):
    """The process has to end: other transfers may hang now, and could still write later."""


class Mover:
    """Keeps transfers of all lanes under way, and answers each request when all of it is over.

    Args:
        base, size: address and bytes of the memory that is shared with the client.
    """

    def __init__(self, engine: Engine, segment: str, base: int, size: int, lanes: Sequence[socket.socket]) -> None:
        self._engine, self._segment, self._base, self._size = engine, segment, base, size
        self._lanes = {lane.fileno(): lane for lane in lanes}
        self._poll = select.poll()
        for descriptor in self._lanes:
            self._poll.register(descriptor, select.POLLIN)
        self._requests: deque[_Request] = deque()
        self._under_way = 0

    def run(self) -> None:
        """Until the client closes its lanes.

        Raises:
            TransferError: one did.
        """
        looks = 0
        while True:
            for descriptor, _ in self._poll.poll(0 if self._requests else None):
                if not self._hear(self._lanes[descriptor]):
                    return
                looks = 0
            if self._look():
                looks = 0
            elif self._requests:
                time.sleep(_POLL_S[looks >= _POLLS_SHORT])
                looks += 1

    def _hear(self, lane: socket.socket) -> bool:
        message = lane.recv(_MESSAGE_BYTES_MAX)
        if not message:
            return False
        ticket, kind = _HEAD.unpack_from(message)
        numbers = memoryview(message)[_HEAD.size :].cast("Q").tolist()
        self._requests.append(_Request(lane, ticket, kind, numbers))
        self._begin()
        self._answer()
        return True

    def _begin(self) -> None:
        """Hand transfers to the engine, as many as may be under way, oldest requests first."""
        engine = self._engine
        for request in self._requests:
            submit = engine.batch_transfer_async_read if request.kind == READ else engine.batch_transfer_async_write
            while 3 * request.begun < len(request.numbers):
                if self._under_way >= _UNDER_WAY_MAX:
                    return
                ours, theirs, size = request.numbers[3 * request.begun : 3 * request.begun + 3]
                if ours + size > self._size:
                    raise TransferError
                batch = submit(self._segment, [self._base + ours], [theirs], [size])
                # Looked at right away: to a dead peer the first one fails at once, the next one would take a second.
                status = engine.transfer_check_status(batch) if batch else -1
                if status < 0:
                    raise TransferError
                request.begun += 1
                if status == 0:
                    request.batches.append(batch)
                    self._under_way += 1

    def _look(self) -> bool:
        """Take note of what has ended; whether anything has."""
        moved = False
        for request in self._requests:
            while request.batches:
                status = self._engine.transfer_check_status(request.batches[0])
                if status == 0:
                    break
                if status < 0:
                    raise TransferError
                request.batches.popleft()
                self._under_way -= 1
                moved = True
        if moved:
            self._begin()
            self._answer()
        return moved

    def _answer(self) -> None:
        open_requests: deque[_Request] = deque()
        for request in self._requests:
            if request.batches or 3 * request.begun < len(request.numbers):
                open_requests.append(request)
                continue
            with contextlib.suppress(OSError):  # the client has just gone
                request.lane.send(DONE.pack(request.ticket))
        self._requests = open_requests


def _end_with_the_client() -> None:
    """The engine's calls can't be interrupted, but the process can end during them."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Entry point of the process: one JSON line on standard input says what to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit("this process is started by a client of kvstore")
    described = json.loads(line)
    threading.Thread(target=_end_with_the_client, daemon=True).start()
    try:
        engine = open_engine(described["host"], described["protocol"], described["device"])
        memory_fd: int = described["memory_fd"]
        size = os.fstat(memory_fd).st_size
        memory = mmap.mmap(memory_fd, size, flags=mmap.MAP_SHARED)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if engine.register_memory(base, size) != 0:
            raise EngineError(f"mooncake can't register {size} bytes")
    except EngineError as error:
        os.write(1, f"{error}\n".encode())
        os._exit(1)
    os.write(1, b"ready\n")
    lanes = [socket.socket(fileno=descriptor) for descriptor in described["lane_fds"]]
    with contextlib.suppress(TransferError):
        Mover(engine, described["segment"], base, size, lanes).run()
    os._exit(0)  # the engine's own end could wait for its peers


if __name__ == "__main__":
    main()
