"""Blocks in runs: those that one request used last and that are alike. A run is one row of a table.

```
log      | handles, each run's side by side, in prefix order | ... |
runs       [start, end)  time  kind  value                               rows 0 .. n-1, in no order
place    of each handle: where in the log it stands; a log entry that its handle does not point to is a leftover
```

Using a block again moves it into a new run. Every step is vectorised over its batch; each log entry is written and
taken off once, and the log is compacted when half of it is leftovers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

_AWAY: Final = -1
_FIRST: Final = -2  # put back in front of all runs
_LOG_MIN: Final = 1024
_COLUMNS: Final = ("starts", "ends", "times", "kinds", "values")


class Runs:
    """See the module."""

    def __init__(self) -> None:
        self.starts: I64 = np.zeros(_LOG_MIN, dtype=np.int64)
        self.ends: I64 = np.zeros(_LOG_MIN, dtype=np.int64)
        self.times: I64 = np.zeros(_LOG_MIN, dtype=np.int64)  # when the run was used
        self.kinds: I64 = np.zeros(_LOG_MIN, dtype=np.int64)
        self.values: F32 = np.zeros(_LOG_MIN, dtype=np.float32)
        self.count = 0  # rows
        self.blocks = 0
        self._log: I32 = np.zeros(_LOG_MIN, dtype=np.int32)
        self._logged = 0
        self._place: I32 = np.zeros(0, dtype=np.int32)
        self._front: I64 = np.zeros(0, dtype=np.int64)

    def append(self, handles: I64, kinds: I64, values: F32, time: int) -> None:
        """Move blocks, in prefix order, into new runs: neighbours of one kind and value share one. Shapes (n,)."""
        count = len(handles)
        if not count:
            return
        self.reach(int(handles.max()) + 1)
        self._make_room(count)
        self.blocks += int(np.count_nonzero(self._place[handles] == _AWAY))
        first, end = self._logged, self._logged + count
        self._log[first:end] = handles
        self._place[handles] = np.arange(first, end)
        self._logged = end
        starts = np.flatnonzero((kinds[1:] != kinds[:-1]) | (values[1:] != values[:-1])) + 1
        starts = np.concatenate([[0], starts])
        rows = slice(self.count, self.count + len(starts))
        self.count += len(starts)
        self._reach_rows(self.count)
        self.starts[rows] = starts + first
        self.ends[rows] = np.append(starts[1:], count) + first
        self.times[rows], self.kinds[rows], self.values[rows] = time, kinds[starts], values[starts]

    def put_first(self, handles: I64) -> None:
        """Put blocks that are away in front of all runs, in this order."""
        if not len(handles):
            return
        before = self._front[self._place[self._front] == _FIRST]
        self._place[handles] = _FIRST
        self._front = np.concatenate([handles, before])
        self.blocks += len(handles)

    def remove(self, handles: I64) -> None:
        """Take blocks out, each once; those that aren't here are none of our business."""
        self.reach(int(handles.max(initial=-1)) + 1)
        self.blocks -= int(np.count_nonzero(self._place[handles] != _AWAY))
        self._place[handles] = _AWAY

    def take_first(self, count: int) -> I64:
        """Take up to `count` of the blocks in front."""
        if not len(self._front):
            return self._front
        front = self._front[self._place[self._front] == _FIRST]
        self._front = front[count:]
        self.remove(front[:count])
        return front[:count]

    def take(self, rows: I64, count: int) -> I64:
        """Take up to `count` blocks of these runs, in this order, deepest first. Runs that have none left are gone."""
        lengths = self.ends[rows] - self.starts[rows]
        enough = int(np.searchsorted(np.cumsum(lengths), count)) + 1
        rows, lengths = rows[:enough], lengths[:enough]
        row_of = np.repeat(np.arange(len(rows)), lengths)
        before = np.cumsum(lengths) - lengths
        places = (self.ends[rows] - 1 + before)[row_of] - np.arange(len(row_of))
        handles = self._log[places].astype(np.int64)
        here = self._place[handles] == places
        handles, places, row_of = handles[here], places[here], row_of[here]
        if len(handles) > count:
            left = int(row_of[count])
            self.ends[rows[left]] = places[count] + 1
            rows, handles = rows[:left], handles[:count]
        self._place[handles] = _AWAY
        self.blocks -= len(handles)
        self._drop(rows)
        return handles

    def reach(self, handles: int) -> None:
        """Know handles below this number."""
        known = len(self._place)
        if handles > known:
            more = max(handles - known, known // 2, _LOG_MIN)
            self._place = np.concatenate([self._place, np.full(more, _AWAY, dtype=np.int32)])

    def _drop(self, rows: I64) -> None:
        """Rows at the end take the places of those that go."""
        left = self.count - len(rows)
        moving = np.ones(len(rows), dtype=np.bool_)
        moving[rows[rows >= left] - left] = False
        source = left + np.flatnonzero(moving)
        target = rows[rows < left]
        for name in _COLUMNS:
            column = getattr(self, name)
            column[target] = column[source]
        self.count = left

    def _make_room(self, count: int) -> None:
        if self._logged + count <= len(self._log):
            return
        self._compact()
        size = len(self._log)
        while 2 * (self._logged + count) > size:
            size *= 2
        self._log = np.concatenate([self._log, np.zeros(size - len(self._log), dtype=np.int32)])

    def _compact(self) -> None:
        """Leave out leftovers, and runs that have nothing else."""
        log = self._log[: self._logged]
        here = self._place[log] == np.arange(self._logged)
        before = np.concatenate([[0], np.cumsum(here)])  # entries that stay, before each place
        kept = log[here]
        self._logged = len(kept)
        self._log[: self._logged] = kept
        self._place[kept] = np.arange(self._logged)
        starts, ends = before[self.starts[: self.count]], before[self.ends[: self.count]]
        rows = np.flatnonzero(ends > starts)
        self.starts[: len(rows)], self.ends[: len(rows)] = starts[rows], ends[rows]
        for column in (self.times, self.kinds, self.values):
            column[: len(rows)] = column[rows]
        self.count = len(rows)

    def _reach_rows(self, rows: int) -> None:
        known = len(self.starts)
        if rows > known:
            for name in _COLUMNS:
                column = getattr(self, name)
                more = np.zeros(max(rows - known, known), dtype=column.dtype)
                setattr(self, name, np.concatenate([column, more]))
