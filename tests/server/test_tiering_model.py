"""A shard with a real SSD tier against a dict: puts, gets, deletes, pins, evictions, demotions, promotions, crashes."""

from __future__ import annotations

import selectors
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvstore.index import IndexReader
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.eviction.tenants import Quota
from kvstore.server.shard import tiering
from kvstore.server.shard.shard import IndexSegment, Shard
from kvstore.server.shard.tiering import Admission, Tiering
from kvstore.server.tiers.disk.engine import DiskTier
from kvstore.server.tiers.disk.messages import (
    Answer,
    Flush,
    Load,
    Namespace,
    Quotas,
    Remove,
    Request,
    Scan,
    Stats,
    Store,
)
from kvstore.transport.memory import private_arena
from kvstore.wire.messages import BY_LAYERS, KeyRequest, RefRequest
from tests.server.shards import CHUNK, Rows, keys, namespace, refs, reserve, segment
from tests.server.tiers.disk.rig import copy_as_it_is

NUMBERS = 24  # blocks; DRAM has slots for a third of them, the SSD for all
POOL_BYTES = 2 * CHUNK
DISK_BYTES = 2 << 20
SPACE = namespace(1, layers=4, layer_bytes=2000)
TIMEOUT_S = 30.0
NOW_S = 0.0
batches = st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=5, unique=True)


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, SPACE.block_bytes, dtype=np.uint8)


class InlineDisk:
    """The disk worker's part of a shard, in its own thread: `step` does what is due, and hands over one answer."""

    def __init__(self, folder: Path, pool: NDArray[np.uint8], boot: bytes) -> None:
        self.tier = DiskTier(folder, DISK_BYTES, pool, boot)
        self._request = 0
        self.answers: deque[Answer] = deque()

    def submit_quotas(self, quotas: dict[str, Quota]) -> None:
        self._submit(Quotas(quotas))

    def submit_store(self, space: Namespace, rows: Rows) -> int:
        self._submit(space)
        return self._submit(Store(space.digest, space.layers, space.layer_bytes, rows))

    def submit_load(self, rows: Rows) -> int:
        return self._submit(Load(rows))

    @property
    def load_room(self) -> int:
        return 1000

    def submit_remove(self, generation: int, keys: Rows) -> int:
        return self._submit(Remove(generation, keys))

    def submit_flush(self, generation: int, digest: bytes) -> int:
        return self._submit(Flush(generation, digest))

    def submit_scan(self) -> int:
        return self._submit(Scan())

    def submit_stats(self) -> int:
        return self._submit(Stats())

    def step(self, tiering: Tiering) -> None:
        if self.tier.scanning:
            self.tier.scan_step()
        elif not self.answers:
            with selectors.DefaultSelector() as selector:
                selector.register(self.tier.fd, selectors.EVENT_READ)
                selector.select(0.02)
        self.tier.poll()
        self.answers += self.tier.answers()
        if self.answers:
            tiering.take(self.answers.popleft())

    def _submit(self, message: Request) -> int:
        self._request += 1
        self.tier.handle(self._request, message)
        return self._request


