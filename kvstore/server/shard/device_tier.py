"""What a shard decides about its device segment: an inclusive cache of the pool's hot blocks in device memory.

A block that goes up stays in the pool as well; the index knows nothing of it. Readers of the same host that want a
block in device memory look at the device board (`kvstore.index.device_board`), which this module alone writes.

- *Up* goes what is used again and again: `USES` times since it was committed or last went down, as seen by calls and by
  looks at the touch board. Its slot of the pool is held while it is copied, and the board names it once it is there.
- *Down* goes the least recently used, when room is needed; and whatever leaves the pool, at once.
- A place in the segment is given to another block only after the board has stopped naming it. A reader that was copying
  from it sees that afterwards. A place that a copy is under way to is given to nobody until that copy has ended.

Plain calls from the shard's one thread; nobody waits. When the device fails, the board is emptied, and the shard goes
on without it: nothing was only there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import DeviceError
from kvstore.device.base import Copies, Device, Memory, Ticket
from kvstore.index.device_board import DeviceBoard
from kvstore.server.allocator import SlotAllocator
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.shard.blocks import BlockTable, Life

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Board = NDArray[np.uint32]

log = logging.getLogger("kvstore")

USES = 2  # a block that is read once is mostly a prompt's that does not come again
BOARD_SCAN_S = 0.25
AT_ONCE_BYTES_MAX = 256 << 20  # under way to the segment, and held in the pool for it
AT_ONCE_SHARE = 8  # nor more than one part in eight of the pool: a device that hangs must leave room for puts
WAITING_MAX = 65536  # hot blocks that had no room so far; the longest waiting ones are forgotten
COPY_TIMEOUT_S = 30.0  # a device that takes longer is given up
EVICTED_SHARE = 8  # between two looks one block in eight may go down: more hot blocks than room must not be a treadmill
_USES_MAX = 255


@dataclass(slots=True)
class DeviceCounters:
    """Totals since the start. Names are those of the metrics."""

    promoted_blocks: int = 0
    promoted_bytes: int = 0
    evicted_blocks: int = 0  # for others' sake
    dropped_blocks: int = 0  # because they left the pool
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Climb:
    """A batch on its way up."""

    handles: I64
    generations: U64
    offsets: I64
    nbytes: int
    ticket: Ticket
    deadline_s: float


class DeviceTier:
    """See the module.

    Args:
        blocks: the shard's table.
        pool: the shard's pool.
        device, segment: where blocks go.
        board: zeroed; all readers map it.
        touch_board: uint32 per handle; readers leave their traces there.
        hold, unhold: the slots of blocks in the pool must not change, and may again.
        chunk_bytes: the segment is cut into chunks of that size, which is the largest block that goes up.
    """

    def __init__(
        self,
        blocks: BlockTable,
        pool: Memory,
        device: Device,
        segment: Memory,
        board: DeviceBoard,
        touch_board: Board,
        *,
        hold: Callable[[I64], None],
        unhold: Callable[[I64], None],
        chunk_bytes: int,
    ) -> None:
        self._blocks = blocks
        self._pool = pool
        self._device = device
        self._segment = segment
        self._board = board
        self._touch_board = touch_board
        self._hold = hold
        self._unhold = unhold
        self._allocator = SlotAllocator(segment.nbytes // chunk_bytes * chunk_bytes, chunk_bytes)
        self._policy = LruPolicy(touch_board)
        self._place: I64 = np.zeros(0, dtype=np.int64)  # offset in the segment of each handle; -1 = not there
        self._climbing = np.zeros(0, dtype=np.bool_)
        self._uses: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._seen: Board = np.zeros(0, dtype=np.uint32)  # the touch board when it was last looked at
        self._waiting: I64 = np.zeros(0, dtype=np.int64)  # handles that were used, latest last
        self._climbs: list[_Climb] = []
        self._climbing_bytes = 0
        self._next_scan_s = 0.0
        self._evictions_left = 0
        self.counters = DeviceCounters()
        self.up = True

    # --- what happens in the shard -----------------------------------------------------------------------------------

    def committed(self, handles: I64) -> None:
        """Blocks are in the pool from now on."""
        self._reach()
        self._uses[handles] = 0
        self._seen[handles] = self._touch_board[handles]

    def used(self, handles: I64) -> None:
        """Distinct blocks were used by a call to the shard."""
        if self.up:
            self._count_use(handles)

    def left(self, handles: I64) -> None:
        """Blocks are out of the pool, or under another generation."""
        self._reach()
        gone = handles[self._place[handles] >= 0]
        self.counters.dropped_blocks += len(gone)
        self._take_down(gone)

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Take in what has arrived, look who was used, send up what is hot."""
        if not self.up:
            return
        try:
            self._settle(now_s)
            if now_s >= self._next_scan_s:
                self._next_scan_s = now_s + BOARD_SCAN_S
                self._evictions_left = max(self.resident // EVICTED_SHARE, 1)
                self._scan()
            self._send_up(now_s)
        except DeviceError as error:
            self._give_up(error)

    # --- sight -------------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """Blocks that the board names."""
        return len(self._policy)

    def stats(self) -> dict[str, int]:
        """What there is now."""
        return {
            "resident_blocks": self.resident,
            "climbing_blocks": int(np.count_nonzero(self._climbing)),
            "capacity_bytes": self._allocator.capacity_bytes,
            "free_bytes": self._allocator.free_bytes,
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _count_use(self, handles: I64) -> None:
        self._reach()
        self._uses[handles] += self._uses[handles] < _USES_MAX
        hot = handles[self._uses[handles] >= USES]
        hot = hot[(self._place[hot] < 0) & ~self._climbing[hot]]
        self._waiting = np.concatenate([self._waiting, hot])[-WAITING_MAX:]
        placed = handles[self._place[handles] >= 0]
        if len(placed):
            self._policy.touch(placed)

    def _scan(self) -> None:
        """Look for blocks that readers have used without telling."""
        self._reach()
        used = len(self._blocks)
        now = self._touch_board[:used].copy()
        handles = np.flatnonzero(now != self._seen[:used])
        self._seen[handles] = now[handles]
        self._count_use(handles)

    def _send_up(self, now_s: float) -> None:
        """The latest used first, as many as may be under way."""
        if not len(self._waiting):
            return
        blocks = self._blocks
        latest = self._waiting[::-1]
        wanted = latest[np.sort(np.unique(latest, return_index=True)[1])]
        wanted = wanted[
            (blocks.life[wanted] == Life.COMMITTED)
            & (self._place[wanted] < 0)
            & ~self._climbing[wanted]
            & (self._uses[wanted] >= USES)
            & (blocks.size[wanted] <= self._allocator.chunk_bytes)
        ]
        room = max(min(AT_ONCE_BYTES_MAX, self._pool.nbytes // AT_ONCE_SHARE) - self._climbing_bytes, 0)
        fits = np.cumsum(blocks.size[wanted].astype(np.int64)) <= room
        if self._climbing_bytes == 0 and len(fits):
            fits[0] = True  # one block alone may be larger than what may be under way
        self._waiting = wanted[~fits][::-1]
        chosen = wanted[fits]
        for size in np.unique(blocks.size[chosen]).tolist():
            self._climb(chosen[blocks.size[chosen] == size], size, now_s)

    def _climb(self, handles: I64, size_bytes: int, now_s: float) -> None:
        blocks = self._blocks
        offsets = self._make_room(self._allocator.slot_bytes_for(size_bytes), len(handles))
        handles = handles[: len(offsets)]
        if not len(handles):
            return
        copies = Copies.of_blocks(offsets, blocks.offset[handles], size_bytes)
        ticket = self._device.copy(self._segment, self._pool, copies)
        self._hold(handles)
        self._climbing[handles] = True
        nbytes = size_bytes * len(handles)
        self._climbing_bytes += nbytes
        generations = blocks.generation[handles].copy()
        self._climbs.append(_Climb(handles, generations, offsets, nbytes, ticket, now_s + COPY_TIMEOUT_S))

    def _settle(self, now_s: float) -> None:
        """Copies of one device end in the order in which they were asked for."""
        blocks = self._blocks
        while self._climbs and self._climbs[0].ticket.done():
            climb = self._end(self._climbs.pop(0))
            handles = climb.handles
            # What was deleted or moved meanwhile has arrived for nothing.
            still = (blocks.generation[handles] == climb.generations) & (blocks.life[handles] == Life.COMMITTED)
            arrived, offsets = handles[still], climb.offsets[still]
            self._place[arrived] = offsets
            self._policy.admit(arrived, np.zeros(len(arrived), np.uint64))  # LRU tells blocks apart by handle
            self._board.place(arrived, climb.generations[still], offsets)
            self._allocator.free(climb.offsets[~still])
            self.counters.promoted_blocks += len(arrived)
            self.counters.promoted_bytes += int(blocks.size[arrived].sum())
            self._unhold(handles)
        if self._climbs and now_s >= self._climbs[0].deadline_s:
            raise DeviceError(f"{self._device.name}: copies did not end within {COPY_TIMEOUT_S:g} s")

    def _end(self, climb: _Climb) -> _Climb:
        self._climbing[climb.handles] = False
        self._climbing_bytes -= climb.nbytes
        return climb

    def _make_room(self, slot_bytes: int, count: int) -> I64:
        """Up to `count` places, for which the least recently used go down, as many as may for now."""
        allocator = self._allocator
        offsets = allocator.allocate(slot_bytes, count)
        while len(offsets) < count and self._evictions_left > 0:
            victims = self._policy.candidates(min(count - len(offsets), self._evictions_left))
            if not len(victims):
                break
            self._policy.restore(victims)  # `_take_down` takes them out of the order, like any others
            other = victims[allocator.slot_bytes_of(self._place[victims]) != slot_bytes]
            if len(other):
                # A chunk serves another size only when it is empty.
                victims = np.union1d(victims, self._chunk_mates(int(other[0])))
            self._evictions_left -= len(victims)
            self.counters.evicted_blocks += len(victims)
            self._take_down(victims)
            offsets = np.concatenate([offsets, allocator.allocate(slot_bytes, count - len(offsets))])
        return offsets

    def _chunk_mates(self, handle: int) -> I64:
        placed = np.flatnonzero(self._place >= 0)
        chunk = self._place[handle] // self._allocator.chunk_bytes
        return placed[self._allocator.chunk_of(self._place[placed]) == chunk]

    def _take_down(self, handles: I64) -> None:
        """The board first: from then on no reader believes what it copies from there."""
        self._board.clear(handles)
        self._policy.remove(handles)
        self._allocator.free(self._place[handles])
        self._place[handles] = -1
        self._uses[handles] = 0

    def _give_up(self, error: DeviceError) -> None:
        """Nobody reads from the segment any more. What may still be copied into it touches nothing else."""
        log.warning("the device segment is given up, blocks are served from DRAM: %s", error)
        self.up = False
        self.counters.failures += 1
        self._take_down(np.flatnonzero(self._place >= 0))
        for climb in self._climbs:
            self._unhold(self._end(climb).handles)
        self._climbs = []

    def _reach(self) -> None:
        known, used = len(self._place), len(self._blocks)
        if used <= known:
            return
        more = max(used - known, known // 2, 1024)
        self._place = np.concatenate([self._place, np.full(more, -1, dtype=np.int64)])
        self._climbing = np.concatenate([self._climbing, np.zeros(more, dtype=np.bool_)])
        self._uses = np.concatenate([self._uses, np.zeros(more, dtype=np.uint8)])
        self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.uint32)])
