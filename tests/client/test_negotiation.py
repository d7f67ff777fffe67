"""Which way a client takes: shared memory on the same host, else the fabric where both sides want it, else TCP."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import kvstore
from kvstore.client.doctor import Finding, Target, check_ways, examine, ping
from kvstore.client.nodes import LinkOptions, make_link
from kvstore.core.errors import ConfigError, Unavailable
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient, NodeInfo
from tests.chaos.sight import hello
from tests.client.sdk import one_line, space, stored
from tests.client.test_doctor import named
from tests.transport.fabrics import needs_mooncake


@pytest.fixture(scope="module")
def store() -> Iterator[ServerProcess]:
    with ServerProcess(dram="32MiB", fabric="tcp") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB") as server:
        yield server


def from_another_host(info: NodeInfo) -> NodeInfo:
    """The node as seen from where its local sockets are not."""
    return replace(info, shards=tuple(replace(shard, socket_path="/nowhere/shard.sock") for shard in info.shards))


def taken(info: NodeInfo, *, fabric: str = "", transport: str = "auto") -> str:
    """The transport of the link that is made to the first shard."""
    options = LinkOptions(namespace=space(), transport=transport, fabric=fabric)
    with closing(make_link("node", info, info.shards[0], options)) as link:
        return link.transport


@needs_mooncake
def test_the_fabric_is_taken_from_another_host_where_both_sides_want_it(store: ServerProcess) -> None:
    info = hello(store)
    assert info.fabric == "tcp"
    assert taken(info, fabric="tcp") == "shm"
    afar = from_another_host(info)
    assert taken(afar, fabric="tcp") == "mooncake"
    assert taken(afar) == "tcp"
    assert taken(afar, fabric="rdma") == "tcp", "the server's is another one"


def test_without_a_fabric_at_the_server_tcp_is_taken_and_who_insists_is_told(plain: ServerProcess) -> None:
    assert taken(from_another_host(hello(plain)), fabric="tcp") == "tcp"
    with one_line(Unavailable, "transport='mooncake'", "serves no fabric: its setting `fabric` is empty"):
        kvstore.connect(plain.address, namespace=space(), transport="mooncake")


def test_an_unknown_fabric_is_refused_with_what_is_allowed(plain: ServerProcess) -> None:
    with one_line(ConfigError, "fabric='1'", "tcp, rdma"):
        kvstore.connect(plain.address, namespace=space(), fabric="1")


@needs_mooncake
def test_the_variable_asks_for_the_fabric_and_stats_show_what_was_taken(
    store: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_FABRIC", "nonsense")
    with one_line(ConfigError, "fabric='nonsense'"):
        kvstore.connect(store.address, namespace=space())
    with kvstore.connect(store.address, namespace=space(), transport="mooncake", fabric="") as client:
        keys, data = stored(client, 2)
        into = np.zeros_like(data)
        assert client.get_into(keys, into).ok.all()
        assert client.stats()["links"][0]["transport"] == "mooncake"
        client.delete(keys)


@needs_mooncake
def test_a_fabric_worker_that_stands_still_is_not_touched_and_tcp_is_taken(store: ServerProcess) -> None:
    afar = from_another_host(hello(store))
    (pid,) = store.fabric_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert taken(afar, fabric="tcp") == "tcp"
        with one_line(Unavailable, "transport='mooncake'", "the fabric worker"):
            kvstore.connect(store.address, namespace=space(), transport="mooncake")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert taken(afar, fabric="tcp") == "mooncake"


@needs_mooncake
def test_doctor_and_ping_try_the_fabric_and_warn_of_what_it_opens(store: ServerProcess) -> None:
    checks = examine(Target(address=store.address))
    fabric = named(checks, "fabric")
    assert fabric.finding is Finding.WARN
    assert "the server offers tcp, and here Mooncake's engine can be had" in fabric.text
    assert "KVSTORE_FABRIC=tcp" in fabric.advice
    pair = named(checks, "mooncake shard 0")
    assert pair.finding is Finding.OK
    assert "content verified, deleted again" in pair.text
    assert {way.way for way in ping(Target(address=store.address), 1) if not way.error} == {
        "control",
        "shm",
        "mooncake",
        "tcp",
    }


def test_doctor_says_that_the_server_has_no_fabric(plain: ServerProcess) -> None:
    fabric = named(examine(Target(address=plain.address)), "fabric")
    assert fabric.finding is Finding.SKIP
    assert fabric.text.startswith("off at the server (its setting `fabric` is empty); here")


@needs_mooncake
def test_doctor_names_the_fabric_when_its_worker_stands_still(store: ServerProcess) -> None:
    info = hello(store)
    with ControlClient(store.address) as control:
        status = control.stats()
    (pid,) = store.fabric_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        checks = list(check_ways(Target(address=store.address), info, status))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert named(checks, "mooncake shard 0").finding is Finding.FAIL
    assert "the fabric worker" in named(checks, "mooncake shard 0").text
    assert named(checks, "tcp shard 0").finding is Finding.OK


@needs_mooncake
def test_a_shard_that_died_is_reached_again_with_its_fabric(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="mooncake", timeout_s=5.0) as client:
        keys, data = stored(client, 4)
        store.kill_shard()
        into = np.zeros_like(data)
        assert not client.get_into(keys, into).ok.any(), "its successor is empty"
        until(lambda: client.put(keys, data).present == 4, 30.0, "a new link")
        assert client.get_into(keys, into).ok.all()
        assert np.array_equal(into, data)
    assert store.status()["healthy"]
