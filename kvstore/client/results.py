"""What the calls of the SDK answer: frozen values over arrays, one row per key, in the order of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client.planning import FetchPlan
from kvstore.core.states import BlockState, PutStatus

Mask = NDArray[np.bool_]


def leading(mask: Mask) -> int:
    """How many rows at the start are true."""
    misses = np.flatnonzero(~mask)
    return int(misses[0]) if len(misses) else len(mask)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer to `lookup`."""

    states: NDArray[np.uint8]
    """`BlockState` of each key, shape (n,)."""

    layers_ready: NDArray[np.uint16]
    """Layers of each block that can be read, shape (n,); all of them once it is committed."""

    hit_blocks: int
    """Committed blocks before the first one that is not: the longest usable prefix."""

    hit_tokens: int
    """The same in tokens."""

    tiers: NDArray[np.uint8]
    """`Tier` of each committed block, shape (n,)."""

    plan: FetchPlan | None = None
    """How much of the prefix to fetch, if that was asked for."""

    @property
    def hit(self) -> Mask:
        """Which blocks are committed, shape (n,)."""
        return self.states == BlockState.COMMITTED

    @property
    def started_blocks(self) -> int:
        """Blocks before the first one that is absent, those that are still being written included: what a
        `layer_stream` may follow.
        """
        return leading(self.states != BlockState.ABSENT)


@dataclass(frozen=True, slots=True)
class PutResult:
    """Answer to `put`."""

    statuses: NDArray[np.uint8]
    """`PutStatus` of each key, shape (n,)."""

    bytes: int
    """Payload bytes that this call wrote."""

    @property
    def stored(self) -> int:
        """Blocks that this call wrote."""
        return int(np.count_nonzero(self.statuses == PutStatus.STORED))

    @property
    def present(self) -> int:
        """Blocks that are in the store now: written by this call or there before."""
        return int(np.count_nonzero(self.statuses <= PutStatus.EXISTS))


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to `get_into`."""

    ok: Mask
    """Which blocks were filled, shape (n,). The target of a block that was not is undefined."""

    bytes: int
    """Payload bytes copied."""

    @property
    def hit_blocks(self) -> int:
        """Filled blocks before the first one that was not."""
        return leading(self.ok)


@dataclass(frozen=True, slots=True)
class GetResult(Fetched):
    """Answer to `get`."""

    blocks: list[NDArray[np.uint8] | None]
    """Payload of each block as uint8 of shape (block bytes,), or None for a miss. Yours to keep and to change."""
