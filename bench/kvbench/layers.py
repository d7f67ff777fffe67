"""`kvbench layers`: does a layer stream hide the transfer behind the compute, and what does it cost itself?

```
kvbench ──┬── kvstore-server   its own processes
          ├── consumer         puts blocks, streams them layer by layer, computes; one thread for matmuls
          └── raw peer         the other end of a plain socket: what bytes cost over tcp without the store
```

Three lists of rows: pipelines of transfer and compute beside the recursion of `kvbench.overlap`; whole streams beside
one `get_into` of the same blocks; and the client's processor time for each layer, with few and with many blocks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbench.consumer import (
    Clear,
    Consumer,
    ConsumerSetup,
    CpuCost,
    Fill,
    MeasureCpu,
    MeasurePipeline,
    MeasureThroughput,
    Pilot,
    Rounds,
)
from kvbench.memory import SharedArena, require_available
from kvbench.overlap import CPU_BLOCKS, CPU_LAYER_BYTES, Compute, LayersPlan, finish_s
from kvbench.plan import Transport
from kvbench.transfer import AskPort, RawPeerSetup
from kvbench.workers import Worker
from kvstore.testing.cluster import ServerProcess

_GIB: Final = 1 << 30
_SERVER_OVERHEAD_BYTES: Final = 256 << 20
_ONE_THREAD: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

Note = Callable[[str], None]
RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One pipeline. Times: medians over rounds."""

    compute: str
    transport: str
    ratio: float  # transfer over compute, as measured
    layers: int
    total_ms: float
    compute_ms: float  # the same without transfer
    transfer_ms: float  # the same without compute
    exposed_ms: float  # total less compute
    predicted_ms: float  # the total that the recursion gives for each round's own transfers and computes
    first_layer_ms: float  # of transfer_ms: lookup and hold, too
    layer_bytes: int
    checked: bool
    samples: int


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """Whole streams beside one `get_into` of the same blocks, in alternation; medians."""

    shape: str
    block_tokens: int
    blocks: int
    transport: str
    get_into_gib_s: float
    stream_gib_s: float
    ratio: float
    checked: bool
    samples: int


@dataclass(frozen=True, slots=True)
class CpuRow:
    """The client's processor time for one layer, with few and with many blocks of as many bytes altogether."""

    transport: str
    blocks: tuple[int, int]
    layer_bytes: int
    cpu_us_per_layer: tuple[float, float]
    bytes_us_per_layer: float  # of it, what the bytes cost without the store
    growth: float  # of what is left without them
    checked: bool


@dataclass(frozen=True, slots=True)
class LayersResult:
    """All rows."""

    pipelines: list[PipelineRow]
    throughputs: list[ThroughputRow]
    cpu: list[CpuRow]


def run_layers(plan: LayersPlan, *, note: Note, step: Note) -> LayersResult:
    """Measure all of it; `step` is called once a row.

    Raises:
        UsageError: the plan does not fit the machine.
        BenchError, KvStoreError: a process died, a block was missing.
    """
    require_available(plan.memory_bytes + _SERVER_OVERHEAD_BYTES, "lower --layer-ms, --ratios or --footprint")
    run_id = f"{os.getpid()}-{secrets.token_hex(8)}"
    with _processes(plan) as consumer:
        note("whole streams")
        throughputs = list(_noted(_measure_throughputs(plan, run_id, consumer), throughput_summary, step))
        cpu = list(_noted(_measure_cpu(plan, run_id, consumer), cpu_summary, step))
        note("pipelines")
        pipelines = list(_noted(_measure_pipelines(plan, run_id, consumer), pipeline_summary, step))
    return LayersResult(pipelines, throughputs, cpu)


def pipeline_summary(row: PipelineRow) -> str:
    """One line about a row."""
    text = (
        f"{row.transport} {row.compute}, ratio {row.ratio:.2f}: {row.total_ms:.1f} ms, "
        f"{row.total_ms / row.predicted_ms:.3f} of the recursion, {row.exposed_ms:.1f} ms exposed"
    )
    return _marked(text, row.checked)


def throughput_summary(row: ThroughputRow) -> str:
    """One line about a row."""
    text = f"{row.transport} {row.shape}, {row.block_tokens} tokens: {row.stream_gib_s:.2f} GiB/s, {row.ratio:.2f} of get_into"
    return _marked(text, row.checked)


def cpu_summary(row: CpuRow) -> str:
    """One line about a row."""
    few, many = row.cpu_us_per_layer
    text = f"{row.transport}: {few:.0f} us a layer with {row.blocks[0]} blocks, {many:.0f} with {row.blocks[1]}"
    return _marked(f"{text}, growth {row.growth:.2f}", row.checked)


