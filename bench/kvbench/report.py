"""The result as JSON and as one table.

Every JSON file says what was run, with which versions, on which machine, from which seed and commit, and whether the
content was checked, so that a number can be traced and run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.disk import DiskRow
from kvbench.engine_rows import LOGPROB_DIFF_MAX, EngineRatio, EngineResult, EngineRow
from kvbench.index import IndexResult, IndexRow
from kvbench.layers import CpuRow, LayersResult, PipelineRow, ThroughputRow
from kvbench.memory import memory_bytes
from kvbench.plan import Op
from kvbench.replay import ReplayRow
from kvbench.restart import RestartRow
from kvbench.scale import EvictionRow, MemoryRow, ScaleResult
from kvbench.transfer import TransferRow, limit_name
from kvstore.core.errors import UsageError
from kvstore.core.sizes import format_size

_ABSENT = "-"
HIDDEN_RATIO = 0.9  # of transfer to compute, up to which a stream should hide all but its first layer


def transfer_json(rows: Sequence[TransferRow], arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a transfer run."""
    checked = bool(rows) and all(row.checked for row in rows)
    return {
        **envelope("kvbench transfer", arguments, seed, checked=checked),
        "limits": {
            "shm": "one thread's numpy.copyto of as many blocks of the same size through as many bytes",
            "tcp": "plain loopback sockets to another process: as many bytes and connections",
        },
        "rows": [asdict(row) for row in rows],
    }


