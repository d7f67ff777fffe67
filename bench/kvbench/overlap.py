"""Transfer behind compute, as pure values: which pipelines `kvbench layers` runs, and when each should finish.

A consumer needs layer l of the cached blocks before it can compute layer l. Both go on at the same time:

    transfer  [ 1 ][ 2 ][ 3 ][ 4 ]                    A(l) = A(l-1) + T_KV(l)              arrival
    compute        [  1  ][  2  ][  3  ][  4  ]       F(l) = max(F(l-1), A(l)) + T_F(l)    finish
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import kvstore
from kvbench.plan import MIB, PAGE_BYTES, SECONDS_MAX, Transport
from kvstore.core.errors import UsageError
from kvstore.core.layout import CanonicalLayout, OpaqueLayout
from kvstore.core.sizes import format_size

DEFAULT_RATIOS: Final = tuple(round(0.1 * 40 ** (step / 19), 3) for step in range(20))  # 0.1 to 4, equal factors apart
_MATMUL_EVERY: Final = 4  # of them, where none are asked for: the processor's own turn is shown, not measured
DEFAULT_LAYERS: Final = 32
DEFAULT_LAYER_MS: Final = 1.0
DEFAULT_ROUNDS: Final = 4
DEFAULT_FOOTPRINT_BYTES: Final = 256 * MIB
DEFAULT_SECONDS: Final = 0.7
CPU_BLOCKS: Final = (16, 512)
CPU_LAYER_BYTES: Final = 256 << 10  # of all blocks together: small, for it is not the bytes that are looked at
RATIO_MIN: Final = 0.01
RATIO_MAX: Final = 100.0
ROUNDS_MAX: Final = 1000
LAYERS_MAX: Final = 256
LAYER_MS_MAX: Final = 1000.0
_FOOTPRINT_BYTES_MAX: Final = 16 << 30
_POOL_BYTES_MIN: Final = 1 << 30  # with smaller chunks a block of 64 tokens of LLaMA-13B, 50 MiB, would not fit
_BYTES_PER_S_MAX: Final = 8 << 30  # of any transport: room is made for so much; a faster one streams fewer bytes


class Compute(StrEnum):
    """What a layer's computing is."""

    SLEEP = "sleep"  # takes no processor, like a GPU's
    MATMUL = "matmul"  # on one thread of the same processor


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of a model: fp16, keys and values."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int

    def namespace(self, block_tokens: int, run_id: str) -> kvstore.Namespace:
        """Blocks of so many tokens, with keys of this run's own."""
        return kvstore.Namespace(
            model=f"kvbench {self.model}",
            revision="1",
            dtype="float16",
            block_tokens=block_tokens,
            layout=CanonicalLayout(self.layers, self.kv_heads, self.head_dim),
            tenant=run_id.encode(),
        )


SMOLLM2: Final = Shape("SmolLM2-135M", 30, 3, 64)
LLAMA_13B: Final = Shape("LLaMA-13B", 40, 40, 128)
_GQA_8B = (8, 128)  # KV heads and head dimension of Llama-3.1-8B


