"""Peers of Mooncake's engine that are killed, stand still or come back: every call ends in time, as a miss at worst,
other peers are not held up, and no byte is wrong.

`KVSTORE_CHAOS_ROUNDS` says how often each way of hurting is tried, `KVSTORE_CHAOS_SLACK_S` how late a call may be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import LARGE, content, has_all, keys_of
from tests.transport.fabrics import needs_mooncake

T = TypeVar("T")

pytestmark = [needs_mooncake, pytest.mark.timeout(3600)]

ROUNDS = int(os.environ.get("KVSTORE_CHAOS_ROUNDS", "1"))
SLACK_S = float(os.environ.get("KVSTORE_CHAOS_SLACK_S", "1.0"))  # a machine with few cores and much to do
TIMEOUT_S = 1.0
RECOVERY_S = 30.0
BLOCKS = 24  # 6 MiB: several pieces of a lane's memory


@pytest.fixture(scope="module")
def victim() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB", fabric="tcp") as server:
        yield server


@pytest.fixture(scope="module")
def neighbour() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB", fabric="tcp") as server:
        yield server


def connected(server: ServerProcess, timeout_s: float = TIMEOUT_S) -> kvstore.Client:
    return kvstore.connect(server.address, namespace=LARGE, transport="mooncake", timeout_s=timeout_s)


def kill_fabric(server: ServerProcess) -> None:
    for pid in server.fabric_pids():
        os.kill(pid, signal.SIGKILL)


def freeze_fabric(server: ServerProcess) -> None:
    for pid in server.fabric_pids():
        os.kill(pid, signal.SIGSTOP)


def thaw_fabric(server: ServerProcess) -> None:
    for pid in server.fabric_pids():
        os.kill(pid, signal.SIGCONT)


def restart(server: ServerProcess) -> None:
    server.start()


HURTS: dict[str, tuple[Callable[[ServerProcess], object], Callable[[ServerProcess], object]]] = {
    "fabric worker killed": (kill_fabric, lambda server: None),
    "fabric worker frozen": (freeze_fabric, thaw_fabric),
    "node killed": (ServerProcess.kill, restart),
    "node frozen": (ServerProcess.freeze, ServerProcess.thaw),
}


class Calls:
    """Gets, puts and streams in turns, every byte compared, until the block ends. `slowest_s` of all calls."""

    def __init__(self, client: kvstore.Client) -> None:
        self.slowest_s = 0.0
        self.wrong = 0
        self.errors: list[str] = []
        self.misses = 0
        self.rounds = 0
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        keys = keys_of(self._client, 77, BLOCKS)
        expected = content(keys, LARGE)
        try:
            while not self._stop.wait(0.002):
                self._round(keys, expected)
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 -- any exception at all is what this looks for
            self.errors.append(repr(error))

    def _round(self, keys: kvstore.BlockKeys, expected: NDArray[np.uint8]) -> None:
        client = self._client
        into = np.zeros_like(expected)
        got = self._timed(lambda: client.get_into(keys, into))
        self.wrong += int((into[got.ok] != expected[got.ok]).any(axis=1).sum())
        self.misses += int((~got.ok).sum())
        into[:] = 0
        with self._timed(lambda: client.layer_stream(keys, into)) as stream:
            last = LARGE.layers - 1
            ok = self._timed(lambda: stream.wait(last))
            self.wrong += int((into[ok] != expected[ok]).any(axis=1).sum())
        if ok.all():
            self._timed(lambda: client.delete(keys))
        self._timed(lambda: client.put(keys, expected))

    def has_gone_on(self, rounds: int) -> bool:
        """Whether it has done more rounds than that."""
        return self.rounds > rounds

    def _timed(self, call: Callable[[], T]) -> T:
        began_s = time.monotonic()
        try:
            return call()
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)


@pytest.mark.parametrize("hurt", HURTS)
def test_whatever_becomes_of_a_peer_calls_end_in_time_and_other_peers_go_on(
    victim: ServerProcess, neighbour: ServerProcess, hurt: str
) -> None:
    harm, heal = HURTS[hurt]
    with ExitStack() as stack:
        client = stack.enter_context(connected(victim))
        # With time enough on any machine: what it misses then, it misses because of its neighbour.
        other = stack.enter_context(connected(neighbour, 20.0))
        keys = keys_of(other, 1, BLOCKS)
        other.put(keys, content(keys, LARGE))
        for number in range(ROUNDS):
            with Calls(client) as calls, Calls(other) as others:
                until(lambda: client.stats()["links"][0]["read_bytes"] > 0, RECOVERY_S, "traffic")
                harm(victim)
                until(lambda: calls.misses > 0, RECOVERY_S, "a miss")
                for seen in (calls, others):
                    until(partial(seen.has_gone_on, seen.rounds + 2), RECOVERY_S, "more calls")
                heal(victim)
                until(lambda: transport(client) == "mooncake", RECOVERY_S, "a new link")
            print(f"{hurt}: slowest {calls.slowest_s:.3f} s, of the other peer {others.slowest_s:.3f} s")  # noqa: T201
            for seen in (calls, others):
                assert (seen.errors, seen.wrong) == ([], 0)
                assert seen.slowest_s < TIMEOUT_S + SLACK_S, f"round {number}"
            assert others.misses <= BLOCKS, "only what its own deletions explain"
            fresh = keys_of(client, 100 + number, BLOCKS)
            assert client.put(fresh, content(fresh, LARGE)).present == BLOCKS
            assert has_all(client, fresh)
            client.delete(fresh)


def transport(client: kvstore.Client) -> str | None:
    """That of the only link, while it is up."""
    link = client.stats()["links"][0]
    return link["transport"] if link["up"] else None
