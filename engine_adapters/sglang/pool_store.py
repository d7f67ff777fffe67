"""One host pool's pages in the store: asked for, read and written by the engine's page hashes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapters.late_client import LateClients
from engine_adapters.sglang.naming import HeadGroups, namespace_of, page_keys
from engine_adapters.sglang.options import Options
from engine_adapters.sglang.pages import page_starts, pages_of
from kvstore import BlockKeys, BlockState, Client, PutStatus

__all__ = ["PoolStore"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

log = logging.getLogger(__name__)


class PoolStore:
    """A pool's pages. Every call is bounded by the client's timeout; what can't be had by then is a miss.

    Args:
        options: the adapter's.
        config: the engine's `HiCacheStorageConfig`.
        pool: a `HostKVCache`.
        name: of the pool, as the engine calls it.
        groups: how its heads are cut.
        settings: of the engine, that change KV.

    Raises:
        UsageError: the pool can't be named or cut like that, or the store refuses us.
    """

    def __init__(
        self, options: Options, config: Any, pool: Any, *, name: str, groups: HeadGroups, settings: dict[str, Any]
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._pages = pages_of(pool, groups.count)
        namespace = namespace_of(options, config, pool, self._pages, name=name, groups=groups, settings=settings)
        self.link = LateClients([namespace], options.connection)
        self.namespace = namespace

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._groups.count * self._pages.layers * self._pages.layer_bytes

    def exists(self, hashes: Sequence[str]) -> Mask:
        """Which pages are complete in the store, shape (n,)."""
        client = self.link.first
        if client is None or not hashes:
            return np.zeros(len(hashes), np.bool_)
        found = client.lookup(self._keys(client, hashes)).states == BlockState.COMMITTED
        return self._by_page(found)

    def get(self, hashes: Sequence[str], host_indices: torch.Tensor) -> Mask:
        """Read pages into the pool's slots; which of them are complete there, shape (n,)."""
        client, rows = self.link.first, self._rows(hashes, host_indices)
        if client is None or rows is None or not hashes:
            return np.zeros(len(hashes), np.bool_)
        return self._by_page(self._pages.fetch(client, self._keys(client, hashes), rows))

    def set(self, hashes: Sequence[str], host_indices: torch.Tensor) -> Mask:
        """Write pages from the pool's slots; which are in the store now, or on their way there, shape (n,)."""
        client, rows = self.link.first, self._rows(hashes, host_indices)
        if client is None or rows is None or not hashes:
            return np.zeros(len(hashes), np.bool_)
        return self._by_page(_kept(self._pages.store(client, self._keys(client, hashes), rows)))

    def get_flat(self, hashes: Sequence[str], targets: Sequence[torch.Tensor]) -> Mask:
        """Read pages into flat tensors of the engine's; which of them are complete, shape (n,)."""
        client = self.link.first
        if client is None or not hashes or not all(self._fits(target) for target in targets):
            return np.zeros(len(hashes), np.bool_)
        blocks = np.empty((len(hashes) * self._groups.count, self.page_bytes // self._groups.count), np.uint8)
        found = self._by_page(client.get_into(self._keys(client, hashes), blocks).ok)
        for target, page, ok in zip(targets, self._as_pages(blocks), found.tolist(), strict=True):
            if ok:
                target.view(torch.uint8).copy_(torch.from_numpy(page))
        return found

    def set_flat(self, hashes: Sequence[str], values: Sequence[torch.Tensor]) -> Mask:
        """Write flat pages; as `set`."""
        client = self.link.first
        if client is None or not hashes or not all(self._fits(value) for value in values):
            return np.zeros(len(hashes), np.bool_)
        pages = np.stack([value.contiguous().view(torch.uint8).reshape(-1).numpy() for value in values])
        return self._by_page(_kept(client.put(self._keys(client, hashes), self._as_blocks(pages)).statuses))

    def _keys(self, client: Client, hashes: Sequence[str]) -> BlockKeys:
        return page_keys(self.namespace, hashes, self._groups, client.scheme)

    def _rows(self, hashes: Sequence[str], host_indices: torch.Tensor) -> I64 | None:
        """Of all head groups of each page, page after page."""
        pages = page_starts(host_indices, len(hashes), self._pool.page_size, self._pool.size)
        if pages is None:
            log.error("%d slots for %d pages are no whole pages of the host pool", host_indices.numel(), len(hashes))
            return None
        count = self._groups.count
        return pages if count == 1 else (pages[:, None] * count + np.arange(count)).reshape(-1)

    def _by_page(self, rows: Mask) -> Mask:
        """A page counts when all its head groups do."""
        return np.logical_and.reduce(rows.reshape(-1, self._groups.count), axis=1)

    def _fits(self, flat: torch.Tensor) -> bool:
        fits = flat.nbytes == self.page_bytes
        if not fits:
            log.error("a flat page of %d bytes: a page of this pool has %d", flat.nbytes, self.page_bytes)
        return fits

    def _as_pages(self, blocks: U8) -> U8:
        """Blocks of head groups as the engine's flat pages, where the group is the second axis, not the first."""
        count, layers = self._groups.count, self._pages.layers
        return blocks.reshape(-1, count, layers, self._pages.layer_bytes).swapaxes(1, 2).reshape(-1, self.page_bytes)

    def _as_blocks(self, pages: U8) -> U8:
        count, layers = self._groups.count, self._pages.layers
        by_group = pages.reshape(-1, layers, count, self._pages.layer_bytes).swapaxes(1, 2)
        return np.ascontiguousarray(by_group).reshape(len(pages) * count, -1)


def _kept(statuses: U8) -> Mask:
    return statuses <= PutStatus.PENDING
