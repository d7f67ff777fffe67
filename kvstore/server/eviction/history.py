"""Keys that were seen lately, in a table of bounded size that forgets, in each bucket, the one seen longest ago.

```
row = bucket * WAYS + way        bucket = low bits of the key, which is a uniform hash
```

Every step is a few numpy operations on a whole batch. A row costs 20 bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

WAYS: Final = 8
_WAY_NUMBERS: Final = np.arange(WAYS, dtype=np.int64)


class Added(NamedTuple):
    """What `KeyHistory.add` did."""

    rows: I64  # of the keys, shape (n,); -1 where there was no place
    forgotten_times: I64  # of the keys that were forgotten for them, shape (m,)
    forgotten_marks: NDArray[np.uint32]  # of the same, shape (m,)


class KeyHistory:
    """See the module.

    Args:
        rows_min, rows_max: of the table, at first and at most; see `reach`.
    """

    def __init__(self, rows_min: int, rows_max: int) -> None:
        self._rows_max = rows_max
        self.rows = 1 << (rows_min - 1).bit_length()
        self.keys: U64 = np.zeros(self.rows, dtype=np.uint64)
        self.times: I64 = np.zeros(self.rows, dtype=np.int64)  # when each was seen last; 0 = an empty row
        self.marks: NDArray[np.uint32] = np.zeros(self.rows, dtype=np.uint32)  # the owner's, of each row

    def find(self, keys: U64) -> I64:
        """The row of each key; -1 where it is not known. Shape (n,)."""
        rows = self._bucket_rows(keys)
        same = (self.keys[rows] == keys[:, None]) & (self.times[rows] > 0)
        found = rows[:, 0] + same.argmax(axis=1)
        found[~same.any(axis=1)] = -1
        return found

    def add(self, keys: U64, time: int) -> Added:
        """Take in keys that are not known, each once, with marks of 0.

        Args:
            keys: shape (n,).
            time: now; never less than before.
        """
        rows: I64 = np.full(len(keys), -1, dtype=np.int64)
        times: list[I64] = []
        marks: list[NDArray[np.uint32]] = []
        waiting = np.arange(len(keys))
        for _ in range(WAYS):  # new keys that meet in a bucket take turns
            candidates = self._bucket_rows(keys[waiting])
            oldest = candidates[:, 0] + self.times[candidates].argmin(axis=1)
            # What was used just now stays, and of several that chose the same row all but one choose again.
            chosen, first = np.unique(oldest, return_index=True)
            older = self.times[chosen] < time
            chosen, winners = chosen[older], waiting[first[older]]
            times.append(self.times[chosen])
            marks.append(self.marks[chosen])
            self.keys[chosen], self.times[chosen], self.marks[chosen] = keys[winners], time, 0
            rows[winners] = chosen
            waiting = waiting[rows[waiting] < 0]
            if not len(waiting):
                break
        forgotten = np.concatenate(times)
        return Added(rows, forgotten[forgotten > 0], np.concatenate(marks)[forgotten > 0])

    def reach(self, rows: int) -> None:
        """Grow to that many rows, or as many as are allowed: each bucket becomes two, so no key loses its way."""
        while self.rows < min(rows, self._rows_max):
            known = np.flatnonzero(self.times)
            self.rows *= 2
            buckets = self._bucket_rows(self.keys[known])[:, 0]
            places = buckets + known % WAYS
            for name in ("keys", "times", "marks"):
                column = getattr(self, name)
                grown = np.zeros(self.rows, dtype=column.dtype)
                grown[places] = column[known]
                setattr(self, name, grown)

    def _bucket_rows(self, keys: U64) -> I64:
        first = (keys & np.uint64(self.rows // WAYS - 1)).astype(np.int64) * WAYS
        return first[:, None] + _WAY_NUMBERS
