"""Servers and readers that stand still: every call ends in time, and what was read after a lease's end is an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import kvstore
from kvstore.core.errors import LeaseExpired, Unavailable
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import LARGE, SMALL, content, has_all, keys_of, put_all, same, wrong
from tests.chaos.processes import Puppet, Stopwatch
from tests.chaos.sight import gauges, is_conserved

TIMEOUT_S = 0.5
SLACK_S = 1.0
RECOVERY_S = 10.0
POOL = 16 << 20
Call = Callable[[kvstore.Client, kvstore.BlockKeys, kvstore.BlockKeys], object]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram=str(POOL), policy="lru") as server:  # the tests rely on what was not used for longest going
        yield server


@contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def put_fails(client: kvstore.Client, _: kvstore.BlockKeys, fresh: kvstore.BlockKeys) -> object:
    statuses = client.put(fresh, content(fresh, client.namespace)).statuses
    return (statuses == kvstore.PutStatus.FAILED).all()


def get_misses(client: kvstore.Client, stored: kvstore.BlockKeys, _: kvstore.BlockKeys) -> object:
    return not client.get(stored).ok.any()


def view_misses(client: kvstore.Client, stored: kvstore.BlockKeys, _: kvstore.BlockKeys) -> object:
    with client.view(stored) as view:
        return not view.ok.any()


# What needs the server, by transport; each with a client of its own, since after the first failure a client knows.
FAILING: dict[str, dict[str, Call]] = {
    "shm": {
        "put": put_fails,
        "view": view_misses,
        "delete": lambda client, stored, _: client.delete(stored) == 0,
        "pin": lambda client, stored, _: client.pin(stored) == 0,
        "prefetch": lambda client, stored, _: client.prefetch(stored) == 0,
    },
    "tcp": {
        "put": put_fails,
        "get": get_misses,
        "view": view_misses,
        "lookup": lambda client, stored, _: client.lookup(stored).hit_blocks == 0,
        "delete": lambda client, stored, _: client.delete(stored) == 0,
        "prefetch": lambda client, stored, _: client.prefetch(stored) == 0,
    },
}


def test_every_call_to_a_frozen_server_ends_in_time_as_a_miss_and_a_thawed_one_is_used_again(
    server: ServerProcess,
) -> None:
    with ExitStack() as stack:

        def connect(transport: str) -> kvstore.Client:
            client = kvstore.connect(server.address, namespace=SMALL, transport=transport, timeout_s=TIMEOUT_S)
            return stack.enter_context(client)

        calls = [(f"{way} {name}", call, connect(way)) for way in FAILING for name, call in FAILING[way].items()]
        stored, fresh = keys_of(calls[0][2], 1, 8), keys_of(calls[0][2], 2, 8)
        put_all(calls[0][2], stored)
        reader = connect("shm")
        into = np.zeros((len(stored), SMALL.block_bytes), dtype=np.uint8)

        def timed(call: Call, client: kvstore.Client) -> tuple[bool, float]:
            started_s = time.monotonic()
            return bool(call(client, stored, fresh)), time.monotonic() - started_s

        with frozen(server), ThreadPoolExecutor(len(calls)) as threads:
            outcomes = [(name, threads.submit(timed, call, client)) for name, call, client in calls]
            # Index and pool are read without the server, so this may hit; then with the right bytes.
            with Stopwatch() as watch:
                got = reader.get_into(stored, into)
            assert np.array_equal(into[got.ok], content(stored, SMALL)[got.ok])
            assert watch.seconds < TIMEOUT_S + SLACK_S
            for name, outcome in outcomes:
                as_said, seconds = outcome.result()
                assert as_said, name
                assert seconds < TIMEOUT_S + SLACK_S, name
            with Stopwatch() as watch, pytest.raises(Unavailable):
                kvstore.connect(server.address, namespace=SMALL, timeout_s=TIMEOUT_S)
            assert watch.seconds < TIMEOUT_S + SLACK_S
        for _, _, client in calls:
            # Deletions that the server has found in its mailbox may come first.
            until(
                lambda client=client: client.put(stored, content(stored, SMALL)).present and has_all(client, stored),
                RECOVERY_S,
                "recovery",
            )
        put_all(reader, keys_of(reader, 3, 8))
    assert is_conserved(server)


def test_a_get_over_tcp_that_is_cut_in_the_middle_by_a_freeze_is_a_miss_in_time(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=LARGE, transport="tcp", timeout_s=TIMEOUT_S) as client:
        keys = keys_of(client, 1, 32)
        put_all(client, keys)

        def get_until_it_is_cut() -> float:
            while True:
                with Stopwatch() as watch:
                    got = client.get(keys)
                assert wrong(keys, got, LARGE) == 0
                if not got.ok.all():
                    return watch.seconds

        with ThreadPoolExecutor(1) as threads:
            cut = threads.submit(get_until_it_is_cut)
            with frozen(server):
                assert cut.result() < TIMEOUT_S + SLACK_S
        until(lambda: client.put(keys, content(keys, LARGE)).present == len(keys), RECOVERY_S, "recovery")
        assert has_all(client, keys)
        client.delete(keys)


def test_a_view_whose_lease_could_not_be_renewed_raises_at_its_end(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport="shm", timeout_s=TIMEOUT_S) as client:
        keys = keys_of(client, 10, 4)
        put_all(client, keys)
        view = client.view(keys, ttl_s=0.3)
        view.check()
        with frozen(server):
            until(lambda: lapsed(view), what="the end of the lease")
        with pytest.raises(LeaseExpired, match=r"0\.3 s"):
            view.check()
        with pytest.raises(LeaseExpired), view:
            pass
        view.close()  # once is enough
        with pytest.raises(kvstore.UsageError):
            _ = view[0]
        until(lambda: has_all(client, keys), RECOVERY_S, "recovery")


def lapsed(view: kvstore.View) -> bool:
    try:
        view.check()
    except LeaseExpired:
        return True
    return False


def test_a_reader_that_was_frozen_longer_than_its_lease_is_told_so(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport="shm") as client:
        keys = keys_of(client, 20, 4)
        put_all(client, keys)
        with Puppet("viewer", address=server.address, prompt=20, blocks=4, ttl_s=0.3) as reader:
            assert reader.hear() == 4
            assert gauges(server)["held_blocks"] == 4
            reader.freeze()
            until(lambda: gauges(server)["held_blocks"] == 0, what="the end of the lease")
            fill(client, 3 * POOL, first_prompt=2000)  # its blocks are others' by now
            reader.thaw()
            reader.tell()
            assert "0.3 s ran out" in reader.hear()


def fill(client: kvstore.Client, size_bytes: int, first_prompt: int) -> None:
    """Store that much, whatever has to go for it."""
    for prompt in range(size_bytes // (16 * client.namespace.block_bytes)):
        put_all(client, keys_of(client, first_prompt + prompt, 16))


def test_a_block_in_a_view_survives_any_pressure_and_its_deletion_until_the_view_is_closed(
    server: ServerProcess,
) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport="shm") as client:
        keys, deleted = keys_of(client, 30, 4), keys_of(client, 31, 4)
        put_all(client, keys)
        put_all(client, deleted)
        with client.view(keys, ttl_s=1.0) as view, client.view(deleted, ttl_s=1.0) as ghosts:
            assert view.hit_blocks == ghosts.hit_blocks == 4
            assert client.delete(deleted) == 4
            fill(client, 3 * POOL, first_prompt=3000)
            assert client.lookup(keys).hit_blocks == 4
            assert client.lookup(deleted).hit_blocks == 0
            for looked_at, its_keys in ((view, keys), (ghosts, deleted)):
                for row, expected in enumerate(content(its_keys, SMALL)):
                    assert same(looked_at[row], expected)
                looked_at.check()
        until(lambda: gauges(server)["held_blocks"] == gauges(server)["condemned_blocks"] == 0, what="release")
        fill(client, 3 * POOL, first_prompt=4000)
        assert client.lookup(keys).hit_blocks == 0
    assert is_conserved(server)
