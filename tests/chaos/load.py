"""Clients at work while a server is hurt: puts and gets from several threads, every block that is got checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

import kvstore
from tests.chaos.blocks import content, keys_of, wrong

FIRST_PROMPT = 5000
PAUSE_S = 0.002  # a small load: it must not take the processor from the server that is to recover
SLACK_S = 1.0  # beyond a call's timeout: a machine with few cores and much to do


class Load:
    """Runs in a `with` block. Each thread keeps to one client and its own prompts.

    What counts: `errors` that calls raised, `wrong_blocks`, `slowest_s` of all calls, and for each client the `hits`
    and `misses` of its gets.
    """

    def __init__(self, clients: Sequence[kvstore.Client], *, threads_each: int = 2, prompts: int = 6, blocks: int = 4):
        self.errors: list[str] = []
        self.wrong_blocks = 0
        self.hits = [0] * len(clients)
        self.misses = [0] * len(clients)
        self.slowest_s = 0.0
        self._blocks = blocks
        self._prompts = prompts
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(client, place, place * threads_each + number))
            for place, client in enumerate(clients)
            for number in range(threads_each)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: kvstore.Client, place: int, number: int) -> None:
        random = np.random.default_rng(number)
        space = client.namespace
        first = FIRST_PROMPT + number * self._prompts
        batches = [keys_of(client, first + prompt, self._blocks) for prompt in range(self._prompts)]
        while not self._stop.wait(PAUSE_S):
            keys = batches[int(random.integers(len(batches)))]
            blocks = content(keys, space)
            started_s = time.monotonic()
            try:
                got = client.get(keys)
                between_s = time.monotonic()
                if not got.ok.all():
                    client.put(keys, blocks)
            except Exception as error:  # noqa: BLE001 -- any exception at all is what this looks for
                with self._lock:
                    self.errors.append(repr(error))
                return
            slower_s = max(between_s - started_s, time.monotonic() - between_s)
            bad = wrong(keys, got, space)
            with self._lock:
                self.slowest_s = max(self.slowest_s, slower_s)
                self.wrong_blocks += bad
                self.hits[place] += int(got.ok.sum())
                self.misses[place] += int((~got.ok).sum())