class ShardWithDisk:
    """Everything of one run of a server but its sockets."""

    def __init__(self, folder: Path, boot: bytes) -> None:
        self.pool = private_arena(POOL_BYTES)
        self.board = np.zeros((POOL_BYTES + DISK_BYTES) // 4096, dtype=np.uint32)
        self.memory = np.zeros(0, dtype=np.uint8)
        self.boot = boot
        self.shard = Shard(
            pool_bytes=POOL_BYTES,
            chunk_bytes=CHUNK,
            new_segment=self._new_segment,
            make_policy=lambda: LruPolicy(self.board),
            disk_bytes=DISK_BYTES,
            index_entries=64,
        )
        self.space = self.shard.open_namespace(SPACE)
        self.session = self.shard.open_session()
        self.begin_disk(folder)

    def begin_disk(self, folder: Path) -> None:
        """The first worker, or the successor of one that died."""
        self.disk = InlineDisk(folder, self.pool, self.boot)
        self.shard.use_disk(self.disk, self.board, Admission.ALWAYS)
        self.until(lambda: self.tiering.scan_complete)

    @property
    def tiering(self) -> Tiering:
        assert self.shard.tiering is not None
        return self.shard.tiering

    @property
    def index(self) -> IndexReader:
        return IndexReader(self.memory)

    def until(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not condition():
            self.disk.step(self.tiering)
            assert time.monotonic() < until_s

    def settle(self) -> None:
        """Until nothing is on its way to the SSD or back."""
        self.until(lambda: self.disk.tier.idle and not self.disk.answers and not self.shard.blocks.storing.any())

    def request(self, numbers: list[int], *, flag: int = 0) -> KeyRequest:
        return KeyRequest(self.space, keys(*numbers), flag=flag, ttl_ms=60_000)

    def close(self) -> None:
        self.settle()
        self.disk.tier.close()

    def _new_segment(self, size_bytes: int) -> IndexSegment:
        made = segment(size_bytes)
        self.memory = made.memory
        return made


class ShardWithDiskAgainstAModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvs-model-"))
        self.runs = 0
        self.folder = self.base / "0"
        self.run = ShardWithDisk(self.folder, bytes(16))
        self.put_numbers: set[int] = set()  # put and not deleted: they may be served
        self.pins: dict[int, int] = {}
        self.held: list[tuple[int, list[tuple[int, int, int]]]] = []  # lease; number, offset, layers that were there
        self.small = patch.multiple(tiering, RANGE_BYTES=SPACE.layer_bytes, BY_LAYERS_BYTES_MIN=SPACE.layer_bytes)
        self.small.start()

    # --- what clients do ---------------------------------------------------------------------------------------------

    @rule(numbers=batches)
    def put(self, numbers: list[int]) -> None:
        run = self.run
        rows = reserve(run.shard, run.session, run.space, numbers)
        granted = np.flatnonzero(rows["status"] == 0)
        for place in granted.tolist():
            offset = int(rows["offset"][place])
            run.pool[offset : offset + SPACE.block_bytes] = content(numbers[place])
        assert run.shard.commit(run.session, refs(rows[granted])).all()
        self.put_numbers |= {numbers[place] for place in granted.tolist()}

    @rule(numbers=batches)
    def get(self, numbers: list[int]) -> None:
        run = self.run
        wanted = run.request(numbers)
        told: list[bool] = []
        run.shard.promote(wanted, NOW_S, lambda: told.append(True))
        run.until(lambda: told)
        probe = run.index.probe(wanted.keys)
        readable = probe.readable(run.space, SPACE.layers, SPACE.block_bytes)
        for place in np.flatnonzero(readable).tolist():
            number, offset = numbers[place], int(probe.offsets[place])
            assert number in self.put_numbers
            assert (run.pool[offset : offset + SPACE.block_bytes] == content(number)).all()

    @rule(numbers=batches, steps=st.integers(0, 4))
    def follow_layers(self, numbers: list[int], steps: int) -> None:
        """Ask for blocks layer by layer, and hold them at any point of their way."""
        run = self.run
        if len(self.held) == 2:
            return  # some of DRAM has to be left for the others
        wanted = run.request(numbers, flag=BY_LAYERS)
        run.shard.promote(wanted, NOW_S, lambda: None)
        for _ in range(steps):
            run.disk.step(run.tiering)
        probe = run.index.probe(wanted.keys)
        there = np.flatnonzero(probe.readable(run.space, 1, SPACE.block_bytes))
        found = RefRequest.of(probe.handles[there], probe.generations[there]).refs
        lease, held = run.shard.lease(run.session, found, 600_000, NOW_S)
        assert held.all()
        ready = np.where(probe.loading[there], probe.layers_ready[there], SPACE.layers)
        read = zip((numbers[place] for place in there), probe.offsets[there].tolist(), ready.tolist(), strict=True)
        self.held.append((lease, list(read)))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        lease, _ = self.held.pop()
        assert self.run.shard.release(self.run.session, np.array([lease], dtype=np.uint64), NOW_S).all()

    @rule(numbers=batches)
    def delete(self, numbers: list[int]) -> None:
        run = self.run
        wanted = run.request(numbers)
        told: list[bool] = []
        run.shard.delete(wanted)
        run.shard.delete_on_disk(wanted.keys, lambda: told.append(True))
        run.until(lambda: told)
        self.put_numbers -= set(numbers)
        for number in numbers:
            self.pins.pop(number, None)

    @rule(numbers=batches, on=st.booleans())
    def pin(self, numbers: list[int], on: bool) -> None:
        run = self.run
        probe = run.index.probe(keys(*numbers))
        readable = probe.readable(run.space, SPACE.layers, SPACE.block_bytes)
        resident = [number for number, there in zip(numbers, readable.tolist(), strict=True) if there]
        if on and len(set(self.pins) | set(resident)) > 4:
            return  # some of DRAM has to be left for the others
        if resident:
            run.shard.pin(run.request(resident, flag=int(on)))
        for number in resident:
            count = self.pins.get(number, 0) + (1 if on else -1)
            self.pins[number] = count
            if count <= 0:
                del self.pins[number]

    @rule(numbers=batches)
    def touch(self, numbers: list[int]) -> None:
        self.run.shard.touch(self.run.request(numbers))

    @rule()
    def wait(self) -> None:
        self.run.settle()

    # --- what happens to the processes -------------------------------------------------------------------------------

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """Of the whole server: stopped, or killed with the folder as it is at this moment."""
        self.run.settle()
        durable = self._durable()
        self._end_disk(clean)
        self.run = ShardWithDisk(self.folder, self.runs.to_bytes(16, "little"))
        self.pins.clear()
        self.held.clear()
        assert self._found() == durable
        self.put_numbers = durable

    @rule(clean=st.booleans())
    def disk_worker_restarts(self, clean: bool) -> None:
        """What is in DRAM stays there."""
        self.run.settle()
        found = self._found()
        self._end_disk(clean)
        self.run.tiering.worker_died()
        self.run.begin_disk(self.folder)
        assert self._found() == found

    def _end_disk(self, clean: bool) -> None:
        self.runs += 1
        copy = self.base / str(self.runs)
        if not clean:
            copy_as_it_is(self.folder, copy)
        self.run.disk.tier.close()
        if not clean:
            shutil.rmtree(self.folder)
            self.folder = copy

    # --- what must hold after every step -----------------------------------------------------------------------------

    @invariant()
    def only_what_was_put_and_not_deleted_is_found(self) -> None:
        if hasattr(self, "run"):
            assert self._found() <= self.put_numbers

    @invariant()
    def the_pool_is_all_accounted_for(self) -> None:
        if hasattr(self, "run"):
            books = self.run.shard.accounting()
            assert books["free"] + books["reserved"] + books["committed"] == books["capacity"]

    @invariant()
    def pinned_blocks_stay_in_dram(self) -> None:
        if hasattr(self, "run") and self.pins:
            probe = self.run.index.probe(keys(*self.pins))
            assert probe.readable(self.run.space, SPACE.layers, SPACE.block_bytes).all()

    @invariant()
    def layers_that_are_said_to_be_there_are_right(self) -> None:
        if not hasattr(self, "run"):
            return
        probe = self.run.index.probe(keys(*range(NUMBERS)))
        loading = np.flatnonzero(probe.loading)
        at = zip(loading.tolist(), probe.offsets[loading].tolist(), probe.layers_ready[loading].tolist(), strict=True)
        for number, offset, layers in [*at, *(row for _, rows in self.held for row in rows)]:
            size = layers * SPACE.layer_bytes
            assert (self.run.pool[offset : offset + size] == content(number)[:size]).all()

    def _found(self) -> set[int]:
        states = self.run.index.probe(keys(*range(NUMBERS))).states
        return set(np.flatnonzero(states).tolist())

    def _durable(self) -> set[int]:
        """Nothing is under way, so the index says it of each block; the SSD has room for all, and evicts none."""
        probe = self.run.index.probe(keys(*range(NUMBERS)))
        there = np.flatnonzero(probe.states)
        return set(there[self.run.shard.blocks.durable[probe.handles[there]]].tolist())

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.small.stop()
            self.run.close()
            shutil.rmtree(self.base)


TestShardWithDisk = ShardWithDiskAgainstAModel.TestCase
TestShardWithDisk.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestShardWithDisk.pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pyright: ignore[reportAttributeAccessIssue] -- to shrink
