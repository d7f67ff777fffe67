"""Layer streams: blocks that arrive layer by layer while the caller computes, and blocks that leave in the same way.

The caller waits for a layer when it needs it, and learns which blocks lack it: those, and what follows them in the
prompt, are the caller's to compute. Sources (`kvstore.transport`) move the bytes step by step; a `LayerStream` decides
whose step is next, and who takes it.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvstore.client.crew import Crew
from kvstore.client.landing import Landing, lifted
from kvstore.client.layer_memory import Shape, device_layers, layer_memory
from kvstore.client.results import Mask, PutResult
from kvstore.client.staging import StagingMemory
from kvstore.core.errors import DeviceError, ProtocolError, StreamClosed, Unavailable, UsageError
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.device.base import COPY_WAIT_S_MIN
from kvstore.transport.base import LayerSink, LayerSource
from kvstore.transport.buffers import LayerMemory
from kvstore.transport.channel import Deadline

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

POLL_S = 0.0005  # between looks for what a writer or the SSD has done
POLL_S_MAX = 0.002
COMPUTES_S = 0.0002  # a caller that stays away for so long between two waits computes meanwhile
RESUME_S = 0.004  # after so long the thread looks whether a caller that only collected does so no more


class LayerStream:
    """Layers on their way into the caller's memory; made by `Client.layer_stream`. A context manager.

    Layers are numbered as in the block. A thread brings them while the caller computes, unless the caller wants to copy
    them itself. A caller that waits takes the steps itself, so that no layer costs a change of threads.

    With layers for a device's memory it is not the host that waits for the device: `wait` returns once the layer's
    copies have been asked for, and what the engine puts on its stream from then on starts after them. That stream is
    the default one, the one that the tensor names, or `stream=` of `Client.layer_stream`.

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
        landing: Landing | None = None,
        ahead: bool = True,
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
            landing: where the layers go on into a device's memory.
            ahead: whether steps are taken that nobody waits for.
        """
        self._began_s = time.monotonic()
        self._complete = complete
        self._parts = [_Part(number, rows, source) for number, (rows, source) in enumerate(parts)]
        self._first, self._end = layers
        self._count = count
        self._timeout_s = timeout_s
        self._lost = lost
        self._landing = landing
        self._turn = threading.Lock()  # who has it takes the next step
        self._resume = threading.Condition()  # for the thread, while the caller takes the steps
        self._done = 0  # layers of which all is known
        self._stop = False
        self._cancelled = False
        self._waits = False  # the caller, and takes the steps itself
        self._left_s = 0.0  # when it last returned from a wait
        self.arrived_s: list[float] = []  # time.monotonic of each layer that is settled
        self._collects = False  # the caller has not computed between its last two waits
        with contextlib.suppress(DeviceError):  # `wait` says so
            self._note()
        for part in self._parts:
            self._tell_if_complete(part)
        if ahead:
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
            DeviceError: the device failed or took too long: it may still be writing to the caller's memory.
        """
        place = self._place(layer)
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        if self._cancelled:
            raise StreamClosed("the stream was cancelled: what its layers hold is not known")
        if self._done <= place and not self._stop:
            self._work(place, deadline)
            if self._done <= place:
                self._end_it(COPY_WAIT_S_MIN)
        if self._cancelled:
            raise StreamClosed("the stream was cancelled: what its layers hold is not known")
        arrived = self._arrived() > place
        if self._landing is not None:
            self._landing.precede(place, max(deadline.left_s(), COPY_WAIT_S_MIN))
        return arrived

    def cancel(self) -> None:
        """Stop. When this returns nothing is written to the caller's memory any more. Idempotent.

        Raises:
            DeviceError: the device failed or took too long: it may still be writing to the caller's memory.
        """
        self._cancelled = True
        self._end_it(max(self._timeout_s, COPY_WAIT_S_MIN))

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second error would hide the first.
        with contextlib.suppress(DeviceError) if kind is not None else contextlib.nullcontext():
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
        """How many layers of each block are in the caller's memory, or will be for the engine's stream."""
        return self._landed() if self._landing is None else self._landing.sent.copy()

    def _landed(self) -> I64:
        """How many layers of each block the sources have brought."""
        arrived = np.zeros(self._count, dtype=np.int64)
        for part in self._parts:
            arrived[part.rows] = part.source.arrived
        return arrived

    def _end_it(self, copies_timeout_s: float) -> None:
        self._stop = True
        self._wake()
        for part in self._parts:
            part.source.close(abandon=part.source.settled < self._end - self._first)
        self._end_landing(copies_timeout_s)

    def _end_landing(self, timeout_s: float) -> None:
        if self._landing is not None:
            self._landing.close(None if self._cancelled else self._landed(), timeout_s)

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
                time.sleep(pause_s)  # nothing wakes who waits for a writer: it moves a word in shared memory
                pause_s = min(2 * pause_s, POLL_S_MAX)
        finally:
            for part in self._parts:
                part.source.close()
            self._stop = True
            with contextlib.suppress(DeviceError):  # `wait` and `cancel` say so
                self._end_landing(max(self._timeout_s, COPY_WAIT_S_MIN))

    def _step(self, timeout_s: float, patient: bool) -> bool:
        """Move something; False when nothing can be moved just now."""
        try:
            if self._landing is not None:
                self._landing.make_room()
            return self._advance(timeout_s, patient)
        except DeviceError:  # `wait` says so
            self._stop = True
            return True

    def _advance(self, timeout_s: float, patient: bool) -> bool:
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
                self._tell_if_complete(part)
                self._note()
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

    def _tell_if_complete(self, part: _Part) -> None:
        layers = self._end - self._first
        if part.source.settled == layers and not part.over and (part.source.arrived == layers).all():
            self._complete(part.number, time.monotonic() - self._began_s, part.waited)

    def _note(self) -> None:
        """Say which layers are settled, once their copies to the device were asked for.

        Raises:
            DeviceError: the device failed.
        """
        layers = self._end - self._first
        done = min((part.source.settled for part in self._parts if not part.over), default=layers)
        if done <= self._done:
            return
        if self._landing is not None:
            self._landing.forward(done, self._landed())
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
    """Blocks, or some heads of them, that the caller computes layer by layer. A context manager; made by
    `Client.publish_stream`.

    Readers see each layer from its `write` on, or once all streams that share a block have written it. Without a
    `commit` the end of the `with` block drops all of it: who has attached to these blocks is told that the rest won't
    come. One thread at a time uses it.
    """

    def __init__(
        self,
        namespace: Namespace,
        statuses: U8,
        parts: Sequence[tuple[I64, LayerSink]],
        size: int,
        timeout_s: float,
        staging: StagingMemory | None,
    ) -> None:
        self._namespace = namespace
        self._size = size  # of a slice, or of our heads in it
        self._staging = staging  # for what lies in a device's memory
        self._parts = list(parts)
        self._timeout_s = timeout_s
        self._next = 0
        self._open = True
        self.statuses = statuses
        """`PutStatus` of each key, shape (n,): STORED where the block, or our heads of it, is ours to write."""

    @property
    def mine(self) -> I64:
        """Rows of the keys whose blocks this stream writes; others have the rest, or there is no room."""
        return np.flatnonzero(self.statuses == PutStatus.STORED)

    def write(self, layer: int, blocks: object, *, slots: object = None) -> None:
        """Publish one layer of all blocks.

        Args:
            layer: the next one: 0, 1, ...
            blocks: slices of all n keys, or our heads of them, in the keys' order, as one contiguous buffer; or with
            `slots` a paged one.
            slots: which slice of the buffer each block has, shape (n,).

        With a device, `blocks` may be a tensor of it. It is read after what is on the default stream by now (or the
        stream that the object names), and has been when this returns.

        Raises:
            StreamClosed: committed or aborted.
            UsageError: not the next layer.
            LayoutMismatch: the buffer does not fit; nothing was published.
            DeviceError: the device failed or took too long; nothing was published.
        """
        self._require_open()
        if layer != self._next or layer >= self._namespace.layers:
            raise UsageError(f"layer {layer}: layers are published in their order, and {self._next} is the next one")
        shape = Shape(len(self.statuses), 1, self._size, self._namespace.dtype)
        with self._in_host_memory(blocks, slots, shape) as memory:
            self._next += 1
            self._write(layer, memory)

    def commit(self) -> PutResult:
        """Make the blocks complete. Where heads were shared, our part of them is: STORED says no more than that, and
        the block is visible once the others have committed theirs.

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
        return PutResult(self.statuses, stored * self._namespace.layers * self._size)

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

    def _in_host_memory(self, blocks: object, slots: object, shape: Shape) -> AbstractContextManager[LayerMemory]:
        if self._staging is not None:
            source = device_layers(
                self._staging.device, [blocks], slots, shape, name="blocks", stream=None, writable=False
            )
            if source is not None:
                return lifted(self._staging, source, self.mine, shape.size, self._timeout_s)
        return contextlib.nullcontext(layer_memory([blocks], slots, shape, name="blocks", writable=False))

    def _write(self, layer: int, memory: LayerMemory) -> None:
        for part in list(self._parts):
            rows, sink = part
            mine = rows[sink.statuses == PutStatus.STORED]
            try:
                sink.write(layer, memory.of(0, mine), self._timeout_s)
            except (Unavailable, ProtocolError):
                self.statuses[rows[sink.statuses == PutStatus.STORED]] = PutStatus.FAILED
                self._parts.remove(part)

    def _require_open(self) -> None:
        if not self._open:
            raise StreamClosed("the stream was committed or aborted")
