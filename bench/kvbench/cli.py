"""The `kvbench` command line: reads flags into plans, runs them, prints, writes, draws."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvbench import disk, engine, index, layers, overlap, replay, report, restart, scale, transfer
from kvbench.engine_modes import PEERS, Mode
from kvbench.errors import BenchError
from kvbench.overlap import Compute, LayersPlan
from kvbench.plan import (
    ALL_OPS,
    ALL_SIZES,
    ALL_TRANSPORTS,
    DEFAULT_FOOTPRINT_BYTES,
    DEFAULT_LAYERS,
    DEFAULT_SECONDS,
    SECONDS_MAX,
    Case,
    Op,
    TransferPlan,
    Transport,
    crossed_cases,
    default_cases,
)
from kvbench.plot import (
    plot_disk,
    plot_engine,
    plot_index,
    plot_layers,
    plot_replay,
    plot_scale,
    plot_transfer,
    require_plot,
)
from kvbench.progress import progress
from kvbench.trace import read_trace
from kvstore.core.errors import KvStoreError, UsageError
from kvstore.core.sizes import format_size, parse_size
from kvstore.server.config import ADMISSIONS
from kvstore.server.eviction import POLICIES

_EXIT_WRONG = 1  # the run failed, or content was wrong
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

_DESCRIPTION = "Measures the store on this machine, checks all content, and compares with what the hardware allows."

_TRANSFER_DESCRIPTION = """\
How fast blocks move: put, get, get_into and view, over shared memory and tcp.

A writer process puts the blocks, a reader process reads them, the server has processes of its own.
Each operation is timed in alternation with its limit, which moves as many blocks of the same size
through as many bytes of memory: one thread's memcpy for shm, plain sockets between two processes
for tcp. Times and percentiles are per call, of one batch.

Outside of the timed parts all content is compared with what was written: of every block read, the
stamp of each 4 KiB page, and every byte in the first round and each 8th turn; what a put wrote is
read back by the reader and compared whole.

put   writes keys that are absent: an older version of the same blocks is deleted between the puts.
get   copies into memory that the client recycles, often still in a cache, so it may exceed its limit.
view  copies nothing, so it has no limit; its time includes taking the lease, touching each block's
      array, and giving the lease back. Not measured over tcp, where it is a copy.

With none of --ops, --sizes, --batch, --transport a fixed list of rows is measured, in under a
minute; with any of them, every combination of the given and the default values.
"""

_TRANSFER_EXAMPLES = """\
examples:
  kvbench transfer                                            the fixed list, as a table
  kvbench transfer --json transfer.json --plot transfer.png   the same, kept
  kvbench transfer --ops get_into --sizes 1MiB --batch 1,64 --transport shm,tcp
  kvbench transfer --server 127.0.0.1:7400 --ops put,get      against a running server
"""

_INDEX_DESCRIPTION = """\
How fast another process finds keys in the index, in shared memory and without a call to the server.

One process fills a table, another maps it read-only and probes it with 90 % present and 10 % absent
keys in random order. Outside of the timed parts each answer is compared with the truth. The limit,
timed in alternation, is one numpy.take of as many random entries of the same table. Times and
percentiles are per probe, of one batch.
"""

_INDEX_EXAMPLES = """\
examples:
  kvbench index                 1,000,000 keys, batches of 1, 64 and 1,024
  kvbench index --keys 100000 --batch 256 --json index.json --plot index.png
"""

_DISK_DESCRIPTION = """\
How fast blocks reach the SSD tier and come back.

A server with a small DRAM tier and an SSD tier is started in a new folder inside --dir, which is removed
at the end; about 1.6GiB of disk are used. Each operation is timed in alternation with direct file I/O of
the same shape in the same folder: as many blocks of the same size, one read or write each, by several
threads, into a preallocated file, synced after the writes. Times and percentiles are per call, of one batch.

write      put until everything is durable: payload, then catalog, synced
read_cold  get_into of blocks that are on the SSD only; the server counts how many really came from there
read_warm  get_into of blocks that are in DRAM too; its limit is one thread's memcpy
mixed      one batch is written while another one is read cold

All content is compared outside of the timed parts: each page's stamp of every read, every byte in the
first round and once at the end.
"""

_DISK_EXAMPLES = """\
examples:
  kvbench disk                                    1MiB and 4MiB blocks, in under a minute
  kvbench disk --dir /mnt/nvme --json disk.json --plot disk.png
  kvbench disk --sizes 256KiB,16MiB --footprint 3GiB --seconds 5
  kvbench disk --restart-blocks 100000            a killed server's way back