def index_json(result: IndexResult, arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of an index run."""
    checked = bool(result.rows) and all(row.checked for row in result.rows)
    return {
        **envelope("kvbench index", arguments, seed, checked=checked),
        "limits": {"index": "one numpy.take of as many random entries of the same table"},
        "resident_keys": result.resident_keys,
        "bytes_per_entry": result.bytes_per_entry,
        "rows": [asdict(row) for row in result.rows],
    }


def disk_json(rows: Sequence[DiskRow], arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a disk run."""
    checked = bool(rows) and all(row.checked for row in rows)
    return {
        **envelope("kvbench disk", arguments, seed, checked=checked),
        "limits": {
            "direct I/O": "one read or write per block of as many blocks of the same size in a preallocated file with "
            "O_DIRECT, several threads, synced after the writes of a turn",
            "plain I/O": "the same on a file system without O_DIRECT: the page cache is in it",
            "memcpy": "of warm reads: one thread's numpy.copyto of as many blocks of the same size",
        },
        "rows": [asdict(row) for row in rows],
    }


def scale_json(result: ScaleResult, arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a scale run."""
    rows = [*result.eviction, *result.memory]
    return {
        **envelope("kvbench scale", arguments, seed, checked=bool(rows) and all(row.checked for row in rows)),
        "limits": {"eviction": "the same on the small shard, in alternation", "memory": "payload, as large as it is"},
        "rows": [asdict(row) for row in result.eviction],
        "memory": [asdict(row) for row in result.memory],
    }


def restart_json(row: RestartRow, arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a restart."""
    return {**envelope("kvbench disk", arguments, seed, checked=row.checked), "rows": [asdict(row)]}


def replay_json(rows: Sequence[ReplayRow], arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a replay."""
    checked = bool(rows) and all(row.checked for row in rows)
    return {
        **envelope("kvbench replay", arguments, seed, checked=checked),
        "limits": {
            "limit_hit_rate": "prefix hit rate of a cache that forgets nothing, computed from the trace",
            "read_limit_p50_us": "one numpy.copyto of as many bytes as each read",
        },
        "rows": [asdict(row) for row in rows],
    }


def layers_json(result: LayersResult, arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a run over layer streams."""
    rows = [*result.pipelines, *result.throughputs, *result.cpu]
    return {
        **envelope("kvbench layers", arguments, seed, checked=bool(rows) and all(row.checked for row in rows)),
        "limits": {
            "predicted_ms": "F(l) = max(F(l-1), A(l)) + T_F(l), A(l) = A(l-1) + T_KV(l), from the transfers and the "
            "computes that each round has measured apart",
            "get_into_gib_s": "one get_into of the same blocks, in alternation",
            "bytes_us_per_layer": "one numpy.copyto of as many bytes, or their way through a plain socket and one "
            "xxh3-64 of them",
        },
        "rows": [asdict(row) for row in result.pipelines],
        "throughput": [asdict(row) for row in result.throughputs],
        "cpu": [asdict(row) for row in result.cpu],
    }


def engine_json(result: EngineResult, arguments: Mapping[str, object], *, seed: int) -> dict[str, Any]:
    """The JSON value of a run through engines."""
    value = envelope("kvbench engine", arguments, seed, checked=result.checked)
    value["versions"] = {**value["versions"], "engine": result.versions}
    return {
        **value,
        "limits": {
            "hit": "median time to the first token of full hits, over another mode's",
            "pair": "each hit over the next one in the same engine's own prefix cache, of the same prompt: the median",
            "saving": "median time to the first token of the engine that saves, over that of one without a connector",
            "lookup": "milliseconds of the scheduler's loop for a prompt that is all there, in blocks of 16 tokens",
            "in_process_ms": "a hit in the same engine's own prefix cache, right after each hit",
            "checked": f"float32: the cold run's tokens and, within {LOGPROB_DIFF_MAX}, its log-probabilities; other "
            "dtypes: the tokens of a hit in an engine's own prefix cache",
        },
        "rows": [asdict(row) for row in result.rows],
        "ratios": [asdict(ratio) for ratio in result.ratios],
        "lookup": None if result.lookup is None else asdict(result.lookup),
    }


def require_writable(flag: str, path: Path) -> None:
    """Find out before the run, not after it, that a result can't be written.

    Raises:
        UsageError: naming flag and path.
    """
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}; allowed: a file in an existing folder")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {path}: can't be written; allowed: a file this user may write")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write the value, readable and with a line end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def print_transfer(rows: Sequence[TransferRow]) -> None:
    """Print the table, then the headline numbers."""
    head = ("op", "transport", "block", "batch", "GiB/s", "p50 us", "p99 us", "limit GiB/s", "of limit", "content")
    print_table(head, [_transfer_cells(row) for row in rows])
    for line in transfer_headlines(rows):
        print(line)


def print_index(result: IndexResult) -> None:
    """Print the table, then the headline numbers."""
    head = ("batch", "M keys/s", "p50 us", "p99 us", "limit M keys/s", "of limit", "answers")
    print_table(head, [_index_cells(row) for row in result.rows])
    for line in index_headlines(result):
        print(line)


def print_disk(rows: Sequence[DiskRow]) -> None:
    """Print the table, then the headline numbers."""
    head = ("op", "block", "batch", "GiB/s", "p50 us", "p99 us", "limit GiB/s", "of limit", "limit", "content")
    print_table(head, [_disk_cells(row) for row in rows])
    for line in disk_headlines(rows):
        print(line)


def print_scale(result: ScaleResult) -> None:
    """Print both tables."""
    head = ("policy", "blocks", "us per evicted block", "of small", "evicted", "content")
    print_table(head, [_eviction_cells(row) for row in result.eviction])
    head = ("policy", "blocks", "bytes per block", "put us per block", "content")
    print_table(head, [_memory_cells(row) for row in result.memory])


def print_replay(rows: Sequence[ReplayRow]) -> None:
    """Print the table, then the headline numbers."""
    head = (
        "policy",
        "blocks",
        "hit rate",
        "of limit",
        "from SSD",
        "saved tokens",
        "lookup p50 us",
        "p99 us",
        "read p50 us",
        "p99 us",
        "evicted",
        "content",
    )
    print_table(head, [_replay_cells(row) for row in rows])
    for line in replay_headlines(rows):
        print(line)


def print_layers(result: LayersResult) -> None:
    """Print the tables, then the headline numbers."""
    head = ("model", "tokens", "blocks", "transport", "get_into GiB/s", "stream GiB/s", "of get_into", "content")
    print_table(head, [_throughput_cells(row) for row in result.throughputs])
    head = ("transport", "blocks", "CPU us a layer", "of it bytes", "growth", "content")
    print_table(head, [_cpu_cells(row) for row in result.cpu])
    head = (
        "compute",
        "transport",
        "ratio",
        "layers",
        "total ms",
        "compute ms",
        "transfer ms",
        "exposed ms",
        "predicted ms",
        "of predicted",
        "content",
    )
    print_table(head, [_pipeline_cells(row) for row in result.pipelines])
    for line in layers_headlines(result):
        print(line)


def print_engine(result: EngineResult) -> None:
    """Print the rows, then what they are beside each other."""
    head = ("dtype", "mode", "hit tokens", "TTFT ms", "min", "max", "own cache ms", "tokens/s", "MB", "saving ms")
    head = (*head, "CPU s", "store CPU s", "logprob diff", "equal", "content")
    print_table(head, [_engine_cells(row) for row in result.rows])
    head = ("dtype", "what", "mode", "over", "ratio", "at most", "reached")
    if result.ratios:
        print_table(head, [_ratio_cells(ratio) for ratio in result.ratios])
    if result.lookup is not None:
        cost = result.lookup
        print(
            f"a lookup of {cost.prompt_tokens:,} tokens costs the scheduler {cost.p50_ms:.2f} ms (p50), "
            f"{cost.p99_ms:.2f} ms (p99)"
        )
    for row in result.rows:
        if row.reason is not None:
            print(f"{row.dtype} {row.mode}: {row.reason}")


def layers_headlines(result: LayersResult) -> list[str]:
    """What to remember of each kind of pipeline: how far it is from the recursion, and what it leaves exposed."""
    lines: list[str] = []
    for kind in dict.fromkeys((row.transport, row.compute) for row in result.pipelines):
        rows = [row for row in result.pipelines if (row.transport, row.compute) == kind]
        apart = [abs(row.total_ms / row.predicted_ms - 1) for row in rows]
        line = (
            f"{' '.join(kind)}: {max(apart):.1%} from the recursion at most, {sorted(apart)[len(rows) // 2]:.1%} median"
        )
        hidden = [(row.exposed_ms - row.first_layer_ms) / row.transfer_ms for row in rows if row.ratio <= HIDDEN_RATIO]
        if hidden:
            line += f"; at ratios up to {HIDDEN_RATIO} the first layer and {max(hidden):.1%} of the transfer exposed at most"
        lines.append(line)
    return lines


def disk_headlines(rows: Sequence[DiskRow]) -> list[str]:
    """The two numbers to remember: writes and cold reads of the smallest blocks."""
    best = {row.op: row for row in sorted(rows, key=lambda row: row.block_bytes, reverse=True)}
    return [
        f"{op} {format_size(row.block_bytes)} x {row.batch}: {row.gib_s:.2f} GiB/s, {row.ratio_to_limit:.2f} of {row.limit}"
        for op, row in best.items()
        if op in ("write", "read_cold")
    ]


def replay_headlines(rows: Sequence[ReplayRow]) -> list[str]:
    """The number to remember for each policy: its mean hit rate, of the capacities that don't hold everything."""
    lines: list[str] = []
    for policy in dict.fromkeys(row.policy for row in rows):
        bounded = [row for row in rows if row.policy == policy and not row.unlimited]
        if bounded:
            mean = sum(row.hit_rate_blocks for row in bounded) / len(bounded)
            lines.append(f"{bounded[0].trace}, {policy}: {mean:.4f} of blocks hit, mean of {len(bounded)} capacities")
    limits = dict.fromkeys((row.trace, row.limit_hit_rate) for row in rows)
    return [*lines, *(f"{trace}: {limit:.4f} with a cache that forgets nothing" for trace, limit in limits)]


def transfer_headlines(rows: Sequence[TransferRow]) -> list[str]:
    """The two numbers to remember: one large get_into per transport, 1 MiB x 64 where it was measured."""
    lines: list[str] = []
    for transport in dict.fromkeys(row.transport for row in rows):
        reads = [row for row in rows if row.transport == transport and row.op == Op.GET_INTO]
        if not reads:
            continue
        best = min(reads, key=lambda row: (abs(row.batch - 64), abs(row.block_bytes - (1 << 20))))
        line = f"{transport} get_into {format_size(best.block_bytes)} x {best.batch}: {best.gib_s:.2f} GiB/s"
        if best.ratio_to_limit is not None:
            line += f", {best.ratio_to_limit:.2f} of {limit_name(transport)}"
        lines.append(line)
    return lines


def index_headlines(result: IndexResult) -> list[str]:
    """The two numbers to remember: keys a second in the largest batch, bytes an entry."""
    best = max(result.rows, key=lambda row: row.batch)
    return [
        f"index of {result.resident_keys:,} keys, batch {best.batch:,}: {best.keys_per_s / 1e6:.1f} M keys/s",
        f"{result.bytes_per_entry:.1f} bytes an entry",
    ]


def envelope(command: str, arguments: Mapping[str, object], seed: int, *, checked: bool) -> dict[str, Any]:
    """What every JSON file says of its run."""
    return {
        "command": command,
        "arguments": dict(arguments),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kvstore-llm": _own_version(),
            "kernel": platform.release(),
        },
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory_bytes("MemTotal"),
            "l3_bytes": _l3_bytes(),
        },
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "checked": checked,
    }


