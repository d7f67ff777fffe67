"""Writers that die, freeze, or come all at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import kvstore
from kvstore.core.states import BlockState, PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import SMALL, content, has_all, keys_of, put_all
from tests.chaos.processes import Puppet, hear_all
from tests.chaos.roles import local_session
from tests.chaos.sight import gauges, hello, is_conserved

PROCESSES, THREADS, ROUNDS = 4, 16, 6


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="32MiB") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=SMALL, transport="shm") as client:
        yield client


def offsets_of(server: ServerProcess, keys: kvstore.BlockKeys) -> list[int]:
    """Where the blocks lie in the pool."""
    session = local_session(hello(server).shards[0].socket_path)
    found = session.shared.index.probe(keys.array)
    session.channel.close()
    assert (found.states == BlockState.COMMITTED).all()
    return found.offsets.tolist()


def test_the_keys_of_a_writer_that_was_killed_before_its_commit_can_be_written_at_once(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 1, 8)
    with Puppet("writer", socket_path=hello(server).shards[0].socket_path, keys=keys.hex(), ttl_ms=600_000) as killed:
        assert killed.hear()["statuses"] == [PutStatus.STORED] * 8
        assert (client.put(keys, content(keys, SMALL)).statuses == PutStatus.PENDING).all()
        assert client.lookup(keys).states.tolist() == [BlockState.RESERVED] * 8
        assert not client.get(keys).ok.any()
        killed.kill()
    until(lambda: gauges(server)["reserved_blocks_now"] == 0, what="the end of the session")
    assert (client.lookup(keys).states == BlockState.ABSENT).all()
    assert not client.get(keys).ok.any()
    put_all(client, keys)
    assert has_all(client, keys)
    assert is_conserved(server)


def test_a_writer_that_was_frozen_beyond_its_time_can_spoil_nothing_when_it_wakes_up(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 2, 4)
    socket_path = hello(server).shards[0].socket_path
    resting = server.status()["shards"][0]["bytes"]["reserved"]
    with Puppet("writer", socket_path=socket_path, keys=keys.hex(), ttl_ms=300) as frozen:
        slots = frozen.hear()["offsets"]
        frozen.freeze()
        until(lambda: gauges(server)["quarantined_blocks"] == 4, what="the end of the reservation")
        assert not client.get(keys).ok.any()
        put_all(client, keys)
        assert not set(slots) & set(offsets_of(server, keys))
        # Under pressure, too, nobody gets the slots that it may still write to.
        crowding = [keys_of(client, 1000 + prompt, 64) for prompt in range(48)]
        for batch in crowding:
            put_all(client, batch)
        assert gauges(server)["quarantined_blocks"] == 4
        frozen.thaw()
        frozen.tell()
        assert frozen.hear() == [False] * 4
        until(lambda: gauges(server)["quarantined_blocks"] == 0, what="the end of the quarantine")
        frozen.tell()
        assert frozen.hear() == [False] * 4, "a second late commit"
        for batch in [keys, *crowding]:
            has_all(client, batch)  # what is still there is right
    assert server.status()["shards"][0]["bytes"]["reserved"] == resting
    assert is_conserved(server)


def test_the_slots_of_a_frozen_writer_are_free_again_when_it_is_killed(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 3, 4)
    with Puppet("writer", socket_path=hello(server).shards[0].socket_path, keys=keys.hex(), ttl_ms=200) as frozen:
        frozen.hear()
        frozen.freeze()
        until(lambda: gauges(server)["quarantined_blocks"] == 4, what="the end of the reservation")
        frozen.kill()
    until(lambda: gauges(server)["quarantined_blocks"] == 0, what="the end of the session")
    assert server.status()["shards"][0]["bytes"]["reserved"] == 0
    assert is_conserved(server)


class Readers:
    """Threads that get the block of one prompt over and over, and note every different content that they ever see."""

    def __init__(self, clients: list[kvstore.Client], prompt: int) -> None:
        self._keys = keys_of(clients[0], prompt, 1)
        self._stop = threading.Event()
        self.seen: set[bytes] = set()
        self._threads = [threading.Thread(target=self._read, args=(client,)) for client in clients]

    def _read(self, client: kvstore.Client) -> None:
        while not self._stop.is_set():
            block = client.get(self._keys).blocks[0]
            if block is not None:
                self.seen.add(block.tobytes())

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_of_64_writers_of_one_key_one_stores_and_readers_see_its_whole_value_and_no_other(
    server: ServerProcess,
) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                Puppet(
                    "crowd",
                    address=server.address,
                    transport=("shm", "tcp")[number % 2],
                    threads=THREADS,
                    first_author=number * THREADS,
                )
            )
            for number in range(PROCESSES)
        ]
        clients = [
            stack.enter_context(kvstore.connect(server.address, namespace=SMALL, transport=transport))
            for transport in ("shm", "tcp")
        ]
        assert hear_all(writers) == ["ready"] * PROCESSES
        for prompt in range(100, 100 + ROUNDS):
            with Readers(clients, prompt) as readers:
                for writer in writers:
                    writer.tell(str(prompt))
                statuses = np.array(hear_all(writers)).reshape(-1)
                until(lambda readers=readers: readers.seen, what="a reader that sees the block")
            assert (statuses == PutStatus.STORED).sum() == 1
            assert set(statuses.tolist()) <= {PutStatus.STORED, PutStatus.EXISTS, PutStatus.PENDING}
            author = int(np.flatnonzero(statuses == PutStatus.STORED)[0])
            keys = keys_of(clients[0], prompt, 1)
            assert readers.seen == {content(keys, SMALL, author).tobytes()}
