"""`kvbench disk --restart-blocks`: how soon a killed server serves what is on its SSD, and knows all of it.

A server with many small blocks on its SSD is killed (SIGKILL to all its processes) and started again. Times count from
the start of the new process: until a client has the newest block, and until the index has every block. Afterwards all
blocks are read and compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvbench.errors import BenchError
from kvstore.core.errors import UsageError
from kvstore.testing.cluster import ServerProcess

U8 = NDArray[np.uint8]

BLOCK_BYTES: Final = 4096
LAYERS: Final = 32
BLOCKS_MAX: Final = 10_000_000
_BLOCK_TOKENS: Final = 16
_BATCH: Final = 4000
_DRAM_BYTES: Final = 128 << 20
_DISK_BYTES_MIN: Final = 256 << 20
_SLOT_BYTES: Final = 2 * BLOCK_BYTES  # on the SSD at most
_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.005
_RESTART_OP: Final = "restart"


@dataclass(frozen=True, slots=True)
class RestartRow:
    """One restart."""

    op: str
    transport: str
    block_bytes: int
    blocks: int
    ready_s: float  # until the server said that it is
    served_s: float  # until a client had read the newest block
    complete_s: float  # until every block was in the index
    checked: bool  # all blocks came back, and every byte was compared


def run_restart(blocks: int, folder: Path, *, seed: int, note: Callable[[str], None]) -> RestartRow:
    """Fill, kill, start, measure, compare.

    Raises:
        UsageError: too few or too many blocks.
        BenchError: a block never became durable, or the scan never ended.
    """
    if not 1 <= blocks <= BLOCKS_MAX:
        raise UsageError(f"--restart-blocks: {blocks} is out of range; allowed: 1 to {BLOCKS_MAX}")
    space = kvstore.Namespace(
        model="kvbench",
        revision=f"restart, seed {seed}",
        dtype="uint8",
        block_tokens=_BLOCK_TOKENS,
        layout=kvstore.OpaqueLayout("kvbench", LAYERS, BLOCK_BYTES // LAYERS),
    )
    disk_bytes = max(_DISK_BYTES_MIN, 2 * blocks * _SLOT_BYTES)
    batches = [np.arange(first, min(first + _BATCH, blocks)) for first in range(0, blocks, _BATCH)]
    with (
        tempfile.TemporaryDirectory(prefix="kvbench-", dir=folder) as data,
        ServerProcess(
            dram=str(_DRAM_BYTES), disk=disk_bytes, admission="always", data_dir=Path(data) / "data"
        ) as server,
    ):
        note(f"{blocks} blocks of 4KiB on the SSD in {folder}")
        with kvstore.connect(server.address, namespace=space) as client:
            for ids in batches:
                if client.put(_keys(client, ids), _content(ids, seed)).stored != len(ids):
                    raise BenchError("a put was refused")
                _wait(lambda: _disk(server)["queued_bytes"] == 0, "the blocks to be durable")
        server.kill_all()
        began_s = time.monotonic()
        server.start()
        ready_s = time.monotonic() - began_s
        with kvstore.connect(server.address, namespace=space, timeout_s=_TIMEOUT_S) as client:
            # The first of a batch counts as its newest: a prefix is told from its start.
            newest = _keys(client, batches[-1])[:1]
            _wait(lambda: bool(client.get(newest).ok.all()), "the newest block")
            served_s = time.monotonic() - began_s
            _wait(lambda: bool(_disk(server)["scan_complete"]), "the end of the scan")
            complete_s = time.monotonic() - began_s
            wrong = sum(_wrong(client, ids, seed) for ids in batches)
    return RestartRow(_RESTART_OP, "shm", BLOCK_BYTES, blocks, ready_s, served_s, complete_s, wrong == 0)


def restart_summary(row: RestartRow) -> str:
    """One line about it."""
    text = (
        f"restart with {row.blocks} blocks: ready in {row.ready_s:.2f} s, the newest block served in {row.served_s:.2f} s, "
        f"all known in {row.complete_s:.2f} s"
    )
    return text if row.checked else f"{text}, CONTENT WRONG OR MISSING"


def _keys(client: kvstore.Client, ids: NDArray[np.int64]) -> kvstore.BlockKeys:
    """A prompt of its own for each batch."""
    first = int(ids[0]) * _BLOCK_TOKENS
    return client.keys(np.arange(first, first + len(ids) * _BLOCK_TOKENS))


def _content(ids: NDArray[np.int64], seed: int) -> U8:
    """Bytes that follow from block and place, shape (n, BLOCK_BYTES)."""
    places = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (ids.astype(np.uint64)[:, None] + np.uint64(seed)) * np.uint64(0xC2B2AE3D27D4EB4F) ^ places[None, :]
    return np.ascontiguousarray(words).view(np.uint8)


def _wrong(client: kvstore.Client, ids: NDArray[np.int64], seed: int) -> int:
    """How many of these blocks don't come back as they were put."""
    rows = np.zeros((len(ids), BLOCK_BYTES), dtype=np.uint8)
    ok = client.get_into(_keys(client, ids), rows).ok
    return int(np.count_nonzero(~ok | (rows != _content(ids, seed)).any(axis=1)))


def _disk(server: ServerProcess) -> dict[str, int]:
    return server.status()["shards"][0]["disk"]


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() >= deadline_s:
            raise BenchError(f"waited {_TIMEOUT_S:.0f} s for {what}")
        time.sleep(_POLL_S)
