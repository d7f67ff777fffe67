"""A client's handle on the process that moves bytes to and from one shard by Mooncake's engine.

One process a peer, because the engine can't be interrupted: its first contact with a peer that stands still takes a
minute, and a transfer that was given up may still write to its buffer later. A process can be killed at any moment;
then nobody writes any more. What it moves lies in memory that it shares with the client, in lanes that belong to one
caller each.

A lane is a socket for transfers and their completions, and a piece of that memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from typing import Any

from kvstore.core.errors import DeadlineExceeded, Unavailable
from kvstore.transport import mooncake_engine

_REAP_S = 5.0


class TransferProcess:
    """See the module. Threads may use different lanes at the same time.

    Args:
        host: this host's address as the peer sees it.
        protocol, device: of the engine.
        segment: the peer's name.
        lanes, lane_bytes: of the memory that is shared with the process.
        timeout_s: for its start.

    Raises:
        Unavailable: it does not start, or not in time.
    """

    def __init__(
        self, host: str, protocol: str, device: str, segment: str, *, lanes: int, lane_bytes: int, timeout_s: float
    ) -> None:
        self._killing = threading.Lock()
        self.peer = segment
        memory_fd = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            os.ftruncate(memory_fd, lanes * lane_bytes)
            self.memory = mmap.mmap(memory_fd, lanes * lane_bytes, flags=mmap.MAP_SHARED)
            pairs += [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
            theirs = [pair[1].fileno() for pair in pairs]
            self._process = subprocess.Popen(
                [sys.executable, "-P", mooncake_engine.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[memory_fd, *theirs],
                bufsize=0,
            )
        except OSError as cause:  # out of descriptors, of memory, of processes
            for pair in pairs:
                pair[0].close()
            raise Unavailable(f"no process for transfers with {segment}: {cause.strerror}") from cause
        finally:
            os.close(memory_fd)
            for _, other in pairs:
                other.close()
        self.sockets = [pair[0] for pair in pairs]
        self._usable = True
        described = {
            "host": host,
            "protocol": protocol,
            "device": device,
            "segment": segment,
            "memory_fd": memory_fd,
            "lane_fds": theirs,
        }
        try:
            self._start(described, timeout_s)
        except BaseException:
            self.kill()
            raise

    @property
    def usable(self) -> bool:
        """Whether it runs."""
        return self._usable

    def kill(self) -> None:
        """End the process. When this returns nobody writes to the memory, and who waits on a lane has been told.
        Idempotent.
        """
        with self._killing:
            self._usable = False
            if self._process.returncode is not None:
                return
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            for lane in self.sockets:
                lane.close()

    def _start(self, described: dict[str, Any], timeout_s: float) -> None:
        out, into = self._process.stdout, self._process.stdin
        assert out is not None
        assert into is not None
        into.write(json.dumps(described).encode() + b"\n")
        if not select.select([out], [], [], timeout_s)[0]:
            raise DeadlineExceeded(f"the process for transfers with {self.peer} did not start within {timeout_s:g} s")
        answer = out.readline().decode(errors="replace").strip()
        if answer != "ready":
            raise Unavailable(answer or f"the process for transfers with {self.peer} ended at its start")