"""

_SCALE_DESCRIPTION = """\
What one block costs the server in time and memory, and whether many blocks make it cost more.

evict    reserve and commit new keys on a full pool, which evicts as many old blocks: a shard's own decisions,
         in this process and without payload. A small and a large shard take turns; the limit is the small one.
memory   what the processes of a real server grow by while as many blocks are put, less the pool.
"""

_SCALE_EXAMPLES = """\
examples:
  kvbench scale                                   10,000 and 1,000,000 blocks, the default policy
  kvbench scale --blocks 10000,200000 --policy lru --json scale.json
"""

_REPLAY_DESCRIPTION = """\
What a cache of limited size is worth on real requests.

Each prompt of a trace is looked up in the real service, the leading hits are read and every byte of them
is compared, and the prompt's blocks are put in prefix order, what is there counting as used. Each row has
a server of its own, whose DRAM tier has room for exactly that many blocks. Hit rates are shares of all
block references that were read as part of a leading run; the limit is a cache that forgets nothing.

Traces: Mooncake's, one JSON object a line with hash_ids, 512 tokens each. Without a capacity: 2, 5, 10 and
25 % of the trace's distinct blocks, and all of them.
"""

_REPLAY_EXAMPLES = """\
examples:
  kvbench replay --trace mooncake_conversation_trace.jsonl --json replay.json
  kvbench replay --trace mooncake_synthetic_trace.jsonl --capacity-fraction 0.1 --policy lru s3fifo reuse
  kvbench replay --trace mooncake_synthetic_trace.jsonl --capacity-blocks 2000,4000 --disk 256MiB
"""

_LAYERS_DESCRIPTION = """\
Does a layer stream hide the transfer of cached KV behind the compute, and what does it cost itself?

A consumer waits for each layer and then computes for a while: it sleeps, as a GPU's host would, or multiplies
matrices on one thread (float32, weights that stay in its cache, as many rows as take the wanted time). In
each round, in changing order, the same is measured without transfer and without compute; from the layers'
own times of these two the recursion A(l) = A(l-1) + T_KV(l), F(l) = max(F(l-1), A(l)) + T_F(l) predicts
the total. Rows have the medians over rounds. A ratio is a layer's transfer over its compute, as measured.

The recursion takes for granted that the two don't hold each other up. A sleep doesn't. A matmul does where
there are fewer free cores than the two need: one and the copying thread over shared memory, and over tcp the
server's, too. Then its total is above the prediction, which is the machine's doing and is shown, not hidden.

throughput   a whole stream, each layer waited for in turn, in alternation with one get_into of the same blocks
cpu          what a layer costs the client's processor with 16 and with 512 blocks of 256KiB altogether: a stream
             of all layers less one of a single layer. Growth: of what is left without the bytes' own cost

Every byte of each layer is compared once at the moment when wait says that it is there; in timed runs, after
them, each page's stamp. Model of the pipelines: 8 KV heads of 128, fp16, blocks of 16 tokens.
"""

_LAYERS_EXAMPLES = """\
examples:
  kvbench layers --json layers.json --plot layers.png    20 ratios with sleep, 5 with matmul, in about a minute
  kvbench layers --compute sleep --transport shm --ratios 0.5,0.9,2 --rounds 20
  kvbench layers --layers 80 --layer-ms 3
"""

_ENGINE_DESCRIPTION = """\
What a shared cache is worth to a real engine, and what it costs: the same prompts through vLLM, time to first token.

cold               an engine without a connector computes the whole prompt
prefix_cache       the same engine hits it in its own memory: what no store can be faster than
kvstore            one engine saves it to kvstore-server and ends, a new one hits it there
mooncake_store     the same with Mooncake's standalone store, over tcp
lmcache_mp         the same with LMCache's server, through shared memory
example_connector  the same with vLLM's own example connector, files in /dev/shm

Each engine is a process of its own, on the same cores; before it is measured it is warmed up on other prompts, so
that connections stand. A prompt's first answer counts; then it is asked again, which the engine's own cache answers,
so that each time has its neighbour. Rounds load again in new engines, every second round in the other order. What
another project's mode can't do is a row with a reason. It takes half a minute for each start of an engine, 20
minutes for all, on a machine that has nothing else to do. While it runs, Mooncake listens on all interfaces.
"""

_ENGINE_EXAMPLES = """\
examples:
  kvbench engine --json engine.json --plot engine.png
  kvbench engine --modes prefix_cache,kvstore,example_connector --dtypes bfloat16 --rounds 5
  kvbench engine --python venv/bin/python --prompts 1 --prompt-tokens 1000 --text book.txt
