"""Layer streams: blocks that arrive layer by layer while the caller computes, and blocks that leave in the same way.

The caller waits for a layer when it needs it, and learns which blocks lack it: those, and what follows them in the
prompt, are the caller's to compute. Sources (`kvstore.transport`) move the bytes step by step; a `LayerStream` decides
whose step is next, and who takes it.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore.client.crew import Crew
from kvstore.client.results import Mask, PutResult
from kvstore.core.errors import LayoutMismatch, ProtocolError, StreamClosed, Unavailable, UsageError
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import LayerSink, LayerSource
from kvstore.transport.buffers import LayerMemory, as_bytes
from kvstore.transport.channel import Deadline

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

POLL_S = 0.0005  # between looks for what a writer or the SSD has done
POLL_S_MAX = 0.002
COMPUTES_S = 0.0002  # a caller that stays away for so long between two waits computes meanwhile
RESUME_S = 0.004  # after so long the thread looks whether a caller that only collected does so no more


def layer_memory(
    value: object,
    slots: object,
    *,
    count: int,
    layers: int,
    size: int,
    dtype: str,
    name: str,
    writable: bool,
) -> LayerMemory:
    """What the caller handed in as memory for `layers` layers of `count` blocks, `size` bytes a slice.

    Args:
        value: one buffer that holds block after block, each with its layers; or a sequence of one buffer a layer.
        slots: with one buffer a layer, which slice of it each block has, shape (count,); 0, 1, ... unless given.
        count: blocks.
        layers: of each block.
        size: bytes of a slice.
        dtype: the namespace's.
        name: of the argument, for messages.
        writable: whether it is written to.

    Raises:
        LayoutMismatch: wrong size or dtype, not contiguous, or not one buffer a layer.
        UsageError: no buffer, or slots that reach outside or are named twice.
    """
    if not isinstance(value, (list, tuple)):
        if slots is not None:
            raise UsageError(f"{name}: slots= goes with one buffer a layer")
        memory, keep = as_bytes(value, name, dtype, writable=writable)
        if len(memory) != count * layers * size:
            raise LayoutMismatch(f"{name}: {len(memory)} bytes for {count} blocks of {layers} layers of {size} bytes")
        offsets = np.arange(count, dtype=np.int64) * (layers * size)
        return LayerMemory((memory,) * layers, tuple(range(0, layers * size, size)), offsets, gapless=True, keep=keep)
    buffers = cast("Sequence[object]", value)
    if len(buffers) != layers:
        raise LayoutMismatch(f"{name}: {len(buffers)} buffers for {layers} layers")
    offsets = _slots(slots, count, name) * size
    memories: list[NDArray[np.uint8]] = []
    owners: list[object] = []
    for layer, buffer in enumerate(buffers):
        memory, keep = as_bytes(buffer, f"{name}[{layer}]", dtype, writable=writable)
        if slots is None and len(memory) != count * size:
            raise LayoutMismatch(f"{name}[{layer}]: {len(memory)} bytes for {count} slices of {size} bytes")
        if count and int(offsets.max()) + size > len(memory):
            raise UsageError(
                f"{name}[{layer}]: slot {int(offsets.max()) // size} is outside of its {len(memory) // size} slices"
            )
        memories.append(memory)
        owners.append(keep)
    return LayerMemory(tuple(memories), (0,) * layers, offsets, gapless=False, keep=owners)


def _slots(slots: object, count: int, name: str) -> I64:
    if slots is None:
        return np.arange(count, dtype=np.int64)
    needed = f"{count} different integers from 0 on are needed, one per key"
    try:
        array = np.asarray(slots)
    except (TypeError, ValueError) as cause:
        raise UsageError(f"{name}: slots of {type(slots).__name__}; {needed}") from cause
    if array.shape != (count,) or (count and (array.dtype.kind not in "iu" or int(array.min()) < 0)):
        raise UsageError(f"{name}: slots of shape {array.shape} and dtype {array.dtype}; {needed}")
    if len(np.unique(array)) != count:
        raise UsageError(f"{name}: a slot is named twice; {needed}")
    return array.astype(np.int64)


class LayerStream:
    """Layers on their way into the caller's memory; made by `Client.layer_stream`. A context manager.

    Layers are numbered as in the block. A thread brings them while the caller computes. A caller that waits takes the
    steps itself, so that no layer costs a change of threads.

    One thread at a time may wait; `cancel` may come from any.
    """

    def __init__(
        self,
        parts: Sequence[tuple[I64, LayerSource]],
        layers: tuple[int, int],
        count: int,
        *,
        timeout_s: float,
        lost: Callable[[int], None],
        complete: Callable[[int, float, bool], None],
        crew: Crew,
    ) -> None:
        """Begin.

        Args:
            parts: each shard's rows of the blocks, and what brings them.
            layers: half-open range, as numbered in the block.
            count: of blocks.
            timeout_s: for each step, and for each wait unless that says otherwise.
            lost: called when a shard failed; with the number of the part.
            complete: called when a part has all its blocks: its number, seconds, whether something was awaited.
            crew: runs the steps that nobody waits for.
        """
        self._began_s = time.monotonic()
        self._complete = complete
        self._parts = [_Part(number, rows, source) for number, (rows, source) in enumerate(parts)]
        self._first, self._end = layers
        self._count = count
        self._timeout_s = timeout_s
        self._lost = lost
        self._turn = threading.Lock()  # who has it takes the next step
        self._resume = threading.Condition()  # for the thread, while the caller takes the steps
        self._done = 0  # layers of which all is known
        self._stop = False
        self._cancelled = False
        self._waits = False  # the caller, and takes the steps itself
        self._left_s = 0.0  # when it last returned from a wait
        self.arrived_s: list[float] = []  # time.monotonic of each layer that is settled
        self._collects = False  # the caller has not computed between its last two waits
        for part in self._parts:
            self._note(part)
        crew.run(self._run)

    @property
    def layers(self) -> range:
        """The layers of this stream, in their order."""
        return range(self._first, self._end)

    @property
    def ok(self) -> Mask:
        """What has arrived so far, bool of shape (layers of the stream, blocks)."""
        return self._arrived() > np.arange(self._end - self._first)[:, None]

    def ready(self, layer: int) -> bool:
        """Whether `wait` for this layer would return at once."""
        return self._done > self._place(layer)

    def wait(self, layer: int, timeout_s: float | None = None) -> Mask:
        """Wait for one layer, and only for that: which blocks have it, shape (blocks,).

        A block that is False there won't get this layer or a later one: compute it, and what follows it in the prompt.
        When the time is over the stream is, too: nothing is written to the caller's memory any more.

        Args:
            layer: as numbered in the block.
            timeout_s: the client's unless given.

        Raises:
            StreamClosed: the stream was cancelled or left.
            UsageError: no layer of this stream.
        """
        place = self._place(layer)
        if self._cancelled:
            raise StreamClosed("the stream was cancelled: what its layers hold is not known")
        if self._done <= place and not self._stop:
            deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
            self._work(place, deadline)
            if self._done <= place:
                self._end_it()
        if self._cancelled:
            raise StreamClosed("the stream was cancelled: what its layers hold is not known")
        return self._arrived() > place

    def cancel(self) -> None:
        """Stop. When this returns nothing is written to the caller's memory any more. Idempotent."""
        self._cancelled = True
        self._end_it()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def renew_if_due(self, now_s: float) -> None:
        """Prolong the hold on the blocks. The client's background calls this."""
        for part in self._parts:
            part.source.renew(now_s)

    def _place(self, layer: int) -> int:
        if not self._first <= layer < self._end:
            raise UsageError(f"layer {layer}: this stream has layers {self._first} to {self._end - 1}")
        return layer - self._first

    def _arrived(self) -> I64:
        arrived = np.zeros(self._count, dtype=np.int64)
        for part in self._parts:
            arrived[part.rows] = part.source.arrived
        return arrived

    def _end_it(self) -> None:
        self._stop = True
        self._wake()
        for part in self._parts:
            part.source.close(abandon=part.source.settled < self._end - self._first)

    def _wake(self) -> None:
        with self._resume:
            self._resume.notify_all()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _work(self, place: int, deadline: Deadline) -> None:
        """Take the steps up to this layer."""
        patient = deadline.timeout_s >= self._timeout_s
        self._collects = time.monotonic() - self._left_s < COMPUTES_S
        self._waits = True
        try:
            while self._done <= place and not self._stop:
                left_s = deadline.left_s()
                if left_s <= 0 or not self._turn.acquire(timeout=left_s):
                    return
                try:
                    moved = self._done > place or self._stop or self._step(left_s, patient)
                finally:
                    self._turn.release()
                if not moved:
                    time.sleep(min(POLL_S, left_s))  # a writer moves a word in shared memory, and wakes nobody
        finally:
            self._waits = False
            self._left_s = time.monotonic()
            # A caller that only collects will be back at once. It is not worth waking anybody.
            if not self._collects:
                self._wake()

    # --- moving ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = POLL_S
        try:
            while self._done < self._end - self._first and not self._stop:
                with self._resume:
                    while self._waits and not self._stop:
                        self._resume.wait(RESUME_S)
                with self._turn:
                    moved = self._stop or self._step(self._timeout_s, patient=True)
                if moved:
                    pause_s = POLL_S
                    continue
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_S_MAX)
        finally:
            for part in self._parts:
                part.source.close()
            self._stop = True

    def _step(self, timeout_s: float, patient: bool) -> bool:
        """Move the part that is furthest behind, of those that can be moved; False when there is none."""
        for part in self._movable(timeout_s):
            try:
                moved = part.source.advance(timeout_s, soon=not self._collects)
            except (Unavailable, ProtocolError):
                part.over = True
                # Whoever would not wait as long as the client does has learned nothing about the shard.
                if patient and not self._stop:
                    self._lost(part.number)
                moved = True
            if moved:
                self._note(part)
                return True
            part.waited = True
        return False

    def _movable(self, timeout_s: float) -> list[_Part]:
        """Parts on which a step would not wait, those that are furthest behind first; all if there is but one."""
        layers = self._end - self._first
        open_parts = [part for part in self._parts if not part.over and part.source.settled < layers]
        open_parts.sort(key=lambda part: part.source.settled)
        waiting = {part.source.fileno(): part for part in open_parts if part.source.fileno() >= 0}
        if not waiting or len(open_parts) < 2:
            return open_parts
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        all_wait = len(waiting) == len(open_parts)
        readable = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000 if all_wait else 0)}
        idle = [part for descriptor, part in waiting.items() if descriptor not in readable]
        movable = [part for part in open_parts if part not in idle]
        return movable or open_parts  # nobody in time: the first one will say so

    def _note(self, part: _Part) -> None:
        """Say which layers are settled, now that a part has moved."""
        layers = self._end - self._first
        if part.source.settled == layers and not part.over and (part.source.arrived == layers).all():
            self._complete(part.number, time.monotonic() - self._began_s, part.waited)
        done = min((part.source.settled for part in self._parts if not part.over), default=layers)
        if done <= self._done:
            return
        self.arrived_s += [time.monotonic()] * (done - self._done)
        self._done = done


