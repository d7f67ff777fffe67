"""What dashboards and people see: metrics that match what was done, health that tells the truth, status as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until

BLOCK_BYTES = 200_000
NAMESPACE = kvstore.Namespace(
    model="dashboards & <people>",
    revision="1",
    dtype="uint8",
    block_tokens=4,
    layout=kvstore.OpaqueLayout(tag="t", layers=2, layer_bytes_per_block=BLOCK_BYTES // 2),
)
SCRAPE_S_MAX = 6.0  # with one shard that does not answer

METRICS = [
    "kvstore_shards_up",
    "kvstore_shards_down",
    "kvstore_reserved_blocks",
    "kvstore_committed_blocks",
    "kvstore_committed_bytes",
    "kvstore_duplicate_puts",
    "kvstore_refused_puts",
    "kvstore_over_quota_puts",
    "kvstore_aborted_blocks",
    "kvstore_expired_reservations",
    "kvstore_evicted_blocks",
    "kvstore_evicted_bytes",
    "kvstore_deleted_blocks",
    "kvstore_leases",
    "kvstore_expired_leases",
    "kvstore_index_resizes",
    "kvstore_noted_requests",
    "kvstore_client_lookup_blocks",
    "kvstore_client_hit_blocks",
    "kvstore_client_read_blocks",
    "kvstore_client_read_bytes",
    "kvstore_client_lost_races",
    "kvstore_client_checksum_failures",
    "kvstore_disk_written_behind_blocks",
    "kvstore_disk_skipped_write_behind_blocks",
    "kvstore_disk_failed_write_behind_blocks",
    "kvstore_disk_demoted_blocks",
    "kvstore_disk_promoted_blocks",
    "kvstore_disk_failed_promotions",
    "kvstore_disk_refused_promotions",
    "kvstore_disk_found_blocks",
    "kvstore_disk_lost_blocks",
    "kvstore_gpu_promoted_blocks",
    "kvstore_gpu_promoted_bytes",
    "kvstore_gpu_evicted_blocks",
    "kvstore_gpu_dropped_blocks",
    "kvstore_gpu_failures",
    "kvstore_gpu_blocks",
    "kvstore_tenant_used_bytes",
    "kvstore_tenant_limit_bytes",
    "kvstore_tenant_share_bytes",
    "kvstore_tenant_refused_blocks",
    "kvstore_pool_bytes",
    "kvstore_warm_bytes",
    "kvstore_resident_blocks",
    "kvstore_reserved_blocks_now",
    "kvstore_quarantined_blocks",
    "kvstore_condemned_blocks",
    "kvstore_disk_blocks",
    "kvstore_loading_blocks",
    "kvstore_durable_blocks",
    "kvstore_held_blocks",
    "kvstore_pinned_blocks",
    "kvstore_leases_now",
    "kvstore_index_slots",
    "kvstore_index_bytes",
    "kvstore_sessions",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="24MiB", shards=2) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=NAMESPACE, transport="shm", timeout_s=10.0) as client:
        yield client


def metrics(server: ServerProcess) -> dict[str, float]:
    """Each sample, summed over the shards; those of the pool by use."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http("/metrics")):
        for sample in family.samples:
            name = f"{sample.name} {sample.labels['use']}" if "use" in sample.labels else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def fetch(server: ServerProcess, path: str) -> tuple[int, str, str]:
    """Status code, content type and text of a page, whatever the code."""
    try:
        with urllib.request.urlopen(server.http_address + path, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def prompt(client: kvstore.Client, number: int, blocks: int) -> kvstore.BlockKeys:
    return client.keys(np.arange(blocks * 4, dtype=np.int32) + number * 10_000)


def test_the_names_of_the_metrics_never_change_by_accident(server: ServerProcess) -> None:
    families = list(text_string_to_metric_families(server.http("/metrics")))
    assert [family.name for family in families] == METRICS
    assert all(family.documentation for family in families)
    assert fetch(server, "/metrics")[1].startswith("text/plain; version=0.0.4")


def test_the_counters_match_what_was_done(server: ServerProcess, client: kvstore.Client) -> None:
    before = metrics(server)

    def grown(name: str) -> float:
        return metrics(server)[name] - before[name]

    keys = prompt(client, 1, 20)
    blocks = np.zeros((20, BLOCK_BYTES), dtype=np.uint8)
    assert client.put(keys, blocks).stored == 20
    assert client.put(keys, blocks).stored == 0
    assert client.lookup(prompt(client, 1, 25)).hit_blocks == 20
    assert client.get(keys[:5]).bytes == 5 * BLOCK_BYTES
    client.pin(keys[:3])
    assert metrics(server)["kvstore_pinned_blocks"] == 3
    client.delete(keys[:2])
    with client.view(keys[4:8]) as view:
        assert view.hit_blocks == 4
        assert metrics(server)["kvstore_held_blocks"] == 4
    for name, amount in {
        "reserved_blocks": 20,
        "committed_blocks": 20,
        "committed_bytes": 20 * BLOCK_BYTES,
        "duplicate_puts": 20,
        "deleted_blocks": 2,
        "refused_puts": 0,
        "evicted_blocks": 0,
    }.items():
        assert grown(f"kvstore_{name}_total") == amount, name
    assert grown("kvstore_leases_total") in {1, 2}  # one on each shard that has some of the blocks
    assert grown("kvstore_resident_blocks") == 18
    # What clients read through shared memory they report by themselves, now and then.
    until(lambda: grown("kvstore_client_read_blocks_total") == 5, what="the client's report")
    assert grown("kvstore_client_read_bytes_total") == 5 * BLOCK_BYTES
    assert grown("kvstore_client_lookup_blocks_total") == 25
    assert grown("kvstore_client_hit_blocks_total") == 20
    now = metrics(server)
    uses = sum(now[f"kvstore_pool_bytes {use}"] for use in ("free", "reserved", "committed"))
    assert uses == now["kvstore_pool_bytes capacity"]


def test_evictions_and_refusals_are_counted(server: ServerProcess, client: kvstore.Client) -> None:
    before = metrics(server)
    stored = 0
    for number in range(100, 110):
        stored += client.put(prompt(client, number, 20), np.zeros((20, BLOCK_BYTES), dtype=np.uint8)).stored
    now = metrics(server)
    assert stored == 200
    evicted = before["kvstore_resident_blocks"] + stored - now["kvstore_resident_blocks"]
    assert now["kvstore_evicted_blocks_total"] - before["kvstore_evicted_blocks_total"] == evicted > 0
    assert now["kvstore_evicted_bytes_total"] - before["kvstore_evicted_bytes_total"] == evicted * BLOCK_BYTES
    everything = prompt(client, 200, 150)
    refused = client.put(everything, np.zeros((150, BLOCK_BYTES), dtype=np.uint8)).statuses == kvstore.PutStatus.NO_ROOM
    assert refused.any()
    grown = metrics(server)["kvstore_refused_puts_total"] - before["kvstore_refused_puts_total"]
    assert grown == np.count_nonzero(refused)


def test_sessions_are_those_of_the_clients_that_are_there(server: ServerProcess, client: kvstore.Client) -> None:
    alone = metrics(server)["kvstore_sessions"]
    with kvstore.connect(server.address, namespace=NAMESPACE, transport="shm"):
        assert metrics(server)["kvstore_sessions"] == alone + 2  # one on each shard
    until(lambda: metrics(server)["kvstore_sessions"] == alone, what="the end of the sessions")


def test_status_is_json_for_machines_and_the_front_page_is_for_people(
    server: ServerProcess, client: kvstore.Client
) -> None:
    client.put(prompt(client, 2, 2), np.zeros((2, BLOCK_BYTES), dtype=np.uint8))
    code, kind, text = fetch(server, "/status")
    assert (code, kind) == (200, "application/json")
    status = json.loads(text)
    assert status["healthy"]
    assert [shard["shard"] for shard in status["shards"]] == [0, 1]
    assert status["endpoints"]["control"] == server.address
    spaces = [space for shard in status["shards"] for space in shard["namespaces"]]
    assert {space["digest"] for space in spaces} == {NAMESPACE.digest.hex()}
    code, kind, text = fetch(server, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert "dashboards &amp; &lt;people&gt;@1" in text
    assert NAMESPACE.model not in text, "a namespace's name could be a script"


def test_a_page_that_is_not_there_says_which_are(server: ServerProcess) -> None:
    code, _, text = fetch(server, "/nowhere")
    assert code == 404
    assert "/health" in text
    assert fetch(server, "/health?verbose=1")[0] == 200


def test_a_half_sent_request_keeps_nobody_else_waiting(server: ServerProcess) -> None:
    host, _, port = server.http_address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET /hea")
        assert fetch(server, "/health")[0] == 200


def test_health_turns_503_while_a_shard_is_frozen_and_the_others_are_still_told_of(server: ServerProcess) -> None:
    assert fetch(server, "/health") == (200, "text/plain", "ok\n")
    frozen = server.shard_pid(1)
    os.kill(frozen, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        with ThreadPoolExecutor() as threads:  # as impatient probes would
            health, status, front, now = (
                threads.submit(fetch, server, "/health"),
                threads.submit(fetch, server, "/status"),
                threads.submit(fetch, server, "/"),
                threads.submit(metrics, server),
            )
        assert time.monotonic() - started_s < SCRAPE_S_MAX
        assert health.result()[0] == 503
        assert json.loads(status.result()[2])["shards_down"] == [1]
        assert "1 shards do not answer" in front.result()[2]
        assert (now.result()["kvstore_shards_up"], now.result()["kvstore_shards_down"]) == (1, 1)
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: fetch(server, "/health")[0] == 200, what="health after the thaw")


def test_a_shard_that_dies_is_started_again_under_a_new_boot_id(server: ServerProcess) -> None:
    def boot_ids() -> list[str]:
        return [shard["boot_id"] for shard in server.status()["shards"]]

    before = boot_ids()
    server.kill_shard(0)
    until(lambda: (now := boot_ids()) != before and len(now) == 2, what="another shard")
    assert boot_ids()[1] == before[1]
    until(lambda: fetch(server, "/health")[0] == 200, what="health with the new shard")
