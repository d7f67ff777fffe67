"""Which measurements a run makes, and how much memory each walks through. Pure values, no I/O.

One block size at a time: `blocks` blocks of that size are resident, and every operation walks round them batch by
batch. The operation and its limit walk through the same number of bytes, more than a last-level cache holds, so that
neither side finds its data in a cache while the other does not:

    resident blocks   0 . . . . . . . . blocks-1
    turn 0            [ batch ]
    turn 1                     [ batch ]            ... turn t uses batch t mod (blocks // batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstore.core.errors import UsageError
from kvstore.core.sizes import format_size

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PAGE_BYTES: Final = 4096
RESIDENT_BLOCKS_MAX: Final = 8192  # keeps the set-up of small blocks short; 64 KiB blocks still fill 512 MiB
BATCH_MAX: Final = 4096
BLOCK_BYTES_MAX: Final = 1 << 30
DEFAULT_FOOTPRINT_BYTES: Final = 512 * MIB
DEFAULT_LAYERS: Final = 32
DEFAULT_SECONDS: Final = 0.5
SECONDS_MAX: Final = 3600


class Op(StrEnum):
    """A data operation of the SDK."""

    PUT = "put"
    GET = "get"
    GET_INTO = "get_into"
    VIEW = "view"


class Transport(StrEnum):
    """How the client reaches the blocks."""

    SHM = "shm"
    TCP = "tcp"


ALL_OPS: Final = tuple(Op)
ALL_TRANSPORTS: Final = tuple(Transport)
ALL_SIZES: Final = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One row of the result: an operation on `batch` blocks of `block_bytes` bytes."""

    op: Op
    transport: Transport
    block_bytes: int
    batch: int

    def __str__(self) -> str:
        return f"{self.transport} {self.op} {format_size(self.block_bytes)} x {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Everything that decides what `kvbench transfer` does.

    Args:
        cases: rows to measure.
        seconds: wall-clock time spent on each row, its limit and its checks included.
        seed: block content and keys follow from it.
        footprint_bytes: bytes that each side of a copy walks through.
        layers: layers of a block, as far as its size can be cut into that many whole pages or equal parts.
        server: address of a running server, or None to start one.
    """

    cases: tuple[Case, ...]
    seconds: float = DEFAULT_SECONDS
    seed: int = 0
    footprint_bytes: int = DEFAULT_FOOTPRINT_BYTES
    layers: int = DEFAULT_LAYERS
    server: str | None = None

    @property
    def arena_bytes(self) -> int:
        """Largest footprint of any block size: what each arena must hold."""
        return max(group.blocks * group.block_bytes for group in groups(self))

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole run: the server's pool, two arenas in reader and writer each, one shared for limits."""
        return self.pool_bytes + 5 * self.arena_bytes

    @property
    def pool_bytes(self) -> int:
        """DRAM pool of the server: the resident blocks and half as much again, at least 64 MiB."""
        return max(self.arena_bytes * 3 // 2, 64 * MIB)


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one block size, measured over the same resident blocks."""

    block_bytes: int
    blocks: int  # resident at a time
    layers: int
    cases: tuple[Case, ...]


def default_cases() -> tuple[Case, ...]:
    """The rows of a run without flags: every figure that the project promises, and a spread of sizes around them."""
    shm = [Case(op, Transport.SHM, size, fair_batch(size)) for size in ALL_SIZES for op in ALL_OPS]
    tcp = [
        Case(op, Transport.TCP, size, fair_batch(size))
        for size in (64 * KIB, 1 * MIB, 4 * MIB)
        for op in (Op.PUT, Op.GET_INTO)
    ]
    return (
        Case(Op.GET, Transport.SHM, 4 * KIB, 1),
        *shm,
        Case(Op.GET_INTO, Transport.SHM, 1 * MIB, 1),
        *tcp,
        Case(Op.GET, Transport.TCP, 1 * MIB, 64),
        Case(Op.GET_INTO, Transport.TCP, 1 * MIB, 1),
    )


def crossed_cases(
    ops: Sequence[Op], transports: Sequence[Transport], sizes: Sequence[int], batches: Sequence[int] | None
) -> tuple[Case, ...]:
    """Every combination, except a view over tcp, which can't be without a copy.

    Without `batches` each size has one: 64 blocks, fewer where that would be more than 256 MiB a call.

    Raises:
        UsageError: a size or batch out of range, or no combination is left.
    """
    for size in sizes:
        if size < PAGE_BYTES or size % PAGE_BYTES or size > BLOCK_BYTES_MAX:
            raise UsageError(
                f"--sizes: {format_size(size)} is no block size; allowed: multiples of 4KiB from 4KiB to {format_size(BLOCK_BYTES_MAX)}"
            )
    for batch in batches or ():
        if not 1 <= batch <= BATCH_MAX:
            raise UsageError(f"--batch: {batch} is out of range; allowed: 1 to {BATCH_MAX}")
    cases = tuple(
        Case(op, transport, size, batch)
        for size in sizes
        for batch in batches or (fair_batch(size),)
        for transport in transports
        for op in ops
        if not (op is Op.VIEW and transport is Transport.TCP)
    )
    if not cases:
        raise UsageError("--ops view --transport tcp: over tcp a view is a copy, as a get is; allowed: --transport shm")
    return cases


def groups(plan: TransferPlan) -> tuple[Group, ...]:
    """The plan's cases by block size, smallest first. Within a group puts come first: reads find what they wrote."""
    sizes = sorted({case.block_bytes for case in plan.cases})
    return tuple(_group(plan, size, [case for case in plan.cases if case.block_bytes == size]) for size in sizes)


def layers_of(block_bytes: int, wanted: int) -> int:
    """The largest number of layers up to `wanted` that cuts a block into equal parts of at least one page."""
    return next(n for n in range(wanted, 0, -1) if block_bytes % n == 0 and block_bytes // n >= PAGE_BYTES)


def _group(plan: TransferPlan, block_bytes: int, cases: Iterable[Case]) -> Group:
    ordered = tuple(sorted(dict.fromkeys(cases), key=lambda case: (case.op is not Op.PUT, case.transport)))
    batch = max(case.batch for case in ordered)
    fitting = min(plan.footprint_bytes // block_bytes, RESIDENT_BLOCKS_MAX)
    blocks = max(batch, fitting - fitting % batch)
    return Group(block_bytes, blocks, layers_of(block_bytes, plan.layers), ordered)


def fair_batch(block_bytes: int) -> int:
    """64 blocks, fewer where that would be more than 256 MiB a call, but at least one."""
    return max(1, min(64, 256 * MIB // block_bytes))