@dataclass(frozen=True, slots=True)
class BlockSet:
    """Blocks that are resident while something is measured over them."""

    namespace: kvstore.Namespace
    blocks: int

    @property
    def total_bytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.namespace.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersPlan:
    """Everything that decides what `kvbench layers` does.

    Args:
        computes, transports: a pipeline is run for each combination, at each ratio.
        ratios: of transfer to compute; 20 from 0.1 to 4 unless given, and every fourth of them for matmul.
        layers: of a pipeline.
        layer_ms: geometric mean of a layer's transfer and its compute: from ratio to ratio both change, by the root.
        rounds: of each pipeline; the row has their medians.
        footprint_bytes: payload of one stream where its throughput is measured, at least one block.
        seconds: wall-clock time for each row of that.
        seed: keys and content follow from it.

    Raises:
        UsageError: a number is out of range.
    """

    computes: tuple[Compute, ...] = tuple(Compute)
    transports: tuple[Transport, ...] = tuple(Transport)
    ratios: tuple[float, ...] | None = None
    layers: int = DEFAULT_LAYERS
    layer_ms: float = DEFAULT_LAYER_MS
    rounds: int = DEFAULT_ROUNDS
    footprint_bytes: int = DEFAULT_FOOTPRINT_BYTES
    seconds: float = DEFAULT_SECONDS
    seed: int = 0

    def __post_init__(self) -> None:
        for ratio in self.ratios or ():
            _require("--ratios", ratio, RATIO_MIN, RATIO_MAX)
        _require("--layers", self.layers, 1, LAYERS_MAX)
        _require("--layer-ms", self.layer_ms, 0.01, LAYER_MS_MAX)
        _require("--rounds", self.rounds, 1, ROUNDS_MAX)
        _require("--seconds", self.seconds, 0.001, SECONDS_MAX)
        if not PAGE_BYTES <= self.footprint_bytes <= _FOOTPRINT_BYTES_MAX:
            raise UsageError(
                f"--footprint: {format_size(self.footprint_bytes)} is out of range; allowed: 4KiB to "
                f"{format_size(_FOOTPRINT_BYTES_MAX)}"
            )

    def ratios_of(self, compute: Compute) -> tuple[float, ...]:
        """The ratios at which pipelines of this kind run."""
        if self.ratios is not None:
            return self.ratios
        return DEFAULT_RATIOS if compute is Compute.SLEEP else DEFAULT_RATIOS[1::_MATMUL_EVERY]

    @property
    def steps(self) -> int:
        """Rows of the run."""
        pipelines = sum(len(self.ratios_of(compute)) for compute in self.computes)
        return len(self.transports) * (pipelines + len(self.throughputs("")) + 1)

    def transfer_s(self, ratio: float) -> float:
        """Wanted time of a layer's transfer."""
        return self.layer_ms / 1000 * math.sqrt(ratio)

    def pipeline(self, run_id: str) -> BlockSet:
        """What pipelines stream: leading blocks of it, as many as take the wanted time."""
        shape = Shape("8B, GQA", self.layers, *_GQA_8B)
        namespace = shape.namespace(16, run_id)
        bytes_max = self.transfer_s(max(self.ratios or DEFAULT_RATIOS)) * _BYTES_PER_S_MAX
        return BlockSet(namespace, max(1, math.ceil(bytes_max / namespace.layer_bytes)))

    def throughputs(self, run_id: str) -> list[tuple[Shape, BlockSet]]:
        """What the throughput of whole streams is measured over."""
        found: list[tuple[Shape, BlockSet]] = []
        for shape in (SMOLLM2, LLAMA_13B):
            for block_tokens in (16, 64):
                namespace = shape.namespace(block_tokens, run_id)
                found.append((shape, BlockSet(namespace, max(1, self.footprint_bytes // namespace.block_bytes))))
        return found

    def cpu_sets(self, run_id: str) -> list[BlockSet]:
        """As many bytes in few and in many blocks."""
        return [_cpu_set(blocks, run_id) for blocks in CPU_BLOCKS]

    @property
    def arena_bytes(self) -> int:
        """What each side of a copy walks through at most."""
        sets = [self.pipeline(""), *(blocks for _, blocks in self.throughputs("")), *self.cpu_sets("")]
        return max(*(blocks.total_bytes for blocks in sets), 4 * self.cpu_sets("")[0].total_bytes)

    @property
    def pool_bytes(self) -> int:
        """DRAM tier of the server: the largest set of blocks, and room for what chunks leave over."""
        return max(self.arena_bytes * 5 // 4 + 256 * MIB, _POOL_BYTES_MIN)

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole run: the server's pool, what was put, what is read, and the limits' source."""
        return self.pool_bytes + 2 * self.arena_bytes + self.cpu_sets("")[0].total_bytes


def _cpu_set(blocks: int, run_id: str) -> BlockSet:
    namespace = kvstore.Namespace(
        model="kvbench cpu",
        revision=str(blocks),
        dtype="uint8",
        block_tokens=16,
        layout=OpaqueLayout("kvbench", DEFAULT_LAYERS, CPU_LAYER_BYTES // blocks),
        tenant=run_id.encode(),
    )
    return BlockSet(namespace, blocks)


def _require(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{flag}: {value:g} is out of range; allowed: {low:g} to {high:g}")


def finish_s(transfer_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """When the last layer is computed, if transfer and compute of different layers never hold each other up.

    Args:
        transfer_s: T_KV of each layer, seconds.
        compute_s: T_F of each layer, seconds.

    With equal layers this is L T_F + T_KV + (L - 1) max(0, T_KV - T_F): only the first layer shows where T_KV <= T_F.
    """
    arrival = finish = 0.0
    for transfer, compute in zip(transfer_s, compute_s, strict=True):
        arrival += transfer
        finish = max(finish, arrival) + compute
    return finish
