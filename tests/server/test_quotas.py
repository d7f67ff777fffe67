"""Quotas through the real service: set by an operator, told to clients, kept over restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient, TenantQuota

BLOCK_BYTES = 64 << 10
SLOT_BYTES = 68 << 10  # with checksums, rounded up to 4 KiB
LAYOUT = kvstore.OpaqueLayout("t", 4, BLOCK_BYTES // 4)


def space(tenant: bytes) -> kvstore.Namespace:
    return kvstore.Namespace(model="quota", revision="1", dtype="uint8", block_tokens=4, layout=LAYOUT, tenant=tenant)


ANN, BOB = space(b"ann's secret salt"), space(b"")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="32MiB", disk="256MiB", admission="always", shards=2) as server:
        yield server


def put(server: ServerProcess, namespace: kvstore.Namespace, first: int, count: int, transport: str) -> list[int]:
    with kvstore.connect(server.address, namespace=namespace, transport=transport, timeout_s=10.0) as client:
        keys = client.keys(np.arange(first * 4, (first + count) * 4))
        return client.put(keys, np.full((count, BLOCK_BYTES), first % 256, np.uint8)).statuses.tolist()


def tenant(server: ServerProcess, namespace: kvstore.Namespace) -> dict[str, dict[str, int]]:
    return next(row for row in server.status()["tenants"] if row["tenant"] == namespace.tenant_id)


def set_quota(server: ServerProcess, namespace: kvstore.Namespace, **amounts: int) -> None:
    with ControlClient(server.address) as control:
        control.set_quota(namespace.tenant_id, TenantQuota(**amounts))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_refused_put_is_an_explicit_answer_and_counted(server: ServerProcess, transport: str) -> None:
    set_quota(server, ANN, dram_limit=20 * SLOT_BYTES)
    statuses = put(server, ANN, 0, 200, transport)
    assert set(statuses) == {kvstore.PutStatus.STORED, kvstore.PutStatus.OVER_QUOTA}
    refused = statuses.count(kvstore.PutStatus.OVER_QUOTA)
    assert tenant(server, ANN)["dram"]["refused"] == refused
    assert sum(shard["counters"]["over_quota_puts"] for shard in server.status()["shards"]) == refused
    assert tenant(server, ANN)["dram"]["used"] <= 20 * SLOT_BYTES
    assert put(server, BOB, 0, 50, transport) == [kvstore.PutStatus.STORED] * 50


def test_a_flood_of_one_tenant_leaves_the_share_of_another_alone() -> None:
    with ServerProcess(dram="32MiB", shards=2) as server:
        flood(server)


def flood(server: ServerProcess) -> None:
    set_quota(server, ANN, dram_share=8 << 20)
    assert set(put(server, ANN, 0, 100, "shm")) == {kvstore.PutStatus.STORED}
    for first in range(0, 2000, 200):
        assert set(put(server, BOB, first, 200, "shm")) == {kvstore.PutStatus.STORED}
    with kvstore.connect(server.address, namespace=ANN) as client:
        got = client.get(client.keys(np.arange(400)))
    assert got.ok.all()
    assert not any(np.asarray(block).any() for block in got.blocks)
    assert tenant(server, ANN)["dram"]["used"] == 100 * SLOT_BYTES
    assert sum(shard["counters"]["evicted_blocks"] for shard in server.status()["shards"]) > 1000


def test_a_limit_of_the_ssd_holds_for_write_behind(server: ServerProcess) -> None:
    set_quota(server, ANN, disk_limit=64 * BLOCK_BYTES)
    put(server, ANN, 0, 100, "shm")

    def settled() -> bool:
        return all(shard["disk"]["queued_bytes"] == 0 for shard in server.status()["shards"])

    until(settled, what="write-behind")
    until(lambda: tenant(server, ANN)["disk"]["used"] > 0, what="the worker's figures")
    assert tenant(server, ANN)["disk"]["used"] <= 64 * BLOCK_BYTES


def test_quotas_and_tenants_survive_restarts_of_the_node_and_of_a_shard(server: ServerProcess) -> None:
    set_quota(server, ANN, dram_limit=20 * SLOT_BYTES, disk_share=1 << 20)
    put(server, ANN, 0, 4, "shm")
    server.kill_shard(0)
    until(lambda: server.status()["healthy"], what="the shard's return")
    assert kvstore.PutStatus.OVER_QUOTA in put(server, ANN, 100, 200, "shm")
    server.kill()
    server.start()
    until(lambda: all(shard["disk"]["scan_complete"] for shard in server.status()["shards"]), what="the scan")
    told = tenant(server, ANN)
    assert told["dram"]["limit"] == 20 * SLOT_BYTES
    assert told["disk"]["share"] == 1 << 20
    label = {row["label"] for shard in server.status()["shards"] for row in shard["namespaces"]}
    assert not any("found on disk" in text for text in label)
    assert kvstore.PutStatus.OVER_QUOTA in put(server, ANN, 1000, 200, "shm")
    set_quota(server, ANN)
    assert kvstore.PutStatus.OVER_QUOTA not in put(server, ANN, 2000, 200, "shm")


def test_shares_that_add_up_to_more_than_there_is_are_refused_and_leave_all_as_it_was(server: ServerProcess) -> None:
    set_quota(server, ANN, dram_share=20 << 20)
    with pytest.raises(kvstore.UsageError, match=r"dram shares of 40MiB in all: there are 32MiB"):
        set_quota(server, BOB, dram_share=20 << 20)
    with ControlClient(server.address) as control, pytest.raises(kvstore.UsageError, match="tenant 'No Such'"):
        control.set_quota("No Such", TenantQuota(dram_limit=1))
    assert [row["tenant"] for row in server.status()["tenants"]] == [ANN.tenant_id, "default"]


def test_the_tenants_salt_is_told_to_nobody(server: ServerProcess) -> None:
    put(server, ANN, 0, 1, "tcp")
    assert ANN.tenant_id in str(server.status())
    assert ANN.tenant.hex() not in str(server.status())
    assert "secret" not in str(server.status())
    assert BOB.tenant_id == "default"


def test_a_frozen_shard_is_named_and_the_others_know_the_quota(server: ServerProcess) -> None:
    frozen = server.shard_pid(0)
    os.kill(frozen, signal.SIGSTOP)
    try:
        with (
            ControlClient(server.address, timeout_s=10.0) as control,
            pytest.raises(kvstore.KvStoreError, match="shard 0 does not answer: the quota is kept"),
        ):
            control.set_quota(ANN.tenant_id, TenantQuota(dram_limit=20 * SLOT_BYTES))
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: server.status()["healthy"], what="shard 0 again")
    assert tenant(server, ANN)["dram"]["limit"] == 20 * SLOT_BYTES
    put(server, ANN, 0, 1, "shm")
    told = server.status()["shards"][1]["quotas"]
    assert [row["limit"] for row in told if row["tenant"] == ANN.tenant_id] == [10 * SLOT_BYTES]
