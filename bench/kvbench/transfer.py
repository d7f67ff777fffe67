"""`kvbench transfer`: starts the processes, walks the plan group by group, and turns measurements into rows.

```
kvbench ──┬── kvstore-server (its own processes; or --server)
          ├── writer    puts blocks; measures put
          ├── reader    reads what the writer put; measures get, get_into, view; compares content
          └── raw peer  the other end of plain sockets, the limit of tcp
```
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvbench.limits import RawPeer
from kvbench.memory import SharedArena, open_shared, require_available
from kvbench.plan import Case, Group, Op, TransferPlan, Transport, groups
from kvbench.session import I64, Clear, Fill, Measure, Measured, Session, SessionSetup, Verify
from kvbench.workers import Worker
from kvstore.core.sizes import format_size
from kvstore.testing.cluster import ServerProcess

TCP_CONNECTIONS: Final = 1
_GIB: Final = 1 << 30
_LOOPBACK: Final = ("127.", "localhost", "[::1]", "local")
_SERVER_OVERHEAD_BYTES: Final = 256 << 20

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One measured case. Rates: medians over turns, GiB of payload a second. Times: per call of `batch` blocks."""

    op: str
    transport: str
    block_bytes: int
    batch: int
    gib_s: float  # of a view, which moves nothing: bytes made readable
    p50_us: float
    p99_us: float
    limit_gib_s: (
        float | None
    )  # memcpy or raw socket, measured in alternation; None where there is nothing to compare with
    ratio_to_limit: float | None
    checked: bool  # every block of every turn was compared, and none was wrong
    samples: int


def run_transfer(plan: TransferPlan, *, note: Note, step: Note) -> list[TransferRow]:
    """Measure every case of the plan; `step` is called once a case with a line about it, `note` with what else happens.

    Raises:
        UsageError: the plan does not fit the machine.
        BenchError, KvStoreError: a process died, a block was missing, the server can't be reached.
    """
    require_available(plan.memory_bytes + _SERVER_OVERHEAD_BYTES, "lower --sizes, --batch or --footprint")
    rows: list[TransferRow] = []
    note(f"starting, with {format_size(plan.memory_bytes >> 20 << 20)} of prefaulted memory")
    with _processes(plan) as (writer, reader):
        for group in groups(plan):
            for row in _measure_group(plan, group, writer, reader):
                rows.append(row)
                step(summary(row))
    return rows


def summary(row: TransferRow) -> str:
    """One line about a row."""
    case = Case(Op(row.op), Transport(row.transport), row.block_bytes, row.batch)
    if row.op == Op.VIEW:
        text = f"{case}: {row.p50_us:,.0f} us"
    elif row.ratio_to_limit is None:
        text = f"{case}: {row.gib_s:.2f} GiB/s"
    else:
        text = f"{case}: {row.gib_s:.2f} GiB/s, {row.ratio_to_limit:.2f} of {limit_name(row.transport)}"
    return text if row.checked else f"{text}, CONTENT WRONG"


def limit_name(transport: str) -> str:
    """What a transport is compared with."""
    return "memcpy" if transport == Transport.SHM else "a raw socket"


@dataclass(frozen=True, slots=True)
class RawPeerSetup:
    """The raw-socket peer over the shared arena."""

    far_path: str

    @contextmanager
    def open(self) -> Iterator[RawPeer]:
        """Listening until the context ends."""
        peer = RawPeer(open_shared(self.far_path, writable=True))
        try:
            yield peer
        finally:
            peer.close()


@dataclass(frozen=True, slots=True)
class AskPort:
    """Where the raw-socket peer listens."""

    def run(self, peer: RawPeer, /) -> int:
        return peer.port


@contextmanager
def _processes(plan: TransferPlan) -> Iterator[tuple[Worker[Session], Worker[Session]]]:
    """The server, the raw peer, the writer and the reader, all started; in reverse order ended."""
    with ExitStack() as stack:
        address = plan.server
        if address is None:
            address = stack.enter_context(ServerProcess(dram=str(plan.pool_bytes))).address
        far = SharedArena("kvbench-far", plan.arena_bytes)
        stack.callback(far.close)
        setup = SessionSetup(
            address=address,
            run_id=f"{os.getpid()}-{secrets.token_hex(8)}",
            seed=plan.seed,
            far_path=far.path,
            arena_bytes=plan.arena_bytes,
            raw_port=None,
            connections=TCP_CONNECTIONS,
        )
        # A socket on this machine is no limit for a server on another one.
        if address.startswith(_LOOPBACK) and any(case.transport is Transport.TCP for case in plan.cases):
            peer = stack.enter_context(Worker("raw peer", RawPeerSetup(far.path)))
            peer.ready()
            setup = replace(setup, raw_port=peer.ask(AskPort()))
        writer = stack.enter_context(Worker("writer", setup))
        reader = stack.enter_context(Worker("reader", setup))
        writer.ready()
        reader.ready()
        yield writer, reader


def _measure_group(
    plan: TransferPlan, group: Group, writer: Worker[Session], reader: Worker[Session]
) -> Iterator[TransferRow]:
    transport = group.cases[0].transport
    ids: I64 = writer.ask(Fill(group, transport))
    for case in group.cases:
        worker = writer if case.op is Op.PUT else reader
        measured = worker.ask(Measure(group, case, ids, plan.seconds))
        ids = measured.ids
        damaged, compared = measured.damaged, measured.compared
        if case.op is Op.PUT:
            damaged += reader.ask(Verify(group, case.transport, ids))
            compared += group.blocks
        yield _row(case, measured, checked=compared > 0 and damaged == 0)
    writer.ask(Clear(group, transport, np.asarray(ids)))


def _row(case: Case, measured: Measured, *, checked: bool) -> TransferRow:
    samples = measured.samples
    gib = case.block_bytes * case.batch / _GIB
    rate, limit = samples.rate(gib), samples.limit_rate(gib)
    return TransferRow(
        op=case.op.value,
        transport=case.transport.value,
        block_bytes=case.block_bytes,
        batch=case.batch,
        gib_s=rate,
        p50_us=samples.percentile_us(50),
        p99_us=samples.percentile_us(99),
        limit_gib_s=limit,
        ratio_to_limit=None if limit is None else rate / limit,
        checked=checked,
        samples=len(samples.op_s),
    )