"""

ValueT = TypeVar("ValueT")
WordT = TypeVar("WordT", bound=StrEnum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 fine, 1 failed or wrong content, 2 wrong usage, 130 interrupted."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except UsageError as error:
        return _complain(options, error, _EXIT_USAGE)
    except (BenchError, KvStoreError) as error:
        return _complain(options, error, _EXIT_WRONG)
    except KeyboardInterrupt:
        return _complain(options, "interrupted", _EXIT_INTERRUPTED)


def _run_transfer(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    plan = TransferPlan(
        cases=_cases(options),
        seconds=options.seconds,
        seed=options.seed,
        footprint_bytes=options.footprint,
        layers=options.layers,
        server=options.server,
    )
    with progress(len(plan.cases)) as shown:
        rows = transfer.run_transfer(plan, note=shown.note, step=shown.step)
    report.print_transfer(rows)
    value = report.transfer_json(rows, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_transfer(path, rows))
    return _verdict(options, checked=value["checked"])


def _run_index(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    plan = index.IndexPlan(
        keys=options.keys,
        batches=options.batch,
        seconds=options.seconds,
        seed=options.seed,
    )
    with progress(len(plan.batches)) as shown:
        result = index.run_index(plan, note=shown.note, step=shown.step)
    report.print_index(result)
    value = report.index_json(result, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_index(path, result))
    return _verdict(options, checked=value["checked"])


def _run_disk(options: argparse.Namespace) -> int:
    if options.restart_blocks is not None:
        return _run_restart(options)
    outputs = _outputs(options)
    plan = disk.DiskPlan(
        sizes=options.sizes,
        footprint_bytes=options.footprint,
        seconds=options.seconds,
        seed=options.seed,
        folder=options.dir,
    )
    with progress(len(plan.sizes) * len(disk.DiskOp)) as shown:
        rows = disk.run_disk(plan, note=shown.note, step=shown.step)
    report.print_disk(rows)
    value = report.disk_json(rows, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_disk(path, rows))
    return _verdict(options, checked=value["checked"])


def _run_scale(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    if len(options.blocks) != 2:
        raise UsageError(f"--blocks: {len(options.blocks)} numbers; allowed: two, a small one and a large one")
    plan = scale.ScalePlan(
        blocks=(options.blocks[0], options.blocks[1]),
        policies=tuple(dict.fromkeys(options.policy)),
        batch=options.batch,
        seconds=options.seconds,
        seed=options.seed,
    )
    with progress(2 * len(plan.policies)) as shown:
        result = scale.run_scale(plan, note=shown.note, step=shown.step)
    report.print_scale(result)
    value = report.scale_json(result, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_scale(path, result))
    return _verdict(options, checked=value["checked"])


def _run_restart(options: argparse.Namespace) -> int:
    if options.plot is not None:
        raise UsageError("--plot: a restart is one row, not a plot; allowed without --restart-blocks")
    outputs = _outputs(options)
    with progress(1) as shown:
        row = restart.run_restart(options.restart_blocks, options.dir, seed=options.seed, note=shown.note)
        shown.step(restart.restart_summary(row))
    print(restart.restart_summary(row))
    value = report.restart_json(row, _arguments(options), seed=options.seed)
    outputs.write(value)
    return _verdict(options, checked=value["checked"])


def _run_replay(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    trace = read_trace(options.trace, requests_max=options.limit_requests)
    plan = replay.ReplayPlan(
        capacities=replay.capacities_of(trace, options.capacity_blocks or (), options.capacity_fraction or ()),
        policies=tuple(dict.fromkeys(options.policy)),
        block_bytes=options.block_bytes,
        disk_bytes=options.disk,
        admission=options.admission,
        seed=options.seed,
    )
    with progress(len(plan.capacities) * len(plan.policies)) as shown:
        rows = replay.run_replay(trace, plan, note=shown.note, step=shown.step, part=shown.part)
    report.print_replay(rows)
    value = report.replay_json(rows, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_replay(path, rows))
    return _verdict(options, checked=value["checked"])


def _run_layers(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    plan = LayersPlan(
        computes=options.compute,
        transports=options.transport,
        ratios=options.ratios,
        layers=options.layers,
        layer_ms=options.layer_ms,
        rounds=options.rounds,
        footprint_bytes=options.footprint,
        seconds=options.seconds,
        seed=options.seed,
    )
    with progress(plan.steps) as shown:
        result = layers.run_layers(plan, note=shown.note, step=shown.step)
    report.print_layers(result)
    value = report.layers_json(result, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_layers(path, result))
    return _verdict(options, checked=value["checked"])


def _cases(options: argparse.Namespace) -> tuple[Case, ...]:
    given = (options.ops, options.transport, options.sizes, options.batch)
    if all(flag is None for flag in given):
        return default_cases()
    return crossed_cases(
        options.ops or ALL_OPS,
        options.transport or ALL_TRANSPORTS,
        options.sizes or ALL_SIZES,
        options.batch,
    )


def _run_engine(options: argparse.Namespace) -> int:
    outputs = _outputs(options)
    plan = engine.EnginePlan(
        python=options.python,
        modes=options.modes,
        dtypes=options.dtypes,
        prompts=options.prompts,
        prompt_tokens=options.prompt_tokens,
        rounds=options.rounds,
        seed=options.seed,
        text=options.text,
        logs=options.logs,
    )
    with progress(plan.steps) as shown:
        result = engine.run_engine(plan, note=shown.note, step=shown.step)
    report.print_engine(result)
    value = report.engine_json(result, _arguments(options), seed=plan.seed)
    outputs.write(value, lambda path: plot_engine(path, result))
    missing = [row.mode for row in result.rows if row.reason is not None and row.mode not in PEERS]
    if missing:
        return _complain(options, f"no figure for {', '.join(dict.fromkeys(missing))}", _EXIT_WRONG)
    return _verdict(options, checked=value["checked"])


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where a result goes."""

    json_path: Path | None
    plot_path: Path | None

    def write(self, value: dict[str, Any], draw: Callable[[Path], None] | None = None) -> None:
        """Write and draw what was asked for."""
        if self.json_path is not None:
            report.write_json(self.json_path, value)
        if self.plot_path is not None and draw is not None:
            draw(self.plot_path)


