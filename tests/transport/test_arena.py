"""Result memory: handed out, watched, recycled only when nobody can see it any more."""

import gc
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.client.arena import SMALL_BYTES, ArenaPool

Bytes = NDArray[np.uint8]
LARGE = 1 << 20


def address(memory: Bytes) -> int:
    return memory.ctypes.data


def test_memory_comes_back_when_it_is_forgotten() -> None:
    pool = ArenaPool()
    memory = pool.take(LARGE)
    first = address(memory)
    del memory
    assert address(pool.take(LARGE)) == first


def test_memory_that_somebody_still_sees_is_never_handed_out_again() -> None:
    pool = ArenaPool()
    memory = pool.take(LARGE)
    memory[:] = 1
    row = memory.reshape(16, -1)[3][10:20].view(np.int8)  # a view of a view of a view
    del memory
    others = [pool.take(LARGE) for _ in range(3)]
    for other in others:
        other[:] = 2
        assert not np.shares_memory(other, row)
    assert row.tolist() == [1] * 10


def test_a_memoryview_keeps_it_too() -> None:
    pool = ArenaPool()
    seen = memoryview(pool.take(LARGE))[100:200]
    seen[:] = bytes([7]) * 100
    other = pool.take(LARGE)
    other[:] = 0
    assert seen.tobytes() == bytes([7]) * 100


def test_the_last_view_to_go_gives_it_back() -> None:
    pool = ArenaPool()
    memory = pool.take(LARGE)
    first = address(memory)
    rows = list(memory.reshape(4, -1))
    del memory
    while rows:
        assert address(pool.take(LARGE)) != first
        rows.pop()
    gc.collect()
    again = [pool.take(LARGE) for _ in range(2)]  # the other one was made while the first was in use
    assert first in [address(memory) for memory in again]


def test_the_caller_may_write_to_it() -> None:
    for size in (1, SMALL_BYTES - 1, SMALL_BYTES, LARGE + 1):
        memory = ArenaPool().take(size)
        assert (memory.dtype, memory.shape) == (np.dtype(np.uint8), (size,))
        memory[:] = 255
        assert memory.flags.c_contiguous


def test_calls_of_about_the_same_size_share_memory() -> None:
    pool = ArenaPool()
    memory = pool.take(LARGE + 1000)
    first = address(memory)
    del memory
    assert address(pool.take(LARGE + 5000)) == first


def test_no_more_than_the_limit_lies_idle() -> None:
    pool = ArenaPool(idle_bytes_max=2 * LARGE)
    held = [pool.take(LARGE) for _ in range(5)]
    addresses = {address(memory) for memory in held}
    held.clear()
    again = [pool.take(LARGE) for _ in range(2)]
    assert {address(memory) for memory in again} <= addresses


def test_it_outlives_its_pool() -> None:
    pool = ArenaPool()
    memory = pool.take(LARGE)
    memory[:] = 9
    del pool
    gc.collect()
    assert (memory == 9).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "narrow"]), st.integers(0, 7)), max_size=40))
def test_whatever_is_taken_and_dropped_no_two_share_memory(steps: list[tuple[str, int]]) -> None:
    pool = ArenaPool(idle_bytes_max=1 << 20)
    held: list[tuple[Bytes, int]] = []  # the memory, and the number that its owner wrote in it
    for turn, (step, number) in enumerate(steps):
        match step:
            case "take":
                memory = pool.take(SMALL_BYTES + number * 10_000)
                memory[:] = turn
                held.append((memory, turn))
            case "drop" if held:
                held.pop(number % len(held))
            case "narrow" if held:
                memory, mark = held[number % len(held)]
                held[number % len(held)] = (memory[1:], mark)
            case _:
                pass
        assert all((memory == mark).all() for memory, mark in held)


def test_threads_get_memory_of_their_own() -> None:
    pool = ArenaPool()
    mixed_up: list[int] = []

    def work(mark: int) -> None:
        for _ in range(100):
            memory = pool.take(SMALL_BYTES + 1)
            memory[:] = mark
            view = memory[100:]
            del memory
            if not (view == mark).all():
                mixed_up.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not mixed_up
