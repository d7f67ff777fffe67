"""The block goes first whose room is worth least: by chance and time of reuse, as learned from the traffic, and cost.

What a block is worth is its forecast (`forecast.py`: expected hits for each request that it stays) times the value of
its bytes. Blocks that one request used last and that are alike form a run (`runs.py`), so that there are far fewer runs
than blocks. For an eviction up to SAMPLE runs, evenly spread over all, are ranked, and the worst ones of these lose
their deepest blocks: the cost does not depend on how many blocks there are. Of equal ones the least recently used goes,
and the youngest of all go only when there is nothing else.

Clients that read through shared memory leave a trace on the touch board (one word per block, the tick of the last use).
A block that comes up for eviction with a newer trace than it was listed with is listed anew, as used just now.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.forecast import Forecast
from kvstore.server.eviction.runs import Runs

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

SAMPLE: Final = 512
SPARED_SHARE: Final = 0.05  # of the blocks, the youngest, go last: who put or found them is about to read them
WORST_SHARE: Final = 8  # one part in so many of a sample may be evicted before the next one is drawn


class ReusePolicy:
    """See the module.

    Args:
        touch_board: uint32 per handle, written by readers in other processes.
    """

    def __init__(self, touch_board: NDArray[np.uint32]) -> None:
        self._board = touch_board
        self._seen: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)  # the board's word when the block was listed
        self._key: U64 = np.zeros(0, dtype=np.uint64)
        self._value: F32 = np.zeros(0, dtype=np.float32)
        self._forecast = Forecast()
        self._runs = Runs()
        self._offset = 0  # of the next sample
        self._announced = False  # the request that the next touch belongs to

    def __len__(self) -> int:
        return self._runs.blocks

    def note_request(self, keys: U64) -> None:
        self._forecast.note(keys)
        self._announced = True

    def admit(self, handles: I64, keys: U64, values: F64 | float = 1.0) -> None:
        if not len(handles):
            return
        self._reach(int(handles.max()) + 1)
        self._key[handles], self._value[handles] = keys, values
        kinds = self._forecast.kinds(keys)
        unasked = kinds < 0
        if unasked.any():  # stored without having been looked for: that is their first use
            self._forecast.note(keys[unasked])
            kinds = self._forecast.kinds(keys)
        self._announced = False
        self._list(handles, kinds)

    def touch(self, handles: I64) -> None:
        if len(handles):
            self._reach(int(handles.max()) + 1)
            if not self._announced:  # a use without a request for reading: time passes all the same
                self._forecast.now += 1
            self._announced = False
            self._list(handles, self._forecast.kinds(self._key[handles]))

    def remove(self, handles: I64) -> None:
        self._runs.remove(handles)

    def candidates(self, count: int) -> I64:
        taken = [self._runs.take_first(count)]
        wanted = count - len(taken[0])
        # Each block gets one second chance a call, so that readers touching all blocks all the time can't keep us here.
        second_chances = len(self)
        while wanted > 0 and len(self):
            chosen = self._runs.take(self._worst_first(), wanted)
            read = self._board[chosen] != self._seen[chosen]
            if second_chances > 0 and read.any():
                second_chances -= int(np.count_nonzero(read))
                self.touch(chosen[read][::-1])
                chosen = chosen[~read]
            taken.append(chosen)
            wanted -= len(chosen)
        return np.concatenate(taken)

    def restore(self, handles: I64) -> None:
        self._runs.put_first(handles)

    def _list(self, handles: I64, kinds: I64) -> None:
        """Enter blocks, in prefix order, as used just now."""
        self._seen[handles] = self._board[handles]
        # Of a block that the history had no room for nothing is known; kind 0 is that of new blocks.
        self._runs.append(handles, np.maximum(kinds, 0), self._value[handles], self._forecast.now)

    def _worst_first(self) -> I64:
        """Rows of runs to evict from, the first one first."""
        runs = self._runs
        rows = np.arange(min(runs.count, SAMPLE))
        if runs.count > SAMPLE:
            self._offset = (self._offset + 1) % runs.count
            rows = (rows * (runs.count // SAMPLE) + self._offset) % runs.count
        times = runs.times[rows]
        worth = self._forecast.ranks(runs.kinds[rows], times) * runs.values[rows]
        # Of equal ones the oldest; what was entered last by one request is the deepest part of its chain.
        lengths = runs.ends[rows] - runs.starts[rows]
        young_first = np.argsort(-times, kind="stable")
        spared = np.zeros(len(rows), dtype=np.bool_)
        spared[young_first] = np.cumsum(lengths[young_first]) <= SPARED_SHARE * lengths.sum()
        order = np.lexsort((-runs.starts[rows], times, worth, spared))
        return rows[order] if runs.count <= SAMPLE else rows[order[: SAMPLE // WORST_SHARE]]

    def _reach(self, handles: int) -> None:
        known = len(self._key)
        if handles > known:
            more = max(handles - known, known // 2, 1024)
            self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.uint32)])
            self._key = np.concatenate([self._key, np.zeros(more, dtype=np.uint64)])
            self._value = np.concatenate([self._value, np.ones(more, dtype=np.float32)])
            self._forecast.reach(len(self._key))
