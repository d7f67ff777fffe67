"""The port between the SDK and a shard, whatever carries the bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.namespace import Namespace
from kvstore.transport.buffers import Blocks, LayerMemory, Region
from kvstore.wire.frames import Op
from kvstore.wire.messages import REPORT_FIELDS, U64, KeyRequest, PartRequest

Keys = NDArray[np.void]  # KEY_DTYPE, shape (n,)
Mask = NDArray[np.bool_]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lookup:
    """State, watermark and tier of n keys."""

    states: U8
    layers_ready: NDArray[np.uint16]
    tiers: U8


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bytes of a block a reader of layers wants: in each of some layers all of them, or those of some heads."""

    first: int
    end: int  # layers [first, end)
    start: int  # of the wanted bytes within a layer
    size: int

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Part:
    """Which bytes of each layer one of several writers of a block has."""

    start: int
    size: int

    @staticmethod
    def reserve(request: KeyRequest, part: Part | None) -> tuple[Op, bytes]:
        """The message that reserves whole blocks, or a part of each."""
        if part is None:
            return Op.RESERVE, request.encode()
        return Op.RESERVE_PART, PartRequest(part.start, part.size, request).encode()


class LayerSource(Protocol):
    """Layers of n blocks on their way into the caller's memory, in order, while the blocks are held.

    One thread at a time calls `advance`, again and again; `renew` and `close` may come from others. Layers are counted
    from the first one that was asked for, and none is written before the memory's `limit` allows it.
    `kvstore.testing.conformance.LayerConformance` is the suite to pass, for sinks too.
    """

    arrived: I64
    """How many layers of each block are in the memory, shape (n,)."""

    settled: int
    """Layers of which all is known: each block has them, or won't get them any more. At the end, all."""

    def advance(self, timeout_s: float, *, soon: bool = True) -> bool:
        """Take one step; False when nothing can be done just now: a writer, the SSD or room in the memory is awaited.

        Args:
            timeout_s: for the shard's answer.
            soon: the next layer is wanted soon. Else the step may be larger, for throughput.

        Raises:
            Unavailable: the shard can't be reached, or not in time. What has arrived by now stays.
        """
        ...

    def fileno(self) -> int:
        """Descriptor that becomes readable when `advance` has something to do; -1 while no peer is waited for."""
        ...

    def renew(self, now_s: float) -> None:
        """Prolong the hold when that is due."""
        ...

    def close(self, *, abandon: bool = False) -> None:
        """Let go of the blocks. When this returns nothing is written to the memory any more. With `abandon` an
        `advance` under way in another thread ends at once, as unavailable.
        """
        ...


class LayerSink(Protocol):
    """Blocks, or a part of each, that are being written layer by layer; readers see each layer from its `write` on, or
    from that of the last one of its parts. One thread uses it.
    """

    statuses: U8  # `PutStatus` of each key, shape (n,): STORED where the block, or our part of it, is ours to write

    def write(self, layer: int, blocks: Region, timeout_s: float) -> None:
        """Write the next layer of the blocks that are ours, `blocks` being just those, and move their watermark.

        Raises:
            Unavailable: the shard can't be reached in time.
        """
        ...

    def commit(self, timeout_s: float) -> Mask:
        """Make them complete; which of them are, shape (n,). A block of parts is when all of them are."""
        ...

    def abort(self, timeout_s: float) -> None:
        """Drop them all, with what others have written of them; no reader is served any more of them."""
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

    def layers(self, keys: Keys, wanted: Wanted, into: LayerMemory, ttl_s: float, timeout_s: float) -> LayerSource:
        """Hold blocks, unfinished ones too, and read some of their layers, in order."""
        ...

    def publish(self, keys: Keys, ttl_s: float, timeout_s: float, part: Part | None = None) -> LayerSink:
        """Reserve what nobody has, to write it layer by layer. After `ttl_s` without a layer it is dropped. With `part`
        others write the rest of each layer, and have to reserve it within `ttl_s` too.
        """
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
