"""The checks behind `kvstorectl doctor`: what is wrong is told as what it is, with what to do about it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.doctor import (
    Check,
    Finding,
    Target,
    Way,
    check_huge_pages,
    check_receive_buffer,
    check_ways,
    complete,
    examine,
)
from kvstore.testing.cluster import ServerProcess
from kvstore.wire.control import ControlClient


def named(checks: Sequence[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("always within_size [advise] never deny force", Finding.OK),
        ("always [within_size] advise never deny force", Finding.OK),
        ("always within_size advise [never] deny force", Finding.WARN),
        ("always within_size advise never [deny] force", Finding.WARN),
    ],
)
def test_huge_pages_are_fine_in_every_mode_that_grants_them(tmp_path: Path, text: str, finding: Finding) -> None:
    path = tmp_path / "shmem_enabled"
    path.write_text(text + "\n")
    check = check_huge_pages(path)
    assert check.finding is finding
    assert bool(check.advice) == (finding is Finding.WARN)


def test_a_kernel_without_huge_pages_is_skipped_not_blamed(tmp_path: Path) -> None:
    assert check_huge_pages(tmp_path / "none").finding is Finding.SKIP


def test_a_small_receive_buffer_limit_is_a_warning_that_says_how_to_raise_it(tmp_path: Path) -> None:
    path = tmp_path / "rmem_max"
    path.write_text("212992\n")
    check = check_receive_buffer(path)
    assert (check.finding, check.advice) == (Finding.WARN, "as root: sysctl -w net.core.rmem_max=2097152")
    path.write_text("4194304\n")
    assert check_receive_buffer(path).finding is Finding.OK


def test_a_server_open_to_everybody_is_warned_about_unless_it_wants_a_token() -> None:
    with ServerProcess(dram="16MiB", host="0.0.0.0") as server:
        check = named(examine(Target(address=server.address)), "exposure")
        assert check == Check(
            "exposure",
            Finding.WARN,
            "listens on 0.0.0.0 and lets everybody in",
            "start it with --auth-token, or on loopback",
        )
    with ServerProcess(dram="16MiB", host="0.0.0.0", auth_token="swordfish") as server:
        check = named(examine(Target(address=server.address, auth_token="swordfish")), "exposure")
        assert check.finding is Finding.OK


def test_a_missing_auth_token_is_told_as_such() -> None:
    with ServerProcess(dram="16MiB", auth_token="swordfish") as server:
        check = named(examine(Target(address=server.address)), "control")
        assert (check.finding, check.advice) == (
            Finding.FAIL,
            "give the server's auth_token with KVSTORE_AUTH_TOKEN",
        )


def test_where_the_local_socket_is_not_to_be_found_shared_memory_is_missed_and_tcp_does_the_work() -> None:
    with ServerProcess(dram="16MiB") as server, ControlClient(server.address) as control:
        seen = control.hello("test")
        from_a_container = replace(seen, shards=(replace(seen.shards[0], socket_path="/nowhere/shard.sock"),))
        status = control.stats()
        shm, tcp = check_ways(Target(address=server.address), from_a_container, status)
        from_afar, _ = check_ways(Target(address="gpu7:7400"), from_a_container, status)
    assert shm == Check(
        "shm shard 0",
        Finding.WARN,
        "not attached, TCP is used: local shard /nowhere/shard.sock: No such file or directory",
        "mount the server's runtime_dir at the same path in this container",
    )
    assert tcp.finding is Finding.OK
    assert from_afar.finding is Finding.SKIP


def test_a_pool_that_pins_hold_whole_is_a_warning_not_an_eviction() -> None:
    block = kvstore.OpaqueLayout(tag="test", layers=1, layer_bytes_per_block=1 << 20)
    namespace = kvstore.Namespace(model="m", revision="1", dtype="uint8", block_tokens=2, layout=block)
    with (
        ServerProcess(dram="16MiB") as server,
        kvstore.connect(server.address, namespace=namespace) as client,
    ):
        keys = client.keys(range(64))
        client.put(keys, np.zeros((32, 1 << 20), np.uint8))  # more than fits
        before = client.lookup(keys)
        assert client.pin(keys) == before.hit.sum() > 0
        check = named(examine(Target(address=server.address)), "tcp shard 0")
        assert (check.finding, check.text) == (Finding.WARN, "a scratch block was not stored: NO_ROOM")
        assert np.array_equal(client.lookup(keys).states, before.states)


def test_a_shard_that_no_way_leads_to_makes_a_ping_incomplete() -> None:
    control = Way(way="control", shard=None, to="a:1")
    shm, tcp = (
        Way(way="shm", shard=0, to="s", error="not here"),
        Way(way="tcp", shard=0, to="a:2"),
    )
    assert complete([control, shm, tcp])
    assert complete([control, shm, tcp, Way(way="tcp", shard=1, to="a:2")])
    assert not complete([control, shm, tcp, Way(way="tcp", shard=1, to="a:2", error="refused")])
