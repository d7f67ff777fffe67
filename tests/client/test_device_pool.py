"""The worker's device pool: against a model with a store that forgets and refuses, with threads, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from numpy.typing import NDArray

import kvstore
from kvstore.client.device_pool import MISS, DevicePool, Held, Writing
from kvstore.device.base import LEGACY_STREAM, Copies, Memory, host_memory
from kvstore.device.host import HostDevice
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.device_blocks import DeviceBlocks
from tests.client.sdk import content, fresh_keys, one_line, space
from tests.device.gpus import DEVICES, usable

SPACE = space(layer_bytes=96)
SIZE = SPACE.block_bytes
TOKENS = np.arange(4 * 16)
PROMPT, FIRST, COUNT = st.integers(0, 1), st.integers(0, 5), st.integers(1, 4)
PROMPTS = [kvstore.chain_keys(SPACE, TOKENS + 1000 * number) for number in range(3)]
ALL_KEYS = kvstore.BlockKeys.concat(*PROMPTS)


class DictStore:
    """A store as `DevicePool` sees it, over a dict. It can refuse, be full, or be stopped in the middle of a get."""

    def __init__(self, device: HostDevice) -> None:
        self.namespace, self.device, self.timeout_s = SPACE, device, 10.0
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.refuses = False
        self.gets = 0
        self.gate = threading.Event()
        self.gate.set()

    def put(self, keys: kvstore.BlockKeys, blocks: object) -> kvstore.PutResult:
        assert isinstance(blocks, DeviceBlocks)
        rows = np.zeros((len(keys), SIZE), dtype=np.uint8)
        self._copy(host_memory(rows.reshape(-1)), np.arange(len(keys)) * SIZE, blocks.memory, blocks.offsets)
        status = kvstore.PutStatus.NO_ROOM if self.refuses else kvstore.PutStatus.STORED
        for name, row in zip(names(keys), rows, strict=True):
            if not self.refuses:
                self.blocks[name] = row
        return kvstore.PutResult(np.full(len(keys), status, dtype=np.uint8), 0)

    def get_into(self, keys: kvstore.BlockKeys, into: object) -> kvstore.Fetched:
        assert isinstance(into, DeviceBlocks)
        self.gets += 1
        self.gate.wait(10)
        found = [self.blocks.get(name) for name in names(keys)]
        ok = np.array([block is not None for block in found], dtype=np.bool_)
        for place, block in zip(into.offsets.tolist(), found, strict=True):
            if block is not None:
                self._copy(into.memory, np.array([place]), host_memory(block), np.zeros(1, dtype=np.int64))
        return kvstore.Fetched(ok, 0)

    def _copy(self, target: Memory, to: NDArray[np.int64], source: Memory, start: NDArray[np.int64]) -> None:
        self.device.copy(target, source, Copies.of_blocks(to, start, SIZE)).wait(10)


def names(keys: kvstore.BlockKeys) -> list[bytes]:
    return [keys[row : row + 1].tobytes() for row in range(len(keys))]


def array(pool: DevicePool) -> NDArray[np.uint8]:
    return np.asarray(pool.blocks)


@contextmanager
def pool_of(slots: int) -> Iterator[tuple[DevicePool, DictStore]]:
    device = HostDevice()
    store = DictStore(device)
    with DevicePool(store, slots * SIZE) as pool:
        yield pool, store
    device.close()


def write(pool: DevicePool, keys: kvstore.BlockKeys) -> NDArray[np.int64]:
    """Write these blocks as an engine does; the slots."""
    with pool.write(keys) as writing:
        rows = writing.slots != MISS
        array(pool)[writing.slots[rows]] = content(keys, SPACE)[rows]
        writing.commit()
        return writing.slots


def check(pool: DevicePool, keys: kvstore.BlockKeys, held: Held) -> None:
    for row in np.flatnonzero(held.ok).tolist():
        assert np.array_equal(array(pool)[held.slots[row]], content(keys, SPACE)[row])


class PoolMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order: bytes are right, what is held stays, nothing vanishes uncounted."""

    holding = Bundle("holding")
    writings = Bundle("writings")

    def __init__(self) -> None:
        super().__init__()
        self.device = HostDevice()
        self.store = DictStore(self.device)
        self.store.timeout_s = 0.001  # one thread: who waits for another block's writer waits for itself
        self.pool = DevicePool(self.store, 7 * SIZE)
        self.committed: set[bytes] = set()
        self.forgotten: set[bytes] = set()

    @rule(target=holding, prompt=PROMPT, first=FIRST, count=COUNT)
    def get(self, prompt: int, first: int, count: int) -> tuple[kvstore.BlockKeys, Held]:
        keys = PROMPTS[prompt][first : first + count]
        before = self.known()
        held = self.pool.get(keys)
        check(self.pool, keys, held)
        for row, name in enumerate(names(keys)):
            assert not held.ok[row] or name in before, "a block that nobody wrote"
        return keys, held

    @rule(held=consumes(holding))
    def release(self, held: tuple[kvstore.BlockKeys, Held]) -> None:
        check(self.pool, *held)
        held[1].release()
        held[1].release()

    @rule(target=writings, prompt=PROMPT, first=FIRST, count=COUNT)
    def begin(self, prompt: int, first: int, count: int) -> tuple[kvstore.BlockKeys, Writing]:
        keys = PROMPTS[prompt][first : first + count]
        writing = self.pool.write(keys)
        rows = writing.slots != MISS
        assert len(set(writing.slots[rows].tolist())) == np.count_nonzero(rows), "one slot for two blocks"
        array(self.pool)[writing.slots[rows]] = content(keys, SPACE)[rows]
        return keys, writing

    @rule(prompt=PROMPT, first=FIRST, count=COUNT)
    def write(self, prompt: int, first: int, count: int) -> None:
        keys = PROMPTS[prompt][first : first + count]
        slots = write(self.pool, keys)
        self.committed |= {name for name, slot in zip(names(keys), slots.tolist(), strict=True) if slot != MISS}

    @rule(writing=consumes(writings))
    def commit(self, writing: tuple[kvstore.BlockKeys, Writing]) -> None:
        keys, slots = writing[0], writing[1].slots
        writing[1].commit()
        self.committed |= {name for name, slot in zip(names(keys), slots.tolist(), strict=True) if slot != MISS}

    @rule(writing=consumes(writings))
    def abort(self, writing: tuple[kvstore.BlockKeys, Writing]) -> None:
        writing[1].abort()
        writing[1].commit()  # too late, and changes nothing

    @rule(prompt=PROMPT)
    def forget(self, prompt: int) -> None:
        self.pool.forget(PROMPTS[prompt])
        self.forgotten |= set(names(PROMPTS[prompt]))

    @rule(refuses=st.booleans())
    def change_the_store_s_mind(self, refuses: bool) -> None:
        self.store.refuses = refuses

    @precondition(lambda self: self.store.blocks)
    @rule()
    def the_store_forgets_one(self) -> None:
        name = next(iter(self.store.blocks))
        del self.store.blocks[name]
        self.forgotten.add(name)

    @rule()
    def flush(self) -> None:
        self.pool.flush()

    @invariant()
    def slots_add_up(self) -> None:
        stats = self.pool.stats()
        assert stats["used"] + stats["free"] + stats["aside"] == 7

    @invariant()
    def nothing_vanishes_uncounted(self) -> None:
        gone = self.committed - self.known() - self.forgotten
        assert len(gone) <= self.pool.stats()["lost"]

    def known(self) -> set[bytes]:
        """Blocks that can be had: in the store or in the pool."""
        here = zip(names(ALL_KEYS), self.pool.has(ALL_KEYS).tolist(), strict=True)
        return set(self.store.blocks) | {name for name, found in here if found}

    def teardown(self) -> None:
        self.device.close()


