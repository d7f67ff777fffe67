"""Layers over shared memory: read out of the pool under a lease, written into it under a reservation.

A reader probes once and takes one lease; from then on a layer of a committed block is a copy and a look at the clock.
Of an unfinished block it looks at the watermark before each copy: the lease keeps the slot from being given away, and
what the watermark covers is not written again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LinkMeter, Mask, Part, SliceStatus
from kvstore.transport.buffers import Blocks, Region
from kvstore.transport.channel import Deadline
from kvstore.transport.copying import copy_blocks
from kvstore.transport.trailer import sums_of, write_trailers
from kvstore.wire.frames import Op
from kvstore.wire.messages import KeyRequest

if TYPE_CHECKING:
    from kvstore.transport.shm import LocalSession

I64 = NDArray[np.int64]

_UNHELD = -1
_ALL_LAYERS = 1 << 16  # more than any watermark: only what is committed has them all


class SharedLayerSource:
    """`LayerSource` over shared memory.

    Args:
        session: the link's.
        number: of the namespace on this shard.
        promote: brings keys up from the SSD; run in a thread of its own.
        meter: the link's.
    """

    depth = 1  # a copy is over when the next one begins

    def __init__(
        self,
        session: LocalSession,
        number: int,
        namespace: Namespace,
        keys: Keys,
        part: Part,
        *,
        ttl_s: float,
        timeout_s: float,
        promote: Callable[[Keys], None],
        meter: LinkMeter,
    ) -> None:
        self._session, self._number, self._namespace = session, number, namespace
        self._keys, self._part, self._ttl_s = keys, part, ttl_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of the leases: `renew` and `close` come from other threads
        self._copying = threading.Lock()  # held while the caller's memory is written to, under leases that must last
        self._closed = False
        self._leases: list[int] = []
        self._valid_until_s = float("inf")
        self._renew_at_s = float("inf")
        self._offsets: I64 = np.full(len(keys), _UNHELD, dtype=np.int64)  # of those that are held
        self._generations = np.zeros(len(keys), dtype=np.uint64)
        self._whole = np.zeros(len(keys), dtype=np.bool_)  # held and committed
        self._gone = np.zeros(len(keys), dtype=np.bool_)
        self._meter = meter
        self._counted = np.zeros(len(keys), dtype=np.bool_)  # blocks of which something was read
        self._promotion: threading.Thread | None = None
        self._requests: deque[tuple[int, I64]] = deque()
        cold = self._hold(np.arange(len(keys)), Deadline(timeout_s))
        if len(cold):
            self._promotion = threading.Thread(target=promote, args=(keys[cold],), name="kvstore-promote", daemon=True)
            self._promotion.start()

    def send(self, layer: int, rows: I64) -> None:
        self._requests.append((layer, rows))

    def receive(self, into: Blocks, timeout_s: float) -> U8:
        layer, rows = self._requests.popleft()
        deadline = Deadline(timeout_s)
        if not self._session.channel.usable or time.monotonic() >= self._valid_until_s:
            raise Unavailable(f"{self._session.channel.stream.peer}: the hold on the blocks ended")
        open_rows = rows[~self._whole[rows] & ~self._gone[rows]]
        ready = self._whole[rows]
        if len(open_rows):
            ready |= np.isin(rows, self._advanced(open_rows, layer, deadline))
        at = np.flatnonzero(ready)
        with self._copying:
            if self._closed:
                raise Unavailable("the stream was given up")
            start = layer * self._namespace.layer_bytes + self._part.start
            self._copy_out(into, at, self._offsets[rows[at]] + start)
            if time.monotonic() >= self._valid_until_s:  # it ran out during the copy
                raise Unavailable(f"{self._session.channel.stream.peer}: the hold on the blocks ended")
        self._count(rows[at])
        statuses = np.where(self._gone[rows], SliceStatus.GONE, SliceStatus.PENDING).astype(np.uint8)
        statuses[at] = SliceStatus.READY
        return statuses

    def renew(self, now_s: float) -> None:
        with self._lock:
            if now_s < self._renew_at_s:
                return
            self._renew_at_s = now_s + self._ttl_s / 3
            with contextlib.suppress(Unavailable):
                renewed = [self._session.renew(lease, self._ttl_s, Deadline(self._timeout_s)) for lease in self._leases]
                if all(renewed):
                    self._valid_until_s = now_s + self._ttl_s

    def close(self, *, abandon: bool = False) -> None:
        del abandon  # nothing waits here for long
        # A copy that is under way ends under its lease: once that is released, the bytes could be another block's.
        with self._copying:
            self._closed = True
        with self._lock, contextlib.suppress(Unavailable):
            leases, self._leases = self._leases, []
            self._renew_at_s = float("inf")
            if leases:
                self._session.release(leases, Deadline(self._timeout_s))

    def _hold(self, rows: I64, deadline: Deadline) -> I64:
        """Lease those of the rows that are in the pool, finished or not; the rows whose blocks are on the SSD."""
        probe = self._session.index(deadline).probe(self._keys[rows])
        size = self._namespace.block_bytes
        cold = probe.on_disk(self._number, size)
        there = (probe.states_in(self._number) > 0) & (probe.sizes == size) & ~cold
        self._gone[rows] = ~there & ~cold
        at = np.flatnonzero(there)
        if len(at):
            found = probe.take(at)
            asked_s = time.monotonic()
            lease, held = self._session.lease(found, self._ttl_s, deadline)
            with self._lock:
                self._leases.append(lease)
                if self._closed:  # meanwhile; `close` has released what was there
                    self._session.release([self._leases.pop()], deadline)
                    raise Unavailable("the stream was given up")
                self._valid_until_s = min(self._valid_until_s, asked_s + self._ttl_s)
                self._renew_at_s = min(self._renew_at_s, asked_s + self._ttl_s / 3)
            mine = rows[at[held]]
            self._offsets[mine] = found.offsets[held]
            self._generations[mine] = found.generations[held]
            self._whole[mine] = found.take(np.flatnonzero(held)).readable(self._number, _ALL_LAYERS, size)
            self._gone[rows[at[~held]]] = True
            self._session.shared.note_use(found.handles)
        return rows[cold]

    def _advanced(self, rows: I64, layer: int, deadline: Deadline) -> I64:
        """Those of the unfinished rows whose writers have passed this layer by now; what is gone is noted."""
        unheld = rows[self._offsets[rows] == _UNHELD]
        if len(unheld):
            over = self._promotion is None or not self._promotion.is_alive()
            cold = self._hold(unheld, deadline)
            if over:
                self._gone[cold] = True  # it could not be brought back
        held = rows[(self._offsets[rows] != _UNHELD) & ~self._gone[rows]]
        if not len(held):
            return held
        probe = self._session.index(deadline).probe(self._keys[held])
        same = probe.generations == self._generations[held]
        self._gone[held[~same]] = True  # aborted, deleted, or another one by now
        size = self._namespace.block_bytes
        self._whole[held] = same & probe.readable(self._number, _ALL_LAYERS, size)
        return held[same & probe.readable(self._number, layer + 1, size)]

    def _count(self, rows: I64) -> None:
        fresh = int(np.count_nonzero(~self._counted[rows]))
        self._counted[rows] = True
        self._meter.add(read_blocks=fresh, read_bytes=len(rows) * self._part.size)

    def _copy_out(self, into: Blocks, at: I64, starts: I64) -> None:
        pool, size = self._session.shared.pool_read_only, self._part.size
        if isinstance(into, Region):
            copy_blocks(into.memory, into.offsets[at], pool, starts, size)
            return
        for row, start in zip(at.tolist(), starts.tolist(), strict=True):
            np.copyto(into.array(row, size), pool[start : start + size])


class SharedLayerSink:
    """`LayerSink` over shared memory.

    Args:
        session: the link's.
        number: of the namespace on this shard.
        checksums: also write the sums of the layers, with the commit.
        meter: the link's.
    """

    def __init__(
        self,
        session: LocalSession,
        number: int,
        namespace: Namespace,
        keys: Keys,
        *,
        ttl_s: float,
        timeout_s: float,
        checksums: bool,
        meter: LinkMeter,
    ) -> None:
        self._session, self._number, self._namespace, self._ttl_s = session, number, namespace, ttl_s
        self._meter = meter
        request = KeyRequest(number, keys, ttl_ms=int(ttl_s * 1000), size_bytes=namespace.block_bytes)
        rows = session.reserve(request, Deadline(timeout_s))
        self.statuses: U8 = rows["status"].copy()
        self._mine = np.flatnonzero(self.statuses == PutStatus.STORED)
        self._rows = rows[self._mine]
        self._offsets: I64 = self._rows["offset"].astype(np.int64)
        self._sums = np.zeros((len(self._mine), namespace.layers), dtype=np.uint64) if checksums else None

    def write(self, layer: int, blocks: Blocks, timeout_s: float) -> None:
        if not len(self._mine):
            return
        size = self._namespace.layer_bytes
        starts = self._offsets + layer * size
        pool = self._session.shared.pool
        if isinstance(blocks, Region):
            copy_blocks(pool, starts, blocks.memory, blocks.offsets, size)
        else:
            for row, start in enumerate(starts.tolist()):
                np.copyto(pool[start : start + size], blocks.array(row, size))
        if self._sums is not None:
            for row in range(len(self._mine)):
                self._sums[row, layer] = sums_of(blocks.piece(row, size), size)[0]
        self._session.publish(self._rows, layer + 1, self._ttl_s, Deadline(timeout_s))

    def commit(self, timeout_s: float) -> Mask:
        done = np.zeros(len(self.statuses), dtype=np.bool_)
        if not len(self._mine):
            return done
        if self._sums is not None:
            size = self._namespace.block_bytes
            write_trailers(self._session.shared.pool, self._offsets, size, self._rows["generation"], self._sums)
        done[self._mine] = self._session.settle(Op.COMMIT, self._rows, Deadline(timeout_s))
        written = int(np.count_nonzero(done))
        self._meter.add(written_blocks=written, written_bytes=written * self._namespace.block_bytes)
        return done

    def abort(self, timeout_s: float) -> None:
        if len(self._mine):
            self._session.settle(Op.ABORT, self._rows, Deadline(timeout_s))
