"""The device board: which blocks of the pool also lie in the device's segment, and where. Shared memory beside the
index.

One row per handle, one writer (the shard), readers in any process:

```
placement    uint64   0 = not in the segment; else a number that is given once, never again
generation   uint64   of the block that lies there
offset       uint64   bytes from the start of the segment
```

It works like the index (see `layout`), one level up. A row says nothing new about a key: a reader has found handle and
generation in the index, and the row says whether the same generation lies in the segment as well. The writer sets
`placement` last, and takes it away before it changes anything else, or lets anything else be written into the place.
So who reads `placement` before and after a copy, and finds it the same, has copied that block and nothing else. That
the block came back to the same place in between would not be seen by its generation, which it keeps; its placement is
another one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PLACEMENT: Final = 0
GENERATION: Final = 1
OFFSET: Final = 2
ROW_BYTES: Final = 24

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class Placed(NamedTuple):
    """What the board says of n blocks; rows of blocks that are not in the segment have placement 0."""

    placements: U64
    offsets: I64


class DeviceBoard:
    """The board in this process's memory.

    Args:
        memory: uint8, `ROW_BYTES` for each handle; readers map it read-only.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._rows: U64 = memory[: len(memory) // ROW_BYTES * ROW_BYTES].view(np.uint64).reshape(-1, 3)
        self._next_placement = 1

    def place(self, handles: I64, generations: U64, offsets: I64) -> None:
        """These blocks lie in the segment now. Their bytes must be there already."""
        rows = self._rows
        rows[handles, PLACEMENT] = 0
        rows[handles, GENERATION] = generations
        rows[handles, OFFSET] = offsets
        first, self._next_placement = self._next_placement, self._next_placement + len(handles)
        rows[handles, PLACEMENT] = np.arange(first, self._next_placement, dtype=np.uint64)

    def clear(self, handles: I64) -> None:
        """They don't any more. When this returns no reader accepts what it copies from their places."""
        self._rows[handles, PLACEMENT] = 0

    def find(self, handles: I64, generations: U64) -> Placed:
        """Where blocks that the index has lie in the segment."""
        placements = self._rows[handles, PLACEMENT]
        same = self._rows[handles, GENERATION] == generations
        offsets = self._rows[handles, OFFSET].astype(np.int64)
        # A row that changed while it was read is none.
        return Placed(np.where(same & self.stand(handles, placements), placements, np.uint64(0)), offsets)

    def stand(self, handles: I64, placements: U64) -> NDArray[np.bool_]:
        """Whether they still lie there. Ask after copying: True means the bytes copied were theirs."""
        return (placements != 0) & (self._rows[handles, PLACEMENT] == placements)
