"""One figure per run, drawn without a display. matplotlib is an optional extra."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.disk import DiskRow
from kvbench.engine_modes import Mode
from kvbench.engine_rows import EngineResult, EngineRow
from kvbench.index import IndexResult
from kvbench.layers import LayersResult
from kvbench.plan import Op
from kvbench.replay import ReplayRow
from kvbench.scale import ScaleResult
from kvbench.transfer import TransferRow, limit_name
from kvstore.core.errors import ConfigError, UsageError
from kvstore.core.sizes import format_size

_COLOURS: Final = {Op.PUT.value: "tab:orange", Op.GET.value: "tab:green", Op.GET_INTO.value: "tab:blue"}


def require_plot(path: Path) -> None:
    """Find out before the run that no figure could be drawn.

    Raises:
        ConfigError: matplotlib is missing.
        UsageError: no picture has that ending.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: install kvstore-llm[bench]")
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise UsageError(f"--plot {path}: no known picture format; allowed: .png, .svg, .pdf")


def plot_transfer(path: Path, rows: Sequence[TransferRow]) -> None:
    """GiB/s by block size, one panel a transport, one line an operation and its limit dashed in the same colour."""
    copies = [row for row in rows if row.op != Op.VIEW]
    transports = list(dict.fromkeys(row.transport for row in copies)) or ["shm"]
    plt = _pyplot()
    figure, panels = plt.subplots(1, len(transports), figsize=(6.5 * len(transports), 4.8), sharey=True, squeeze=False)
    for panel, transport in zip(panels[0], transports, strict=True):
        _draw_transport(panel, transport, [row for row in copies if row.transport == transport])
    panels[0][0].set_ylabel("GiB/s of payload (median)")
    figure.suptitle("kvbench transfer: content checked, limits measured in alternation")
    _save(plt, figure, path)


def plot_index(path: Path, result: IndexResult) -> None:
    """Keys per second by batch, and the memory's own limit."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(6.5, 4.8))
    rows = sorted(result.rows, key=lambda row: row.batch)
    batches = [row.batch for row in rows]
    panel.plot(batches, [row.keys_per_s / 1e6 for row in rows], "o-", color="tab:blue", label="probe")
    panel.plot(batches, [row.limit_keys_per_s / 1e6 for row in rows], "--", color="tab:gray", label="numpy.take")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(batches, [f"{batch:,}" for batch in batches])
    panel.set_xlabel("keys per probe")
    panel.set_ylabel("million keys/s (median)")
    panel.set_title(f"kvbench index: {result.resident_keys:,} keys, {result.bytes_per_entry:.0f} bytes an entry")
    panel.grid(visible=True, alpha=0.3)
    panel.legend()
    _save(plt, figure, path)


def plot_disk(path: Path, rows: Sequence[DiskRow]) -> None:
    """GiB/s by block size, a panel for the SSD and one for DRAM, one line an operation and its limit dashed."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.8))
    warm = {True: "from DRAM", False: "to and from the SSD"}
    for panel, is_warm in zip(panels, (False, True), strict=True):
        mine = [row for row in rows if (row.limit == "memcpy") is is_warm]
        sizes = sorted({row.block_bytes for row in mine})
        for number, op in enumerate(dict.fromkeys(row.op for row in mine)):
            line = sorted((row for row in mine if row.op == op), key=lambda row: row.block_bytes)
            at, colour = [row.block_bytes for row in line], f"C{number}"
            panel.plot(at, [row.gib_s for row in line], "o-", color=colour, label=op)
            limit = f"limit of {op}: {line[0].limit}"
            panel.plot(at, [row.limit_gib_s for row in line], "--", color=colour, alpha=0.5, label=limit)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [format_size(size) for size in sizes])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("block size")
        panel.set_title(warm[is_warm])
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("GiB/s of payload (median)")
    figure.suptitle("kvbench disk: content checked, limits measured in alternation")
    _save(plt, figure, path)


def plot_scale(path: Path, result: ScaleResult) -> None:
    """Microseconds for each evicted block by size of the shard, and bytes of memory per block, for each policy."""
    plt = _pyplot()
    figure, (cost, memory) = plt.subplots(1, 2, figsize=(11, 4.8))
    for policy in dict.fromkeys(row.policy for row in result.eviction):
        mine = [row for row in result.eviction if row.policy == policy]
        cost.plot([row.blocks for row in mine], [row.evict_us_per_block for row in mine], "o-", label=policy)
    cost.set_xscale("log")
    cost.set_ylim(bottom=0)
    cost.set_xlabel("blocks in the shard")
    cost.set_ylabel("us per evicted block (median)")
    cost.grid(visible=True, alpha=0.3)
    cost.legend()
    bars = memory.bar([row.policy for row in result.memory], [row.bytes_per_block for row in result.memory], width=0.5)
    memory.bar_label(bars, fmt="%.0f")
    memory.set_ylabel("bytes of memory per block")
    figure.suptitle("kvbench scale")
    _save(plt, figure, path)


