"""The consumer of layer streams, inside its own process: it waits for each layer, and computes.

One set of blocks at a time is resident (`Fill` to `Clear`). The commands measure over its leading blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

import kvstore
from kvbench.content import Content
from kvbench.errors import BenchError
from kvbench.limits import SocketLimit
from kvbench.memory import arena, open_shared
from kvbench.overlap import BlockSet, Compute
from kvbench.plan import Transport
from kvbench.sampling import Samples, alternate
from kvstore.core.keys import BlockKeys

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_TIMEOUT_S: Final = 20.0
_SETUP_BYTES: Final = 64 << 20  # of one put
_WHOLE_EVERY: Final = 8  # turns
_PILOTS: Final = 5
_CPU_ROUNDS: Final = 40
_MATRIX: Final = 512  # weights of 1 MiB stay in the processor's cache: computing does not take the transfer's bandwidth
_CALIBRATIONS: Final = 4


@dataclass(frozen=True, slots=True)
class ConsumerSetup:
    """What a consumer needs; picklable.

    Args:
        address: the server's.
        seed: content follows from it.
        arena_bytes: size of the largest set of blocks.
        far_path: shared memory that the raw-socket peer sends from.
        raw_port: where it listens.
    """

    address: str
    seed: int
    arena_bytes: int
    far_path: str
    raw_port: int

    @contextmanager
    def open(self) -> Iterator[Consumer]:
        """The consumer, its clients closed afterwards."""
        consumer = Consumer(self)
        try:
            yield consumer
        finally:
            consumer.leave()


class Consumer:
    """Memory and clients of the process."""

    def __init__(self, setup: ConsumerSetup) -> None:
        self.setup = setup
        self.put = arena(setup.arena_bytes)
        self.read = arena(setup.arena_bytes)
        self.far = open_shared(setup.far_path, writable=True)
        self.scene: Scene | None = None

    def leave(self) -> None:
        """Close the clients of the current set of blocks."""
        if self.scene is not None:
            self.scene.close()
        self.scene = None


class Scene:
    """One set of blocks: what was put, where it is read to, and a client per transport."""

    def __init__(self, consumer: Consumer, blocks: BlockSet, first_byte: int = 0) -> None:
        count, size = blocks.blocks, blocks.namespace.block_bytes
        part = slice(first_byte, first_byte + count * size)
        self._consumer = consumer
        self.namespace = blocks.namespace
        self.content = Content(consumer.setup.seed, size, count)
        self.put = consumer.put[part].reshape(count, size)
        self.rows = consumer.read[part].reshape(count, size)
        self.ids: I64 = np.arange(count, dtype=np.int64)
        self.damaged = 0
        self._clients: dict[Transport, kvstore.Client] = {}
        self.keys: BlockKeys = self.client(Transport.SHM).keys(np.arange(count * blocks.namespace.block_tokens))

    def client(self, transport: Transport) -> kvstore.Client:
        """A connected client that uses this transport only."""
        if transport not in self._clients:
            self._clients[transport] = kvstore.connect(
                self._consumer.setup.address,
                namespace=self.namespace,
                timeout_s=_TIMEOUT_S,
                transport=transport.value,
            )
        return self._clients[transport]

    def fill(self) -> None:
        """Put all blocks."""
        self.content.fill(self.put, self.ids)
        batch = max(1, _SETUP_BYTES // self.namespace.block_bytes)
        for first in range(0, len(self.ids), batch):
            part = slice(first, first + batch)
            stored = self.client(Transport.SHM).put(self.keys[part], self.put[part]).stored
            if stored != len(self.put[part]):
                raise BenchError(f"a put stored {stored} of {len(self.put[part])} blocks")

    def clear(self) -> None:
        """Delete all blocks, and close the clients."""
        self.client(Transport.SHM).delete(self.keys)
        self.close()

    def check(self, count: int, *, whole: bool) -> None:
        """Compare the first `count` blocks that were read, and spoil them."""
        rows = self.rows[:count]
        self.damaged += len(self.content.damaged(rows, self.ids[:count], whole=whole))
        self.content.blot(rows)

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            client.close()


@dataclass(frozen=True, slots=True)
class Fill:
    """Put all blocks of the set, untimed; what was there before is left."""

    blocks: BlockSet

    def run(self, consumer: Consumer, /) -> None:
        consumer.leave()
        consumer.scene = scene = Scene(consumer, self.blocks)
        scene.fill()


@dataclass(frozen=True, slots=True)
class Clear:
    """Delete all blocks of the set."""

    def run(self, consumer: Consumer, /) -> None:
        _scene(consumer).clear()
        consumer.scene = None


@dataclass(frozen=True, slots=True)
class Pilot:
    """Seconds that one more block adds to the transfer of a layer."""

    transport: Transport

    def run(self, consumer: Consumer, /) -> float:
        scene = _scene(consumer)
        count = -(-len(scene.ids) // 2)
        return _layer_s(scene, self.transport, count) / count


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of each round of one pipeline, float64 of shape (rounds,)."""

    total_s: F64
    compute_s: F64
    transfer_s: F64
    first_s: F64  # until the first layer was there, of `transfer_s`
    arrivals_s: F64  # of each layer in the run without compute, shape (rounds, layers)
    computes_s: F64  # each layer's in the run without transfer, shape (rounds, layers)
    damaged: int
    compared: int  # blocks


