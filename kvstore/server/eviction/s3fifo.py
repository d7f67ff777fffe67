"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

```
admit ──► small (a tenth) ──used twice──► main ──► evicted
  │          └──not──► evicted             ▲ │
  │                       │                └─┘ used: once more round, for each use (three at most)
  └──── ghost (keys) ◄────┘
         └── comes again ──► main
```

The blocks of a put come in together, deepest first, so that the deepest are evicted first. All steps are vectorised
over the batch; an entry of a queue counts only while its stamp is the block's newest. Each look at a block takes off a
use, moves it to the other queue or evicts it, so the work is O(1) amortised.

A reader through shared memory leaves its tick on the touch board. It is seen when the block comes to the head of its
queue, and counts as one use, however often the block was read.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.history import KeyHistory

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

SMALL_SHARE: Final = 0.1  # of all blocks, and USES_MAX and USES_TO_STAY: the paper's
USES_MAX: Final = 3
USES_TO_STAY: Final = 2
GHOST_ROWS_MIN: Final = 1 << 12
GHOST_ROWS_MAX: Final = 1 << 24
_LOOK_MIN: Final = 64  # blocks looked at together: fewer would cost as much
_NOWHERE, _SMALL, _MAIN, _FRONT = range(4)


class _Entry(NamedTuple):
    handles: I64
    stamps: I64


