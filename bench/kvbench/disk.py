"""`kvbench disk`: how fast blocks reach the SSD tier and come back, beside direct file I/O of the same shape.

```
kvbench ──┬── kvstore-server   small DRAM tier, SSD tier with admission `always`, in a folder of its own
          └── direct file      in the same folder: the limit, in alternation
```

One block size at a time. A ring of blocks, three times as many bytes as the DRAM tier holds, is on the SSD; every
operation walks round it, so that the DRAM tier, which keeps what was used last, has dropped a block when its turn comes
again:

    write      puts until all of it is durable: payload, then catalog, synced. Older versions are deleted untimed
    read_cold  get_into of blocks that are on the SSD only; how many came from there is counted by the server
    read_warm  get_into of blocks that are in DRAM as well; its limit is a memcpy, as in `kvbench transfer`
    mixed      a batch written and another one read cold at the same time, until both are done

All content is compared: each page's stamp of every read, each byte in the first round and at the ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvbench.direct import DirectFile
from kvbench.errors import BenchError
from kvbench.limits import MemcpyLimit
from kvbench.memory import arena, require_available
from kvbench.plan import MIB, PAGE_BYTES, Group, Transport, layers_of
from kvbench.sampling import Samples, Timed, alternate
from kvbench.session import Scene, SessionSetup
from kvstore.core.errors import UsageError
from kvstore.core.sizes import format_size
from kvstore.core.states import PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.wire.control import ControlClient

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
Note = Callable[[str], None]

DEFAULT_SIZES: Final = (1 * MIB, 4 * MIB)
DEFAULT_SECONDS: Final = 1.0
DEFAULT_FOOTPRINT_BYTES: Final = 768 * MIB
_FOOTPRINT_BYTES_MIN: Final = 48 * MIB
_FOOTPRINT_BYTES_MAX: Final = 48 << 30
_BATCH_MAX: Final = 64
_RING_BLOCKS_MIN: Final = 192  # larger blocks would leave much of a chunk of the DRAM tier unused
_RING_BLOCKS_MAX: Final = 12288
_LAYERS: Final = 32
_WARM_BATCHES: Final = 2  # as many as the turns that don't count: these bring them into DRAM
_COLD_SHARE_MIN: Final = 0.99
_WHOLE_EVERY: Final = 8
_DURABLE_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.001
_SERVER_OVERHEAD_BYTES: Final = 256 * MIB
_DISK_OVERHEAD_BYTES: Final = 256 * MIB  # the catalog, and what the tier leaves free


class DiskOp(StrEnum):
    """What is measured."""

    WRITE = "write"
    READ_COLD = "read_cold"
    READ_WARM = "read_warm"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Everything that decides what `kvbench disk` does.

    Args:
        sizes: block sizes, four rows each.
        footprint_bytes: of the ring; all else follows from it. DRAM tier: four ninths of it; SSD tier: twice as much.
        seconds: wall-clock time per row, its limit and its checks included.
        seed: block content and keys follow from it.
        folder: where the server's data and the direct file go, in a folder that is removed afterwards.

    Raises:
        UsageError: a size is out of range.
    """

    sizes: tuple[int, ...] = DEFAULT_SIZES
    footprint_bytes: int = DEFAULT_FOOTPRINT_BYTES
    seconds: float = DEFAULT_SECONDS
    seed: int = 0
    folder: Path

    def __post_init__(self) -> None:
        footprint = self.footprint_bytes
        if not _FOOTPRINT_BYTES_MIN <= footprint <= _FOOTPRINT_BYTES_MAX or footprint % _FOOTPRINT_BYTES_MIN:
            least = format_size(_FOOTPRINT_BYTES_MIN)
            raise UsageError(
                f"--footprint: {format_size(footprint)} is out of range; allowed: multiples of {least} from {least} to "
                f"{format_size(_FOOTPRINT_BYTES_MAX)}"
            )
        low = max(PAGE_BYTES, footprint // _RING_BLOCKS_MAX)
        high = footprint // _RING_BLOCKS_MIN
        for size in self.sizes:
            if not low <= size <= high or size % PAGE_BYTES:
                raise UsageError(
                    f"--sizes: {format_size(size)} is no block size for a footprint of {format_size(footprint)}; allowed: "
                    f"multiples of 4KiB from {format_size(low)} to {format_size(high)}, larger ones with a larger --footprint"
                )

    @property
    def dram_bytes(self) -> int:
        """DRAM tier of the server: more than half of the ring has always been dropped from it, and a turn of writes is
        less than what may be on its way to the SSD.
        """
        return self.footprint_bytes * 4 // 9

    @property
    def disk_bytes(self) -> int:
        """SSD tier of the server: nothing is ever evicted from it."""
        return self.footprint_bytes * 2


@dataclass(frozen=True, slots=True)
class DiskRow:
    """One measured operation. Rates: medians over turns, GiB of payload a second. Times: per call of `batch` blocks; of
    a write with its share of the wait for durability, of mixed for the pair.
    """

    op: str
    transport: str
    block_bytes: int
    batch: int
    gib_s: float
    p50_us: float
    p99_us: float
    limit_gib_s: float  # direct file I/O, or memcpy for warm reads; measured in alternation
    ratio_to_limit: float
    checked: bool  # every read was compared, none was wrong, and cold reads came from the SSD
    samples: int
    limit: str  # "direct I/O", "plain I/O" where the file system has no O_DIRECT, or "memcpy"


@dataclass(frozen=True, slots=True)
class Ring:
    """Places of one block size."""

    block_bytes: int
    batch: int  # blocks per call
    calls: int  # per turn of write: back to back, then one wait for all of them
    blocks: int  # whole turns of write

    def batch_at(self, turn: int) -> slice:
        """Places of one call."""
        first = turn * self.batch % self.blocks
        return slice(first, first + self.batch)

    def write_at(self, turn: int) -> list[slice]:
        """Places of each call of a turn of write."""
        return [self.batch_at(turn * self.calls + call) for call in range(self.calls)]

    def across(self, turn: int) -> slice:
        """Places of the call half the ring away: whatever the DRAM tier holds, these it has dropped."""
        return self.batch_at(turn + self.blocks // self.batch // 2)


def ring_of(block_bytes: int, footprint_bytes: int) -> Ring:
    """64 blocks per call, fewer where that would be over a twelfth of the ring; a quarter of it per turn of write."""
    batch = max(1, min(_BATCH_MAX, footprint_bytes // 12 // block_bytes))
    calls = max(1, footprint_bytes // 4 // (batch * block_bytes))
    turn = batch * calls
    return Ring(block_bytes, batch, calls, footprint_bytes // block_bytes // turn * turn)


def run_disk(plan: DiskPlan, *, note: Note, step: Note) -> list[DiskRow]:
    """Measure all; `step` is called once a row with a line about it, `note` with what else happens.

    Raises:
        UsageError: the machine has not enough memory, or the folder not enough room.
        BenchError, KvStoreError: a block was missing, or never became durable.
    """
    require_available(plan.dram_bytes + 2 * plan.footprint_bytes + _SERVER_OVERHEAD_BYTES, "lower --footprint")
    _require_room(plan)
    mine, near = arena(plan.footprint_bytes), arena(plan.footprint_bytes)
    rows: list[DiskRow] = []
    for size in plan.sizes:
        note(f"{format_size(size)} blocks: {format_size(plan.footprint_bytes)} of them on the SSD in {plan.folder}")
        with _bench(plan, ring_of(size, plan.footprint_bytes), mine, near) as bench:
            for row in bench.measure(plan.seconds):
                rows.append(row)
                step(summary(row))
    return rows


def summary(row: DiskRow) -> str:
    """One line about a row."""
    text = (
        f"{row.op} {format_size(row.block_bytes)} x {row.batch}: {row.gib_s:.2f} GiB/s, {row.ratio_to_limit:.2f} of "
        f"{row.limit}"
    )
    return text if row.checked else f"{text}, CONTENT WRONG"


class DiskState:
    """What the server says of its one shard's SSD tier."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._dropped = self._counters()[0]

    def wait_durable(self) -> None:
        """Return when everything put so far is on the SSD.

        Raises:
            BenchError: the tier skipped a block, or stands still.
        """
        deadline_s = time.monotonic() + _DURABLE_TIMEOUT_S
        while (disk := self._disk())["queued_bytes"]:
            if time.monotonic() >= deadline_s:
                raise BenchError(
                    f"{format_size(disk['queued_bytes'])} are not durable after {_DURABLE_TIMEOUT_S:.0f} s"
                )
            time.sleep(_POLL_S)
        dropped = self._counters()[0]
        if dropped != self._dropped:
            raise BenchError(f"the SSD tier did not write {dropped - self._dropped} blocks: {disk['counters']}")

    def promoted(self) -> int:
        """Blocks that were read from the SSD so far."""
        return self._counters()[1]

    def _counters(self) -> tuple[int, int]:
        """Blocks that were put and not written to the SSD, and blocks that were read from it."""
        counters = self._disk()["counters"]
        return (
            counters["skipped_write_behind_blocks"] + counters["failed_write_behind_blocks"],
            counters["promoted_blocks"],
        )

    def _disk(self) -> dict[str, Any]:
        return self._control.stats()["shards"][0]["disk"]


class DiskBench:
    """One ring of blocks: on the SSD in full, in DRAM in part."""

    def __init__(self, scene: Scene, ring: Ring, state: DiskState, file: DirectFile, near: U8) -> None:
        self._scene = scene
        self._client = scene.client(Transport.SHM)
        self._ring = ring
        self._state = state
        self._file = file
        self._near = near
        self._ids: I64 = np.arange(ring.blocks, dtype=np.int64)
        self._damaged = 0
        self._compared = 0
        scene.content.fill(scene.rows, self._ids)
        for turn in range(ring.blocks // (ring.batch * ring.calls)):
            for places in ring.write_at(turn):
                self._put(places)
            state.wait_durable()

    def measure(self, seconds: float) -> Iterator[DiskRow]:
        """All operations in turn."""
        ring = self._ring
        direct = "direct I/O" if self._file.direct else "plain I/O"
        samples = alternate(self._write, self._limit_write, seconds=seconds)
        self._sweep()
        yield self._row(DiskOp.WRITE, samples, ring.calls, ring.calls, direct)
        samples = self._counted(1.0, lambda: alternate(self._read, self._limit_read, seconds=seconds))
        yield self._row(DiskOp.READ_COLD, samples, 1, 1, direct)
        samples = self._counted(0.0, lambda: alternate(self._read_warm, self._limit_warm(), seconds=seconds))
        yield self._row(DiskOp.READ_WARM, samples, 1, 1, "memcpy")
        samples = alternate(self._mix, self._limit_mix, seconds=seconds)
        self._sweep()
        yield self._row(DiskOp.MIXED, samples, 2, 1, direct)

    # --- what is timed -----------------------------------------------------------------------------------------------

    def _write(self, turn: int) -> float:
        calls = self._ring.write_at(turn)
        for places in calls:
            self._renew(places)
        begin = time.perf_counter()
        for places in calls:
            self._put(places)
        self._state.wait_durable()
        return time.perf_counter() - begin

    def _read(self, turn: int) -> float:
        return self._fetch(self._ring.batch_at(turn), turn)

    def _read_warm(self, turn: int) -> float:
        return self._fetch(self._ring.batch_at(turn % _WARM_BATCHES), turn)

    def _mix(self, turn: int) -> float:
        self._renew(self._ring.batch_at(turn))
        begin = time.perf_counter()
        self._put(self._ring.batch_at(turn))
        put_s = time.perf_counter() - begin
        read_s = self._fetch(self._ring.across(turn), turn)
        begin = time.perf_counter()
        self._state.wait_durable()
        return put_s + read_s + time.perf_counter() - begin

    # --- and its limits ----------------------------------------------------------------------------------------------

    def _limit_write(self, turn: int) -> float:
        return self._file.write([row for places in self._ring.write_at(turn) for row in _rows(places)])

    def _limit_read(self, turn: int) -> float:
        return self._file.read(_rows(self._ring.batch_at(turn)))

    def _limit_warm(self) -> Timed:
        ring = self._ring
        size = _WARM_BATCHES * ring.batch * ring.block_bytes
        return MemcpyLimit(
            self._near[:size],
            self._near[size : 2 * size],
            block_bytes=ring.block_bytes,
            blocks=_WARM_BATCHES * ring.batch,
            batch=ring.batch,
        )

    def _limit_mix(self, turn: int) -> float:
        return self._file.write_and_read(_rows(self._ring.batch_at(turn)), _rows(self._ring.across(turn)))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _renew(self, places: slice) -> None:
        """Delete these places' blocks, and make their next version ready in memory."""
        blocks = self._ring.blocks
        self._client.delete(self._scene.keys(self._ids[places], Transport.SHM))
        self._ids[places] = (self._ids[places] + blocks) % (2 * blocks)
        # The bodies are there, since `fill` or the last read. Writing them would put them in a cache.
        self._scene.content.stamp(self._scene.rows[places], self._ids[places])

    def _put(self, places: slice) -> None:
        statuses = self._client.put(
            self._scene.keys(self._ids[places], Transport.SHM), self._scene.rows[places]
        ).statuses
        if not (statuses == PutStatus.STORED).all():
            names = sorted({PutStatus(int(status)).name for status in statuses})
            raise BenchError(f"a put of {len(statuses)} blocks answered {', '.join(names)}")

    def _fetch(self, places: slice, turn: int) -> float:
        """Read a batch and compare it; seconds of the read."""
        rows = self._scene.rows[places]
        keys = self._scene.keys(self._ids[places], Transport.SHM)
        self._scene.content.blot(rows)
        begin = time.perf_counter()
        ok = self._client.get_into(keys, rows).ok
        took_s = time.perf_counter() - begin
        if not ok.all():
            raise BenchError(f"a read found {int(ok.sum())} of {len(ok)} blocks that were durable")
        whole = turn * self._ring.batch < self._ring.blocks or turn % _WHOLE_EVERY == 0
        self._damaged += len(self._scene.content.damaged(rows, self._ids[places], whole=whole))
        self._compared += len(ok)
        return took_s

    def _sweep(self) -> None:
        """Read every place once and compare every byte. Afterwards DRAM has the end of the ring, not its beginning."""
        for turn in range(self._ring.blocks // self._ring.batch):
            self._fetch(self._ring.batch_at(turn), turn)

    def _counted(self, cold_share: float, run: Callable[[], Samples]) -> Samples:
        """Run, and make sure that this share of the blocks was read from the SSD.

        Raises:
            BenchError: it was not.
        """
        promoted, compared = self._state.promoted(), self._compared
        samples = run()
        from_disk = self._state.promoted() - promoted
        read = self._compared - compared
        warm_up = _WARM_BATCHES * self._ring.batch
        if from_disk < cold_share * _COLD_SHARE_MIN * read or (not cold_share and from_disk > warm_up):
            raise BenchError(f"{from_disk} of {read} blocks were read from the SSD: the wrong tier was measured")
        return samples

    def _row(self, op: DiskOp, samples: Samples, batches: int, calls: int, limit: str) -> DiskRow:
        """A row of turns that move so many batches in so many calls."""
        ring = self._ring
        gib = ring.block_bytes * ring.batch * batches / (1 << 30)
        rate, limit_rate = samples.rate(gib), samples.limit_rate(gib)
        assert limit_rate is not None
        checked = self._compared > 0 and self._damaged == 0
        self._damaged = self._compared = 0
        return DiskRow(
            op=op.value,
            transport=Transport.SHM.value,
            block_bytes=ring.block_bytes,
            batch=ring.batch,
            gib_s=rate,
            p50_us=samples.percentile_us(50) / calls,
            p99_us=samples.percentile_us(99) / calls,
            limit_gib_s=limit_rate,
            ratio_to_limit=rate / limit_rate,
            checked=checked,
            samples=len(samples.op_s),
            limit=limit,
        )


@contextmanager
def _bench(plan: DiskPlan, ring: Ring, mine: U8, near: U8) -> Iterator[DiskBench]:
    """A server, a direct file and a client over a new folder, which is removed afterwards."""
    size = ring.blocks * ring.block_bytes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-", dir=plan.folder)))
        # Only the data goes there: the path of a local socket may not be as long as that of a folder.
        server = ServerProcess(
            dram=str(plan.dram_bytes // MIB * MIB),
            disk=plan.disk_bytes,
            admission="always",
            policy="lru",  # so that what comes round again is what was dropped
            data_dir=folder / "data",
        )
        stack.callback(server.close)
        server.start()
        server.wait_warm()
        file = DirectFile(folder / "limit", near[:size].reshape(ring.blocks, ring.block_bytes))
        stack.callback(file.close)
        setup = SessionSetup(
            address=server.address,
            run_id=f"{os.getpid()}-{secrets.token_hex(8)}",
            seed=plan.seed,
            far_path="",
            arena_bytes=size,
            raw_port=None,
            connections=1,
        )
        scene = Scene(setup, Group(ring.block_bytes, ring.blocks, layers_of(ring.block_bytes, _LAYERS), ()), mine)
        stack.callback(scene.close)
        state = DiskState(stack.enter_context(ControlClient(server.address)))
        yield DiskBench(scene, ring, state, file, near)


def _require_room(plan: DiskPlan) -> None:
    folder = plan.folder
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--dir {folder}: can't be used; allowed: an existing folder that this user may write")
    needed = plan.footprint_bytes + plan.disk_bytes + _DISK_OVERHEAD_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        spare = format_size(free >> 20 << 20)
        raise UsageError(
            f"--dir {folder}: this run needs {format_size(needed)} there, {spare} are free; allowed: a folder with room, or a smaller --footprint"
        )


def _rows(places: slice) -> range:
    return range(places.start, places.stop)
