"""Blocks into a shard's landing space, and from there into their slots: what puts and publish streams share.

The space of a lane is used by halves: while the server takes blocks out of one, the next ones are written to the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.core.namespace import Namespace
from kvstore.transport.base import Mask
from kvstore.transport.buffers import Blocks, Region
from kvstore.transport.channel import Deadline, Exchange
from kvstore.transport.copying import copy_blocks
from kvstore.transport.mooncake_lanes import Lane
from kvstore.transport.trailer import sums_of
from kvstore.wire.fabric import LANDED_ROW, LandedRequest
from kvstore.wire.frames import Op

I64 = NDArray[np.int64]

HALVES = 2


@dataclass(frozen=True, slots=True)
class _Load:
    """What goes into one half: some layers of some blocks."""

    rows: I64
    first: int
    end: int


class Landing:
    """A lane's way to write. One thread uses it.

    Args:
        lane: connected.
        number: of the namespace on this shard.
    """

    def __init__(self, lane: Lane, number: int, namespace: Namespace) -> None:
        self._lane, self._number, self._namespace = lane, number, namespace
        self._half = min(lane.landing_bytes, len(lane.memory)) // HALVES

    @property
    def has_room(self) -> bool:
        """Whether there is landing space for a layer of a block."""
        return self._half >= self._namespace.layer_bytes

    def land(
        self,
        reserved: NDArray[np.void],
        blocks: Blocks,
        layers: tuple[int, int],
        deadline: Deadline,
        *,
        publish_ttl_s: float | None = None,
    ) -> Mask:
        """Write layers [first, end) of blocks; which of them arrived whole.

        Args:
            reserved: `RESERVE_ROW` of each block, shape (n,).
            blocks: those layers of each.
            layers: half-open range.
            deadline: of all of it.
            publish_ttl_s: readers may see the layers then; the reservation's new time.
        """
        done = np.ones(len(reserved), dtype=np.bool_)
        channel = self._lane.channel
        assert channel is not None, "a lane in use is connected"
        answers: deque[_Load] = deque()
        written: tuple[int, _Load, NDArray[np.uint64], int] | None = None
        with channel.exchange(deadline) as exchange:
            for number, load in enumerate(self._loads(len(reserved), layers)):
                half = number % HALVES
                if len(answers) + (written is not None) == HALVES:
                    self._hear(exchange, answers, done)
                sums = self._fill(half, blocks, load, layers[0])
                if written is not None:
                    self._tell(exchange, written, reserved, publish_ttl_s, answers, deadline)
                size = len(load.rows) * (load.end - load.first) * self._namespace.layer_bytes
                start = half * self._half
                ticket = self._lane.write(start, self._lane.landing + start, size)
                written = ticket, load, sums, start
            if written is not None:
                self._tell(exchange, written, reserved, publish_ttl_s, answers, deadline)
            while answers:
                self._hear(exchange, answers, done)
        return done

    def _loads(self, count: int, layers: tuple[int, int]) -> Iterator[_Load]:
        """As many whole blocks as fit; else block by block as many layers as fit."""
        first, end = layers
        fitting = self._half // self._namespace.layer_bytes
        if end - first <= fitting:
            each = fitting // (end - first)
            for start in range(0, count, each):
                yield _Load(np.arange(start, min(start + each, count)), first, end)
            return
        for row in range(count):
            for layer in range(first, end, fitting):
                yield _Load(np.array([row]), layer, min(layer + fitting, end))

    def _fill(self, half: int, blocks: Blocks, load: _Load, origin: int) -> NDArray[np.uint64]:
        """Copy a load to the lane's memory; its sums, shape (rows, layers)."""
        layer_bytes = self._namespace.layer_bytes
        size = (load.end - load.first) * layer_bytes
        shift = (load.first - origin) * layer_bytes
        memory = self._lane.memory[half * self._half : (half + 1) * self._half]
        places = np.arange(len(load.rows), dtype=np.int64) * size
        if isinstance(blocks, Region):
            copy_blocks(memory, places, blocks.memory, blocks.offsets[load.rows] + shift, size)
        else:
            for place, row in zip(places.tolist(), load.rows.tolist(), strict=True):
                np.copyto(memory[place : place + size], blocks.array(row, shift + size)[shift:])
        sums = sums_of(memoryview(memory)[: len(load.rows) * size], layer_bytes)
        return np.array(sums, dtype=np.uint64).reshape(len(load.rows), -1)

    def _tell(
        self,
        exchange: Exchange,
        written: tuple[int, _Load, NDArray[np.uint64], int],
        reserved: NDArray[np.void],
        publish_ttl_s: float | None,
        answers: deque[_Load],
        deadline: Deadline,
    ) -> None:
        """When a load has been written: have the server take it."""
        ticket, load, sums, start = written
        self._lane.wait(ticket, deadline)
        rows = np.empty(len(load.rows), dtype=LANDED_ROW)
        rows["handle"], rows["generation"] = reserved["handle"][load.rows], reserved["generation"][load.rows]
        size = (load.end - load.first) * self._namespace.layer_bytes
        rows["at"] = start + np.arange(len(rows)) * size
        ttl_ms = 0 if publish_ttl_s is None else max(1, int(publish_ttl_s * 1000))
        layers = (load.first, load.end)
        request = LandedRequest(self._number, layers, rows, sums, publish_ttl_s is not None, ttl_ms)
        exchange.send(Op.LANDED, request.encode())
        answers.append(load)

    def _hear(self, exchange: Exchange, answers: deque[_Load], done: Mask) -> None:
        load = answers.popleft()
        frame, body = exchange.reply()
        if frame.payload_bytes or len(body) != len(load.rows):
            raise ProtocolError(f"an answer of {len(body)} bytes to {len(load.rows)} blocks that have landed")
        done[load.rows] &= np.frombuffer(body, dtype=np.bool_)
