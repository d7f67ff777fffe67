"""A host pool's memory, page by page: where the bytes of a page lie, and how they travel.

A page is a few slices (parts), one in each of as many buffers; slice i of a part belongs to page i:

    layer_first        2 * layers parts        kv_buffer[k|v][layer] is [pages][page, head, dim]
    page_first*        2 parts, K and V        kv_buffer[k|v]        is [pages][all layers of a page]
    latent attention   1 part, or one a layer

Equal parts become the layers of a block and move straight between the pool and the store; only where they are many is
what is written gathered before. Parts of several sizes (K and V heads that differ, recurrent states) pass through a
staging buffer. Either way the bytes of a block are those of the engine's own flat page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore import BlockKeys, Client, UsageError

__all__ = ["DirectPages", "FlatPages", "GatheredPages", "Pages", "page_starts", "pages_of"]

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

STAGING_BYTES = 64 << 20
STREAMED_PARTS_MAX = (
    4  # each layer of a stream that is written costs a call to the server: more of them, and a copy is less
)


class Pages(Protocol):
    """The pages of one pool. A row is what has a key of its own: a page, or one of the head groups of a page."""

    @property
    def layers(self) -> int:
        """Of a block."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Of each."""
        ...

    def fetch(self, client: Client, keys: BlockKeys, rows: I64) -> Mask:
        """Read blocks into these rows; which of them are complete, shape (n,). The others are undefined."""
        ...

    def store(self, client: Client, keys: BlockKeys, rows: I64) -> U8:
        """Write these rows; `PutStatus` of each, shape (n,)."""
        ...


@dataclass(frozen=True, slots=True)
class DirectPages:
    """Parts of one size: no copy but the one between the pool and the store, unless many parts are written."""

    parts: tuple[U8, ...]  # of shape (rows of all pages, bytes) each
    keep: object  # what owns the memory

    @property
    def layers(self) -> int:
        """One a part."""
        return len(self.parts)

    @property
    def layer_bytes(self) -> int:
        """Of a part."""
        return self.parts[0].shape[1]

    def fetch(self, client: Client, keys: BlockKeys, rows: I64) -> Mask:
        """See `Pages`."""
        if len(self.parts) == 1:
            buffer = client.register(self.parts[0])
            return client.get_into(keys, buffer, offsets=rows * self.layer_bytes).ok
        with client.layer_stream(keys, list(self.parts), slots=rows) as stream:
            return stream.wait(self.layers - 1)

    def store(self, client: Client, keys: BlockKeys, rows: I64) -> U8:
        """See `Pages`."""
        if len(self.parts) == 1:
            buffer = client.register(self.parts[0])
            return client.put(keys, buffer, offsets=rows * self.layer_bytes).statuses
        if len(self.parts) > STREAMED_PARTS_MAX:
            return _store_staged(
                client, keys, self.layers * self.layer_bytes, lambda span: _side_by_side(self.parts, rows[span])
            )
        with client.publish_stream(keys) as stream:
            if not len(stream.mine):
                return stream.statuses
            for layer, part in enumerate(self.parts):
                stream.write(layer, part, slots=rows)
            return stream.commit().statuses


@dataclass(frozen=True, slots=True)
class GatheredPages:
    """Parts of several sizes: all of a page behind one another, through a staging buffer."""

    parts: tuple[U8, ...]  # of shape (pages, bytes of that part)
    keep: object
    layers: int = 1

    @property
    def layer_bytes(self) -> int:
        """Of a page."""
        return sum(part.shape[1] for part in self.parts)

    def fetch(self, client: Client, keys: BlockKeys, rows: I64) -> Mask:
        """See `Pages`."""

        def scatter(span: slice, staged: U8, ok: Mask) -> None:
            place = 0
            for part in self.parts:
                size = part.shape[1]
                part[rows[span][ok]] = staged[ok, place : place + size]
                place += size

        return _fetch_staged(client, keys, self.layer_bytes, scatter)

    def store(self, client: Client, keys: BlockKeys, rows: I64) -> U8:
        """See `Pages`."""
        return _store_staged(client, keys, self.layer_bytes, lambda span: _side_by_side(self.parts, rows[span]))


@dataclass(frozen=True, slots=True)
class FlatPages:
    """A pool that doesn't tell where its pages lie, or moves them: its own copies, page by page."""

    pool: Any
    page_size: int
    layer_bytes: int
    layers: int = 1

    def fetch(self, client: Client, keys: BlockKeys, rows: I64) -> Mask:
        """See `Pages`."""

        def scatter(span: slice, staged: U8, ok: Mask) -> None:
            for page, block in zip(rows[span][ok].tolist(), staged[ok], strict=True):
                flat = self.pool.get_dummy_flat_data_page()
                flat.view(torch.uint8).copy_(torch.from_numpy(block))
                self.pool.set_from_flat_data_page(page * self.page_size, flat)

        return _fetch_staged(client, keys, self.layer_bytes, scatter)

    def store(self, client: Client, keys: BlockKeys, rows: I64) -> U8:
        """See `Pages`."""

        def gather(span: slice) -> U8:
            pages = [self.pool.get_data_page(page * self.page_size, flat=True) for page in rows[span].tolist()]
            return np.stack([page.contiguous().view(torch.uint8).numpy() for page in pages])

        return _store_staged(client, keys, self.layer_bytes, gather)


