"""Joint blocks: several writers share one, each with some bytes of every layer. Who has which, how far each of them is,
and who may still be writing.

Tables of fixed width, no Python object per block or part. A part is named by a ref like a block's, with a generation of
its own. Its row lives as long as the reservation of its block, or until the last writer of a block that was dropped
has reported: only then can the slot be another block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.void]

PART_HANDLES = 1 << 31  # in refs, parts have numbers from here on; the handles of blocks are below
PARTS_MAX = 256  # of one block
NEVER_S = float("inf")

_PART = np.dtype(
    [
        ("generation", "u8"),  # 0: the row is free
        ("block", "i8"),  # its handle
        ("owner", "u4"),  # session that writes it; 0 once it has reported or left
        ("done", "?"),  # it was committed
        ("start", "i8"),  # of its bytes within each layer
        ("end", "i8"),
        ("ready", "i8"),  # layers that are written
        ("deadline_s", "f8"),
        ("next", "i8"),  # of the block's parts; -1 at the last
    ]
)
_JOINT = np.dtype(
    [
        ("newest", "i8"),  # of its parts; -1: none
        ("unclaimed", "i8"),  # bytes of each layer that nobody has reserved
        ("arrival_s", "f8"),  # until when somebody must have
    ]
)


class PartTable:
    """See the module. Handles are those of blocks, rows are those of parts; what is changed in a call is distinct."""

    def __init__(self) -> None:
        self._parts: NDArray[Any] = np.zeros(0, dtype=_PART)
        self._joint: NDArray[Any] = np.zeros(0, dtype=_JOINT)  # by handle
        self._free: list[int] = []
        self._fresh = 0  # rows below this number have been used at least once
        self._due_s = NEVER_S  # nothing runs out before

    def __len__(self) -> int:
        return self._fresh - len(self._free)

    def begin(self, handles: I64, layer_bytes: int, arrival_s: float) -> None:
        """These blocks have been reserved, to be written by parts; all of them have to be claimed by that time."""
        self._joint = _reach(self._joint, int(handles.max(initial=-1)) + 1)
        self._joint["newest"][handles] = -1
        self._joint["unclaimed"][handles] = layer_bytes
        self._joint["arrival_s"][handles] = arrival_s
        self._due_s = min(self._due_s, arrival_s)

    def are_unclaimed(self, handles: I64, start: int, end: int) -> Mask:
        """Whether nobody has any of these bytes of a block's layers. Shape (n,)."""
        free = np.ones(len(handles), dtype=np.bool_)
        for places, rows in self._parts_of(handles):
            free[places] &= (self._parts["end"][rows] <= start) | (end <= self._parts["start"][rows])
        return free

    def claim(
        self, handles: I64, owner: int, start: int, end: int, generations: NDArray[np.uint64], deadline_s: float
    ) -> I64:
        """A session writes these unclaimed bytes of each layer. What to name the parts in refs, shape (n,)."""
        rows = self._take(len(handles))
        parts, joint = self._parts, self._joint
        parts["generation"][rows], parts["block"][rows], parts["owner"][rows] = generations, handles, owner
        parts["done"][rows], parts["ready"][rows] = False, 0
        parts["start"][rows], parts["end"][rows], parts["deadline_s"][rows] = start, end, deadline_s
        parts["next"][rows] = joint["newest"][handles]
        joint["newest"][handles] = rows
        joint["unclaimed"][handles] -= end - start
        joint["arrival_s"][handles[joint["unclaimed"][handles] == 0]] = NEVER_S
        self._due_s = min(self._due_s, deadline_s)
        return rows + PART_HANDLES

    def named(self, refs: Rows, owner: int) -> tuple[I64, I64]:
        """Which refs name a part that this session is writing, each once: their places, and their rows."""
        rows = refs["handle"].astype(np.int64) - PART_HANDLES
        places = np.flatnonzero((rows >= 0) & (rows < self._fresh))
        parts = self._parts[rows[places]]
        places = places[(parts["generation"] == refs["generation"][places]) & (parts["owner"] == owner)]
        places = places[np.unique(rows[places], return_index=True)[1]]
        return places, rows[places]

    def written_by(self, owner: int) -> I64:
        """Rows of the parts that a session is writing."""
        return np.flatnonzero(self._parts["owner"][: self._fresh] == owner)

    def blocks(self, rows: I64) -> I64:
        """Handles of the blocks of parts, shape (n,)."""
        return self._parts["block"][rows]

    def advance(self, rows: I64, layers_ready: int, deadline_s: float) -> None:
        """Writers have come so far, and have time until then at least."""
        self._parts["ready"][rows] = layers_ready
        self._parts["deadline_s"][rows] = np.maximum(self._parts["deadline_s"][rows], deadline_s)

    def layers_ready(self, rows: I64) -> I64:
        """How far the writers of these parts have come, shape (n,)."""
        return self._parts["ready"][rows]

    def finish(self, rows: I64, layers: I64) -> None:
        """Parts are complete: their writers write there no more."""
        self._parts["done"][rows], self._parts["ready"][rows] = True, layers
        self._parts["owner"][rows], self._parts["deadline_s"][rows] = 0, NEVER_S

    def leave(self, rows: I64) -> None:
        """Writers have given their parts up, and write there no more."""
        self._parts["owner"][rows] = 0

    def watermarks(self, handles: I64) -> I64:
        """Layers of each block that all its parts have written; none before every byte is claimed. Shape (n,)."""
        ready = np.full(len(handles), np.iinfo(np.int64).max)
        for places, rows in self._parts_of(handles):
            ready[places] = np.minimum(ready[places], self._parts["ready"][rows])
        ready[self._joint["unclaimed"][handles] > 0] = 0
        return ready

    def are_complete(self, handles: I64) -> Mask:
        """Whether all of a block is claimed, and all its parts are complete. Shape (n,)."""
        complete = self._joint["unclaimed"][handles] == 0
        for places, rows in self._parts_of(handles):
            complete[places] &= self._parts["done"][rows]
        return complete

    def are_last(self, rows: I64) -> Mask:
        """Whether all of a part's block but the part itself is complete. Shape (n,)."""
        handles = self._parts["block"][rows]
        open_parts = np.zeros(len(handles), dtype=np.int64)
        for places, others in self._parts_of(handles):
            open_parts[places] += ~self._parts["done"][others]
        return (open_parts == 1) & (self._joint["unclaimed"][handles] == 0)

    def are_written(self, handles: I64) -> Mask:
        """Whether somebody may be writing to a block. Shape (n,)."""
        written = np.zeros(len(handles), dtype=np.bool_)
        for places, rows in self._parts_of(handles):
            written[places] |= self._parts["owner"][rows] != 0
        return written

    def due(self, now_s: float) -> I64:
        """Handles of the blocks with a writer whose time is over, or that nobody has come to write all of."""
        if now_s < self._due_s:
            return np.zeros(0, dtype=np.int64)
        rows = np.flatnonzero(self._parts["generation"][: self._fresh])
        handles = self._parts["block"][rows]
        ends_s = np.minimum(self._parts["deadline_s"][rows], self._joint["arrival_s"][handles])
        self._due_s = float(ends_s[ends_s > now_s].min(initial=NEVER_S))
        return np.unique(handles[ends_s <= now_s])

    def drop(self, handles: I64) -> None:
        """Blocks are out of the index: their writers have as much time as they want."""
        self._joint["arrival_s"][handles] = NEVER_S
        for _, rows in self._parts_of(handles):
            self._parts["deadline_s"][rows] = NEVER_S

    def end(self, handles: I64) -> None:
        """Nobody writes to these blocks any more: their parts are history."""
        for _, rows in self._parts_of(handles):
            self._free += rows.tolist()
            self._parts["generation"][rows] = self._parts["owner"][rows] = 0
        self._joint["newest"][handles] = -1

    def _parts_of(self, handles: I64) -> Iterator[tuple[I64, I64]]:
        """One part of each block after the other: places of the blocks that have one more, and its row."""
        places, rows = np.arange(len(handles)), self._joint["newest"][handles]
        while True:
            more = rows >= 0
            places, rows = places[more], rows[more]
            if not len(rows):
                return
            yield places, rows
            rows = self._parts["next"][rows]

    def _take(self, count: int) -> I64:
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        rows = np.array(reused + list(range(self._fresh, self._fresh + fresh)), dtype=np.int64)
        self._fresh += fresh
        self._parts = _reach(self._parts, self._fresh)
        return rows


def _reach(table: NDArray[Any], rows: int) -> NDArray[Any]:
    """The table with at least so many rows."""
    if rows <= len(table):
        return table
    more = max(rows - len(table), len(table) // 2, 1024)
    return np.concatenate([table, np.zeros(more, dtype=table.dtype)])