def plot_replay(path: Path, rows: Sequence[ReplayRow]) -> None:
    """Hit rate by capacity, one line a policy, and what a cache that forgets nothing would hit."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(6.5, 4.8))
    for policy in dict.fromkeys(row.policy for row in rows):
        line = sorted((row for row in rows if row.policy == policy), key=lambda row: row.capacity_blocks)
        at = [row.capacity_blocks / row.distinct_blocks * 100 for row in line]
        panel.plot(at, [row.hit_rate_blocks for row in line], "o-", label=policy)
    panel.axhline(rows[0].limit_hit_rate, linestyle="--", color="tab:gray", label="forgets nothing")
    panel.set_xscale("log")
    ticks = sorted({round(row.capacity_blocks / row.distinct_blocks * 100, 3) for row in rows})
    panel.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity, % of distinct blocks")
    panel.set_ylabel("share of blocks hit as a prefix")
    panel.set_title(f"kvbench replay: {rows[0].trace}")
    panel.grid(visible=True, alpha=0.3)
    panel.legend()
    _save(plt, figure, path)


def plot_layers(path: Path, result: LayersResult) -> None:
    """Total over compute by ratio, a panel a transport, one line a kind of compute and its prediction dashed."""
    plt = _pyplot()
    transports = list(dict.fromkeys(row.transport for row in result.pipelines))
    figure, panels = plt.subplots(1, len(transports), figsize=(6.5 * len(transports), 4.8), sharey=True, squeeze=False)
    for panel, transport in zip(panels[0], transports, strict=True):
        mine = [row for row in result.pipelines if row.transport == transport]
        for number, compute in enumerate(dict.fromkeys(row.compute for row in mine)):
            line = sorted((row for row in mine if row.compute == compute), key=lambda row: row.ratio)
            at, colour = [row.ratio for row in line], f"C{number}"
            panel.plot(at, [row.total_ms / row.compute_ms for row in line], "o-", color=colour, label=compute)
            predicted = [row.predicted_ms / row.compute_ms for row in line]
            panel.plot(at, predicted, "--", color=colour, alpha=0.5, label=f"{compute}, predicted")
            apart = [1 + row.transfer_ms / row.compute_ms for row in line]
            panel.plot(at, apart, ":", color=colour, alpha=0.5, label=f"{compute}, one after the other")
        panel.set_xscale("log")
        panel.set_xlabel("transfer over compute")
        panel.set_title(transport)
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=8)
    panels[0][0].set_ylabel("total over compute")
    figure.suptitle("kvbench layers: content checked, transfer and compute measured apart in the same rounds")
    _save(plt, figure, path)


def plot_engine(path: Path, result: EngineResult) -> None:
    """Time to the first token by mode, a panel a dtype: medians as bars, least and most as lines."""
    plt = _pyplot()
    dtypes = list(dict.fromkeys(row.dtype for row in result.rows))
    figure, panels = plt.subplots(1, len(dtypes), figsize=(6.5 * len(dtypes), 4.8), sharey=True, squeeze=False)
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        _draw_engines(panel, [row for row in result.rows if row.dtype == dtype and row.ttft_ms is not None])
        panel.set_title(dtype)
    panels[0][0].set_ylabel("ms to the first token (median, least and most)")
    figure.suptitle(f"kvbench engine: vLLM, prompts of {result.rows[0].prompt_tokens:,} tokens")
    _save(plt, figure, path)


def _draw_engines(panel: Any, rows: Sequence[EngineRow]) -> None:
    times = [(row.ttft_ms or 0.0, row.ttft_min_ms or 0.0, row.ttft_max_ms or 0.0) for row in rows]
    errors = [[mid - low for mid, low, _ in times], [high - mid for mid, _, high in times]]
    colours = ["tab:blue" if row.mode == Mode.KVSTORE else "tab:gray" for row in rows]
    bars = panel.bar([row.mode for row in rows], [mid for mid, _, _ in times], yerr=errors, capsize=3, color=colours)
    panel.bar_label(bars, fmt="%.0f", padding=3)
    panel.tick_params(axis="x", labelrotation=30)
    panel.set_yscale("log")
    panel.margins(y=0.15)
    panel.grid(visible=True, axis="y", alpha=0.3)


def _draw_transport(panel: Any, transport: str, rows: Sequence[TransferRow]) -> None:
    sizes = sorted({row.block_bytes for row in rows})
    for op in [op for op in _COLOURS if any(row.op == op for row in rows)]:
        mine = sorted((row for row in rows if row.op == op), key=lambda row: (row.block_bytes, row.batch))
        # The largest batch of each size makes the line. Other batches, and single blocks beside batches, are points.
        several = [row for row in mine if row.batch > 1] or mine
        line = list({row.block_bytes: row for row in several}.values())
        panel.plot([row.block_bytes for row in line], [row.gib_s for row in line], "o-", color=_COLOURS[op], label=op)
        limited = [row for row in line if row.limit_gib_s is not None]
        panel.plot(
            [row.block_bytes for row in limited],
            [row.limit_gib_s for row in limited],
            "--",
            color=_COLOURS[op],
            alpha=0.5,
            label=f"limit of {op}: {limit_name(transport)}",
        )
        rest = [row for row in mine if row not in line]
        for batch in sorted({row.batch for row in rest}):
            points = [(row.block_bytes, row.gib_s) for row in rest if row.batch == batch]
            panel.plot(*zip(*points, strict=True), "x", color=_COLOURS[op], label=f"{op}, batch {batch}")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [format_size(size) for size in sizes])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("block size")
    panel.set_title(transport)
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=8)


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
