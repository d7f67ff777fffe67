"""Made-up results for tests of how results are shown."""

from kvbench.index import IndexResult, IndexRow
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

INDEX_RESULT = IndexResult(
    rows=[
        IndexRow(1, 1e5, 8.0, 9.0, 6e5, 1 / 6, checked=True, samples=100),
        IndexRow(1024, 6e6, 170.0, 200.0, 5e7, 0.12, checked=True, samples=100),
    ],
    resident_keys=1_000_000,
    bytes_per_entry=82.5,
)
