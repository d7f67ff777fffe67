"""A server with an SSD tier that is killed again and again under load: what was durable is served, what was deleted is
not, and no byte is wrong.

`KVSTORE_TEST_SERVICE_KILLS` sets how often; 200 is the figure of a release, the default is CI's share.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import SMALL, content, keys_of, wrong

KILLS = int(os.environ.get("KVSTORE_TEST_SERVICE_KILLS", "3"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "7"))
PROMPTS = 240  # 15 MiB: twice the DRAM tier, and less than the SSD tier, so that nothing is evicted there
BLOCKS = 4
LOST_SHARE_MAX = 0.02
CALLS_BEFORE = 200
CALLS_MAX = 300  # between the moment when everything was durable and the kill
CALL_TIMEOUT_S = 30.0
TRANSPORTS = ("shm", "tcp")


class State(Enum):
    """What a client was told of a prompt's blocks."""

    ABSENT = "never put, or the delete was acknowledged"
    PRESENT = "the put was acknowledged"
    UNKNOWN = "a call about it was under way, or was not answered"


@dataclass
class Known:
    """What was told of each prompt. `changes` counts the calls that may have changed it."""

    states: list[State] = field(default_factory=lambda: [State.ABSENT] * PROMPTS)
    changes: list[int] = field(default_factory=lambda: [0] * PROMPTS)
    durable: dict[int, int] = field(default_factory=dict[int, int])  # prompt: its changes when that was seen
    wrong: int = 0
    back: list[int] = field(default_factory=list[int])  # deleted prompts that were served
    errors: list[str] = field(default_factory=list[str])

    def lasting(self) -> list[int]:
        """Prompts that were durable at some time and have not been touched since."""
        return [prompt for prompt, changes in self.durable.items() if self.changes[prompt] == changes]


class Mix:
    """Puts, gets and deletes by one thread per client, each on prompts of its own. Runs in a `with` block."""

    def __init__(self, clients: list[kvstore.Client], known: Known, seed: float) -> None:
        self._known = known
        self._stop = threading.Event()
        self._calls = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run, args=(client, place, len(clients), random.Random(f"{seed} {place}")))
            for place, client in enumerate(clients)
        ]

    def __enter__(self) -> Mix:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, calls: int) -> None:
        """Until that many calls have returned."""
        for _ in range(calls):
            assert self._calls.acquire(timeout=CALL_TIMEOUT_S), self._known.errors

    def _run(self, client: kvstore.Client, place: int, places: int, chance: random.Random) -> None:
        try:
            while not self._stop.is_set():
                prompt = chance.randrange(PROMPTS // places) * places + place
                act = chance.choices([self._put, self._get, self._delete], [5, 4, 2])[0]
                act(client, prompt)
                self._calls.release()
        except Exception as error:  # noqa: BLE001 -- any exception at all is what this looks for
            self._known.errors.append(repr(error))

    def _put(self, client: kvstore.Client, prompt: int) -> None:
        keys = keys_of(client, prompt, BLOCKS)
        self._begin(prompt)
        put = client.put(keys, content(keys, SMALL))
        if put.present == BLOCKS:
            self._known.states[prompt] = State.PRESENT
        elif (put.statuses == kvstore.PutStatus.FAILED).any():
            self._stop.set()  # the server is dead: going on would leave nothing untouched

    def _delete(self, client: kvstore.Client, prompt: int) -> None:
        before = self._begin(prompt)
        gone = client.delete(keys_of(client, prompt, BLOCKS))
        if gone == BLOCKS or before is State.ABSENT:
            self._known.states[prompt] = State.ABSENT

    def _get(self, client: kvstore.Client, prompt: int) -> None:
        look(client, prompt, self._known)

    def _begin(self, prompt: int) -> State:
        before = self._known.states[prompt]
        self._known.states[prompt] = State.UNKNOWN
        self._known.changes[prompt] += 1
        return before


def look(client: kvstore.Client, prompt: int, known: Known) -> int:
    """Get a prompt, note what must not be, and tell how many blocks came."""
    keys = keys_of(client, prompt, BLOCKS)
    got = client.get(keys)
    known.wrong += wrong(keys, got, SMALL)
    if got.ok.any() and known.states[prompt] is State.ABSENT:
        known.back.append(prompt)
    return int(np.count_nonzero(got.ok))


def disk(server: ServerProcess) -> dict[str, Any]:
    return server.status()["shards"][0]["disk"]


def make_durable(server: ServerProcess, client: kvstore.Client, known: Known) -> None:
    """See to it that all that is present is on the SSD: what was put, or used again, in a hurry may have been skipped
    there, and is written when it is used again.
    """
    until(lambda: disk(server)["queued_bytes"] == 0, what="write-behind")
    failed = disk(server)["counters"]["failed_write_behind_blocks"]
    present = [prompt for prompt in range(PROMPTS) if known.states[prompt] is State.PRESENT]
    skipped = -1
    while skipped != disk(server)["counters"]["skipped_write_behind_blocks"]:
        skipped = disk(server)["counters"]["skipped_write_behind_blocks"]
        for prompt in present:
            client.prefetch(keys_of(client, prompt, BLOCKS))
        until(lambda: disk(server)["queued_bytes"] == 0, what="write-behind")
    assert disk(server)["counters"]["failed_write_behind_blocks"] == failed
    known.durable = {prompt: known.changes[prompt] for prompt in present}


def check_everything(server: ServerProcess, client: kvstore.Client, known: Known) -> None:
    """After a restart: every prompt is looked at, and every byte that is served compared."""
    lasting = known.lasting()
    hits = {prompt: look(client, prompt, known) for prompt in range(PROMPTS)}
    assert known.wrong == 0
    assert known.back == [], "deleted blocks are back"
    served = sum(hits[prompt] for prompt in lasting)
    told = f"{served} of {BLOCKS * len(lasting)} durable blocks; the tier: {disk(server)}; the client: {client.stats()}"
    assert served >= (1 - LOST_SHARE_MAX) * BLOCKS * len(lasting), told
    for prompt, blocks in hits.items():
        known.states[prompt] = {0: State.ABSENT, BLOCKS: State.PRESENT}.get(blocks, State.UNKNOWN)
    known.durable = {prompt: known.changes[prompt] for prompt, blocks in hits.items() if blocks == BLOCKS}


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * KILLS)
def test_through_kills_at_any_moment_durable_blocks_are_served_and_deleted_ones_never_come_back() -> None:
    chance, known = random.Random(SEED), Known()
    lasting = 0
    with ServerProcess(dram="8MiB", disk="64MiB", admission="always") as server:
        for kill in range(KILLS + 1):
            with ExitStack() as stack:
                clients = [
                    stack.enter_context(kvstore.connect(server.address, namespace=SMALL, transport=transport))
                    for transport in TRANSPORTS
                ]
                until(lambda: disk(server)["scan_complete"], what="the scan")
                check_everything(server, clients[kill % 2], known)
                if kill == KILLS:
                    break
                with Mix(clients, known, chance.random()) as mix:
                    mix.wait(CALLS_BEFORE)
                make_durable(server, clients[0], known)
                with Mix(clients, known, chance.random()) as mix:
                    mix.wait(chance.randrange(CALLS_MAX))
                    (server.kill if kill % 2 else server.kill_all)()
            assert known.errors == []
            lasting += len(known.lasting())
            server.start()
    assert lasting > 10 * KILLS, "too little was durable to prove anything"
