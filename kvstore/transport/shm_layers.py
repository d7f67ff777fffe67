"""Layers over shared memory: read out of the pool under a lease, written into it under a reservation.

A reader probes once and takes one lease; while the shard grants that, the first layers are copied already. From then on
a layer of a committed block is a copy and a look at the clock; of an unfinished block the index is asked before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import Unavailable
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import U8, Keys, LinkMeter, Mask, Part, Wanted
from kvstore.transport.buffers import LayerMemory, Region
from kvstore.transport.channel import Deadline
from kvstore.transport.copying import CopyPlan, copy_blocks
from kvstore.transport.holding import LayerHold
from kvstore.transport.joint import commit_summed
from kvstore.transport.trailer import read_trailers, sums_of, write_trailers
from kvstore.wire.frames import Op
from kvstore.wire.messages import KeyRequest

if TYPE_CHECKING:
    from kvstore.transport.shm import LocalSession

I64 = NDArray[np.int64]

STEP_BYTES = 1 << 20  # 0.1 to 0.2 ms, of which the step's own cost is 20 us
STEPS_MIN = 5  # of a whole stream, for a caller that only collects: in one copy several small layers run faster
LOOK_S = 0.0005  # between looks at blocks that are still being written: a look at shared memory costs 20 us


@dataclass(slots=True)
class _Cohort:
    """Blocks that have come equally far."""

    rows: I64
    next: int  # layer of the block that is copied next
    ready: int  # layers of the block that can be read
    plan: CopyPlan


class SharedLayerSource:
    """`LayerSource` over shared memory.

    Args:
        session: the link's.
        number: of the namespace on this shard.
        wanted, into: what to read, and where it goes.
        meter: the link's.
        damaged: told of blocks whose bytes do not match their sums; None leaves the sums alone.
    """

    def __init__(
        self,
        session: LocalSession,
        number: int,
        namespace: Namespace,
        keys: Keys,
        wanted: Wanted,
        into: LayerMemory,
        *,
        ttl_s: float,
        timeout_s: float,
        meter: LinkMeter,
        damaged: Callable[[Keys], None] | None = None,
    ) -> None:
        self._session, self._keys, self._namespace = session, keys, namespace
        self._wanted, self._into = wanted, into
        self._timeout_s = timeout_s
        self._meter = meter
        self._damaged = damaged
        self._wrong: list[Keys] = []  # met, but not told yet: the session may be in the middle of a call
        self._hold = LayerHold(session, number, namespace.layers, namespace.block_bytes, keys, ttl_s)
        self._copying = threading.Lock()  # held while the caller's memory is written to, under leases that must last
        self._closed = False
        self._cohorts: list[_Cohort] = []
        self._waiting: I64 = np.zeros(0, dtype=np.int64)  # blocks that a writer or the SSD still works at
        self._look_at_s = 0.0
        self._bytes = len(keys) * wanted.layers * wanted.size
        self.arrived: I64 = np.zeros(len(keys), dtype=np.int64)
        self.settled = 0
        self._begin(Deadline(timeout_s))

    def advance(self, timeout_s: float, *, soon: bool = True) -> bool:
        deadline = Deadline(timeout_s)
        if self._closed:
            raise Unavailable("the stream was given up")
        self._tell_damaged()
        if len(self._waiting) and time.monotonic() >= self._look_at_s:
            self._look(deadline)
        limit = self._limit()
        furthest_behind = min(
            (cohort for cohort in self._cohorts if cohort.next < min(cohort.ready, limit)), key=_next, default=None
        )
        if furthest_behind is not None:
            self._step(furthest_behind, STEP_BYTES if soon else self._bytes // STEPS_MIN)
            self._settle()
        return furthest_behind is not None

    def fileno(self) -> int:
        return -1

    def renew(self, now_s: float) -> None:
        self._hold.renew(now_s)

    def close(self, *, abandon: bool = False) -> None:
        del abandon  # nothing waits here for long
        # A copy that is under way ends under its lease: once that is released, the bytes could be another block's.
        with self._copying:
            self._closed = True
        self._hold.release(Deadline(self._timeout_s))
        with contextlib.suppress(Unavailable):  # the shard is gone, and the blocks with it
            self._tell_damaged()

    def _begin(self, deadline: Deadline) -> None:
        hold = self._hold

        def copy_first() -> None:
            self._group()
            if self._cohorts and self._cohorts[0].ready > self._wanted.first:
                self._step(self._cohorts[0], STEP_BYTES)

        lost = hold.take(np.arange(len(self._keys)), deadline, meanwhile=copy_first)
        self.arrived[lost] = 0
        self._meter.add(lost_races=len(lost))
        if len(lost) or not self._cohorts:
            self._group()
        self._settle()

    def _look(self, deadline: Deadline) -> None:
        """See what writers and the SSD have done meanwhile."""
        hold, rows = self._hold, self._waiting
        before = hold.ready[rows] + hold.gone[rows]
        hold.look(rows, deadline)
        self._look_at_s = time.monotonic() + LOOK_S
        if (hold.ready[rows] + hold.gone[rows] != before).any():
            self._group()

    def _group(self) -> None:
        """Put blocks together that have come equally far, and whose writers have."""
        hold, first, end = self._hold, self._wanted.first, self._wanted.end
        rows = np.flatnonzero((hold.offsets >= 0) & ~hold.gone & (self.arrived < end - first))
        ready = np.minimum(hold.ready[rows], end)
        self._cohorts = []
        stages = self.arrived[rows] * (end + 1) + ready
        one = len(rows) > 0 and bool((stages == stages[0]).all())
        for stage in stages[:1].tolist() if one else np.unique(stages).tolist():
            mine = rows if one else rows[stages == stage]
            plan = CopyPlan(self._into.offsets[mine], hold.offsets[mine])
            self._cohorts.append(_Cohort(mine, first + stage // (end + 1), stage % (end + 1), plan))
        self._waiting = np.flatnonzero((hold.ready < end) & ~hold.gone)
        self._settle()

    def _settle(self) -> None:
        hold = self._hold
        behind = min((cohort.next for cohort in self._cohorts), default=self._wanted.end) - self._wanted.first
        unheld = len(self._waiting) and (hold.offsets[self._waiting] < 0).any()
        self.settled = 0 if unheld else behind

    def _step(self, cohort: _Cohort, step_bytes: int) -> None:
        """Copy some layers of some blocks."""
        wanted, into = self._wanted, self._into
        layer_bytes = self._namespace.layer_bytes
        pool, plan = self._session.shared.pool_read_only, cohort.plan
        each = len(cohort.rows) * wanted.size
        end = min(cohort.ready, self._limit(), cohort.next + max(1, step_bytes // max(1, each)))
        fresh = cohort.next == wanted.first
        with self._copying:
            if self._closed:
                return
            if into.gapless and wanted.size == layer_bytes:
                place = cohort.next - wanted.first
                size = (end - cohort.next) * layer_bytes
                plan.copy(into.memories[place], into.shifts[place], pool, cohort.next * layer_bytes, size, into.copy)
            else:
                for layer in range(cohort.next, end):
                    place, start = layer - wanted.first, layer * layer_bytes + wanted.start
                    plan.copy(into.memories[place], into.shifts[place], pool, start, wanted.size, into.copy)
            wrong = None if self._damaged is None else self._mismatching(cohort.rows, cohort.next, end)
            self._hold.require_valid()
        self._meter.add(read_blocks=len(cohort.rows) * fresh, read_bytes=(end - cohort.next) * each)
        cohort.next = end
        if wrong is not None and wrong.any():
            self._leave_out(cohort, wrong)
        self.arrived[cohort.rows] = end - wanted.first

    def _mismatching(self, rows: I64, first: int, end: int) -> Mask:
        """Which blocks hold bytes that do not match the sums of these layers. Blocks without sums match."""
        namespace, offsets = self._namespace, self._hold.offsets[rows]
        pool, size = self._session.shared.pool_read_only, namespace.layer_bytes
        trailers = read_trailers(pool, offsets, namespace.block_bytes, namespace.layers)
        wrong = np.zeros(len(rows), dtype=np.bool_)
        for place in np.flatnonzero(trailers[:, 0] == self._hold.generations[rows]).tolist():
            start = int(offsets[place])
            # In the pool, where a lease holds them: a range of heads has no sum of its own.
            slices = memoryview(pool[start + first * size : start + end * size])
            wrong[place] = sums_of(slices, size) != trailers[place, 1 + first : 1 + end].tolist()
        return wrong

    def _leave_out(self, cohort: _Cohort, wrong: Mask) -> None:
        rows, cohort.rows = cohort.rows[wrong], cohort.rows[~wrong]
        cohort.plan = CopyPlan(self._into.offsets[cohort.rows], self._hold.offsets[cohort.rows])
        if not len(cohort.rows):
            cohort.next = self._wanted.end
        self._hold.gone[rows] = True
        self._wrong.append(self._keys[rows])
        self._meter.add(checksum_failures=len(rows))

    def _tell_damaged(self) -> None:
        wrong, self._wrong = self._wrong, []
        for keys in wrong:
            assert self._damaged is not None
            self._damaged(keys)

    def _limit(self) -> int:
        """Layer of the block before which the memory may be written."""
        return self._wanted.first + self._into.limit()


def _next(cohort: _Cohort) -> int:
    return cohort.next


class SharedLayerSink:
    """`LayerSink` over shared memory.

    Args:
        session: the link's.
        number: of the namespace on this shard.
        checksums: also write the sums of the layers, with the commit.
        meter: the link's.
        part: of each layer, where others write the rest.
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
        part: Part | None = None,
    ) -> None:
        self._session, self._namespace, self._ttl_s = session, namespace, ttl_s
        self._meter = meter
        self._part = part or Part(0, namespace.layer_bytes)
        self._sums_jointly = checksums and part is not None
        request = KeyRequest(number, keys, ttl_ms=int(ttl_s * 1000), size_bytes=namespace.block_bytes)
        rows = session.reserve(request, Deadline(timeout_s), part)
        self.statuses: U8 = rows["status"].copy()
        self._mine = np.flatnonzero(self.statuses == PutStatus.STORED)
        self._rows = rows[self._mine]
        self._offsets: I64 = self._rows["offset"].astype(np.int64)
        summed = checksums and part is None  # sums are those of whole slices
        self._sums = np.zeros((len(self._mine), namespace.layers), dtype=np.uint64) if summed else None

    def write(self, layer: int, blocks: Region, timeout_s: float) -> None:
        if not len(self._mine):
            return
        size = self._part.size
        starts = self._offsets + (layer * self._namespace.layer_bytes + self._part.start)
        pool = self._session.shared.pool
        with self._session.channel.kept():
            copy_blocks(pool, starts, blocks.memory, blocks.offsets, size)
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
            with self._session.channel.kept():
                write_trailers(self._session.shared.pool, self._offsets, size, self._rows["generation"], self._sums)
        done[self._mine] = self._commit(Deadline(timeout_s))
        written = int(np.count_nonzero(done))
        self._meter.add(written_blocks=written, written_bytes=written * self._namespace.layers * self._part.size)
        return done

    def _commit(self, deadline: Deadline) -> Mask:
        if not self._sums_jointly:
            return self._session.settle(Op.COMMIT, self._rows, deadline)
        layers, layer_bytes = self._namespace.layers, self._namespace.layer_bytes
        return commit_summed(self._session, self._rows, self._offsets, layers, layer_bytes, deadline)

    def abort(self, timeout_s: float) -> None:
        if len(self._mine):
            self._session.settle(Op.ABORT, self._rows, Deadline(timeout_s))
