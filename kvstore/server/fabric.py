"""A fabric worker. `python -m kvstore.server.fabric`, started by the node where `fabric` is set.

It attaches to one shard like any local client and lets peers read the pool, and write the landing space, by Mooncake's
engine. It decides nothing: who may read what, and when, is settled on the data port. Over TCP it has the pool mapped
read-only, so that a write to it from afar fails in the kernel.

Data port workers ask it, over a local socket, where it is reached. That it answers shows that it is not standing still,
before a client makes the first contact. When its shard goes, it goes too; the node starts it again.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from dataclasses import dataclass

from kvstore.core.errors import KvStoreError
from kvstore.server.children import read_configuration, say_ready
from kvstore.transport.channel import Deadline, Stream
from kvstore.transport.memory import map_segment
from kvstore.transport.mooncake_engine import EngineError, open_engine
from kvstore.transport.shm import SharedShard, connect_local
from kvstore.wire.fabric import FabricInfo
from kvstore.wire.frames import HEADER_BYTES, Op, decode_header, encode

log = logging.getLogger("kvstore")

SHARD_TIMEOUT_S = 20.0  # it may still be starting
QUESTION_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """What the node tells a fabric worker."""

    socket_path: str  # where data port workers ask
    shard_socket: str
    landing_fd: int
    host: str
    protocol: str
    device: str


class FabricWorker:
    """Makes a shard's memory reachable, and tells where.

    Raises:
        EngineError: the engine refuses.
        Unavailable: the shard can't be reached.
    """

    def __init__(self, config: FabricConfig) -> None:
        engine = open_engine(config.host, config.protocol, config.device)
        deadline = Deadline(SHARD_TIMEOUT_S)
        self.channel = connect_local(config.shard_socket, deadline)
        self._shared = shared = SharedShard(self.channel, deadline)
        # A network card can only be given memory that may be written to.
        pool = shared.pool_read_only if config.protocol == "tcp" else shared.pool
        self._landing = landing = map_segment(config.landing_fd, writable=True)
        for name, memory in (("pool", pool), ("landing space", landing)):
            if engine.register_memory(memory.ctypes.data, len(memory)) != 0:
                raise EngineError(f"mooncake can't register the {name} of {len(memory)} bytes")
        segment = f"{config.host}:{engine.get_rpc_port()}"
        self._answer = FabricInfo(config.protocol, segment, pool.ctypes.data, landing.ctypes.data).encode()
        self._engine = engine
        threading.Thread(target=shared.warm_up, args=(threading.Event(),), daemon=True).start()

    def serve(self, listener: socket.socket) -> None:
        """Answer data port workers, for ever."""
        while True:
            sock, _ = listener.accept()
            stream = Stream(sock, "a data port worker")
            try:
                deadline = Deadline(QUESTION_TIMEOUT_S)
                frame = decode_header(bytes(stream.receive(HEADER_BYTES, deadline)))
                if frame.op == Op.FABRIC and not frame.body_bytes:
                    stream.send([encode(Op.FABRIC, frame.request, self._answer)], deadline)
            except KvStoreError as error:
                log.warning("fabric worker: %s", error)
            finally:
                stream.close()


def main() -> None:
    """Entry point of the process."""
    config = FabricConfig(**read_configuration())
    try:
        worker = FabricWorker(config)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(config.socket_path)
        listener.listen(64)
    except (EngineError, KvStoreError, OSError) as error:
        sys.exit(f"error: fabric worker: {error}")
    threading.Thread(target=worker.serve, args=(listener,), daemon=True).start()
    say_ready()
    # Until the node or the shard is gone. Neither says anything before.
    select.select([0, worker.channel.stream.sock], [], [])
    os._exit(0)  # the engine's own end could wait for its peers


if __name__ == "__main__":
    main()
