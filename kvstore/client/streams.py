"""Layer streams: blocks that arrive layer by layer while the caller computes, and blocks that leave in the same way.

A `LayerStream` has one thread of its own, which asks for the layers in order and notes for each of them which blocks
have arrived. The caller waits for a layer when it needs it, and learns which blocks lack it: those, and what follows
them in the prompt, are the caller's to compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore.client.results import Mask, PutResult
from kvstore.core.errors import LayoutMismatch, ProtocolError, StreamClosed, Unavailable, UsageError
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.transport.base import LayerSink, LayerSource, SliceStatus
from kvstore.transport.buffers import Blocks, Region, as_blocks, as_bytes

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

POLL_S = 0.0005  # between looks at blocks that are still being written: a look at shared memory costs 20 us
POLL_S_MAX = 0.002
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where each layer's slices of n blocks lie in the caller's memory.

    Args:
        layers: for each layer, a memory and the offset of each block's slice in it.
    """

    layers: tuple[Blocks, ...]

    def of(self, layer: int, rows: I64) -> Blocks:
        """Slices of some blocks in one layer."""
        return self.layers[layer].take(rows)


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
        blocks = as_blocks(value, count, layers * size, name, dtype, writable=writable)
        assert isinstance(blocks, Region)
        parts = (Region(blocks.memory, blocks.offsets + layer * size, blocks.keep) for layer in range(layers))
        return LayerMemory(tuple(parts))
    buffers = cast("Sequence[object]", value)
    if len(buffers) != layers:
        raise LayoutMismatch(f"{name}: {len(buffers)} buffers for {layers} layers")
    offsets = _slots(slots, count, name) * size
    regions: list[Blocks] = []
    for layer, buffer in enumerate(buffers):
        memory, keep = as_bytes(buffer, f"{name}[{layer}]", dtype, writable=writable)
        if slots is None and len(memory) != count * size:
            raise LayoutMismatch(f"{name}[{layer}]: {len(memory)} bytes for {count} slices of {size} bytes")
        if count and int(offsets.max()) + size > len(memory):
            raise UsageError(
                f"{name}[{layer}]: slot {int(offsets.max()) // size} is outside of its {len(memory) // size} slices"
            )
        regions.append(Region(memory, offsets, keep))
    return LayerMemory(tuple(regions))


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

    Layers are numbered as in the block. `ok` is bool of shape (layers of the stream, blocks): what has arrived so far.
    One thread at a time may wait; `cancel` may come from any.
    """

    def __init__(
        self,
        parts: Sequence[tuple[I64, LayerSource]],
        memory: LayerMemory,
        layers: tuple[int, int],
        count: int,
        *,
        timeout_s: float,
        lost: Callable[[int], None],
    ) -> None:
        self._parts = list(parts)
        self._memory = memory
        self._first, self._end = layers
        self._timeout_s = timeout_s
        self._lost = lost
        self._settled = threading.Condition()
        self._done = 0  # layers of which all is known
        self._stop = False
        self._cancelled = False
        self.ok: Mask = np.zeros((self._end - self._first, count), dtype=np.bool_)
        self.arrived_s: list[float] = []  # time.monotonic of each layer that is settled
        self._thread = threading.Thread(target=self._run, name="kvstore-layers", daemon=True)
        self._thread.start()

    @property
    def layers(self) -> range:
        """The layers of this stream, in their order."""
        return range(self._first, self._end)

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
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._settled:
            if self._cancelled:
                raise StreamClosed("the stream was cancelled: what its layers hold is not known")
            in_time = self._settled.wait_for(lambda: self._done > place or self._stop, limit_s)
        if not in_time:
            self._end_it()
        if self._cancelled:
            raise StreamClosed("the stream was cancelled: what its layers hold is not known")
        return self.ok[place].copy()

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
        for _, source in self._parts:
            source.renew(now_s)

    def _place(self, layer: int) -> int:
        if not self._first <= layer < self._end:
            raise UsageError(f"layer {layer}: this stream has layers {self._first} to {self._end - 1}")
        return layer - self._first

    def _end_it(self) -> None:
        with self._settled:
            self._stop = True
            self._settled.notify_all()
        if self._thread.is_alive():
            for _, source in self._parts:
                source.close(abandon=True)
        self._thread.join(_JOIN_S)

    # --- the stream's own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            readers = [_PartReader(rows, source, self._memory, self._first, self._end) for rows, source in self._parts]
            for place in range(self._end - self._first):
                for number, reader in enumerate(readers):
                    self._read(number, reader, place)
                if self._stop:
                    return
                with self._settled:
                    self.arrived_s.append(time.monotonic())
                    self._done = place + 1
                    self._settled.notify_all()
        finally:
            for _, source in self._parts:
                source.close()
            with self._settled:
                self._stop = True
                self._settled.notify_all()

    def _read(self, number: int, reader: _PartReader, place: int) -> None:
        try:
            while True:
                self.ok[place, reader.read(place, self._timeout_s)] = True
                if self._stop or not reader.pending:
                    return
                reader.pause()
        except (Unavailable, ProtocolError):
            reader.give_up()
            if not self._stop:
                self._lost(number)


class _PartReader:
    """One shard's part of a stream: keeps `depth` requests under way, and asks again for what is not there yet."""

    def __init__(self, rows: I64, source: LayerSource, memory: LayerMemory, first: int, end: int) -> None:
        self._rows = rows  # of the stream
        self._source = source
        self._memory = memory
        self._first, self._layers = first, end - first
        self._alive = np.arange(len(rows))  # rows of the source that are not gone
        self._sent: list[tuple[int, I64]] = []
        self._next = 0  # the layer that is asked for next, as a place
        self._waiting: I64 = self._alive[:0]
        self._pause_s = POLL_S

    @property
    def pending(self) -> bool:
        """Whether blocks lack the layer that was read last, and may still get it."""
        return len(self._waiting) > 0

    def read(self, place: int, timeout_s: float) -> I64:
        """Read a layer, or after a pause what was pending of it: rows of the stream that have arrived."""
        if self.pending:
            self._send(place, self._waiting)
        while self._next < self._layers and len(self._sent) < self._source.depth and not self.pending:
            self._send(self._next, self._alive)
            self._next += 1
        arrived = self._take(place, timeout_s)
        if self.pending:
            self._drain(timeout_s)
            self._next = place + 1
        return arrived

    def pause(self) -> None:
        """Before the next look: a writer moves a word in shared memory, and nothing wakes its readers."""
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, POLL_S_MAX)

    def give_up(self) -> None:
        """No more of this part."""
        self._alive = self._waiting = self._alive[:0]
        self._sent.clear()
        self._next = self._layers

    def _send(self, place: int, rows: I64) -> None:
        self._source.send(self._first + place, rows)
        self._sent.append((place, rows))

    def _drain(self, timeout_s: float) -> None:
        """A layer has to be waited for: take the answers about later ones, which will be asked for again."""
        waiting = self._waiting
        while self._sent:
            self._take(self._sent[0][0], timeout_s)
        self._waiting = waiting[np.isin(waiting, self._alive)]

    def _take(self, place: int, timeout_s: float) -> I64:
        if not self._sent:
            return self._alive[:0]
        asked, rows = self._sent.pop(0)
        assert asked == place
        statuses = self._source.receive(self._memory.of(place, self._rows[rows]), timeout_s)
        gone = rows[statuses == SliceStatus.GONE]
        if len(gone):
            self._alive = self._alive[~np.isin(self._alive, gone)]
        # What lacks a layer stays away, also when somebody has put it again since this was asked for.
        if len(self._alive) < len(self._rows):
            statuses[~np.isin(rows, self._alive)] = SliceStatus.GONE
        self._waiting = rows[statuses == SliceStatus.PENDING]
        if not len(self._waiting):
            self._pause_s = POLL_S
        return self._rows[rows[statuses == SliceStatus.READY]]


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