def _outputs(options: argparse.Namespace) -> _Outputs:
    """The paths to write, known to be writable."""
    outputs = _Outputs(options.json, options.plot)
    if outputs.json_path is not None:
        report.require_writable("--json", outputs.json_path)
    if outputs.plot_path is not None:
        require_plot(outputs.plot_path)
        report.require_writable("--plot", outputs.plot_path)
    return outputs


def _arguments(options: argparse.Namespace) -> dict[str, object]:
    """The flags as they can be given again: words, numbers, lists of them, or None for one that was left out."""
    values: dict[str, object] = vars(options)
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name not in {"run", "command"}
    }


def _verdict(options: argparse.Namespace, *, checked: bool) -> int:
    return 0 if checked else _complain(options, "content was WRONG: see the last column", _EXIT_WRONG)


def _complain(options: argparse.Namespace, error: object, status: int) -> int:
    print(f"kvbench {options.command}: {error}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Complains in one line that names flag, value and what is allowed."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{self.prog}: {message} (--help explains)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvbench", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, description, examples, add_flags in (
        ("transfer", "how fast blocks move", _TRANSFER_DESCRIPTION, _TRANSFER_EXAMPLES, _add_transfer_flags),
        ("index", "how fast keys are found", _INDEX_DESCRIPTION, _INDEX_EXAMPLES, _add_index_flags),
        ("disk", "how fast blocks reach the SSD and come back", _DISK_DESCRIPTION, _DISK_EXAMPLES, _add_disk_flags),
        ("layers", "what layer streams hide", _LAYERS_DESCRIPTION, _LAYERS_EXAMPLES, _add_layers_flags),
        ("scale", "what a block costs the server", _SCALE_DESCRIPTION, _SCALE_EXAMPLES, _add_scale_flags),
        ("replay", "what a cache is worth on a trace", _REPLAY_DESCRIPTION, _REPLAY_EXAMPLES, _add_replay_flags),
        ("engine", "what a cache is worth to vLLM", _ENGINE_DESCRIPTION, _ENGINE_EXAMPLES, _add_engine_flags),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_flags(command)
    return parser


def _add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_transfer)
    parser.add_argument(
        "--ops", type=_list(_word(Op)), metavar="OP,...", help=f"of {', '.join(ALL_OPS)} (default: all)"
    )
    parser.add_argument(
        "--transport",
        type=_list(_word(Transport)),
        metavar="T,...",
        help=f"of {', '.join(ALL_TRANSPORTS)} (default: both)",
    )
    parser.add_argument(
        "--sizes",
        type=_list(_size),
        metavar="SIZE,...",
        help=f"block sizes, multiples of 4KiB (default: {','.join(format_size(size) for size in ALL_SIZES)})",
    )
    parser.add_argument(
        "--batch", type=_list(_positive), metavar="N,...", help="blocks per call (default: 64, at most 256MiB)"
    )
    parser.add_argument("--server", metavar="ADDRESS", help="host:port of a running server (default: start one)")
    parser.add_argument(
        "--layers",
        type=_positive,
        default=DEFAULT_LAYERS,
        metavar="N",
        help="layers of a block, fewer where a layer would be under 4KiB (default: %(default)s)",
    )
    parser.add_argument(
        "--footprint",
        type=_size,
        default=DEFAULT_FOOTPRINT_BYTES,
        metavar="SIZE",
        help="bytes that each side of a copy walks through; below a few times the last-level cache the numbers are the "
        f"cache's (default: {format_size(DEFAULT_FOOTPRINT_BYTES)})",
    )
    _add_seconds(parser, DEFAULT_SECONDS)
    _add_common(parser)


