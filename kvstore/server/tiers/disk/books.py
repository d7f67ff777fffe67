"""What all parts of the tier share: blocks and their slots, namespaces, what was deleted, the answers so far.

One thread owns it. A slot's holds count what is in flight on it; a block that leaves is DYING until they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.eviction.tenants import Tenants
from kvstore.server.tiers.disk.barriers import Barriers
from kvstore.server.tiers.disk.catalog import Catalog, NamespaceRow
from kvstore.server.tiers.disk.directory import Directory, Life
from kvstore.server.tiers.disk.messages import Answer
from kvstore.server.tiers.disk.slabs import Slabs

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    missed_blocks: int = 0
    removed_blocks: int = 0
    evicted_blocks: int = 0
    stale_stores: int = 0
    refused_stores: int = 0
    failed_stores: int = 0
    failed_reads: int = 0  # blocks that could not be read or whose checksum was wrong; each was dropped
    dropped_tail_blocks: int = 0  # blocks of an unclean end whose payload was not what the catalog says
    lost_catalogs: int = 0
    commits: int = 0


@dataclass(slots=True)
class Books:
    """See the module."""

    pool: NDArray[np.uint8]
    directory: Directory
    slabs: Slabs
    catalog: Catalog
    namespaces: dict[bytes, NamespaceRow]
    barriers: Barriers
    sequence: int  # of the block that is stored next
    by_number: dict[int, NamespaceRow] = field(default_factory=dict[int, NamespaceRow])
    answers: list[Answer] = field(default_factory=list[Answer])
    counters: Counters = field(default_factory=Counters)
    complete: bool = False  # everything on the disk is known
    not_slots: set[int] = field(default_factory=set[int])  # handles whose place is no slot of ours
    tenants: Tenants = field(init=False)  # and the order of eviction
    tenant_of: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # by number of namespace

    def __post_init__(self) -> None:
        untouched = np.zeros(self.slabs.allocator.pool_bytes // 4096, np.uint32)  # nobody reads the SSD unseen
        self.tenants = Tenants(
            lambda: LruPolicy(untouched),
            lambda handles: self.tenant_of[self.directory.namespace[handles]],
            lambda handles: (self.directory.keys(handles)["lo"], 1.0),
        )
        for row in self.namespaces.values():
            self.know(row)

    def know(self, row: NamespaceRow) -> None:
        """Take in a namespace."""
        self.by_number[row.number] = row
        if row.number >= len(self.tenant_of):
            self.tenant_of = np.append(self.tenant_of, np.zeros(row.number + 1 - len(self.tenant_of), np.int64))
        self.tenant_of[row.number] = self.tenants.number(row.tenant)

    def charge(self, handles: I64) -> None:
        """New blocks count on their tenants' quotas, until they leave."""
        np.add.at(self.tenants.used, self.tenant_of[self.directory.namespace[handles]], self.slot_bytes(handles))

    def slot_bytes(self, handles: I64) -> I64:
        """Bytes that each block takes on the disk. Shape (n,)."""
        sizes, at = np.unique(self.directory.size[handles], return_inverse=True)
        return np.array([self.slabs.allocator.slot_bytes_for(size) for size in sizes.tolist()], dtype=np.int64)[at]

    def check_offsets(self, offsets: U64, sizes: int | I64) -> None:
        """Refuse what reaches beyond the pool.

        Raises:
            ProtocolError: it does, or is not on a page.
        """
        if not len(offsets):
            return
        ends = offsets.astype(np.int64) + -(-np.asarray(sizes) // 4096) * 4096
        if int(ends.max()) > len(self.pool) or (offsets % np.uint64(4096)).any():
            raise ProtocolError("a block outside the pool, or not on a page")

    def hold(self, handles: I64) -> None:
        """Something is in flight on these."""
        np.add.at(self.directory.holds, handles, 1)

    def release(self, handles: I64) -> None:
        """Let go; a dying block that nothing holds any more gives its slot back."""
        directory = self.directory
        np.subtract.at(directory.holds, handles, 1)
        free = np.unique(handles)
        free = free[(directory.holds[free] == 0) & (directory.life[free] == Life.DYING)]
        if not len(free):
            return
        slots = free
        if self.not_slots:
            slots = free[~np.isin(free, list(self.not_slots))]
            self.not_slots -= set(free.tolist())
        self.slabs.free(directory.locations(slots))
        directory.give_back(free)