TestPoolAgainstAModel = PoolMachine.TestCase
TestPoolAgainstAModel.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_what_is_on_the_device_is_not_asked_of_the_store() -> None:
    keys = PROMPTS[0][:4]
    with pool_of(8) as (pool, store):
        write(pool, keys)
        with pool.get(keys) as held:
            check(pool, keys, held)
            assert held.hit_blocks == 4
        assert store.gets == 0


def test_what_the_store_has_is_fetched_once_and_found_on_the_device_from_then_on() -> None:
    keys = PROMPTS[0][:4]
    with pool_of(8) as (pool, store):
        write(pool, keys)
        pool.flush()
        pool.forget(keys)
        for _ in range(3):
            with pool.get(keys) as held:
                check(pool, keys, held)
                assert held.ok.all()
        assert store.gets == 1
        assert (pool.stats()["hits"], pool.stats()["fetched"]) == (8, 4)


def test_a_block_that_exists_only_here_is_in_the_store_before_its_slot_is_another_s() -> None:
    old, new = PROMPTS[0][:4], PROMPTS[1][:4]
    with pool_of(4) as (pool, store):
        slots = write(pool, old)
        assert not store.blocks
        assert sorted(write(pool, new)) == sorted(slots)
        assert set(store.blocks) == set(names(old))
        for name, row in zip(names(old), content(old, SPACE), strict=True):
            assert np.array_equal(store.blocks[name], row)


