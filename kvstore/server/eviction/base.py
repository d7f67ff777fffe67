"""The port of eviction policies."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


class EvictionPolicy(Protocol):
    """Orders committed blocks by how soon they should go. Blocks are named by handle; all calls take batches.

    A batch lists blocks in prefix order. A policy must offer deeper blocks before the blocks that they depend on when
    all else is equal. O(1) amortised per block. `kvstore.testing.conformance.EvictionConformance` is the suite to
    pass.
    """

    def admit(self, handles: I64) -> None:
        """These blocks were committed just now."""
        ...

    def touch(self, handles: I64) -> None:
        """These blocks were used just now."""
        ...

    def remove(self, handles: I64) -> None:
        """These blocks are gone; forget them."""
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
