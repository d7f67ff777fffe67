"""What the shard knows of namespaces, and of each block beyond the index: a row of fixed width per handle, no Python
object per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.transport.trailer import slot_payload_bytes

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """What the shard needs to know of a namespace. The digest stands for all the rest."""

    digest: bytes
    layers: int
    layer_bytes: int
    label: str  # model and revision, for people
    tenant: str = DEFAULT_TENANT  # whose quota its blocks count on
    value: float = 1.0  # of one of its bytes: what computing it again costs, relative to other namespaces

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return self.layers * self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        """Payload and checksum trailer of one block."""
        return slot_payload_bytes(self.block_bytes, self.layers)


class Life(IntEnum):
    """Where the slot of a handle stands. Blocks are in the index while RESERVED, COMMITTED, ON_DISK or LOADING."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    QUARANTINED = 3  # out of the index, but a live session may still be writing into the slot
    CONDEMNED = 4  # out of the index, but readers still hold the slot
    ON_DISK = 5  # committed, on the SSD only: no slot
    LOADING = 6  # the same, with a slot that the disk worker is filling


class BlockTable:
    """Arrays by handle. Handles are dense: free ones are given out first, so the arrays stay as short as the peak."""

    def __init__(self, handles_max: int) -> None:
        self.handles_max = handles_max
        self._free: list[int] = []
        self._fresh = 0  # handles below this number have been given out at least once
        self.life: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.offset: I64 = np.zeros(0, np.int64)
        self.generation: U64 = np.zeros(0, np.uint64)
        self.size: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.holds: NDArray[np.int32] = np.zeros(0, np.int32)  # leases on the block
        self.pins: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.namespace: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.owner: NDArray[np.uint32] = np.zeros(0, np.uint32)  # session that reserved it
        self.storing: NDArray[np.bool_] = np.zeros(0, np.bool_)  # a copy is being written to the SSD
        self.durable: NDArray[np.bool_] = np.zeros(0, np.bool_)  # there is a copy on the SSD

    def __len__(self) -> int:
        return self._fresh

    @property
    def available(self) -> int:
        """Handles that can still be taken."""
        return len(self._free) + self.handles_max - self._fresh

    def take(self, count: int) -> I64:
        """`count` free handles, at most `available`."""
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        handles = np.array(reused + list(range(self._fresh, self._fresh + fresh)), dtype=np.int64)
        self._fresh += fresh
        self._reach(self._fresh)
        return handles

    def give_back(self, handles: I64) -> None:
        """Free handles and clear their rows."""
        self.life[handles] = Life.FREE
        self.pins[handles] = 0
        self.owner[handles] = 0
        self.durable[handles] = False
        self.storing[handles] = False
        self._free.extend(handles.tolist())

    def select(self, *lives: Life) -> I64:
        """All handles in one of these states."""
        return np.flatnonzero(np.isin(self.life[: self._fresh], lives))

    def _reach(self, handles: int) -> None:
        known = len(self.life)
        if handles <= known:
            return
        more = max(handles - known, known // 2, 1024)
        for name in (
            "life",
            "offset",
            "generation",
            "size",
            "holds",
            "pins",
            "namespace",
            "owner",
            "storing",
            "durable",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
