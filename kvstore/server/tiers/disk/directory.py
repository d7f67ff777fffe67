"""What the tier knows in memory of each block on disk: a row of fixed width by handle, and a hash table of handles.

About 55 bytes a block and no Python object; checksums stay in the catalog. All steps are vectorised over the batch.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KEY_DTYPE

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Keys = NDArray[np.void]

UNIT_BYTES = 4096  # locations are kept in these units: 32 bits reach 16 TiB
_EMPTY, _GONE = -1, -2
_TABLE_MIN = 1024
_ROWS_MIN = 1024


class Life(IntEnum):
    """Where the block of a handle stands. Only WRITING, COMMITTING and DURABLE blocks are found by key."""

    FREE = 0
    WRITING = 1  # its payload is on the way to the disk
    COMMITTING = 2  # its payload is on the disk, its catalog row on the way
    DURABLE = 3
    DYING = 4  # no longer found; its slot is given back when nothing holds it any more


class Directory:
    """Rows by handle; handles are dense and used again."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._fresh = 0
        self._keys: U64 = np.zeros((_ROWS_MIN, 3), np.uint64)
        self._location: NDArray[np.uint32] = np.zeros(_ROWS_MIN, np.uint32)
        self.size: NDArray[np.uint32] = np.zeros(_ROWS_MIN, np.uint32)
        self.namespace: NDArray[np.uint16] = np.zeros(_ROWS_MIN, np.uint16)
        self.life: NDArray[np.uint8] = np.zeros(_ROWS_MIN, np.uint8)
        self.holds: NDArray[np.uint16] = np.zeros(_ROWS_MIN, np.uint16)  # reads, a write, commits in flight
        self.sequence: U64 = np.zeros(_ROWS_MIN, np.uint64)  # order of storing; names the catalog row
        self._table: NDArray[np.int32] = np.full(_TABLE_MIN, _EMPTY, np.int32)
        self._taken = 0  # places of the table that aren't empty
        self._found = 0  # keys in the table

    def __len__(self) -> int:
        """Blocks that are found by key."""
        return self._found

    def keys(self, handles: I64) -> Keys:
        """Keys of handles, KEY_DTYPE, shape (n,)."""
        return self._keys[handles].view(KEY_DTYPE).reshape(-1)

    def locations(self, handles: I64) -> I64:
        """Where blocks lie, bytes from the start of all slabs."""
        return self._location[handles].astype(np.int64) * UNIT_BYTES

    def select(self, *lives: Life) -> I64:
        """All handles in one of these states."""
        return np.flatnonzero(np.isin(self.life[: self._fresh], lives))

    def find(self, keys: Keys) -> I64:
        """The handle of each key, or -1. Shape (n,)."""
        wanted = keys.view(np.uint64).reshape(-1, 3)
        handles = np.full(len(wanted), -1, dtype=np.int64)
        active = np.arange(len(wanted))
        places = self._homes(wanted)
        while len(active):
            there = self._table[places]
            match = np.flatnonzero(there >= 0)
            match = match[(self._keys[there[match]] == wanted[active[match]]).all(axis=1)]
            handles[active[match]] = there[match]
            going_on = there != _EMPTY
            going_on[match] = False
            active = active[going_on]
            places = (places[going_on] + 1) & (len(self._table) - 1)
        return handles

    def add(self, keys: Keys, locations: I64, sizes: int | I64, namespaces: int | I64, sequences: U64) -> I64:
        """New WRITING rows for distinct keys that aren't here; their handles."""
        count = len(keys)
        handles = self._take(count)
        self._keys[handles] = keys.view(np.uint64).reshape(-1, 3)
        self._location[handles] = locations // UNIT_BYTES
        self.size[handles] = sizes
        self.namespace[handles] = namespaces
        self.life[handles] = Life.WRITING
        self.holds[handles] = 0
        self.sequence[handles] = sequences
        if 10 * (self._taken + count) > 7 * len(self._table):
            self._rebuild(self._found + count)
        self._link(handles)
        return handles

    def unlink(self, handles: I64) -> None:
        """Blocks that are found no longer. Their rows stay until `give_back`."""
        places = self._homes(self._keys[handles])
        active = np.arange(len(handles))
        while len(active):
            at = places[active]
            here = self._table[at] == handles[active]
            self._table[at[here]] = _GONE
            active = active[~here]
            places[active] = (places[active] + 1) & (len(self._table) - 1)
        self._found -= len(handles)

    def give_back(self, handles: I64) -> None:
        """Free unlinked handles."""
        self.life[handles] = Life.FREE
        self._free.extend(handles.tolist())

    def _homes(self, keys: U64) -> I64:
        return (keys[:, 1] & np.uint64(len(self._table) - 1)).astype(np.int64)  # keys are uniform hashes

    def _link(self, handles: I64) -> None:
        places = self._homes(self._keys[handles])
        active = np.arange(len(handles))
        while len(active):
            at = places[active]
            free = np.flatnonzero(self._table[at] < 0)
            _, first = np.unique(at[free], return_index=True)
            won = free[first]
            self._taken += int(np.count_nonzero(self._table[at[won]] == _EMPTY))
            self._table[at[won]] = handles[active[won]]
            lost = np.ones(len(active), dtype=np.bool_)
            lost[won] = False
            active = active[lost]
            places[active] = (places[active] + 1) & (len(self._table) - 1)
        self._found += len(handles)

    def _rebuild(self, keys: int) -> None:
        """Room for that many keys with half of the table to spare, and no trace of removed ones."""
        linked = np.sort(self._table[self._table >= 0]).astype(np.int64)
        size = _TABLE_MIN
        while size < 2 * keys:
            size *= 2
        self._table = np.full(size, _EMPTY, np.int32)
        self._taken = self._found = 0
        self._link(linked)

    def _take(self, count: int) -> I64:
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        handles = np.array(reused + list(range(self._fresh, self._fresh + fresh)), dtype=np.int64)
        self._fresh += fresh
        known = len(self.life)
        if self._fresh > known:
            more = max(self._fresh - known, known // 4)
            for name in ("_keys", "_location", "size", "namespace", "life", "holds", "sequence"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
        return handles
