"""Clients that come and go, fork, or are killed: what they held is given back, and others don't notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.mooncake_engine import engine_problem
from tests.chaos.blocks import SMALL, has_all, keys_of, put_all, same
from tests.chaos.processes import Puppet
from tests.chaos.sight import Holdings, descriptors, gauges
from tests.transport.fabrics import needs_mooncake

CLIENTS = 50
FABRIC = "" if engine_problem() else "tcp"
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("mooncake", marks=needs_mooncake)])
QUICK = pytest.mark.parametrize("transport", ["shm", "tcp"])  # a link over Mooncake starts a process first


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB", fabric=FABRIC) as server:
        yield server


def own() -> tuple[int, int]:
    """Descriptors and mapped pools of this process."""
    return descriptors(os.getpid()), Path("/proc/self/maps").read_text().count("memfd:kvstore-pool")


def come_and_go(server: ServerProcess, transport: str, keys: kvstore.BlockKeys) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport=transport) as client:
        assert client.get(keys).hit_blocks == 8
        with client.view(keys) as view:
            assert view.hit_blocks == 8


@TRANSPORTS
def test_fifty_clients_that_come_and_go_leave_nothing_behind(server: ServerProcess, transport: str) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport=transport) as first:
        keys = keys_of(first, 1, 8)
        first.delete(keys)
        put_all(first, keys)
        held, here = Holdings(server), own()
        for _ in range(CLIENTS):
            come_and_go(server, transport, keys)
        held.are_back()
        until(lambda: own() == here, what=f"{here} descriptors and mappings here")
        assert has_all(first, keys)


def test_what_a_killed_reader_held_is_given_back(server: ServerProcess) -> None:
    held = Holdings(server)
    with kvstore.connect(server.address, namespace=SMALL) as client:
        keys = keys_of(client, 2, 4)
        put_all(client, keys)
        with Puppet("viewer", address=server.address, prompt=2, blocks=4, ttl_s=600) as reader:
            assert reader.hear() == 4
            assert gauges(server)["held_blocks"] == 4
            reader.kill()
        until(lambda: gauges(server)["held_blocks"] == gauges(server)["leases_now"] == 0, what="the end of its lease")
    held.are_back()


@TRANSPORTS
def test_a_fork_gets_connections_of_its_own_and_its_parent_goes_on_undisturbed(transport: str) -> None:
    with ServerProcess(dram="16MiB", fabric=FABRIC) as server:
        kvstore.connect(server.address, namespace=SMALL, transport="tcp").close()  # now the worker has mapped its shard
        held = Holdings(server)
        with Puppet("parent", address=server.address, transport=transport) as parent:
            assert parent.hear() == {"child": 0, "parent_reads": True, "parent_writes": 4, "same_links": True}
        held.are_back()


@QUICK
def test_a_fork_while_the_server_is_down_reads_misses_and_finds_the_successor(transport: str) -> None:
    with (
        ServerProcess(dram="16MiB", fabric=FABRIC) as server,
        Puppet("forker", address=server.address, transport=transport) as forker,
    ):
        assert forker.hear() == "ready"
        server.kill()
        forker.tell()
        assert forker.hear() is False
        server.start()

        def child_works() -> bool:
            forker.tell()
            return forker.hear()

        until(child_works, what="recovery of the child")


def test_a_view_can_not_be_written_through_and_its_blocks_stay_as_they_are(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport="shm") as client:
        keys = keys_of(client, 3, 2)
        put_all(client, keys)
        with client.view(keys) as view:
            block = view[0]
            assert block is not None
            before = block.copy()
            with pytest.raises(ValueError, match="read-only"):
                block[0] = 1
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                block.flags.writeable = True
            assert same(view[0], before)
            assert np.array_equal(before, client.get(keys[:1]).blocks[0])  # pyright: ignore[reportArgumentType]
