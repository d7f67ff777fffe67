"""The shard's end of the link to its disk worker: submit, and take what has come, without ever waiting.

```
child, link = start_disk_worker(...)
selector.register(link, link.events)      # again when link.events has changed, after any call
link.submit_scan()                        # first of all
number = link.submit_load(rows)           # 0: the queue is full, nothing was sent
for answer in link.drain(): ...           # readable: Scanned, Stored, Loaded, Removed, Flushed, StatsAnswer, Gone
```

Until its answer has come a STORE's slots must not change, and a LOAD's slots are the worker's: a deadline may end the
wait of whoever wanted the block, never the claim on the slot. When the link breaks (`Unavailable`) the worker is gone:
end it with `Child.stop` first, then all slots are the shard's again, and everything unanswered has failed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import Unavailable
from kvstore.server.children import Child
from kvstore.server.eviction.tenants import Quota
from kvstore.server.tiers.disk.messages import (
    BLOCKS_MAX,
    Answer,
    Flush,
    Load,
    Loaded,
    MessageReader,
    Namespace,
    Quotas,
    Remove,
    Request,
    Scan,
    Stats,
    Store,
    Stored,
    decode_answer,
    encode_request,
)

STORE_BYTES_MAX = 256 << 20  # payload of stores without an answer
STORE_SHARE = 0.75  # of the pool, where that is less: these blocks can't be evicted meanwhile, and puts want room
LOAD_BLOCKS_MAX = 16384
_READ_BYTES = 1 << 18
_REQUESTS_MAX = (1 << 32) - 1


def start_disk_worker(
    shard: int, folder: Path, capacity_bytes: int, pool_fd: int, pool_bytes: int, boot_id: str
) -> tuple[Child, DiskLink]:
    """Start the worker of a shard; it is ready when `Child.wait_ready` says so, but requests can be submitted at once.

    Args:
        shard: its number, for people.
        folder: of this shard alone.
        capacity_bytes: bound on what its slab files take.
        pool_fd: the pool's memory, writable.
        pool_bytes: its size.
        boot_id: the shard's, 32 hexadecimal digits.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        configuration = {
            "folder": str(folder),
            "capacity_bytes": capacity_bytes,
            "pool_fd": pool_fd,
            "link_fd": theirs.fileno(),
            "boot_id": boot_id,
        }
        module = "kvstore.server.tiers.disk.process"
        child = Child(f"disk worker {shard}", module, configuration, pass_fds=[pool_fd, theirs.fileno()])
    return child, DiskLink(ours, store_bytes_max=min(STORE_BYTES_MAX, int(pool_bytes * STORE_SHARE)))


class DiskLink:
    """See the module.

    Args:
        sock: one end of a stream socket pair.
        store_bytes_max, load_blocks_max: what may be without an answer; more is refused. Removing never is.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        store_bytes_max: int = STORE_BYTES_MAX,
        load_blocks_max: int = LOAD_BLOCKS_MAX,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = MessageReader()
        self._unsent = bytearray()
        self._last = 0
        self._stores: dict[int, int] = {}  # request: bytes
        self._loads: dict[int, int] = {}  # request: blocks
        self._announced: set[bytes] = set()  # namespaces that the worker has been told of
        self._store_bytes_max, self._load_blocks_max = store_bytes_max, load_blocks_max
        self.store_bytes = 0  # without an answer
        self.load_blocks = 0  # without an answer

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """What to wait for: EVENT_READ, and EVENT_WRITE while something could not be sent."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def submit_quotas(self, quotas: dict[str, Quota]) -> None:
        """What each tenant may have of the SSD from now on."""
        self._submit(Quotas(quotas))

    def submit_store(self, space: Namespace, rows: NDArray[np.void]) -> int:
        """Write committed blocks of one namespace behind: STORE_ROW (n,), prefix order. 0: too many bytes under way."""
        size = len(rows) * space.layers * space.layer_bytes
        alone = not self._stores and len(rows) == 1  # a block that is larger than all that may be under way
        if self.store_bytes + size > self._store_bytes_max and not alone:
            return 0
        assert len(rows) <= BLOCKS_MAX
        if space.digest not in self._announced:
            self._announced.add(space.digest)
            self._submit(space)
        number = self._submit(Store(space.digest, space.layers, space.layer_bytes, rows))
        self._stores[number] = size
        self.store_bytes += size
        return number

    def submit_load(self, rows: NDArray[np.void]) -> int:
        """Read blocks into pool slots: LOAD_ROW (n,). 0: too many blocks under way."""
        if self._loads and self.load_blocks + len(rows) > self._load_blocks_max:
            return 0
        assert len(rows) <= BLOCKS_MAX
        number = self._submit(Load(rows))
        self._loads[number] = len(rows)
        self.load_blocks += len(rows)
        return number

    @property
    def load_room(self) -> int:
        """Blocks whose loading may still be asked for."""
        return max(0, self._load_blocks_max - self.load_blocks)

    def submit_remove(self, generation: int, keys: NDArray[np.void]) -> int:
        """Delete blocks: KEY_DTYPE (n,). `generation` is the next one that the shard will give out."""
        assert len(keys) <= BLOCKS_MAX
        return self._submit(Remove(generation, keys))

    def submit_flush(self, generation: int, digest: bytes) -> int:
        """Delete a namespace; all of them with an empty digest."""
        return self._submit(Flush(generation, digest))

    def submit_scan(self) -> int:
        """Ask what is there. Stores find little room until the scan is complete: ask first of all."""
        return self._submit(Scan())

    def submit_stats(self) -> int:
        """Ask for gauges and counters."""
        return self._submit(Stats())

    def drain(self) -> list[Answer]:
        """Everything that has arrived; also sends what could not be sent before.

        Raises:
            Unavailable: the worker is gone.
            ProtocolError: it sent nonsense.
        """
        self._send()
        answers: list[Answer] = []
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return answers
            except ConnectionError as cause:
                raise Unavailable("the disk worker is gone") from cause
            if not data:
                if answers:
                    return answers  # the next call finds the end again
                raise Unavailable("the disk worker is gone")
            for op, request, body in self._reader.feed(data):
                answer = decode_answer(op, request, body)
                if isinstance(answer, Stored):
                    self.store_bytes -= self._stores.pop(request, 0)
                elif isinstance(answer, Loaded):
                    self.load_blocks -= self._loads.pop(request, 0)
                answers.append(answer)

    def close(self) -> None:
        """Close: a worker that lives finishes what is on its way to the disk and ends."""
        self._sock.close()

    def _submit(self, message: Request) -> int:
        self._last = self._last % _REQUESTS_MAX + 1
        self._unsent += encode_request(self._last, message)
        self._send()
        return self._last

    def _send(self) -> None:
        if not self._unsent:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):  # later, or never: `drain` finds the end
            del self._unsent[: self._sock.send(self._unsent)]