def pages_of(pool: Any, head_groups: int = 1) -> Pages:
    """The pages of a registered host pool.

    Args:
        pool: a `HostKVCache` of the engine.
        head_groups: into how many groups of heads each page is cut; more than one needs the layout `page_head`.

    Raises:
        UsageError: the pool can't be cut like that.
    """
    parts = None if getattr(pool, "shared_allocation_domain", None) is not None else _parts(pool, head_groups)
    if parts is None:
        if head_groups > 1:
            raise UsageError(f"tp_lcm_size with {type(pool).__name__}, {pool.layout}: allowed is the layout page_head")
        return FlatPages(pool, pool.page_size, _flat_bytes(pool))
    keep = (getattr(pool, "kv_buffer", None), _hybrid_buffers(pool))
    if len({part.shape[1] for part in parts}) == 1:
        return DirectPages(parts, keep)
    return GatheredPages(parts, keep)


def page_starts(host_indices: torch.Tensor, count: int, page_size: int, size: int) -> I64 | None:
    """Numbers of the pages that token slots belong to, shape (count,); None where they are no whole pages.

    Args:
        host_indices: slots, `page_size` consecutive ones for each page.
        count: pages.
        page_size: slots of a page.
        size: slots of the pool.
    """
    slots = host_indices.cpu().numpy().astype(np.int64, copy=False).reshape(-1)
    if len(slots) != count * page_size:
        return None
    by_page = slots.reshape(count, page_size)
    first = by_page[:, 0]
    whole = (by_page == first[:, None] + np.arange(page_size)).all()
    if not whole or (first % page_size).any() or (first < 0).any() or (first + page_size > size).any():
        return None
    return first // page_size


def _flat_bytes(pool: Any) -> int:
    try:
        return pool.get_data_page(0, flat=True).nbytes
    except (ValueError, NotImplementedError) as cause:  # how pools say that a layout of theirs has no such page
        raise UsageError(
            f"host pool {type(pool).__name__}, layout {pool.layout}: it gives no pages ({cause})"
        ) from cause


def _parts(pool: Any, head_groups: int) -> tuple[U8, ...] | None:
    """The buffers of the pool's parts, from the pointers that it gives for its first pages and its last one. None where
    it gives none, or where pages don't follow one another.
    """
    count = pool.size // pool.page_size
    if count < 2:
        return None
    try:
        first, second, last = (_pointers(pool, page, head_groups) for page in (0, 1, count - 1))
    except (
        ValueError,
        NotImplementedError,
        AttributeError,
        AssertionError,
    ):  # how pools say that they have no pointers
        return None
    if first is None or second is None or last is None:
        return None
    (bases, sizes), (nexts, _), (lasts, _) = first, second, last
    steps = sizes * head_groups
    if not (np.array_equal(nexts, bases + steps) and np.array_equal(lasts, bases + (count - 1) * steps)):
        return None
    if isinstance(getattr(pool, "kv_buffer", None), torch.Tensor):
        order = np.argsort(bases)  # as they lie in the one buffer: the order of the engine's flat page
        bases, sizes = bases[order], sizes[order]
    rows = count * head_groups
    return tuple(_memory(base, rows, size) for base, size in zip(bases.tolist(), sizes.tolist(), strict=True))


def _pointers(pool: Any, page: int, head_groups: int) -> tuple[I64, I64] | None:
    """Address and size of each part of a page's first head group, if the other groups follow at once."""
    slots = torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
    if head_groups > 1:
        meta = pool.get_split_heads_page_buffer_meta(slots, head_groups)
    else:
        meta = pool.get_page_buffer_meta(slots)
    if not meta or not meta[0]:
        return None
    pointers = np.array(meta[0], np.int64).reshape(head_groups, -1)
    sizes = np.array(meta[1], np.int64).reshape(head_groups, -1)
    if not np.array_equal(pointers, pointers[0] + np.arange(head_groups)[:, None] * sizes[0]):
        return None
    return pointers[0], sizes[0]


def _memory(address: int, rows: int, size: int) -> U8:
    raw = (ctypes.c_uint8 * (rows * size)).from_address(address)
    return np.frombuffer(raw, np.uint8).reshape(rows, size)


def _hybrid_buffers(pool: Any) -> object:
    try:
        return pool.get_hybrid_pool_buffer()
    except (AttributeError, NotImplementedError):  # a pool that is no hybrid one has no such call, or refuses it
        return None


def _fetch_staged(
    client: Client, keys: BlockKeys, block_bytes: int, scatter: Callable[[slice, U8, Mask], None]
) -> Mask:
    found = np.zeros(len(keys), np.bool_)
    for span in _spans(len(keys), block_bytes):
        staged = np.empty((span.stop - span.start, block_bytes), np.uint8)
        found[span] = client.get_into(keys[span], staged).ok
        scatter(span, staged, found[span])
        if not found[span].all():  # what follows a gap is no use
            break
    return found


def _store_staged(client: Client, keys: BlockKeys, block_bytes: int, gather: Callable[[slice], U8]) -> U8:
    statuses: Sequence[U8] = [client.put(keys[span], gather(span)).statuses for span in _spans(len(keys), block_bytes)]
    return np.concatenate(statuses) if statuses else np.empty(0, np.uint8)


def _side_by_side(parts: Sequence[U8], rows: I64) -> U8:
    return np.concatenate([part[rows] for part in parts], axis=1)


def _spans(count: int, block_bytes: int) -> Iterator[slice]:
    step = max(1, STAGING_BYTES // block_bytes)
    for first in range(0, count, step):
        yield slice(first, min(count, first + step))