def test_the_least_recently_used_go_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    with pool_of(6) as (pool, _):
        write(pool, PROMPTS[0][:3])
        write(pool, PROMPTS[1][:3])
        with pool.get(PROMPTS[0][:3]):
            pass
        write(pool, PROMPTS[2][:4])
        assert pool.has(PROMPTS[0][:3]).tolist() == [True, True, False]
        assert not pool.has(PROMPTS[1][:3]).any()


def test_a_store_that_refuses_costs_the_block_and_is_counted() -> None:
    with pool_of(2) as (pool, store):
        write(pool, PROMPTS[0][:2])
        store.refuses = True
        write(pool, PROMPTS[1][:2])
        assert pool.stats()["lost"] == 2
        store.refuses = False
        assert pool.get(PROMPTS[0][:2]).slots.tolist() == [MISS, MISS]


def test_a_flush_that_is_refused_keeps_the_blocks_for_the_next_one() -> None:
    with pool_of(2) as (pool, store):
        write(pool, PROMPTS[0][:2])
        store.refuses = True
        assert pool.flush() == 0
        store.refuses = False
        assert pool.flush() == 2
        assert pool.stats()["lost"] == 0


def test_blocks_that_are_held_stay_and_what_finds_no_slot_is_a_miss() -> None:
    with pool_of(3) as (pool, _):
        write(pool, PROMPTS[0][:3])
        with pool.get(PROMPTS[0][:3]) as held:
            assert write(pool, PROMPTS[1][:2]).tolist() == [MISS, MISS]
            check(pool, PROMPTS[0][:3], held)
        assert (write(pool, PROMPTS[1][:2]) != MISS).all()


def test_a_request_larger_than_the_pool_gets_the_beginning() -> None:
    with pool_of(3) as (pool, store):
        keys = PROMPTS[0][:5]
        for name, row in zip(names(keys), content(keys, SPACE), strict=True):
            store.blocks[name] = row
        with pool.get(keys) as held:
            check(pool, keys, held)
            assert held.hit_blocks == 3
        assert pool.stats()["missed"] == 2


def test_the_same_key_twice_in_a_call_is_one_slot() -> None:
    keys = kvstore.BlockKeys.concat(PROMPTS[0][:2], PROMPTS[0][:2])
    with pool_of(4) as (pool, _):
        assert (write(pool, keys) != MISS).tolist() == [True, True, False, False]
        with pool.get(keys) as held:
            assert held.slots[:2].tolist() == held.slots[2:].tolist()
        assert pool.stats()["held"] == 0


def test_a_block_that_another_thread_is_fetching_is_waited_for() -> None:
    keys = PROMPTS[0][:3]
    with pool_of(8) as (pool, store):
        for name, row in zip(names(keys), content(keys, SPACE), strict=True):
            store.blocks[name] = row
        store.gate.clear()
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(pool.get, keys) for _ in range(4)]
            until(lambda: store.gets)
            store.gate.set()
            for future in asked:
                assert future.result(10).ok.all()
                future.result().release()
        assert store.gets == 1


