"""The disk worker of one shard. `python -m kvstore.server.tiers.disk.process`, started with `client.start_disk_worker`.

It attaches to the shard's pool by an inherited descriptor, and talks to the shard over an inherited socket. It ends
when its standard input or that socket ends: what is on the way then is finished, within `DRAIN_S`.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.server.children import read_configuration, say_ready
from kvstore.server.tiers.disk.engine import DiskTier
from kvstore.server.tiers.disk.messages import MessageReader, decode_request, encode_answer
from kvstore.transport.memory import map_pool

log = logging.getLogger("kvstore")

TICK_S = 0.1
DRAIN_S = 2.0
READ_BYTES = 1 << 18
BACKLOG_BYTES_MAX = 1 << 20  # of answers that the shard has not taken; more of its requests wait until it does


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """What the shard tells its disk worker."""

    folder: str
    capacity_bytes: int
    pool_fd: int
    link_fd: int
    boot_id: str  # 32 hexadecimal digits


class DiskWorker:
    """Serves one link until it or `control` ends."""

    def __init__(self, link: socket.socket, tier: DiskTier) -> None:
        self._link = link
        self._tier = tier
        self._reader = MessageReader()
        self._backlog = bytearray()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._selector = selectors.DefaultSelector()

    def run(self, control: int) -> None:
        """Serve until `control`, a pipe, or the link is closed.

        Raises:
            ProtocolError: the shard does not speak the protocol.
        """
        self._link.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._tier.fd, selectors.EVENT_READ)
        self._selector.register(self._link, selectors.EVENT_READ)
        while True:
            scanning = self._tier.scanning and not self._backlog
            for key, events in self._selector.select(0 if scanning else TICK_S):
                if key.fileobj == control:
                    if not os.read(control, 4096):
                        return
                elif key.fileobj is self._link and events & selectors.EVENT_READ and not self._receive():
                    return
            self._tier.poll()
            if scanning:
                self._tier.scan_step()
            if not self._send():
                return

    def drain(self) -> None:
        """Finish what is on its way to the disk, for a while."""
        until_s = time.monotonic() + DRAIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._tier.fd, selectors.EVENT_READ)
            while not self._tier.idle and time.monotonic() < until_s:
                selector.select(TICK_S)
                self._tier.poll()
        self._send()

    def _receive(self) -> bool:
        """False at the end of the link."""
        try:
            size = self._link.recv_into(self._buffer)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        for op, request, body in self._reader.feed(self._buffer[:size]):
            self._tier.handle(request, decode_request(op, body))
        return size > 0

    def _send(self) -> bool:
        """Send answers as far as the shard takes them; False at the end of the link."""
        for answer in self._tier.answers():
            self._backlog += encode_answer(answer)
        if self._backlog:
            try:
                del self._backlog[: self._link.send(self._backlog)]
            except BlockingIOError:
                pass
            except ConnectionError:
                return False
        events = selectors.EVENT_WRITE if self._backlog else 0
        if len(self._backlog) < BACKLOG_BYTES_MAX:
            events |= selectors.EVENT_READ
        if self._selector.get_map() and self._selector.get_key(self._link).events != events:
            self._selector.modify(self._link, events)
        return True


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = DiskConfig(**read_configuration())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor per slab
    link = socket.socket(fileno=config.link_fd)
    pool = map_pool(config.pool_fd, writable=True)
    try:
        tier = DiskTier(Path(config.folder), config.capacity_bytes, pool, bytes.fromhex(config.boot_id))
    except ConfigError as error:
        sys.exit(f"kvstore-server: {error}")
    worker = DiskWorker(link, tier)
    say_ready()
    try:
        worker.run(control=0)
    except ProtocolError as error:
        log.error("disk worker: %s", error)
    worker.drain()
    tier.close()
    # Not `sys.exit`: that would wait for threads that hang in the disk.
    os._exit(0)


if __name__ == "__main__":
    main()
