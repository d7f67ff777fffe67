"""A reader of the segment who is slow at the worst moment: what the shard does meanwhile makes the copy worthless."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError, Unavailable
from kvstore.device.base import Copies, host_memory
from kvstore.device.host import HostDevice
from kvstore.index import Probe
from kvstore.index.device_board import ROW_BYTES, DeviceBoard
from kvstore.index.layout import POOL_UNIT_BYTES, Word
from kvstore.testing.waiting import until
from kvstore.transport.device_blocks import DeviceBlocks
from kvstore.transport.device_side import DeviceSide, Segment

BLOCK = 4096
HANDLES = np.arange(4)
GENERATIONS = np.arange(10, 14, dtype=np.uint64)
Mask = NDArray[np.bool_]


class Slow:
    """A reader whose copies begin when the test says so, over a pool and a segment of four blocks."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.device = HostDevice(begin=self._hold_back)
        self.pool = np.repeat(np.arange(1, 5, dtype=np.uint8), BLOCK)
        self.memory = self.device.allocate(4 * BLOCK)
        self.bytes = np.asarray(self.device.array(self.memory, (4, BLOCK)))
        self.bytes[:] = self.pool.reshape(4, BLOCK)
        self.board = DeviceBoard(np.zeros(4 * ROW_BYTES, dtype=np.uint8))
        self.board.place(HANDLES[:2], GENERATIONS[:2], HANDLES[:2] * BLOCK)
        self.closed = 0
        self.segment = Segment(self.device, self.memory, self.board)
        self.segment.close = self._count_close
        self.side = DeviceSide(self.device, self.pool, self.segment)
        self.target = self.device.allocate(4 * BLOCK)
        self.read = np.asarray(self.device.array(self.target, (4, BLOCK)))
        self.threads = ThreadPoolExecutor(1)

    def _hold_back(self) -> None:
        self.begun.set()
        self.go.wait(10)

    def _count_close(self) -> None:
        self.closed += 1

    def ask(self, timeout_s: float = 10.0) -> Future[tuple[Mask, int]]:
        """All four blocks: two that lie in the segment, two that don't."""
        entries = np.zeros((4, 8), dtype=np.uint64)
        entries[:, Word.GENERATION] = GENERATIONS
        entries[:, Word.META] = HANDLES
        entries[:, Word.LOCATION] = HANDLES * BLOCK // POOL_UNIT_BYTES
        found = Probe(entries, HANDLES)
        into = DeviceBlocks(self.device, self.target, HANDLES * BLOCK)
        return self.threads.submit(self.side.copy_out, into, HANDLES, found, 0, BLOCK, timeout_s)


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.go.set()
    slow.threads.shutdown()
    slow.device.close()


def test_what_stands_is_whole_wherever_it_came_from(slow: Slow) -> None:
    slow.go.set()
    whole, near = slow.ask().result(10)
    assert (whole.tolist(), near) == ([True] * 4, 2)
    assert slow.read[:, 0].tolist() == [1, 2, 3, 4]


def replaced(slow: Slow) -> None:
    """Another block was given the place."""
    slow.board.clear(HANDLES[:1])
    slow.bytes[0] = 99


def replaced_and_back(slow: Slow) -> None:
    """And the first one has come back to it, under the generation that it has had all the time."""
    replaced(slow)
    slow.board.place(HANDLES[:1], GENERATIONS[:1], HANDLES[:1] * BLOCK)


def moved(slow: Slow) -> None:
    """And the first one is somewhere else."""
    replaced(slow)
    slow.board.place(HANDLES[:1], GENERATIONS[:1], np.array([3 * BLOCK]))


@pytest.mark.parametrize("meanwhile", [replaced, replaced_and_back, moved])
def test_a_place_that_was_given_to_another_block_during_the_copy_is_noticed(
    slow: Slow, meanwhile: Callable[[Slow], None]
) -> None:
    asked = slow.ask()
    assert slow.begun.wait(10)  # the board was looked at, and no byte has been copied
    meanwhile(slow)
    slow.go.set()
    whole, near = asked.result(10)
    assert slow.read[0, 0] == 99, "the copy was made after the place had been given away"
    assert (whole.tolist(), near) == ([False, True, True, True], 1)


def test_nothing_is_let_go_of_while_a_call_is_copying(slow: Slow) -> None:
    asked = slow.ask()
    assert slow.begun.wait(10)
    slow.side.close()
    slow.side.close()
    assert slow.closed == 0
    slow.go.set()
    asked.result(10)
    until(lambda: slow.closed == 1)
    with pytest.raises(Unavailable, match="closed meanwhile"):
        slow.ask().result(10)
    assert slow.closed == 1


def test_what_a_stuck_copy_may_still_use_is_never_let_go_of(slow: Slow) -> None:
    with pytest.raises(DeviceError, match="did not end"):
        slow.ask(timeout_s=0.01).result(10)
    slow.side.close()
    assert slow.closed == 0


def test_the_pool_is_registered_once_it_is_present() -> None:
    class Registering(HostDevice):
        registered: list[int]

        def register(self, memory: object) -> None:
            self.registered.append(1)

    device, stop = Registering(), threading.Event()
    device.registered = []
    side = DeviceSide(device, np.zeros(BLOCK, dtype=np.uint8), None)
    warm = iter([0, 0, BLOCK])
    side.register_pool(lambda: next(warm), stop)
    assert device.registered == [1]
    stop.set()
    side.register_pool(lambda: 0, stop)
    assert device.registered == [1]


def test_a_pool_that_can_not_be_registered_is_read_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(HostDevice):
        def register(self, memory: object) -> None:
            raise DeviceError("cuda:0: cuMemHostRegister: operation not supported")

    device = Refusing()
    pool = np.full(BLOCK, 7, dtype=np.uint8)
    side = DeviceSide(device, pool, None)
    side.register_pool(lambda: BLOCK, threading.Event())
    assert "not registered with the device, copies from it are slower" in caplog.text
    target = device.allocate(BLOCK)
    zero = np.zeros(1, dtype=np.int64)
    device.copy(target, host_memory(pool), Copies.of_blocks(zero, zero, BLOCK)).wait(10)
    side.close()
    device.close()
