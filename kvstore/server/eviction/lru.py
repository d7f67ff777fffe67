"""Least recently used, for readers that don't call the server.

Order is kept as a log of (block, stamp) batches: using a block appends it again, and an entry counts only while its
stamp is the block's newest. All steps are vectorised over the batch, and each log entry is appended and taken off
once.

Clients that read through shared memory leave a trace on the touch board (one word per block, the tick of the last use).
A block that comes up for eviction with a newer trace than it was logged with goes to the back instead.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


class _Entry(NamedTuple):
    handles: I64
    stamps: I64


class LruPolicy:
    """See the module.

    Args:
        touch_board: uint32 per handle, written by readers in other processes.
    """

    def __init__(self, touch_board: NDArray[np.uint32]) -> None:
        self._board = touch_board
        self._stamp: I64 = np.zeros(0, dtype=np.int64)  # newest stamp of each handle; 0 = not in the order
        self._seen: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)  # the board's word when the block was logged
        self._log: deque[_Entry] = deque()
        self._logged = 0
        self._next_stamp = 1
        self._first_stamp = 0  # stamps of restored blocks count down from here
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def note_request(self, keys: U64) -> None:
        """Recency is all that counts here, and `touch` tells it."""

    def admit(self, handles: I64, keys: U64, values: F64 | float = 1.0) -> None:
        del keys, values
        self.touch(handles)

    def touch(self, handles: I64) -> None:
        self._log_as_newest(handles)
        if self._logged > 4 * self._live + 1024:
            self._compact()

    def remove(self, handles: I64) -> None:
        self._reach(int(handles.max(initial=-1)) + 1)
        self._live -= int(np.count_nonzero(self._stamp[handles]))
        self._stamp[handles] = 0

    def candidates(self, count: int) -> I64:
        taken: list[I64] = []
        wanted = count
        # Each block gets one second chance a call, so that readers touching all blocks all the time can't keep us here.
        second_chances = self._live
        while wanted > 0 and self._log:
            entry = self._log.popleft()
            self._logged -= len(entry.handles)
            current = self._stamp[entry.handles] == entry.stamps
            handles, stamps = entry.handles[current], entry.stamps[current]
            used_since = self._board[handles] != self._seen[handles]
            if second_chances > 0 and used_since.any():
                second_chances -= int(np.count_nonzero(used_since))
                # No compaction here: it would list again what this call has taken already.
                self._log_as_newest(handles[used_since][::-1])
                handles, stamps = handles[~used_since], stamps[~used_since]
            if len(handles) > wanted:
                self._log.appendleft(_Entry(handles[wanted:], stamps[wanted:]))
                self._logged += len(handles) - wanted
                handles = handles[:wanted]
            taken.append(handles)
            wanted -= len(handles)
        chosen = np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)
        self.remove(chosen)
        return chosen

    def restore(self, handles: I64) -> None:
        if not len(handles):
            return
        self._first_stamp -= len(handles)
        stamps = np.arange(self._first_stamp, self._first_stamp + len(handles), dtype=np.int64)
        self._stamp[handles] = stamps
        self._log.appendleft(_Entry(handles, stamps))
        self._logged += len(handles)
        self._live += len(handles)

    def _log_as_newest(self, handles: I64) -> None:
        self._reach(int(handles.max(initial=-1)) + 1)
        deepest_first = handles[::-1].copy()
        self._live += int(np.count_nonzero(self._stamp[handles] == 0))
        stamps = np.arange(self._next_stamp, self._next_stamp + len(handles), dtype=np.int64)
        self._next_stamp += len(handles)
        self._stamp[deepest_first] = stamps
        self._seen[deepest_first] = self._board[deepest_first]
        self._log.append(_Entry(deepest_first, stamps))
        self._logged += len(handles)

    def _compact(self) -> None:
        handles = np.flatnonzero(self._stamp)
        order = np.argsort(self._stamp[handles], kind="stable")
        handles = handles[order]
        self._log = deque([_Entry(handles, self._stamp[handles])])
        self._logged = len(handles)

    def _reach(self, handles: int) -> None:
        known = len(self._stamp)
        if handles > known:
            more = max(handles - known, known // 2, 1024)
            self._stamp = np.concatenate([self._stamp, np.zeros(more, dtype=np.int64)])
            self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.uint32)])