def _own_version() -> str | None:
    try:
        return metadata.version("kvstore-llm")
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _l3_bytes() -> int | None:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text.removesuffix("K")) << 10


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` if files differ; None outside of one."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _transfer_cells(row: TransferRow) -> tuple[str, ...]:
    return (
        row.op,
        row.transport,
        format_size(row.block_bytes),
        str(row.batch),
        "no copy" if row.op == Op.VIEW else f"{row.gib_s:.2f}",
        f"{row.p50_us:,.0f}",
        f"{row.p99_us:,.0f}",
        _ABSENT if row.limit_gib_s is None else f"{row.limit_gib_s:.2f}",
        _ABSENT if row.ratio_to_limit is None else f"{row.ratio_to_limit:.2f}",
        "checked" if row.checked else "WRONG",
    )


def _index_cells(row: IndexRow) -> tuple[str, ...]:
    return (
        f"{row.batch:,}",
        f"{row.keys_per_s / 1e6:.2f}",
        f"{row.p50_us:,.1f}",
        f"{row.p99_us:,.1f}",
        f"{row.limit_keys_per_s / 1e6:.2f}",
        f"{row.ratio_to_limit:.2f}",
        "checked" if row.checked else "WRONG",
    )


def _disk_cells(row: DiskRow) -> tuple[str, ...]:
    return (
        row.op,
        format_size(row.block_bytes),
        str(row.batch),
        f"{row.gib_s:.2f}",
        f"{row.p50_us:,.0f}",
        f"{row.p99_us:,.0f}",
        f"{row.limit_gib_s:.2f}",
        f"{row.ratio_to_limit:.2f}",
        row.limit,
        "checked" if row.checked else "WRONG",
    )


def _eviction_cells(row: EvictionRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.blocks:,}",
        f"{row.evict_us_per_block:.2f}",
        f"{row.ratio_to_small:.2f}",
        f"{row.evicted:,}",
        "checked" if row.checked else "WRONG",
    )


def _memory_cells(row: MemoryRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.blocks:,}",
        f"{row.bytes_per_block:.0f}",
        f"{row.put_us_per_block:.1f}",
        "checked" if row.checked else "WRONG",
    )


def _pipeline_cells(row: PipelineRow) -> tuple[str, ...]:
    return (
        row.compute,
        row.transport,
        f"{row.ratio:.2f}",
        str(row.layers),
        f"{row.total_ms:.1f}",
        f"{row.compute_ms:.1f}",
        f"{row.transfer_ms:.1f}",
        f"{row.exposed_ms:.1f}",
        f"{row.predicted_ms:.1f}",
        f"{row.total_ms / row.predicted_ms:.3f}",
        "checked" if row.checked else "WRONG",
    )


def _throughput_cells(row: ThroughputRow) -> tuple[str, ...]:
    return (
        row.shape,
        str(row.block_tokens),
        f"{row.blocks:,}",
        row.transport,
        f"{row.get_into_gib_s:.2f}",
        f"{row.stream_gib_s:.2f}",
        f"{row.ratio:.2f}",
        "checked" if row.checked else "WRONG",
    )


def _cpu_cells(row: CpuRow) -> tuple[str, ...]:
    return (
        row.transport,
        " to ".join(map(str, row.blocks)),
        " to ".join(f"{us:.0f}" for us in row.cpu_us_per_layer),
        f"{row.bytes_us_per_layer:.0f}",
        f"{row.growth:.2f}",
        "checked" if row.checked else "WRONG",
    )


def _engine_cells(row: EngineRow) -> tuple[str, ...]:
    if row.reason is not None:
        return (row.dtype, row.mode, *[_ABSENT] * 12, "no figure")
    return (
        row.dtype,
        row.mode,
        _number(row.hit_tokens, ","),
        _number(row.ttft_ms, ",.1f"),
        _number(row.ttft_min_ms, ",.1f"),
        _number(row.ttft_max_ms, ",.1f"),
        _number(row.in_process_ms, ",.1f"),
        _number(row.tokens_per_s, ".1f"),
        _number(None if row.bytes is None else row.bytes / 1e6, ".1f"),
        _number(row.saving_ttft_ms, ",.0f"),
        _number(row.engine_cpu_s, ".2f"),
        _number(row.store_cpu_s, ".2f"),
        _number(row.logprob_max_abs_diff, ".1e"),
        "yes" if row.tokens_equal else "as own cache" if row.equal_to_prefix_cache else "no",
        "checked" if row.checked else "no hit" if row.hit_tokens == 0 else "WRONG",
    )


def _ratio_cells(ratio: EngineRatio) -> tuple[str, ...]:
    return (
        ratio.dtype,
        ratio.what,
        ratio.mode,
        ratio.over,
        f"{ratio.ratio:.3f}",
        f"{ratio.at_most:.2f}",
        "yes" if ratio.reached else "NO",
    )


def _number(value: float | None, form: str) -> str:
    return _ABSENT if value is None else format(value, form)


def _replay_cells(row: ReplayRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.capacity_blocks:,}" + (" (all)" if row.unlimited else ""),
        f"{row.hit_rate_blocks:.4f}",
        f"{row.ratio_to_limit:.3f}",
        f"{row.hit_rate_disk:.4f}",
        f"{row.saved_tokens:,}",
        f"{row.lookup_p50_us:,.0f}",
        f"{row.lookup_p99_us:,.0f}",
        f"{row.read_p50_us:,.0f}",
        f"{row.read_p99_us:,.0f}",
        f"{row.evicted_blocks:,}",
        "checked" if row.checked else "WRONG",
    )


def print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print it, with `rich` to a terminal where that is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _print_rich(head, lines)
    else:
        print(plain_table(head, lines))


def plain_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned with blanks: words left, numbers right."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    numeric = [
        all(line[column][:1].isdigit() or line[column] in (_ABSENT, "no copy") for line in lines)
        for column in range(len(head))
    ]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in (head, rule, *lines)
    )


def _print_rich(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = importlib.import_module("rich.table").Table(*head)
    for line in lines:
        table.add_row(*line)
    importlib.import_module("rich.console").Console().print(table)
