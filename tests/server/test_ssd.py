"""The SSD tier through the real service: what goes there, what comes back, what a restart and a stuck disk do."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient

BLOCK_BYTES = 256 << 10
BATCH = 32
DRAM_BYTES = 32 << 20
SPACE = kvstore.Namespace(
    model="ssd", revision="1", dtype="uint8", block_tokens=4, layout=kvstore.OpaqueLayout("t", 8, BLOCK_BYTES // 8)
)


def server_with_disk(admission: str = "always") -> ServerProcess:
    return ServerProcess(dram=str(DRAM_BYTES), disk="256MiB", admission=admission)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_with_disk() as server:
        yield server


def connect(server: ServerProcess, transport: str = "shm") -> kvstore.Client:
    return kvstore.connect(server.address, namespace=SPACE, transport=transport, timeout_s=10.0)


def keys_of(client: kvstore.Client, batch: int) -> kvstore.BlockKeys:
    return client.keys(np.arange(BATCH * 4) + batch * 100_000)


def content(batch: int) -> NDArray[np.uint8]:
    return np.random.default_rng(batch).integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8)


def disk(server: ServerProcess) -> dict[str, Any]:
    return server.status()["shards"][0]["disk"]


def gauges(server: ServerProcess) -> dict[str, int]:
    return server.status()["shards"][0]["gauges"]


def fill(client: kvstore.Client, server: ServerProcess, batches: range) -> None:
    """Put more than DRAM holds, and see to it that all of it is durable."""
    for batch in batches:
        assert client.put(keys_of(client, batch), content(batch)).stored == BATCH
        until(lambda: disk(server)["queued_bytes"] == 0, what="write-behind")


def right(client: kvstore.Client, batch: int) -> int:
    """Read a batch: how many blocks came, after checking every byte of them."""
    got = client.get(keys_of(client, batch))
    expected = content(batch)
    for row in np.flatnonzero(got.ok):
        np.testing.assert_array_equal(got.blocks[row], expected[row])
    return int(np.count_nonzero(got.ok))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_dram_cannot_hold_comes_back_from_the_ssd(server: ServerProcess, transport: str) -> None:
    with connect(server, transport) as client:
        fill(client, server, range(8))
        assert gauges(server)["disk_blocks"] > 0
        assert [client.lookup(keys_of(client, batch)).hit_blocks for batch in range(8)] == [BATCH] * 8
        assert [right(client, batch) for batch in range(8)] == [BATCH] * 8
        with client.view(keys_of(client, 0)) as view:
            assert view.hit_blocks == BATCH
            np.testing.assert_array_equal(view[3], content(0)[3])
        one = client.get_into(keys_of(client, 1)[5:6], target := np.zeros((1, BLOCK_BYTES), dtype=np.uint8))
        assert one.ok.all()
        np.testing.assert_array_equal(target[0], content(1)[5])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_one_get_brings_more_from_the_ssd_than_dram_holds(server: ServerProcess, transport: str) -> None:
    with connect(server, transport) as client:
        fill(client, server, range(6))
        blocks = np.concatenate([content(batch) for batch in range(6)])
        assert blocks.nbytes > DRAM_BYTES
        keys = kvstore.BlockKeys(np.concatenate([keys_of(client, batch).array for batch in range(6)]))
        got = client.get(keys)
        assert got.ok.all()
        np.testing.assert_array_equal(got.blocks, blocks)


def test_a_killed_server_serves_what_was_durable_and_nothing_that_was_deleted() -> None:
    with server_with_disk() as server:
        with connect(server) as client:
            fill(client, server, range(6))
            assert client.delete(keys_of(client, 2)) == BATCH
        server.kill()
        server.start()
        with connect(server) as client:
            until(lambda: disk(server)["scan_complete"], what="the scan")
            assert [client.lookup(keys_of(client, b)).hit_blocks for b in range(6)] == [
                BATCH,
                BATCH,
                0,
                BATCH,
                BATCH,
                BATCH,
            ]
            assert [right(client, batch) for batch in range(6)] == [BATCH, BATCH, 0, BATCH, BATCH, BATCH]
            assert client.put(keys_of(client, 2), content(2)).stored == BATCH


def test_a_flush_is_final_across_a_restart() -> None:
    with server_with_disk() as server:
        with connect(server) as client:
            fill(client, server, range(3))
            with ControlClient(server.address) as control:
                assert control.flush(SPACE.digest) == 3 * BATCH
        server.kill()
        server.start()
        with connect(server) as client:
            until(lambda: disk(server)["scan_complete"], what="the scan")
            assert [client.lookup(keys_of(client, batch)).hit_blocks for batch in range(3)] == [0, 0, 0]


def test_a_byte_that_flipped_on_the_ssd_costs_its_block_and_no_other(server: ServerProcess) -> None:
    with connect(server) as client:
        fill(client, server, range(3))
    server.kill()
    slabs = sorted((server.runtime_dir.parent / "data").glob("shard-0/slab-*.kv"))
    damaged = content(1)[7]
    (path,) = [slab for slab in slabs if damaged.tobytes() in slab.read_bytes()]
    at = path.read_bytes().index(damaged.tobytes()) + 12345
    with path.open("r+b") as slab:
        slab.seek(at)
        slab.write(bytes([damaged[12345] ^ 1]))
    server.start()
    with connect(server) as client:
        until(lambda: disk(server)["scan_complete"], what="the scan")
        assert [right(client, batch) for batch in range(3)] == [BATCH, BATCH - 1, BATCH]
        assert client.put(keys_of(client, 1), content(1)).stored == 1
        assert right(client, 1) == BATCH


def test_without_its_catalog_the_ssd_starts_empty_and_serves_again(server: ServerProcess) -> None:
    with connect(server) as client:
        fill(client, server, range(2))
    server.kill()
    shutil.rmtree(server.runtime_dir.parent / "data" / "shard-0" / "catalog")
    server.start()
    with connect(server) as client:
        until(lambda: disk(server)["scan_complete"], what="the scan")
        assert [right(client, batch) for batch in range(2)] == [0, 0]
        fill(client, server, range(6))
        assert [right(client, batch) for batch in range(6)] == [BATCH] * 6


def test_only_what_is_used_again_goes_to_the_ssd_by_default() -> None:
    with server_with_disk(admission="second") as server, connect(server) as client:
        for batch in range(2):
            assert client.put(keys_of(client, batch), content(batch)).stored == BATCH
        assert right(client, 1) == BATCH
        until(lambda: gauges(server)["durable_blocks"] == BATCH, what="the blocks that were read again")
        for batch in range(2, 8):
            client.put(keys_of(client, batch), content(batch))
        assert client.lookup(keys_of(client, 0)).hit_blocks == 0
        assert client.lookup(keys_of(client, 1)).hit_blocks == BATCH


def test_fifty_readers_of_one_cold_prefix_cause_one_read(server: ServerProcess) -> None:
    with connect(server) as writer:
        fill(writer, server, range(8))
        cold = keys_of(writer, 0)
        before = disk(server)["counters"]["promoted_blocks"]
        clients = [connect(server) for _ in range(10)]

        def read(reader: int) -> int:
            return clients[reader % len(clients)].get(cold).hit_blocks

        try:
            with ThreadPoolExecutor(50) as threads:
                answers = list(threads.map(read, range(50)))
        finally:
            for client in clients:
                client.close()
        assert answers == [BATCH] * 50
        assert disk(server)["counters"]["promoted_blocks"] - before == BATCH


def test_prefetch_brings_blocks_up_without_waiting(server: ServerProcess) -> None:
    with connect(server) as client:
        fill(client, server, range(8))
        assert client.prefetch(keys_of(client, 0)) == BATCH
        until(lambda: disk(server)["counters"]["promoted_blocks"] >= BATCH, what="the promotion")
        assert right(client, 0) == BATCH


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stuck_disk_costs_the_deadline_and_dram_goes_on(server: ServerProcess, transport: str) -> None:
    with (
        connect(server) as client,
        kvstore.connect(server.address, namespace=SPACE, transport=transport, timeout_s=1.0) as hasty,
    ):
        fill(client, server, range(8))
        worker = worker_pid(server)
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        try:
            assert not hasty.get(keys_of(client, 0)).ok.any()
            assert hasty.put(keys_of(client, 9), content(9)).stored == BATCH
            assert right(hasty, 9) == BATCH
            assert hasty.stats()["links"][0]["up"]
        finally:
            os.kill(worker, signal.SIGCONT)
        until(lambda: right(client, 0) == BATCH, what="the blocks after the disk came back")


def test_a_disk_worker_that_dies_is_started_again_and_its_blocks_come_back(server: ServerProcess) -> None:
    with connect(server) as client:
        fill(client, server, range(6))
        killed = worker_pid(server)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: worker_pid(server) not in {killed, None}, what="the new worker")
        until(lambda: disk(server)["up"] and disk(server)["scan_complete"], what="the new worker's scan")
        assert [right(client, batch) for batch in range(6)] == [BATCH] * 6


def worker_pid(server: ServerProcess) -> int | None:
    """The disk worker of the only shard; None between two of them."""
    return next(iter(server.disk_worker_pids()), None)