def _add_index_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_index)
    parser.add_argument(
        "--keys",
        type=_positive,
        default=index.DEFAULT_KEYS,
        metavar="N",
        help="keys in the table (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=_list(_positive),
        default=index.DEFAULT_BATCHES,
        metavar="N,...",
        help=f"keys per probe (default: {','.join(map(str, index.DEFAULT_BATCHES))})",
    )
    _add_seconds(parser, index.DEFAULT_SECONDS)
    _add_common(parser)


def _add_disk_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_disk)
    parser.add_argument(
        "--sizes",
        type=_list(_size),
        default=disk.DEFAULT_SIZES,
        metavar="SIZE,...",
        help=f"block sizes (default: {','.join(map(format_size, disk.DEFAULT_SIZES))})",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="folder on the disk to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--footprint",
        type=_size,
        default=disk.DEFAULT_FOOTPRINT_BYTES,
        metavar="SIZE",
        help="bytes of blocks that each operation walks through; the DRAM tier has less than half of it, and three times as much "
        f"disk is used (default: {format_size(disk.DEFAULT_FOOTPRINT_BYTES)})",
    )
    parser.add_argument(
        "--restart-blocks",
        type=int,
        metavar="N",
        help="instead: kill a server with N blocks of 4KiB on its SSD, and time its restart",
    )
    _add_seconds(parser, disk.DEFAULT_SECONDS)
    _add_common(parser)


def _add_layers_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_layers)
    parser.add_argument(
        "--compute",
        type=_list(_word(Compute)),
        default=tuple(Compute),
        metavar="C,...",
        help=f"of {', '.join(Compute)} (default: both)",
    )
    parser.add_argument(
        "--transport",
        type=_list(_word(Transport)),
        default=ALL_TRANSPORTS,
        metavar="T,...",
        help=f"of {', '.join(ALL_TRANSPORTS)} (default: all)",
    )
    parser.add_argument(
        "--ratios",
        type=_list(_number),
        metavar="R,...",
        help="of a layer's transfer to its compute (default: 20 from 0.1 to 4 with sleep, every fourth with matmul)",
    )
    parser.add_argument(
        "--layers",
        type=_positive,
        default=overlap.DEFAULT_LAYERS,
        metavar="N",
        help="of a pipeline (default: %(default)s)",
    )
    parser.add_argument(
        "--layer-ms",
        type=_number,
        default=overlap.DEFAULT_LAYER_MS,
        metavar="MS",
        help="geometric mean of a layer's transfer and its compute: the blocks follow from it (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=overlap.DEFAULT_ROUNDS,
        metavar="N",
        help="of each pipeline (default: %(default)s)",
    )
    parser.add_argument(
        "--footprint",
        type=_size,
        default=overlap.DEFAULT_FOOTPRINT_BYTES,
        metavar="SIZE",
        help=f"bytes of a whole stream (default: {format_size(overlap.DEFAULT_FOOTPRINT_BYTES)})",
    )
    _add_seconds(parser, overlap.DEFAULT_SECONDS)
    _add_common(parser)