def test_a_writer_that_never_commits_costs_a_reader_its_timeout_and_no_more() -> None:
    with pool_of(2) as (pool, store):
        store.timeout_s = 0.01
        with pool.write(PROMPTS[0][:1]):
            assert pool.get(PROMPTS[0][:1]).slots.tolist() == [MISS]


def test_threads_that_share_a_small_pool_never_see_a_wrong_byte() -> None:
    stop = threading.Event()

    def work(pool: DevicePool, seed: int) -> int:
        random, checked = np.random.default_rng(seed), 0
        while not stop.is_set():
            prompt, first = random.integers(0, 3), random.integers(0, 12)
            keys = PROMPTS[prompt][int(first) : int(first + random.integers(1, 5))]
            if random.integers(0, 3) == 0:
                write(pool, keys)
            with pool.get(keys) as held:
                check(pool, keys, held)
                checked += int(np.count_nonzero(held.ok))
        return checked

    with pool_of(9) as (pool, _), ThreadPoolExecutor(6) as threads:
        running = [threads.submit(work, pool, seed) for seed in range(6)]
        until(lambda: pool.stats()["evicted"] > 2000, timeout_s=60, what="many evictions")
        stop.set()
        assert sum(future.result(30) for future in running) > 0
        assert pool.stats()["held"] == 0


# --- faults of the device ---------------------------------------------------------------------------------------------


class FailingStore(DictStore):
    """Its gets fail as a device does that does not answer: the copies may still come."""

    fails = True

    def get_into(self, keys: kvstore.BlockKeys, into: object) -> kvstore.Fetched:
        if self.fails:
            raise kvstore.DeviceError("copies did not end within 2 s")
        return super().get_into(keys, into)


def test_slots_that_a_copy_may_still_write_to_are_kept_aside_until_the_device_is_idle() -> None:
    gate = threading.Event()
    gate.set()
    device = HostDevice(begin=gate.wait)
    store = FailingStore(device)
    pool = DevicePool(store, 2 * SIZE)
    write(pool, PROMPTS[0][:1])
    gate.clear()
    with pytest.raises(kvstore.DeviceError):
        pool.get(PROMPTS[0][:2])
    assert (pool.stats()["aside"], pool.stats()["held"]) == (1, 0)
    assert pool.write(PROMPTS[1][1:1]).slots.tolist() == []
    busy = device.copy(
        host_memory(np.zeros(1, np.uint8)), host_memory(np.zeros(1, np.uint8)), Copies.of_blocks(*ZERO, 1)
    )
    with pool.get(PROMPTS[0][:1]):
        assert pool.write(PROMPTS[1][:1]).slots.tolist() == [MISS]
        gate.set()
        busy.wait(10)
        assert (write(pool, PROMPTS[1][:1]) != MISS).all()
    assert pool.stats()["aside"] == 0
    pool.close()
    device.close()


ZERO = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_a_client_without_a_device_is_refused(server: ServerProcess) -> None:
    with kvstore.connect(server.address, namespace=SPACE) as client, one_line(kvstore.UsageError, 'device="cuda:0"'):
        DevicePool(client, 1 << 20)


def test_a_pool_too_small_for_a_block_is_refused() -> None:
    with one_line(kvstore.UsageError, f"capacity_bytes={SIZE - 1}"):
        DevicePool(DictStore(HostDevice()), SIZE - 1)


def test_a_closed_pool_is_refused_and_has_left_its_blocks_to_the_store() -> None:
    with pool_of(2) as (pool, store):
        write(pool, PROMPTS[0][:2])
        pool.close()
        pool.close()
        assert len(store.blocks) == 2
        with pytest.raises(kvstore.UsageError, match="closed"):
            pool.get(PROMPTS[0][:1])


# --- with the real service --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as server:
        yield server


