"""Blocks in a worker's device memory, in front of the store: looked up there first, given back to the store when room
is needed.

    pool = DevicePool(client, capacity_bytes=8 << 30)
    with pool.get(keys) as held:            # blocks stay where they are until the end
        run(pool.blocks, held.slots)        # rows of the paged engine's tensor; -1 is a miss: compute it
    with pool.write(new_keys) as writing:
        compute(pool.blocks, writing.slots)
        writing.commit()

A key names content (a chain of hashes over namespace and tokens), and a block never changes once it is complete. So a
copy in this pool is right for as long as it exists, whatever happens in the store: evicting, deleting or flushing a
block there makes no copy here wrong, and there is nothing to invalidate. Other weights are another `revision`, so other
keys. Who deletes for another reason (a tenant has left) calls `forget` here as well.

*Demotion*: least recently used blocks go first, the deepest of a prompt before those that they depend on. A block that
exists only here is put into the store before its slot is given away; what the store refuses is lost, and counted.

*Threads*: all methods may be called from any thread. One lock guards the tables and is never held while bytes move or
the store is asked. Who wants a block that another thread is just fetching waits for that, within the client's timeout.

*Faults*: a fault of the store reads as a miss. A fault of the device raises `DeviceError`; slots that a copy may still
be writing to are kept aside until the device is idle.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client.results import Fetched, Mask, PutResult, leading
from kvstore.core.errors import DeviceError, UsageError
from kvstore.core.keys import BlockKeys
from kvstore.core.namespace import Namespace
from kvstore.core.states import PutStatus
from kvstore.device.base import Device
from kvstore.transport.device_blocks import DeviceBlocks

I64 = NDArray[np.int64]
MISS = -1


class Store(Protocol):
    """What the pool needs of its client: `kvstore.Client`."""

    @property
    def namespace(self) -> Namespace: ...
    @property
    def device(self) -> Device | None: ...
    @property
    def timeout_s(self) -> float: ...
    def get_into(self, keys: BlockKeys, into: object) -> Fetched: ...
    def put(self, keys: BlockKeys, blocks: object) -> PutResult: ...


@dataclass(slots=True)
class PoolCounters:
    """Totals since the pool was made, in blocks."""

    hits: int = 0  # found on the device
    fetched: int = 0  # found in the store
    missed: int = 0  # found nowhere, or no slot was free
    written: int = 0  # committed here
    demoted: int = 0  # put into the store because their slot was needed, or by `flush`
    lost: int = 0  # existed only here, and the store refused them
    evicted: int = 0  # slots given to other blocks


@dataclass(slots=True)
class _Slot:
    """One slot that has a key."""

    number: int
    key: bytes
    ready: bool = False  # complete: before that, somebody is filling it
    dirty: bool = False  # exists only here, as far as we know
    holds: int = 0


class Held:
    """Blocks that stay where they are until `release`, or the end of the `with` block."""

    def __init__(self, pool: DevicePool, slots: I64) -> None:
        self._pool = pool
        self._open = True
        self.slots = slots
        """Slot of each key, shape (n,); -1 for a miss."""

    @property
    def ok(self) -> Mask:
        """Which blocks are there, shape (n,)."""
        return self.slots != MISS

    @property
    def hit_blocks(self) -> int:
        """Blocks before the first one that is missing."""
        return leading(self.ok)

    def release(self, stream: int | None = None) -> None:
        """The blocks may go. Idempotent.

        Args:
            stream: of the engine, where work that reads them may still be under way: no slot is filled again before
            what is on it now has ended. Without it, that work must have ended.
        """
        if self._open:
            self._open = False
            self._pool.end_holds(self.slots[self.ok], stream)

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Writing:
    """Slots to write new blocks into. What is not committed at the end of the `with` block is dropped."""

    def __init__(self, pool: DevicePool, slots: I64) -> None:
        self._pool = pool
        self._open = True
        self.slots = slots
        """Slot of each key that is ours to write, shape (n,); -1 where the block is there, being made, or no slot was
        free."""

    def commit(self, stream: int | None = None) -> None:
        """The blocks are complete.

        Args:
            stream: of the engine, where the work that writes them may still be under way: nothing is copied out of
            them before what is on it now has ended. Without it, that work must have ended.
        """
        if self._open:
            self._open = False
            self._pool.end_writing(self.slots[self.slots != MISS], stream, complete=True)

    def abort(self) -> None:
        """Drop them. Idempotent; the work that writes them must have ended."""
        if self._open:
            self._open = False
            self._pool.end_writing(self.slots[self.slots != MISS], None, complete=False)

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class DevicePool:
    """See the module. A context manager: it is closed at the end.

    Args:
        client: connected with a device; the pool lies there.
        capacity_bytes: of the pool, rounded down to whole blocks. Never more is taken.

    Raises:
        UsageError: the client has no device, or not even one block fits.
        DeviceError: the device has not that much memory.
    """

    def __init__(self, client: Store, capacity_bytes: int) -> None:
        if client.device is None:
            raise UsageError('a device pool needs a client with a device, as connect(..., device="cuda:0") makes it')
        self.block_bytes = client.namespace.block_bytes
        self.slots = capacity_bytes // self.block_bytes
        if not self.slots:
            raise UsageError(f"capacity_bytes={capacity_bytes}: a block alone has {self.block_bytes} bytes")
        self._client = client
        self._device: Device = client.device
        self._memory = self._device.allocate(self.slots * self.block_bytes)
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)  # a slot became ready, or was given up
        self._by_key: OrderedDict[bytes, _Slot] = OrderedDict()  # least recently used first
        self._by_number: dict[int, _Slot] = {}
        self._free = list(range(self.slots - 1, -1, -1))
        self._aside: list[int] = []  # a copy that was given up may still write there
        self._counters = PoolCounters()
        self._open = True

    @property
    def blocks(self) -> object:
        """The pool as one uint8 tensor of shape (slots, block bytes), without a copy: a numpy array on the host, on
        CUDA an object that `torch.as_tensor(pool.blocks, device="cuda")` and cupy take in.
        """
        return self._device.array(self._memory, (self.slots, self.block_bytes))

    def get(self, keys: BlockKeys) -> Held:
        """Blocks in device memory: those that are there, and those that the store has, as far as slots can be had.

        Raises:
            DeviceError: the device failed or took too long.
        """
        deadline_s = time.monotonic() + self._client.timeout_s
        names = self._names(keys)
        held = Held(self, np.full(len(keys), MISS, dtype=np.int64))
        try:
            mine, others = self._claim(names, held.slots, found=True)
            self._fill(keys, mine, held.slots)
            self._await(names, others, held.slots, deadline_s)
        except BaseException:  # Ctrl-C too: nobody else knows what was claimed
            held.release()
            raise
        return held

    def write(self, keys: BlockKeys) -> Writing:
        """Slots for blocks that are not here, to be written by the caller.

        Raises:
            DeviceError: the device failed or took too long, while a block was demoted.
        """
        slots = np.full(len(keys), MISS, dtype=np.int64)
        self._claim(self._names(keys), slots, found=False)
        return Writing(self, slots)

    def has(self, keys: BlockKeys) -> Mask:
        """Which blocks are here and complete, shape (n,). Changes nothing, asks nobody."""
        with self._lock:
            found = (self._by_key.get(name) for name in self._names(keys))
            return np.array([slot is not None and slot.ready for slot in found], dtype=np.bool_)

    def forget(self, keys: BlockKeys) -> int:
        """Drop blocks that nobody holds, also those that exist only here; how many."""
        with self._lock:
            dropped = 0
            for name in self._names(keys):
                slot = self._by_key.get(name)
                if slot is not None and slot.ready and not slot.holds:
                    self._drop(slot)
                    dropped += 1
            return dropped

    def flush(self) -> int:
        """Put all blocks that exist only here into the store; how many it has taken.

        Raises:
            DeviceError: the device failed or took too long.
        """
        with self._lock:
            dirty = [slot for slot in self._by_key.values() if slot.ready and slot.dirty]
            for slot in dirty:
                slot.holds += 1
        try:
            return self._demote(dirty)
        finally:
            with self._lock:
                for slot in dirty:
                    slot.holds -= 1

    def stats(self) -> dict[str, int]:
        """Counters, and how many slots are used, free, kept aside and held."""
        with self._lock:
            holds = sum(1 for slot in self._by_key.values() if slot.holds)
            dirty = sum(1 for slot in self._by_key.values() if slot.dirty)
            return {
                **asdict(self._counters),
                "slots": self.slots,
                "used": len(self._by_key),
                "free": len(self._free),
                "aside": len(self._aside),
                "held": holds,
                "dirty": dirty,
            }

    def close(self) -> None:
        """Flush, and give the memory back; `blocks` must not be used any more. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        try:
            self.flush()
        finally:
            if self._device.idle():  # else a copy may still be at work: the memory is kept for good
                self._device.free(self._memory)

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for `Held` and `Writing` ------------------------------------------------------------------------------------

    def end_holds(self, numbers: I64, stream: int | None) -> None:
        """Slots are no longer held; one hold for each time that a slot is named."""
        if stream is not None and len(numbers):
            self._device.follow(stream)
        with self._lock:
            for number in numbers.tolist():
                self._by_number[number].holds -= 1

    def end_writing(self, numbers: I64, stream: int | None, *, complete: bool) -> None:
        """Slots were written, or are given up."""
        if stream is not None and len(numbers):
            self._device.follow(stream)
        with self._lock:
            for number in numbers.tolist():
                slot = self._by_number[number]
                slot.holds -= 1
                slot.ready = slot.dirty = complete
                if not complete:
                    self._drop(slot)
            self._counters.written += len(numbers) if complete else 0
            self._settled.notify_all()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _names(self, keys: BlockKeys) -> list[bytes]:
        if not isinstance(keys, BlockKeys):
            raise UsageError(f"keys: {type(keys).__name__} is no batch of keys; pass BlockKeys, as keys() makes them")
        raw, size = keys.tobytes(), keys.array.itemsize
        return [raw[start : start + size] for start in range(0, len(raw), size)]

    def _claim(self, names: list[bytes], slots: I64, *, found: bool) -> tuple[list[int], list[int]]:
        """Hold what is here (if `found`) and get slots for what is not: rows that are the caller's to fill, and rows
        that somebody else is filling.
        """
        mine: list[int] = []
        others: list[int] = []
        absent: list[int] = []
        with self._lock:
            self._require_open()
            for row, name in enumerate(names):
                slot = self._by_key.get(name)
                if slot is None:
                    absent.append(row)
                elif not slot.ready:
                    others.append(row)
                elif found:
                    slot.holds += 1
                    slots[row] = slot.number
            self._counters.hits += len(names) - len(absent) - len(others) if found else 0
            # Deepest first, so that the beginning of a prompt is the last to go.
            for name in reversed(names):
                if name in self._by_key:
                    self._by_key.move_to_end(name)
        self._make_room(len(absent))
        with self._lock:
            for row in absent:
                name = names[row]
                if name in self._by_key:  # named twice, or another thread was faster
                    others.append(row)
                elif self._free:
                    slot = _Slot(self._free.pop(), name, holds=1)
                    self._by_key[name] = self._by_number[slot.number] = slot
                    slots[row] = slot.number
                    mine.append(row)
            for row in reversed(mine):
                self._by_key.move_to_end(names[row])
            if found:
                asked = len(names) - np.count_nonzero(slots != MISS) - len(others)
                self._counters.missed += int(asked)  # for want of a slot
        return mine, others

    def _make_room(self, count: int) -> None:
        """Free slots until there are `count`, as far as blocks may go."""
        with self._lock:
            self._take_back_aside()
            victims: list[_Slot] = []
            for slot in self._by_key.values():
                if len(self._free) + len(victims) >= count:
                    break
                if slot.ready and not slot.holds:
                    victims.append(slot)
            # Held, so that nobody else takes them; they can still be found until they are gone.
            for slot in victims:
                slot.holds += 1
        answered = False
        try:
            self._demote([slot for slot in victims if slot.dirty])
            answered = True
        finally:
            with self._lock:
                for slot in victims:
                    slot.holds -= 1
                    if not slot.holds and (answered or not slot.dirty):
                        self._counters.lost += slot.dirty
                        self._counters.evicted += 1
                        self._drop(slot)

    def _demote(self, dirty: list[_Slot]) -> int:
        """Put blocks that are held into the store; how many it has taken. The others stay dirty."""
        if not dirty:
            return 0
        keys = BlockKeys.frombuffer(b"".join(slot.key for slot in dirty))
        statuses = self._client.put(keys, self._at([slot.number for slot in dirty])).statuses
        taken = statuses <= PutStatus.EXISTS
        with self._lock:
            for slot, good in zip(dirty, taken.tolist(), strict=True):
                slot.dirty = not good
            self._counters.demoted += int(np.count_nonzero(taken))
        return int(np.count_nonzero(taken))

    def _fill(self, keys: BlockKeys, mine: list[int], slots: I64) -> None:
        """Fetch these rows' blocks from the store; slots of misses are given back."""
        if not mine:
            return
        rows = np.array(mine, dtype=np.int64)
        wanted = BlockKeys(keys.array[rows])
        ok: Mask = np.zeros(len(rows), dtype=np.bool_)
        may_still_write = True
        try:
            ok = self._client.get_into(wanted, self._at(slots[rows].tolist())).ok
            may_still_write = False
        finally:
            with self._lock:
                for row, good in zip(mine, ok.tolist(), strict=True):
                    slot = self._by_number[int(slots[row])]
                    slot.ready = good
                    if not good:
                        slot.holds -= 1
                        self._drop(slot, aside=may_still_write)
                        slots[row] = MISS
                self._counters.fetched += int(np.count_nonzero(ok))
                self._counters.missed += int(np.count_nonzero(~ok))
                self._settled.notify_all()

    def _await(self, names: list[bytes], rows: list[int], slots: I64, deadline_s: float) -> None:
        """Hold blocks that others are filling, once they are ready."""
        with self._settled:
            for row in rows:
                name = names[row]
                while (slot := self._by_key.get(name)) is not None and not slot.ready:
                    if not self._settled.wait(deadline_s - time.monotonic()):
                        break
                if slot is not None and slot.ready:
                    slot.holds += 1
                    slots[row] = slot.number
                    self._counters.hits += 1
                else:
                    self._counters.missed += 1

    def _at(self, numbers: list[int]) -> DeviceBlocks:
        return DeviceBlocks(self._device, self._memory, np.array(numbers, dtype=np.int64) * self.block_bytes)

    def _drop(self, slot: _Slot, *, aside: bool = False) -> None:
        del self._by_key[slot.key], self._by_number[slot.number]
        (self._aside if aside else self._free).append(slot.number)

    def _take_back_aside(self) -> None:
        if not self._aside:
            return
        try:
            idle = self._device.idle()
        except DeviceError:  # it is broken: nothing is certain any more
            return
        if idle:
            self._free += self._aside
            self._aside = []

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError("the device pool is closed")
