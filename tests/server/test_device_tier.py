"""What goes up into the device segment, what comes down, and what no reader is ever told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.device.base import Copies, Memory, host_memory
from kvstore.device.host import HostDevice, HostTicket
from kvstore.index.device_board import ROW_BYTES, DeviceBoard
from kvstore.server.shard import device_tier as module
from kvstore.server.shard.device_tier import COPY_TIMEOUT_S, USES, DeviceTier
from kvstore.server.shard.shard import Session, Shard
from kvstore.testing.waiting import until
from kvstore.wire.messages import KeyRequest
from tests.server.shards import CHUNK, keys, namespace, new_shard, refs, reserve, states

BLOCK = 4096 * 4  # with its trailer two in a chunk would not fit the odd slot; one size, so what fits is simple
LAYERS = 4
I64 = NDArray[np.int64]


class Bench:
    """A shard over real memory with a device segment of a few chunks, and readers' eyes for both."""

    def __init__(self, *, chunks: int = 64, segment_chunks: int = 2) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.device = HostDevice(begin=self.gate.wait)
        self.shard, self.touches = new_shard(chunks)
        self.pool = np.zeros(chunks * CHUNK, dtype=np.uint8)
        self.segment = self.device.allocate(segment_chunks * CHUNK)
        self.board = DeviceBoard(np.zeros(len(self.touches) * ROW_BYTES, dtype=np.uint8))
        self.tier = DeviceTier(
            self.shard.blocks,
            host_memory(self.pool),
            self.device,
            self.segment,
            self.board,
            self.touches,
            hold=self.shard.hold,
            unhold=self.shard.unhold,
            chunk_bytes=CHUNK,
        )
        self.shard.device_tier = self.tier
        self.session: Session = self.shard.open_session()
        self.space = self.shard.open_namespace(namespace(1, LAYERS, BLOCK // LAYERS - 16))
        self.size = self.shard.namespace(self.space).block_bytes
        self.now_s = 0.0
        self.ticks = 0

    def put(self, *numbers: int) -> I64:
        """Store blocks whose bytes follow from their numbers; their handles."""
        rows = reserve(self.shard, self.session, self.space, numbers)
        assert not rows["status"].any()
        for number, offset in zip(numbers, rows["offset"].tolist(), strict=True):
            self.pool[offset : offset + self.size] = number % 251
        assert self.shard.commit(self.session, refs(rows)).all()
        return rows["handle"].astype(np.int64)

    def read(self, handles: I64, times: int = 1) -> None:
        """As readers do that don't tell: a new tick, and the shard has looked at it."""
        for _ in range(times):
            self.ticks += 1
            self.touches[handles] = self.ticks
            self.tick()

    def tick(self) -> None:
        self.now_s += module.BOARD_SCAN_S
        self.tier.tick(self.now_s)

    def settle(self) -> None:
        """All that is on its way has arrived."""
        until(self.device.idle)
        self.tier.tick(self.now_s)

    def above(self, handles: I64) -> list[bool]:
        """Which of them the board names, after checking the bytes of those: the block's own, all of them."""
        generations = self.shard.blocks.generation[handles]
        found = self.board.find(handles, generations)
        memory = np.asarray(self.device.array(self.segment, (self.segment.nbytes,)))
        for place in np.flatnonzero(found.placements).tolist():
            start, slot = int(found.offsets[place]), int(self.shard.blocks.offset[handles[place]])
            assert np.array_equal(memory[start : start + self.size], self.pool[slot : slot + self.size])
        return (found.placements != 0).tolist()

    def delete(self, *numbers: int) -> None:
        self.shard.delete(KeyRequest(self.space, keys(*numbers)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.set()
    bench.device.close()


def test_a_block_that_is_read_again_goes_up_and_one_that_is_not_stays_down(bench: Bench) -> None:
    often, once = bench.put(1), bench.put(2)
    bench.read(once)
    bench.read(often, USES)
    bench.settle()
    assert bench.above(often) == [True]
    assert bench.above(once) == [False]


def test_calls_to_the_shard_count_as_uses(bench: Bench) -> None:
    handles = bench.put(1, 2)
    for _ in range(USES):
        bench.shard.touch(KeyRequest(bench.space, keys(1, 2)))
    bench.tick()
    bench.settle()
    assert bench.above(handles) == [True, True]


def test_the_board_names_a_block_only_once_it_is_there(bench: Bench) -> None:
    handles = bench.put(1)
    bench.gate.clear()
    bench.read(handles, USES + 3)
    assert bench.above(handles) == [False]
    assert bench.tier.stats()["climbing_blocks"] == 1
    bench.gate.set()
    bench.settle()
    assert bench.above(handles) == [True]


def test_a_block_on_its_way_up_keeps_its_slot_of_the_pool(bench: Bench) -> None:
    handles = bench.put(1)
    bench.gate.clear()
    bench.read(handles, USES)
    assert bench.shard.blocks.holds[handles].tolist() == [1]
    bench.gate.set()
    bench.settle()
    assert bench.shard.blocks.holds[handles].tolist() == [0]


def test_a_block_that_is_deleted_on_its_way_up_never_is_on_the_board(bench: Bench) -> None:
    handles = bench.put(1)
    free = bench.shard.accounting()["free"]
    bench.gate.clear()
    bench.read(handles, USES)
    bench.delete(1)
    assert bench.shard.accounting()["free"] == free  # the copy still reads it
    bench.gate.set()
    bench.settle()
    assert bench.shard.accounting()["free"] > free
    assert bench.above(handles) == [False]
    assert bench.tier.stats()["free_bytes"] == bench.tier.stats()["capacity_bytes"]


def test_deleting_a_block_takes_it_off_the_board_at_once(bench: Bench) -> None:
    handles = bench.put(1, 2)
    bench.read(handles, USES)
    bench.settle()
    before = bench.board.find(handles, bench.shard.blocks.generation[handles])
    bench.delete(1)
    assert bench.board.stand(handles, before.placements).tolist() == [False, True]
    assert bench.tier.counters.dropped_blocks == 1


def test_a_flush_empties_the_segment(bench: Bench) -> None:
    handles = bench.put(1, 2, 3)
    bench.read(handles, USES)
    bench.settle()
    bench.shard.flush(b"")
    assert bench.tier.resident == 0
    assert bench.tier.stats()["free_bytes"] == bench.tier.stats()["capacity_bytes"]


def test_the_least_recently_used_goes_down_for_a_hotter_one(bench: Bench) -> None:
    first = bench.put(*range(10))
    bench.read(first, USES)
    bench.settle()
    full = bench.tier.resident
    assert 0 < full < 10
    again, later = first[bench.above(first)][:1], bench.put(20)
    bench.read(again)
    bench.read(later, USES)
    bench.settle()
    assert bench.above(later) == [True]
    assert bench.above(again) == [True]
    assert bench.tier.resident == full
    assert bench.tier.counters.evicted_blocks == 1


def test_what_went_down_has_to_be_used_again_as_often_as_before(bench: Bench) -> None:
    first = bench.put(*range(4))
    bench.read(first, USES)
    bench.settle()
    assert bench.above(first) == [True] * 4
    bench.read(bench.put(20), USES)
    bench.settle()
    down = first[~np.array(bench.above(first))]
    assert len(down) == 1
    bench.read(down, USES - 1)
    bench.settle()
    assert bench.above(down) == [False]
    bench.read(down)
    bench.settle()
    assert bench.above(down) == [True]


def test_more_hot_blocks_than_there_is_room_for_do_not_chase_one_another_out_at_once(bench: Bench) -> None:
    first, second = bench.put(*range(4)), bench.put(*range(10, 14))
    bench.read(first, USES)
    bench.settle()
    bench.read(second, USES)
    bench.settle()
    assert sum(bench.above(first)) == 3


def test_a_block_that_leaves_the_pool_leaves_the_segment(bench: Bench) -> None:
    handles = bench.put(*range(4))
    bench.read(handles, USES)
    bench.settle()
    before = bench.board.find(handles, bench.shard.blocks.generation[handles])
    assert before.placements.any()
    for number in range(100, 500):  # more than the pool holds
        bench.put(number)
    assert not bench.board.stand(handles, before.placements).any()
    assert states(bench.shard, bench.space, range(4)) == [0, 0, 0, 0]


def test_blocks_of_another_size_get_room_too(bench: Bench) -> None:
    first = bench.put(*range(6))
    bench.read(first, USES)
    bench.settle()
    other = bench.shard.open_namespace(namespace(2, 2, 4000))
    bench.space, bench.size = other, bench.shard.namespace(other).block_bytes
    small = bench.put(50, 51)
    bench.read(small, USES)
    bench.settle()
    assert bench.above(small) == [True, True]


def test_a_block_larger_than_a_chunk_of_the_segment_stays_down() -> None:
    bench = Bench()
    bench.tier = DeviceTier(
        bench.shard.blocks,
        host_memory(bench.pool),
        bench.device,
        bench.segment,
        bench.board,
        bench.touches,
        hold=bench.shard.hold,
        unhold=bench.shard.unhold,
        chunk_bytes=8192,
    )
    bench.shard.device_tier = bench.tier
    handles = bench.put(1)
    bench.read(handles, USES)
    bench.settle()
    assert bench.above(handles) == [False]


def test_no_more_than_so_many_bytes_are_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE_BYTES_MAX", bench.size * 2)
    handles = bench.put(*range(3))
    bench.gate.clear()
    bench.read(handles, USES)
    assert bench.tier.stats()["climbing_blocks"] == 2
    bench.gate.set()
    for _ in range(2):
        bench.settle()
    assert bench.above(handles) == [True] * 3


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_device_that_does_not_answer_is_given_up_and_the_pool_goes_on(bench: Bench) -> None:
    up, stuck = bench.put(1), bench.put(2)
    bench.read(up, USES)
    bench.settle()
    bench.gate.clear()
    bench.read(stuck, USES)
    bench.now_s += COPY_TIMEOUT_S
    bench.tick()
    assert not bench.tier.up
    assert bench.above(np.concatenate([up, stuck])) == [False, False]
    assert not bench.shard.blocks.holds.any()
    assert bench.tier.counters.failures == 1
    bench.read(up, USES)
    bench.delete(1, 2)
    assert bench.put(3) is not None


def test_a_device_that_refuses_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: Memory, source: Memory, copies: Copies) -> HostTicket:
        raise module.DeviceError("cuda:0: cuMemcpyBatchAsync: an illegal memory access was encountered")

    up, other = bench.put(1), bench.put(2)
    bench.read(up, USES)
    bench.settle()
    monkeypatch.setattr(bench.device, "copy", refuse)
    bench.read(other, USES)
    assert (bench.tier.up, bench.tier.resident) == (False, 0)


# --- whatever happens -------------------------------------------------------------------------------------------------


def test_whatever_is_done_the_board_names_only_what_is_there_and_no_place_is_lost() -> None:
    random = np.random.default_rng(11)
    bench = Bench(chunks=10)
    alive: dict[int, int] = {}
    for number in range(1, 600):
        match int(random.integers(0, 6)):
            case 0:
                alive[number] = int(bench.put(number)[0])
            case 1 if alive:
                gone = int(random.choice(list(alive)))
                bench.delete(gone)
                del alive[gone]
            case 2:
                bench.gate.clear() if random.integers(0, 2) else bench.gate.set()
            case 3:
                bench.gate.set()
                bench.settle()
            case _ if alive:
                chosen = random.choice(list(alive.values()), size=min(3, len(alive)), replace=False)
                bench.read(np.array(chosen, dtype=np.int64))
            case _:
                pass
        present = states(bench.shard, bench.space, list(alive))
        alive = {key: handle for (key, handle), state in zip(list(alive.items()), present, strict=True) if state}
        bench.above(np.array(list(alive.values()), dtype=np.int64))
    bench.gate.set()
    bench.settle()
    assert bench.tier.counters.promoted_blocks > 20
    bench.shard.flush(b"")
    bench.settle()
    stats = bench.tier.stats()
    assert stats["free_bytes"] == stats["capacity_bytes"]
    assert not bench.shard.blocks.holds.any()
    bench.device.close()


def test_the_shard_is_plain_without_a_device() -> None:
    shard: Shard = new_shard()[0]
    assert shard.device_tier is None