@dataclass(frozen=True, slots=True)
class MeasurePipeline:
    """The three runs of a pipeline (both, only compute, only transfer) in every round, in changing order."""

    transport: Transport
    compute: Compute
    ratio: float
    blocks: int
    rounds: int

    def run(self, consumer: Consumer, /) -> Rounds:
        scene = _scene(consumer)
        scene.damaged = 0
        compared = _compare_each_layer(scene, self.transport, self.blocks)
        layer_s = _layer_s(scene, self.transport, self.blocks)
        compute = _compute(self.compute, layer_s / self.ratio)
        totals: list[float] = []
        arrivals: list[F64] = []
        transfers: list[float] = []
        computes: list[list[float]] = []

        def both() -> None:
            totals.append(_stream(scene, self.transport, self.blocks, compute)[0])
            scene.check(self.blocks, whole=False)

        def transfer() -> None:
            took, arrived = _stream(scene, self.transport, self.blocks, None)
            transfers.append(took)
            arrivals.append(arrived)
            scene.check(self.blocks, whole=False)

        def alone() -> None:
            computes.append(_layers_alone(compute, scene.namespace.layers))

        for number in range(self.rounds):
            runs: list[Callable[[], None]] = [both, alone, transfer]
            for run in runs[number % 3 :] + runs[: number % 3]:
                run()
        arrivals_s, computes_s = np.array(arrivals), np.array(computes)
        return Rounds(
            total_s=np.array(totals),
            compute_s=computes_s.sum(axis=1),
            transfer_s=np.array(transfers),
            first_s=arrivals_s[:, 0],
            arrivals_s=arrivals_s,
            computes_s=computes_s,
            damaged=scene.damaged,
            compared=compared + 2 * self.rounds * self.blocks,
        )


@dataclass(frozen=True, slots=True)
class MeasureThroughput:
    """A whole stream, each layer waited for in turn, in alternation with one `get_into` of the same blocks."""

    transport: Transport
    seconds: float

    def run(self, consumer: Consumer, /) -> tuple[Samples, int]:
        """Seconds of stream and get_into, and how many blocks were wrong."""
        scene = _scene(consumer)
        scene.damaged = 0
        client, keys, rows = scene.client(self.transport), scene.keys, scene.rows
        scene.content.blot(rows)

        def layered(turn: int) -> float:
            begin = time.perf_counter()
            with client.layer_stream(keys, rows) as stream:
                ok = _each_layer(stream)
            took = time.perf_counter() - begin
            _require_all(ok)
            scene.check(len(rows), whole=turn % _WHOLE_EVERY == 0)
            return took

        def get_into(turn: int) -> float:
            begin = time.perf_counter()
            ok = client.get_into(keys, rows).ok
            took = time.perf_counter() - begin
            _require_all(ok)
            scene.check(len(rows), whole=turn % _WHOLE_EVERY == 0)
            return took

        return alternate(layered, get_into, seconds=self.seconds), scene.damaged


@dataclass(frozen=True, slots=True)
class CpuCost:
    """Processor time of this process, all threads of it; medians. Pairs: with few blocks, with many."""

    layer_s: tuple[float, float]  # of each layer but the first: a stream of all layers less one of a single layer
    bytes_s: float  # of as many bytes moved without the store
    damaged: int


@dataclass(frozen=True, slots=True)
class MeasureCpu:
    """What a layer costs the client's processor with few and with many blocks, and what its bytes alone would."""

    few: BlockSet
    many: BlockSet
    transport: Transport

    def run(self, consumer: Consumer, /) -> CpuCost:
        consumer.leave()
        scenes = [Scene(consumer, self.few), Scene(consumer, self.many, self.few.total_bytes)]
        for scene in scenes:
            scene.fill()
            scene.content.blot(scene.rows)
        layers, size = self.few.namespace.layers, self.few.total_bytes
        streams_s: list[list[float]] = [[], []]
        singles_s: list[list[float]] = [[], []]
        bytes_s: list[float] = []
        with _bytes_alone(consumer, self.transport, size, layers) as alone:
            for number in range(_CPU_ROUNDS):
                for scene, stream_s, single_s in zip(scenes, streams_s, singles_s, strict=True):
                    stream_s.append(_stream_cpu_s(scene, self.transport, layers))
                    scene.check(len(scene.ids), whole=number == 0)
                    single_s.append(_stream_cpu_s(scene, self.transport, 1))
                bytes_s.append(_cpu_s(alone))
        for scene in scenes:
            scene.clear()
        few, many = np.median(streams_s, axis=1) - np.median(singles_s, axis=1)
        each = layers - 1
        damaged = sum(scene.damaged for scene in scenes)
        return CpuCost((float(few) / each, float(many) / each), float(np.median(bytes_s)) / layers, damaged)


