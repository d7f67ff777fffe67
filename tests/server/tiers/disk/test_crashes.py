"""SIGKILL at random moments of a mixed load: what was durable is served, what was removed is gone, no byte is wrong.

`KVSTORE_TEST_KILLS` sets how often; 200 is the figure of a release, the default is CI's share.
"""

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.core.errors import Unavailable
from kvstore.server.tiers.disk.messages import Flushed, Gone, Loaded, Removed, Stored, StoreStatus
from tests.server.tiers.disk.rig import DIGEST, key_of, keys_of
from tests.server.tiers.disk.shard_end import ShardEnd

KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "16"))
BLOCKS = 600
GROUP = 6
LANES = 8  # groups in flight
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "7"))


@dataclass
class Known:
    """What the shard was told of each block."""

    present: set[int] = field(default_factory=set[int])
    evicted: set[int] = field(default_factory=set[int])  # not a promise: it may still have been there at the kill
    uncertain: set[int] = field(default_factory=set[int])  # something about it was in flight: the kill decided


class Load:
    """Mixed load: groups of blocks, each with at most one request in flight, in slots of its own."""

    def __init__(self, end: ShardEnd, known: Known, chance: random.Random) -> None:
        self.end, self.known, self.chance = end, known, chance
        self.generation = 1
        self.flying: dict[int, tuple[str, list[int], int]] = {}  # request: what, blocks, lane

    def step(self) -> None:
        free = set(range(LANES)) - {lane for _, _, lane in self.flying.values()}
        busy = {number for _, numbers, _ in self.flying.values() for number in numbers}
        for lane in free:
            first = self.chance.randrange(0, BLOCKS - GROUP)
            numbers = [number for number in range(first, first + GROUP) if number not in busy]
            if not numbers:
                continue
            busy |= set(numbers)
            what = self.chance.choices(["store", "load", "remove", "flush"], [6, 4, 2, 0.01])[0]
            self.generation += 1
            if what == "flush":
                if self.flying:
                    continue  # it would make everything uncertain
                request = self.end.link.submit_flush(self.generation, DIGEST)
                numbers = list(range(BLOCKS))
            elif what == "store":
                request = self.end.begin_store(numbers, self.generation, base=lane * GROUP)
            elif what == "load":
                request = self.end.begin_load(numbers, base=lane * GROUP)
            else:
                request = self.end.link.submit_remove(self.generation, keys_of(numbers))
            self.flying[request] = (what, numbers, lane)
            if what == "flush":
                break
        self.end.receive(0.05)
        self.take()

    def take(self) -> None:
        known = self.known
        for answer in self.end.answers:
            if isinstance(answer, Gone):
                raw = answer.keys.tobytes()
                gone = {NUMBER_OF[raw[at : at + 24]] for at in range(0, len(raw), 24)}
                known.present -= gone
                known.evicted |= gone
                continue
            what, numbers, lane = self.flying.pop(answer.request)
            match answer:
                case Stored():
                    for number, status in zip(numbers, answer.statuses.tolist(), strict=True):
                        if status in {StoreStatus.DURABLE, StoreStatus.EXISTS}:
                            known.present.add(number)
                        else:  # BUSY: it was there, and has been evicted for others of the batch
                            assert status in {StoreStatus.NO_ROOM, StoreStatus.BUSY}
                case Removed() | Flushed():
                    known.present -= set(numbers)
                    known.evicted -= set(numbers)
                case Loaded():
                    assert what == "load"
                    there = self.end.check(lane * GROUP, numbers, answer)
                    assert set(there) == known.present & set(numbers)
                case _:
                    raise AssertionError(answer)
        self.end.answers.clear()


NUMBER_OF = {key_of(number): number for number in range(BLOCKS)}


def check_everything(end: ShardEnd, known: Known, *, evictions: bool) -> None:
    """After a restart: what the scan says, and every byte of every block."""
    end.wait_scanned()
    assert len(set(end.scanned)) == len(end.scanned)
    found = {NUMBER_OF[key] for key in end.scanned}
    assert found <= known.present | known.uncertain | known.evicted, "a removed block is back"
    if not evictions:
        lost = known.present - known.uncertain - found
        assert not lost, f"{len(lost)} of {len(known.present)} durable blocks are lost"
    numbers = list(range(BLOCKS))
    there: set[int] = set()
    for start in range(0, BLOCKS, 48):
        part = numbers[start : start + 48]
        there |= set(end.check(0, part, end.wait(end.begin_load(part), Loaded)))
    assert there == found, "what is offered is served"
    known.present, known.uncertain, known.evicted = found, set(), set()


@pytest.mark.slow
@pytest.mark.timeout(30 + 3 * KILLS)
@pytest.mark.parametrize("capacity", [64 << 20, 6 << 20], ids=["roomy", "evicting"])
def test_kill_9_at_any_moment_loses_nothing_durable_and_brings_nothing_back(tmp_path: Path, capacity: int) -> None:
    chance = random.Random(SEED)
    end = ShardEnd(tmp_path)
    known = Known()
    generation = 1
    for _ in range(KILLS // 2):
        end.start(capacity)
        check_everything(end, known, evictions=capacity < 16 << 20)
        load = Load(end, known, chance)
        load.generation = generation
        until_s = time.monotonic() + chance.expovariate(1 / 0.15)
        while time.monotonic() < until_s:
            load.step()
        os.kill(end.child.pid, 9)
        try:  # what had been said before is known
            while True:
                end.receive(0.05)
        except Unavailable:
            load.take()
        end.hang_up()
        known.uncertain = {number for _, numbers, _ in load.flying.values() for number in numbers}
        generation = load.generation + 1
    end.start(capacity)
    check_everything(end, known, evictions=capacity < 16 << 20)
    end.close()
