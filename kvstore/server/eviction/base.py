"""The port of eviction policies."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


class EvictionPolicy(Protocol):
    """Orders committed blocks by how soon they should go. Blocks are named by handle; all calls take batches.

    A batch lists blocks in prefix order. A policy must offer deeper blocks before the blocks that they depend on when
    all else is equal. O(1) amortised per block. `kvstore.testing.conformance.EvictionConformance` is the suite to
    pass.

    Keys are the low 64 bits of block keys. They outlive handles, so that a policy can know a block that comes again.
    There is no clock: policies count requests.
    """

    def note_request(self, keys: U64) -> None:
        """Somebody asked for this chain just now, hits and misses, in prefix order. Once for each request for reading.

        What is there of it is told by `touch`, or by the touch board.
        """
        ...

    def admit(self, handles: I64, keys: U64, values: F64 | float = 1.0) -> None:
        """These blocks were committed just now.

        Args:
            handles: of the blocks, shape (n,), each once, none in the order.
            keys: theirs, shape (n,).
            values: what computing one of their bytes again would cost, relative to other blocks; shape (n,), or one
            for all.
        """
        ...

    def touch(self, handles: I64) -> None:
        """These blocks were used just now. Those that left the order as candidates are in it again."""
        ...

    def remove(self, handles: I64) -> None:
        """These blocks are gone, deleted or evicted; forget them."""
        ...

    def candidates(self, count: int) -> I64:
        """Up to `count` blocks to evict, the first one first. They leave the order: `restore` or `touch` those kept."""
        ...

    def restore(self, handles: I64) -> None:
        """Put candidates back as the next ones to go, in this order."""
        ...

    def __len__(self) -> int:
        """Blocks in the order."""
        ...