def _scene(consumer: Consumer) -> Scene:
    assert consumer.scene is not None, "Fill comes first"
    return consumer.scene


def _stream(scene: Scene, transport: Transport, count: int, compute: Callable[[], object] | None) -> tuple[float, F64]:
    """Seconds until the last layer was there and computed, and when each arrived.

    Without compute only the last layer is waited for: a caller that collects layer after layer is given them in larger
    steps, which is not what happens beside compute.
    """
    keys, rows, client = scene.keys[:count], scene.rows[:count], scene.client(transport)
    begin = time.monotonic()
    with client.layer_stream(keys, rows) as stream:
        ok = stream.wait(stream.layers[-1]) if compute is None else _each_layer(stream, compute)
        end = time.monotonic()
    _require_all(ok)
    return end - begin, np.array(stream.arrived_s) - begin


def _each_layer(stream: kvstore.LayerStream, compute: Callable[[], object] = lambda: None) -> NDArray[np.bool_]:
    """Wait for each layer in turn and compute it; which blocks have the last one, and so all of them."""
    ok = np.zeros(0, dtype=np.bool_)
    for layer in stream.layers:
        ok = stream.wait(layer)
        compute()
    return ok


def _layers_alone(compute: Callable[[], object], layers: int) -> list[float]:
    edges = [time.monotonic()]
    for _ in range(layers):
        compute()
        edges.append(time.monotonic())
    return np.diff(edges).tolist()


def _layer_s(scene: Scene, transport: Transport, count: int) -> float:
    """A layer's transfer, median of a few streams."""
    return (
        float(np.median([_stream(scene, transport, count, None)[0] for _ in range(_PILOTS)])) / scene.namespace.layers
    )


def _compare_each_layer(scene: Scene, transport: Transport, count: int) -> int:
    """Compare every byte of each layer at the moment when `wait` says that it is there."""
    size = scene.namespace.layer_bytes
    rows, expected = scene.rows[:count], scene.put[:count]
    rows[:] = 0
    wrong = np.zeros(count, dtype=np.bool_)
    with scene.client(transport).layer_stream(scene.keys[:count], rows) as stream:
        for layer in stream.layers:
            _require_all(stream.wait(layer))
            part = slice(layer * size, (layer + 1) * size)
            for row in range(count):
                wrong[row] |= not np.array_equal(rows[row, part], expected[row, part])
    scene.damaged += int(np.count_nonzero(wrong))
    scene.content.blot(rows)
    return count


def _compute(kind: Compute, seconds: float) -> Callable[[], object]:
    """One layer's computing."""
    return (lambda: time.sleep(seconds)) if kind is Compute.SLEEP else Matmul(seconds)


class Matmul:
    """Activations times weights, float32 of shapes (rows, 512) and (512, 512), with as many rows as take that long."""

    def __init__(self, seconds: float) -> None:
        random = np.random.default_rng(0)
        self._weights = random.standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
        rows = 128
        self._resize(random, rows)
        for _ in range(_CALIBRATIONS):
            took = float(np.median(_layers_alone(self, 8)))
            rows = max(1, round(rows * seconds / took))
            self._resize(random, rows)

    def __call__(self) -> None:
        np.matmul(self._activations, self._weights, out=self._out)

    def _resize(self, random: np.random.Generator, rows: int) -> None:
        self._activations = random.standard_normal((rows, _MATRIX), dtype=np.float32)
        self._out = np.zeros_like(self._activations)


@contextmanager
def _bytes_alone(consumer: Consumer, transport: Transport, size: int, layers: int) -> Iterator[Callable[[], object]]:
    """Moves so many bytes without the store, a layer at a time: by one copy, or by a plain socket and with one sum."""
    source, target = np.split(consumer.far[:size], layers), np.split(consumer.read[-size:], layers)
    if transport is Transport.SHM:
        yield lambda: [np.copyto(*pair) for pair in zip(target, source, strict=True)]
        return
    limit = SocketLimit(
        consumer.setup.raw_port,
        consumer.read[-size:],
        block_bytes=size,
        blocks=1,
        batch=1,
        connections=1,
        upload=False,
    )

    def receive() -> None:
        limit(0)
        for part in target:
            xxhash.xxh3_64_intdigest(part)

    try:
        yield receive
    finally:
        limit.close()


def _stream_cpu_s(scene: Scene, transport: Transport, layers: int) -> float:
    """Processor seconds of a stream of the first `layers` layers."""
    into = scene.rows.reshape(-1)[: len(scene.ids) * layers * scene.namespace.layer_bytes]

    begin = time.process_time()
    with scene.client(transport).layer_stream(scene.keys, into, layers=(0, layers)) as stream:
        ok = _each_layer(stream)
    took = time.process_time() - begin
    _require_all(ok)
    return took


def _cpu_s(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _require_all(ok: NDArray[np.bool_]) -> None:
    if not ok.all():
        raise BenchError(f"{int(ok.sum())} of {len(ok)} blocks came")
