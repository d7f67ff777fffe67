"""A restart with 100,000 blocks: served at once, known in seconds, and little memory for each."""

import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvstore.core.keys import KEY_DTYPE
from kvstore.server.tiers.disk.messages import BLOCKS_MAX, LOAD_ROW, STORE_ROW, Loaded, LoadStatus, Stored, StoreStatus
from tests.server.tiers.disk.shard_end import ShardEnd

BLOCKS = 100_000
FIXED_BYTES = 48 << 20  # of RocksDB's caches and memtables, whatever the number of blocks


@pytest.mark.slow
def test_a_hundred_thousand_blocks_are_served_in_two_seconds_and_known_in_ten(tmp_path: Path) -> None:
    end = ShardEnd(tmp_path, slots=4 * BLOCKS_MAX, layers=4, layer_bytes=1000)
    end.pool[:] = 7
    end.start(1 << 30)
    end.wait_scanned()
    memory_before = psutil.Process(end.child.pid).memory_full_info().uss
    keys = np.random.default_rng(1).integers(0, 1 << 63, (BLOCKS, 3), dtype=np.uint64).view(KEY_DTYPE).reshape(-1)
    for start in range(0, BLOCKS, BLOCKS_MAX):
        part = keys[start : start + BLOCKS_MAX]
        rows = np.zeros(len(part), STORE_ROW)
        rows["key"], rows["generation"], rows["offset"] = part, 1, np.arange(len(part)) * end.slot
        stored = end.wait(end.link.submit_store(end.space, rows), Stored)
        assert set(stored.statuses.tolist()) == {StoreStatus.DURABLE}
    grown = psutil.Process(end.child.pid).memory_full_info().uss - memory_before
    assert grown < FIXED_BYTES + 256 * BLOCKS
    end.kill()

    began_s = time.monotonic()
    end.start(1 << 30)
    while not end.scanned:
        end.receive()
    newest = np.frombuffer(end.scanned[0], KEY_DTYPE)
    rows = np.zeros(1, LOAD_ROW)
    rows["key"] = newest
    loaded = end.wait(end.link.submit_load(rows), Loaded)
    served_s = time.monotonic() - began_s
    assert loaded.statuses.tolist() == [LoadStatus.OK]
    assert (end.pool[: end.size] == 7).all()
    end.wait_scanned()
    complete_s = time.monotonic() - began_s
    assert len(end.scanned) == BLOCKS
    assert served_s < 2.0
    assert complete_s < 10.0
    end.close()