class S3FifoPolicy:
    """See the module.

    Args:
        touch_board: uint32 per handle, written by readers in other processes.
    """

    def __init__(self, touch_board: NDArray[np.uint32]) -> None:
        self._board = touch_board
        self._queues: list[deque[_Entry]] = [deque() for _ in range(4)]
        self._live = [0, 0, 0, 0]  # blocks by queue
        self._logged = 0
        self._next_stamp = 1
        self._queue: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)  # that each handle is in
        self._stamp: I64 = np.zeros(0, dtype=np.int64)
        self._uses: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._seen: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)  # the board's word that is counted already
        self._key: U64 = np.zeros(0, dtype=np.uint64)
        self._ghosts = KeyHistory(GHOST_ROWS_MIN, GHOST_ROWS_MAX)
        self._evicted = 1  # from the small queue, ever: the ghosts' time

    def __len__(self) -> int:
        return sum(self._live[_SMALL:])

    def note_request(self, keys: U64) -> None:
        """Uses are counted by block here; `touch` tells them."""

    def admit(self, handles: I64, keys: U64, values: F64 | float = 1.0) -> None:
        del values
        self._reach(int(handles.max(initial=-1)) + 1)
        self._key[handles] = keys
        back = self._take_ghosts(keys)
        self._push(_MAIN, handles[back][::-1])
        self._push(_SMALL, handles[~back][::-1])
        if self._logged > 4 * len(self) + 1024:
            self._compact()

    def touch(self, handles: I64) -> None:
        self._reach(int(handles.max(initial=-1)) + 1)
        there = (self._queue[handles] == _SMALL) | (self._queue[handles] == _MAIN)
        known = handles[there]
        self._uses[known] = np.minimum(self._uses[known] + 1, USES_MAX)
        self._seen[known] = self._board[known]
        self._push(_MAIN, handles[~there][::-1])

    def remove(self, handles: I64) -> None:
        self._reach(int(handles.max(initial=-1)) + 1)
        self._leave(handles[self._queue[handles] != _NOWHERE])

    def candidates(self, count: int) -> I64:
        taken: list[I64] = []
        wanted = count
        looks_left = (USES_MAX + 2) * len(self)  # so that readers touching all blocks all the time can't keep us here
        while wanted > 0 and len(self):
            if self._live[_FRONT]:
                chosen = self._look(_FRONT, wanted)
            else:
                small = self._live[_SMALL] > SMALL_SHARE * len(self) or not self._live[_MAIN]
                queue = _SMALL if small else _MAIN
                chosen = self._look(queue, max(wanted, _LOOK_MIN))
                looks_left -= len(chosen)
                if looks_left > 0:
                    chosen = self._from_small(chosen) if small else self._from_main(chosen)
                self._put_back(queue, chosen[wanted:])
                chosen = chosen[:wanted]
                if small:
                    self._leave_ghosts(self._key[chosen])
            self._leave(chosen)
            taken.append(chosen)
            wanted -= len(chosen)
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def restore(self, handles: I64) -> None:
        if len(handles):
            self._push(_FRONT, handles, first=True)

    def _from_small(self, handles: I64) -> I64:
        """Those that go, of the oldest ones of the small queue; the others move to the main queue."""
        self._count_reads(handles)
        stays = self._uses[handles] >= USES_TO_STAY
        self._push(_MAIN, handles[stays])
        return handles[~stays]

    def _from_main(self, handles: I64) -> I64:
        """The same for the main queue; who was used goes round again."""
        self._count_reads(handles)
        stays = self._uses[handles] > 0
        self._push(_MAIN, handles[stays], uses=self._uses[handles[stays]] - 1)
        return handles[~stays]

    def _count_reads(self, handles: I64) -> None:
        """Uses that only the touch board knows of."""
        read = handles[self._board[handles] != self._seen[handles]]
        self._seen[read] = self._board[read]
        self._uses[read] = np.minimum(self._uses[read] + 1, USES_MAX)

    def _look(self, queue: int, limit: int) -> I64:
        """Take up to `limit` entries off the head of a queue; the blocks that they stand for."""
        entry = self._queues[queue].popleft()
        if len(entry.handles) > limit:
            self._queues[queue].appendleft(_Entry(entry.handles[limit:], entry.stamps[limit:]))
        self._logged -= min(limit, len(entry.handles))
        handles, stamps = entry.handles[:limit], entry.stamps[:limit]
        return handles[self._stamp[handles] == stamps]

    def _put_back(self, queue: int, handles: I64) -> None:
        """The opposite of `_look`."""
        if len(handles):
            self._queues[queue].appendleft(_Entry(handles, self._stamp[handles]))
            self._logged += len(handles)

    def _push(self, queue: int, handles: I64, *, uses: int | NDArray[np.uint8] = 0, first: bool = False) -> None:
        """Move blocks to a queue, the first one next to its head."""
        if not len(handles):
            return
        self._leave(handles[self._queue[handles] != _NOWHERE])
        stamps = np.arange(self._next_stamp, self._next_stamp + len(handles), dtype=np.int64)
        self._next_stamp += len(handles)
        self._stamp[handles], self._queue[handles], self._uses[handles] = stamps, queue, uses
        self._seen[handles] = self._board[handles]
        entry = _Entry(handles.copy(), stamps)
        if first:
            self._queues[queue].appendleft(entry)
        else:
            self._queues[queue].append(entry)
        self._logged += len(handles)
        self._live[queue] += len(handles)

    def _leave(self, handles: I64) -> None:
        for queue, count in enumerate(np.bincount(self._queue[handles], minlength=4).tolist()):
            self._live[queue] -= count
        self._queue[handles], self._stamp[handles] = _NOWHERE, 0

    def _leave_ghosts(self, keys: U64) -> None:
        """Remember what left the small queue."""
        self._evicted += len(keys)
        rows = self._ghosts.find(keys)
        self._ghosts.times[rows[rows >= 0]] = self._evicted
        self._ghosts.add(keys[rows < 0], self._evicted)

    def _take_ghosts(self, keys: U64) -> NDArray[np.bool_]:
        """Which of the keys left the small queue not long ago; they are ghosts no more."""
        rows = self._ghosts.find(keys)
        oldest = self._evicted - int((1 - SMALL_SHARE) * len(self))
        recent = (rows >= 0) & (self._ghosts.times[rows] > oldest)
        self._ghosts.times[rows[recent]] = 0
        return recent

    def _compact(self) -> None:
        """List again only what is there."""
        self._logged = 0
        for queue in (_SMALL, _MAIN, _FRONT):
            entries = self._queues[queue]
            if not entries:
                continue
            handles = np.concatenate([entry.handles for entry in entries])
            stamps = np.concatenate([entry.stamps for entry in entries])
            current = self._stamp[handles] == stamps
            self._queues[queue] = deque([_Entry(handles[current], stamps[current])])
            self._logged += int(np.count_nonzero(current))

    def _reach(self, handles: int) -> None:
        known = len(self._stamp)
        if handles > known:
            more = max(handles - known, known, 1024)
            for name in ("_queue", "_stamp", "_uses", "_seen", "_key"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
            self._ghosts.reach(2 * len(self._stamp))