@contextmanager
def _processes(plan: LayersPlan) -> Iterator[Worker[Consumer]]:
    """The server, the raw peer and the consumer, all started; in reverse order ended."""
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(dram=str(plan.pool_bytes)))
        server.wait_warm()
        far = SharedArena("kvbench-far", plan.cpu_sets("")[0].total_bytes)
        stack.callback(far.close)
        peer = stack.enter_context(Worker("raw peer", RawPeerSetup(far.path)))
        peer.ready()
        setup = ConsumerSetup(server.address, plan.seed, plan.arena_bytes, far.path, peer.ask(AskPort()))
        with _environment(dict.fromkeys(_ONE_THREAD, "1")):  # is read when numpy is imported
            consumer = stack.enter_context(Worker("consumer", setup))
        consumer.ready()
        yield consumer


def _measure_pipelines(plan: LayersPlan, run_id: str, consumer: Worker[Consumer]) -> Iterator[PipelineRow]:
    blocks = plan.pipeline(run_id)
    consumer.ask(Fill(blocks))
    for transport in plan.transports:
        block_s = consumer.ask(Pilot(transport))
        for compute in plan.computes:
            for ratio in plan.ratios_of(compute):
                count = min(blocks.blocks, max(1, round(plan.transfer_s(ratio) / block_s)))
                rounds = consumer.ask(MeasurePipeline(transport, compute, ratio, count, plan.rounds))
                yield pipeline_row(compute, transport, rounds, layer_bytes=count * blocks.namespace.layer_bytes)
    consumer.ask(Clear())


def pipeline_row(compute: Compute, transport: Transport, rounds: Rounds, *, layer_bytes: int) -> PipelineRow:
    """The row of a pipeline's rounds."""
    transfers = np.diff(rounds.arrivals_s, axis=1, prepend=0.0)
    predicted = [finish_s(*both) for both in zip(transfers.tolist(), rounds.computes_s.tolist(), strict=True)]
    return PipelineRow(
        compute=compute.value,
        transport=transport.value,
        ratio=_median(rounds.transfer_s) / _median(rounds.compute_s),
        layers=rounds.arrivals_s.shape[1],
        total_ms=_median(rounds.total_s) * 1e3,
        compute_ms=_median(rounds.compute_s) * 1e3,
        transfer_ms=_median(rounds.transfer_s) * 1e3,
        exposed_ms=(_median(rounds.total_s) - _median(rounds.compute_s)) * 1e3,
        predicted_ms=_median(predicted) * 1e3,
        first_layer_ms=_median(rounds.first_s) * 1e3,
        layer_bytes=layer_bytes,
        checked=rounds.damaged == 0 and rounds.compared > 0,
        samples=len(rounds.total_s),
    )


def _measure_throughputs(plan: LayersPlan, run_id: str, consumer: Worker[Consumer]) -> Iterator[ThroughputRow]:
    for shape, blocks in plan.throughputs(run_id):
        consumer.ask(Fill(blocks))
        for transport in plan.transports:
            samples, damaged = consumer.ask(MeasureThroughput(transport, plan.seconds))
            gib = blocks.total_bytes / _GIB
            rate, limit = samples.rate(gib), samples.limit_rate(gib)
            assert limit is not None
            yield ThroughputRow(
                shape=shape.model,
                block_tokens=blocks.namespace.block_tokens,
                blocks=blocks.blocks,
                transport=transport.value,
                get_into_gib_s=limit,
                stream_gib_s=rate,
                ratio=rate / limit,
                checked=damaged == 0,
                samples=len(samples.op_s),
            )
        consumer.ask(Clear())


def _measure_cpu(plan: LayersPlan, run_id: str, consumer: Worker[Consumer]) -> Iterator[CpuRow]:
    few, many = plan.cpu_sets(run_id)
    for transport in plan.transports:
        yield cpu_row(transport, consumer.ask(MeasureCpu(few, many, transport)))


def cpu_row(transport: Transport, cost: CpuCost) -> CpuRow:
    """The row of what was measured."""
    few_s, many_s = cost.layer_s
    return CpuRow(
        transport=transport.value,
        blocks=CPU_BLOCKS,
        layer_bytes=CPU_LAYER_BYTES,
        cpu_us_per_layer=(few_s * 1e6, many_s * 1e6),
        bytes_us_per_layer=cost.bytes_s * 1e6,
        growth=(many_s - cost.bytes_s) / (few_s - cost.bytes_s),
        checked=cost.damaged == 0,
    )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _noted(rows: Iterable[RowT], summary: Callable[[RowT], str], step: Note) -> Iterator[RowT]:
    for row in rows:
        step(summary(row))
        yield row


def _median(values: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.median(values))


def _marked(text: str, checked: bool) -> str:
    return text if checked else f"{text}, CONTENT WRONG"
