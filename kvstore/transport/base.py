"""The port between the SDK and a shard, whatever carries the bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.namespace import Namespace
from kvstore.transport.buffers import Blocks
from kvstore.wire.messages import REPORT_FIELDS, U64

Keys = NDArray[np.void]  # KEY_DTYPE, shape (n,)
Mask = NDArray[np.bool_]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Lookup:
    """State and watermark of n keys."""

    states: U8
    layers_ready: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """What one link has moved and met since it was made."""

    lookup_blocks: int = 0
    hit_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    segment_blocks: int = 0  # of those, into device memory from the server's device segment
    lost_races: int = 0  # optimistic reads whose block was evicted meanwhile: read as a miss
    checksum_failures: int = 0  # blocks whose bytes did not match: read as a miss
    written_blocks: int = 0
    written_bytes: int = 0


class LinkMeter:
    """Counts for one link, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {spec.name: 0 for spec in fields(LinkCounters)}
        self._reported = dict(self._counts)

    @property
    def counters(self) -> LinkCounters:
        """The totals so far."""
        with self._lock:
            return LinkCounters(**self._counts)

    def add(self, **amounts: int) -> None:
        """Add to some of the counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def take_report(self) -> bytes:
        """Body of a REPORT: what happened since the last one."""
        with self._lock:
            before, self._reported = self._reported, dict(self._counts)
            return np.array([self._reported[name] - before[name] for name in REPORT_FIELDS], dtype=U64).tobytes()


class HeldBlocks(Protocol):
    """Blocks under a lease."""

    held: Mask  # shape (n,)
    blocks: list[NDArray[np.uint8] | None]  # read-only bytes of each block that is held, None for the others

    def valid(self) -> bool:
        """Whether the lease has held without a gap until now: only then are the bytes read under it the blocks'."""
        ...

    def renew(self, ttl_s: float, timeout_s: float) -> None:
        """Prolong, if it has not run out."""
        ...

    def release(self) -> None:
        """Give back, at the latest with the next `ShardLink.tidy`. Ask `valid` before."""
        ...


class ShardLink(Protocol):
    """One client's way to one shard. Batches only; every call returns within its timeout.

    A call raises `Unavailable` (or `DeadlineExceeded`) when the shard can't be reached in time, and the link is then
    unusable: make a new one. Wrong input raises a `UsageError`. A miss is an answer.
    `kvstore.testing.conformance.LinkConformance` is the suite to pass.
    """

    transport: str
    boot_id: str
    meter: LinkMeter

    @property
    def usable(self) -> bool:
        """False once the shard has gone, been restarted, or a call has failed."""
        ...

    def open(self, namespace: Namespace, timeout_s: float) -> None:
        """Announce the namespace that all later calls are about."""
        ...

    def lookup(self, keys: Keys, timeout_s: float) -> Lookup:
        """Which keys are there. Changes nothing."""
        ...

    def fetch(self, keys: Keys, into: Blocks, layers: tuple[int, int], timeout_s: float) -> Mask:
        """Copy layers [a, b) of each block that has them; which blocks were filled. The rest of `into` is undefined."""
        ...

    def store(self, keys: Keys, blocks: Blocks, timeout_s: float) -> U8:
        """Write whole blocks that nobody has: `PutStatus` of each."""
        ...

    def lease(self, keys: Keys, ttl_s: float, timeout_s: float) -> HeldBlocks:
        """Hold committed blocks for that long."""
        ...

    def delete(self, keys: Keys, timeout_s: float) -> Mask:
        """Remove; which were there."""
        ...

    def pin(self, keys: Keys, on: bool, timeout_s: float) -> Mask:
        """Add or take off a pin; which are there."""
        ...

    def touch(self, keys: Keys, timeout_s: float) -> Mask:
        """Count as used now; which are there."""
        ...

    def tidy(self, timeout_s: float) -> None:
        """Send what was not urgent: leases that were given back. The client's background calls this all the time."""
        ...

    def report(self, timeout_s: float) -> None:
        """Tell the shard what this link did since the last report, for the server's metrics."""
        ...

    def close(self) -> None:
        """End the session: its leases and reservations end too."""
        ...