@dataclass(slots=True)
class _Part:
    """One shard's blocks of a stream."""

    number: int
    rows: I64
    source: LayerSource
    over: bool = False  # the shard was lost
    waited: bool = False  # for a writer, or for the SSD


class PublishStream:
    """Blocks that the caller computes layer by layer; made by `Client.publish_stream`. A context manager.

    Readers see each layer from its `write` on. Without a `commit` the end of the `with` block drops all of it: who has
    attached to these blocks is told that the rest won't come. One thread at a time uses it.
    """

    def __init__(
        self, namespace: Namespace, statuses: U8, parts: Sequence[tuple[I64, LayerSink]], timeout_s: float
    ) -> None:
        self._namespace = namespace
        self._parts = list(parts)
        self._timeout_s = timeout_s
        self._next = 0
        self._open = True
        self.statuses = statuses
        """`PutStatus` of each key, shape (n,): STORED where the block is this stream's to write."""

    @property
    def mine(self) -> I64:
        """Rows of the keys whose blocks this stream writes; others have the rest, or there is no room."""
        return np.flatnonzero(self.statuses == PutStatus.STORED)

    def write(self, layer: int, blocks: object, *, slots: object = None) -> None:
        """Publish one layer of all blocks.

        Args:
            layer: the next one: 0, 1, ...
            blocks: slices of all n keys, in their order, as one contiguous buffer; or with `slots` a paged one.
            slots: which slice of the buffer each block has, shape (n,).

        Raises:
            StreamClosed: committed or aborted.
            UsageError: not the next layer.
            LayoutMismatch: the buffer does not fit; nothing was published.
        """
        self._require_open()
        if layer != self._next or layer >= self._namespace.layers:
            raise UsageError(f"layer {layer}: layers are published in their order, and {self._next} is the next one")
        memory = layer_memory(
            [blocks],
            slots,
            count=len(self.statuses),
            layers=1,
            size=self._namespace.layer_bytes,
            dtype=self._namespace.dtype,
            name="blocks",
            writable=False,
        )
        self._next += 1
        for part in list(self._parts):
            rows, sink = part
            mine = rows[sink.statuses == PutStatus.STORED]
            try:
                sink.write(layer, memory.of(0, mine), self._timeout_s)
            except (Unavailable, ProtocolError):
                self.statuses[rows[sink.statuses == PutStatus.STORED]] = PutStatus.FAILED
                self._parts.remove(part)

    def commit(self) -> PutResult:
        """Make the blocks complete.

        Raises:
            StreamClosed: committed or aborted already.
            UsageError: layers are missing.
        """
        self._require_open()
        if self._next < self._namespace.layers:
            raise UsageError(f"{self._next} of {self._namespace.layers} layers were written: nothing to commit yet")
        self._open = False
        for rows, sink in self._parts:
            wanted = sink.statuses == PutStatus.STORED
            try:
                done = sink.commit(self._timeout_s)
            except (Unavailable, ProtocolError):
                done = np.zeros(len(rows), dtype=np.bool_)
            self.statuses[rows[wanted & ~done]] = PutStatus.FAILED
        stored = int(np.count_nonzero(self.statuses == PutStatus.STORED))
        return PutResult(self.statuses, stored * self._namespace.block_bytes)

    def abort(self) -> None:
        """Drop everything. Idempotent."""
        if not self._open:
            return
        self._open = False
        for _, sink in self._parts:
            try:
                sink.abort(self._timeout_s)
            except (Unavailable, ProtocolError):
                continue  # its session is over, and the reservation with it
        self.statuses[self.statuses == PutStatus.STORED] = PutStatus.FAILED

    def __enter__(self) -> PublishStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._open:
            raise StreamClosed("the stream was committed or aborted")