@pytest.fixture(params=DEVICES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The worker's device."""
    with usable(request.param) as name:
        yield name


@pytest.fixture(params=["shm", "tcp"])
def client(server: ServerProcess, name: str, request: pytest.FixtureRequest) -> Iterator[kvstore.Client]:
    options: dict[str, Any] = {"transport": request.param, "device": name, "timeout_s": 10.0}
    with kvstore.connect(server.address, namespace=SPACE, **options) as client:
        yield client


def write_there(pool: DevicePool, client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    """As `write`, by copies: the processor reaches no GPU's memory."""
    with pool.write(keys) as writing:
        move(pool, client, writing.slots, content(keys, SPACE), to_pool=True)
        writing.commit()


def check_there(pool: DevicePool, client: kvstore.Client, keys: kvstore.BlockKeys, held: Held) -> None:
    got = np.zeros((len(keys), SIZE), dtype=np.uint8)
    move(pool, client, held.slots, got, to_pool=False)
    assert np.array_equal(got[held.ok], content(keys, SPACE)[held.ok])


def move(
    pool: DevicePool, client: kvstore.Client, slots: NDArray[np.int64], rows: NDArray[np.uint8], *, to_pool: bool
) -> None:
    """Between slots and rows; misses are left out."""
    assert client.device is not None
    there = np.flatnonzero(slots != MISS)
    memory, host = memory_of(pool.blocks), host_memory(rows.reshape(-1))
    if to_pool:
        client.device.copy(memory, host, Copies.of_blocks(slots[there] * SIZE, there * SIZE, SIZE)).wait(10)
    else:
        client.device.copy(host, memory, Copies.of_blocks(there * SIZE, slots[there] * SIZE, SIZE)).wait(10)


def memory_of(blocks: Any) -> Memory:
    """The pool's memory, as any engine finds it: by the address that the tensor names."""
    shown = getattr(blocks, "__cuda_array_interface__", None) or blocks.__array_interface__
    return Memory(shown["data"][0], shown["shape"][0] * shown["shape"][1], on_device=True, keep=blocks)


def test_one_worker_s_demoted_blocks_are_another_s_hits(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 12)
    with DevicePool(client, 8 * SIZE) as first:
        write_there(first, client, keys[:8])
        write_there(first, client, keys[8:])
    with DevicePool(client, 16 * SIZE) as second, second.get(keys) as held:
        assert held.ok.all()
        check_there(second, client, keys, held)


def test_a_block_that_was_deleted_in_the_store_is_still_right_on_the_device(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 4)
    with DevicePool(client, 8 * SIZE) as pool:
        write_there(pool, client, keys)
        pool.flush()
        assert client.delete(keys) == 4
        with pool.get(keys) as held:
            assert held.ok.all()
            check_there(pool, client, keys, held)
        assert pool.forget(keys) == 4
        assert not pool.get(keys).ok.any()


def test_with_the_store_gone_what_is_on_the_device_is_served_and_the_rest_is_a_miss() -> None:
    with (
        ServerProcess(dram="16MiB") as server,
        kvstore.connect(server.address, namespace=SPACE, device="host") as client,
        DevicePool(client, 8 * SIZE) as pool,
    ):
        keys = fresh_keys(client, 4)
        write(pool, keys[:2])
        server.stop()
        with pool.get(keys) as held:
            assert held.ok.tolist() == [True, True, False, False]
            check(pool, keys, held)


def test_torch_sees_the_pool_where_it_is(client: kvstore.Client, name: str) -> None:
    torch = pytest.importorskip("torch")
    if name != "host" and not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA")
    with DevicePool(client, 8 * SIZE) as pool:
        tensor = torch.from_dlpack(pool.blocks) if name == "host" else torch.as_tensor(pool.blocks, device=name)
        keys = fresh_keys(client, 3)
        with pool.write(keys) as writing:
            tensor[torch.from_numpy(writing.slots).to(tensor.device)] = torch.from_numpy(content(keys, SPACE)).to(
                tensor.device
            )
            writing.commit(stream=LEGACY_STREAM)
        assert tuple(tensor.shape) == (8, SIZE)
        assert pool.flush() == 3
        for block, row in zip(client.get(keys).blocks, content(keys, SPACE), strict=True):
            assert block is not None
            assert np.array_equal(block, row)
