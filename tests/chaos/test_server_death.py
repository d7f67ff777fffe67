"""Servers and shards that are killed while clients work: misses, then the successor, and never a wrong byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.core.errors import Unavailable
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.channel import Deadline
from kvstore.transport.tcp import connect_data_port
from kvstore.wire.control import ControlClient
from tests.chaos.blocks import LARGE, SMALL, TINY, content, has_all, keys_of, put_all, wrong
from tests.chaos.load import SLACK_S, Load
from tests.chaos.processes import Stopwatch
from tests.chaos.sight import hello, is_conserved

TIMEOUT_S = 1.0
RECOVERY_S = 15.0  # seconds in truth; a machine with few cores and much to do
CYCLES = 10
Connect = Callable[..., kvstore.Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`kvstore.connect` to a server, closed at the end."""
    with ExitStack() as stack:

        def connect(server: ServerProcess, transport: str, space: kvstore.Namespace = SMALL) -> kvstore.Client:
            client = kvstore.connect(server.address, namespace=space, transport=transport, timeout_s=TIMEOUT_S)
            return stack.enter_context(client)

        yield connect


def boot_ids(server: ServerProcess) -> set[str]:
    status = server.status()
    return {status["boot_id"], *(shard["boot_id"] for shard in status["shards"])}


def mapped_pools() -> int:
    """How many pools of shards this process has mapped; each is mapped twice."""
    return Path("/proc/self/maps").read_text().count("memfd:kvstore-pool")


def test_clients_of_a_server_killed_under_load_read_misses_and_find_its_successor_by_themselves(
    connect: Connect,
) -> None:
    others = mapped_pools()  # that tests before this one keep for good
    with ServerProcess(dram="32MiB") as server:
        clients = [connect(server, "shm"), connect(server, "tcp"), connect(server, "tcp", LARGE)]
        before = [keys_of(client, 1, 8) for client in clients]
        for client, keys in zip(clients[1:], before[1:], strict=True):  # the first two share a namespace
            put_all(client, keys)
        assert has_all(clients[0], before[0])
        old_ids, old_token = boot_ids(server), hello(server).token
        with Load(clients) as load:
            until(lambda: min(load.hits) > 50, what="clients at work")
            server.kill()
            missed = list(load.misses)
            until(lambda: all(now > then for now, then in zip(load.misses, missed, strict=True)), what="misses")
            server.start()
            served = list(load.hits)
            until(
                lambda: all(now > then + 50 for now, then in zip(load.hits, served, strict=True)),
                RECOVERY_S,
                "recovery",
            )
        assert load.errors == []
        assert load.wrong_blocks == 0
        assert load.slowest_s < TIMEOUT_S + SLACK_S
        assert not boot_ids(server) & old_ids
        for client, keys in zip(clients, before, strict=True):
            assert not client.get(keys).ok.any(), "what only the dead server had"
            assert client.lookup(keys).hit_blocks == 0
        info = hello(server)
        with pytest.raises(Unavailable, match="token"):
            connect_data_port(info.data_host, info.data_port, old_token, 0, Deadline(5))
        assert is_conserved(server)
        # A thread of the client may be on its way out of a call.
        until(lambda: mapped_pools() == others + 2, RECOVERY_S, "the dead server's memory unmapped")


def test_calls_return_at_once_while_the_server_is_down(connect: Connect) -> None:
    with ServerProcess(dram="16MiB") as server:
        clients = [connect(server, "shm"), connect(server, "tcp")]
        keys = keys_of(clients[0], 1, 8)
        server.kill()
        for client in clients:
            client.get(keys)  # from now on it knows
            with Stopwatch() as watch:
                assert client.get(keys).hit_blocks == 0
                assert client.lookup(keys).hit_blocks == 0
                assert (client.put(keys, content(keys, SMALL)).statuses == kvstore.PutStatus.FAILED).all()
                assert client.delete(keys) == client.pin(keys) == client.prefetch(keys) == 0
                with client.view(keys) as view:
                    assert view.hit_blocks == 0
            assert watch.seconds < TIMEOUT_S
        with Stopwatch() as watch, pytest.raises(Unavailable, match=server.address):
            kvstore.connect(server.address, namespace=SMALL, timeout_s=TIMEOUT_S)
        assert watch.seconds < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize(
    ("transport", "space"), [("shm", SMALL), ("tcp", TINY), ("tcp", LARGE)], ids=["shm", "tcp-tiny", "tcp-large"]
)
def test_one_killed_shard_of_three_shortens_the_hit_and_is_used_again(
    connect: Connect, three_shards: ServerProcess, transport: str, space: kvstore.Namespace
) -> None:
    server = three_shards
    client = connect(server, transport, space)
    keys = keys_of(client, 1, 40)
    put_all(client, keys)
    with ControlClient(server.address) as control:
        lost = np.array([block.shard == 1 for block in control.query(keys)])
    assert 0 < lost.sum() < len(keys)
    old_ids = boot_ids(server)
    server.kill_shard(1)

    # From the first call on: the dead shard's memory is still mapped, and must not be read as data.
    got = client.get(keys)
    assert wrong(keys, got, space) == 0
    assert got.ok.tolist() == (~lost).tolist()
    assert client.lookup(keys).hit_blocks == int(np.flatnonzero(lost)[0])
    until(lambda: client.put(keys, content(keys, space)).present == len(keys), RECOVERY_S, "puts to the successor")
    assert has_all(client, keys)
    assert len(boot_ids(server) - old_ids) == 1, "only that shard is another one"
    assert client.delete(keys) == len(keys)


@pytest.fixture(scope="module")
def three_shards() -> Iterator[ServerProcess]:
    with ServerProcess(dram="96MiB", shards=3) as server:
        yield server


@pytest.mark.slow
def test_through_ten_kills_and_restarts_a_client_reads_no_wrong_byte_and_never_hangs(connect: Connect) -> None:
    with ServerProcess(dram="16MiB") as server:
        clients = [connect(server, "shm"), connect(server, "tcp")]
        with Load(clients, threads_each=1) as load:
            for cycle in range(CYCLES):
                if cycle % 2 == 0:  # the others are killed while clients may be in the middle of finding them
                    served = list(load.hits)
                    until(
                        lambda served=served: all(now > then for now, then in zip(load.hits, served, strict=True)),
                        RECOVERY_S,
                        "recovery",
                    )
                server.kill_all()
                server.start()
            served = list(load.hits)
            until(lambda: all(now > then for now, then in zip(load.hits, served, strict=True)), RECOVERY_S, "recovery")
        assert load.errors == []
        assert load.wrong_blocks == 0
        assert load.slowest_s < TIMEOUT_S + SLACK_S
        assert server.status()["epoch"] == CYCLES + 1
        assert len(list(server.runtime_dir.iterdir())) == 1, "sockets of the dead"