def _add_scale_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_scale)
    parser.add_argument(
        "--blocks",
        type=_list(_positive),
        default=scale.DEFAULT_BLOCKS,
        metavar="N,N",
        help=f"a small and a large number of blocks (default: {','.join(map(str, scale.DEFAULT_BLOCKS))})",
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        default=scale.DEFAULT_BATCH,
        metavar="N",
        help="blocks of one put (default: %(default)s)",
    )
    _add_policy(parser)
    _add_seconds(parser, scale.DEFAULT_SECONDS)
    _add_common(parser)


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=tuple(POLICIES),
        default=[next(iter(POLICIES))],
        metavar="P",
        help=f"eviction policies, of {', '.join(POLICIES)} (default: {next(iter(POLICIES))})",
    )


def _add_replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_replay)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a Mooncake trace (.jsonl)")
    parser.add_argument(
        "--capacity-blocks", type=_list(_positive), metavar="N,...", help="blocks that the DRAM tier has room for"
    )
    parser.add_argument(
        "--capacity-fraction",
        type=_list(_fraction),
        metavar="X,...",
        help="the same as a share of the trace's distinct blocks; 1: all of them",
    )
    _add_policy(parser)
    parser.add_argument(
        "--block-bytes",
        type=_size,
        default=replay.DEFAULT_BLOCK_BYTES,
        metavar="SIZE",
        help="size of a block in the server: small ones, for it is hits that are measured "
        f"(default: {format_size(replay.DEFAULT_BLOCK_BYTES)})",
    )
    parser.add_argument(
        "--disk",
        type=_size,
        default=0,
        metavar="SIZE",
        help="SSD tier below the DRAM tier, in the temporary folder (default: none)",
    )
    parser.add_argument(
        "--admission",
        choices=ADMISSIONS,
        default=replay.DEFAULT_ADMISSION,
        metavar="A",
        help=f"what is written to it, of {', '.join(ADMISSIONS)} (default: %(default)s)",
    )
    parser.add_argument("--limit-requests", type=_positive, metavar="N", help="only the first N requests")
    _add_common(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_engine)
    parser.add_argument(
        "--python",
        type=Path,
        default=engine.DEFAULT_PYTHON,
        metavar="PATH",
        help="the Python of an environment with vLLM (default: %(default)s, which `make test-vllm` builds)",
    )
    parser.add_argument(
        "--modes",
        type=_list(_word(Mode)),
        default=tuple(Mode),
        metavar="M,...",
        help=f"of {', '.join(Mode)} (default: all); cold is measured anyway, to compare with",
    )
    parser.add_argument(
        "--dtypes",
        type=_list(str),
        default=engine.DEFAULT_DTYPES,
        metavar="D,...",
        help=f"of {', '.join(engine.DTYPE_BYTES)} (default: {','.join(engine.DEFAULT_DTYPES)})",
    )
    for flag, value, meaning in (
        ("--prompts", engine.DEFAULT_PROMPTS, "prompts, each of other text"),
        ("--prompt-tokens", engine.DEFAULT_PROMPT_TOKENS, "tokens of each"),
        ("--rounds", engine.DEFAULT_ROUNDS, "new engines that load"),
    ):
        parser.add_argument(flag, type=_positive, default=value, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what prompts are cut from (default: the reference of Python itself)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' and servers' messages there")
    _add_common(parser)


def _add_seconds(parser: argparse.ArgumentParser, seconds: float) -> None:
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=seconds,
        metavar="S",
        help="time for each row of the table (default: %(default)s)",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="what keys and content follow from (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows, the machine, versions and arguments here"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a figure here (.png, .svg or .pdf; needs matplotlib)"
    )


def _list(parse: Callable[[str], ValueT]) -> Callable[[str], tuple[ValueT, ...]]:
    """A comma-separated list, repetitions dropped."""
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def _word(words: type[WordT]) -> Callable[[str], WordT]:
    def parse(text: str) -> WordT:
        try:
            return words(text)
        except ValueError as cause:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; allowed: {', '.join(words)}") from cause

    return parse


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as cause:
        raise argparse.ArgumentTypeError(str(cause)) from cause


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 1")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number above 0") from cause


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: more than 0, at most 1")
    return fraction


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 0, below 2**63")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: more than 0, at most {SECONDS_MAX} seconds"
        )
    return seconds
