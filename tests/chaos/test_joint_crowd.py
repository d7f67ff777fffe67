"""Ranks of engines of several sizes that write the same few prompts at once, over both transports, and give up or die
at random: whatever comes of it, no reader is ever told of a wrong byte, and nothing is left behind.

All of them are played by one thread, in steps: so they meet in every order, however busy the machine is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import kvstore
from kvstore.client.streams import PublishStream
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import HEADED, HEADS, LAYERS, content, keys_of, wrong
from tests.chaos.sight import gauges, is_conserved

BLOCKS, PROMPTS = 3, 8
STEPS, RANKS_MAX, LOOK_EVERY = 3000, 12, 40
TTL_S = 5.0  # parts whose block nobody completes are gone after it
TRANSPORTS = ("shm", "tcp")
SPLITS = (1, 2, 2, 2, 4)


@dataclass(slots=True)
class Rank:
    """One that writes its heads of the blocks of a prompt."""

    client: int
    keys: kvstore.BlockKeys
    heads: tuple[int, int]
    stream: PublishStream
    layer: int = 0

    def write(self) -> None:
        layers = content(self.keys, HEADED).reshape(BLOCKS, LAYERS, HEADS, -1)
        self.stream.write(self.layer, np.ascontiguousarray(layers[:, self.layer, self.heads[0] : self.heads[1]]))
        self.layer += 1


class Play:
    """The clients, and the ranks that are writing."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._random = np.random.default_rng(seed)
        self._clients = [self._connect(transport) for transport in TRANSPORTS * 2]
        self._readers = [self._connect(transport) for transport in TRANSPORTS]
        self._ranks: list[Rank] = []
        names = ["begun", "refused", "stored", "lost", "given_up", "died", "read", "wrong"]
        self.counts = dict.fromkeys(names, 0)

    def step(self) -> None:
        dice = self._random.random()
        if len(self._ranks) < RANKS_MAX and dice < 0.3:
            self._begin()
        elif dice < 0.42:
            self._readers[0].delete(keys_of(self._readers[0], self._prompt(), BLOCKS))
        elif dice < 0.44:
            self._die()
        elif self._ranks:
            self._go_on(self._ranks[int(self._random.integers(len(self._ranks)))])

    def look(self) -> None:
        """Read what is there of all prompts, some heads of it or all."""
        first = int(self._random.integers(HEADS))
        heads = (first, int(self._random.integers(first, HEADS)) + 1)
        for reader in self._readers:
            for prompt in range(PROMPTS):
                keys = keys_of(reader, prompt, BLOCKS)
                got = reader.get(keys)
                self._count(wrong=wrong(keys, got, HEADED), read=int(np.count_nonzero(got.ok)))
                expected = content(keys, HEADED).reshape(BLOCKS, LAYERS, HEADS, -1)[:, :, heads[0] : heads[1]]
                into = np.zeros_like(expected)
                with reader.layer_stream(keys, into, heads=heads) as stream:
                    for layer in range(LAYERS):
                        if not stream.ready(layer) and not got.ok.all():
                            break  # it may be that nobody writes on
                        ok = stream.wait(layer)
                        same = (into[:, layer] == expected[:, layer]).all(axis=(1, 2))
                        self._count(wrong=int(np.count_nonzero(ok & ~same)))

    def end(self) -> None:
        for client in (*self._clients, *self._readers):
            client.close()

    def _begin(self) -> None:
        number = int(self._random.integers(len(self._clients)))
        ranks = int(self._random.choice(SPLITS))
        rank = int(self._random.integers(ranks))
        heads = (rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        keys = keys_of(self._clients[number], self._prompt(), BLOCKS)
        stream = self._clients[number].publish_stream(keys, heads=heads, ttl_s=TTL_S)
        if not len(stream.mine):
            self._count(refused=1)
            stream.abort()
            return
        self._count(begun=1)
        self._ranks.append(Rank(number, keys, heads, stream))

    def _go_on(self, rank: Rank) -> None:
        if self._random.random() < 0.08:
            rank.stream.abort()
            self._count(given_up=1)
        elif rank.layer < LAYERS:
            rank.write()
            return
        else:
            wanted = len(rank.stream.mine)
            stored = rank.stream.commit().stored
            self._count(stored=stored, lost=wanted - stored)
        self._ranks.remove(rank)

    def _die(self) -> None:
        """The end of a client, with all its ranks."""
        number = int(self._random.integers(len(self._clients)))
        self._clients[number].close()
        self._clients[number] = self._connect(TRANSPORTS[number % len(TRANSPORTS)])
        self._ranks = [rank for rank in self._ranks if rank.client != number]
        self._count(died=1)

    def _prompt(self) -> int:
        return int(self._random.integers(PROMPTS))

    def _count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.counts[name] += amount

    def _connect(self, transport: str) -> kvstore.Client:
        return kvstore.connect(self._server.address, namespace=HEADED, transport=transport, timeout_s=10.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_give_up_and_die_at_random_never_make_a_reader_see_a_wrong_byte(seed: int) -> None:
    with ServerProcess(dram="8MiB") as server:
        play = Play(server, seed)
        for number in range(STEPS):
            play.step()
            if number % LOOK_EVERY == 0:
                play.look()
        assert play.counts["wrong"] == 0, play.counts
        assert all(play.counts[name] for name in play.counts if name != "wrong"), play.counts
        play.end()
        until(lambda: server.status()["shards"][0]["bytes"]["reserved"] == 0, 6 * TTL_S, "the end of all reservations")
        now = gauges(server)
        assert (now["quarantined_blocks"], now["held_blocks"], now["condemned_blocks"]) == (0, 0, 0)
        assert is_conserved(server)
