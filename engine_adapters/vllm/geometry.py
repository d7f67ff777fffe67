"""How a worker's KV lies in memory, and the layout of blocks in the store that follows from it.

Nothing is guessed from shapes. Where a block begins is read off the tensors' strides; where K and V lie inside of it is
found by having the engine's own attention backend write known values into a scratch block. A backend whose order is
none of those below keeps its blocks to itself: opaque, with rank and strides in the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from kvstore import CanonicalLayout, OpaqueLayout
from kvstore.core.namespace import ITEM_BYTES

__all__ = ["Geometry", "KvViews", "Order", "Ranks", "Unsupported", "find_order", "measure", "probes_of"]

Probe = Callable[[Tensor, Tensor, Tensor], None]
"""Writes K and V [tokens, heads, dim] of one block into a cache of one block, as the engine does."""


class Unsupported(Exception):  # noqa: N818 - not an error: the engine runs without the store, and says why
    """The store can't hold this engine's KV; the reason in one line."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a worker stands."""

    tp_rank: int = 0
    tp_size: int = 1
    kv_heads: int = 1  # of the whole model

    def heads(self, mine: int) -> tuple[int, int]:
        """The half-open range of KV heads of this rank, which has `mine` of them."""
        first = self.tp_rank * mine if mine * self.tp_size == self.kv_heads else self.tp_rank // self.replicas(mine)
        return first, first + mine

    def replicas(self, mine: int) -> int:
        """How many ranks hold the same heads."""
        return max(1, mine * self.tp_size // self.kv_heads)

    def writes(self, mine: int) -> bool:
        """Whether this is the rank that writes, of those that hold the same heads."""
        return self.tp_rank % self.replicas(mine) == 0


@dataclass(frozen=True, slots=True)
class KvViews:
    """The keys and values of a cache as [blocks, heads, tokens, dim], whatever their strides."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Order:
    """One way in which a backend arranges K and V within a block of logical shape [heads, tokens, content]."""

    name: Literal["k|v per token", "k, v", "k transposed, v"]
    split: Callable[[Tensor, int], KvViews]
    """Of a cache [blocks, heads, tokens, content] and the size of a key head."""

    key_order: Literal["token", "dim"] | None
    """That of the canonical layout with the same bytes in a head; None where there is none."""


def _per_token(cache: Tensor, head_dim: int) -> KvViews:
    return KvViews(cache[..., :head_dim], cache[..., head_dim:])


def _planes(cache: Tensor, head_dim: int) -> KvViews:
    blocks, heads, tokens, _ = cache.shape
    runs = cache.reshape(blocks, heads, -1)
    cut = tokens * head_dim
    return KvViews(runs[..., :cut].unflatten(-1, (tokens, head_dim)), runs[..., cut:].unflatten(-1, (tokens, -1)))


def _planes_with_k_transposed(cache: Tensor, head_dim: int) -> KvViews:
    blocks, heads, tokens, _ = cache.shape
    runs = cache.reshape(blocks, heads, -1)
    cut = tokens * head_dim
    keys = runs[..., :cut].unflatten(-1, (head_dim, tokens)).transpose(-1, -2)
    return KvViews(keys, runs[..., cut:].unflatten(-1, (tokens, -1)))


ORDERS = (
    Order("k transposed, v", _planes_with_k_transposed, "dim"),  # vLLM's CPU backend
    Order("k, v", _planes, "token"),
    Order("k|v per token", _per_token, None),  # FlashAttention and its relatives
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A worker's blocks: how the store names them, and how they are reached."""

    layout: CanonicalLayout | OpaqueLayout
    dtype: str
    block_tokens: int
    layer_names: tuple[str, ...]
    heads: tuple[int, int] | None
    """This rank's half-open range of the KV heads; None where blocks can't be cut by heads."""

    part: tuple[int, int]
    """Which of how many writers of a block this rank is."""

    writes: bool
    """False where another rank, which holds the same, writes."""

    buffers: tuple[Tensor, ...]
    """Each layer's memory as flat uint8, from its block 0 on."""

    stride: int
    """From one block to the next, in slices of this rank."""

    caches: tuple[Tensor, ...]
    """Each layer's cache, [blocks, heads, tokens, content], as registered."""

    order: Order | None
    """What has to be changed into the canonical layout and back; None where bytes move as they are."""

    def to_canonical(self, layer: int, block_ids: Tensor) -> Tensor:
        """A layer of these blocks in the store's order: uint8 [n, slice], a copy."""
        assert self.order is not None
        views = self.order.split(self.caches[layer], self._head_dim)
        keys, values = (view.index_select(0, block_ids).flatten(2) for view in (views.keys, views.values))
        return torch.cat([keys, values], dim=-1).flatten(1).contiguous().view(torch.uint8)

    def from_canonical(self, layer: int, block_ids: Tensor) -> None:
        """Arrange anew, in place, what has arrived in the store's order."""
        assert self.order is not None
        cache = self.caches[layer]
        head_dim, (heads, tokens, _) = self._head_dim, cache.shape[1:]
        cut = tokens * head_dim
        arrived = _flat_blocks(cache).index_select(0, block_ids).unflatten(-1, (heads, -1))
        views = self.order.split(cache, head_dim)
        views.keys[block_ids] = arrived[..., :cut].unflatten(-1, (tokens, head_dim))
        views.values[block_ids] = arrived[..., cut:].unflatten(-1, (tokens, -1))

    @property
    def _head_dim(self) -> int:
        assert isinstance(self.layout, CanonicalLayout)
        return self.layout.head_dim


def measure(
    config: KVCacheConfig,
    caches: Mapping[str, Tensor],
    probes: Mapping[str, Probe],
    ranks: Ranks,
    *,
    wanted: Literal["auto", "canonical", "opaque"],
    backend: str,
) -> Geometry:
    """The geometry of a worker's KV caches.

    Args:
        config: as vLLM hands it to connectors.
        caches: by layer name, as `register_kv_caches` gets them.
        probes: how the backend of each layer writes, for layers where that can be asked.
        ranks: where this worker stands.
        wanted: the option `layout`.
        backend: names of the attention backends, for the name of an opaque layout.

    Raises Unsupported.
    """
    spec = _only_spec(config)
    names = tuple(name for group in config.kv_cache_groups for name in group.layer_names if name in caches)
    if not names:
        raise Unsupported("no layer of this worker has a KV cache")
    tensors = tuple(caches[name] for name in names)
    shapes = {(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].dim() != 4:
        raise Unsupported("layers differ in shape, dtype or strides")
    first = tensors[0]
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise Unsupported(f"a KV cache of {dtype}; allowed is one of {', '.join(ITEM_BYTES)}")
    kernel_blocks, uneven = divmod(first.shape[0], config.num_blocks)
    if uneven or not kernel_blocks:
        raise Unsupported(f"{first.shape[0]} blocks of the backend for {config.num_blocks} of the scheduler")
    page = _page_elements(first) * kernel_blocks
    if first.stride(0) * kernel_blocks % page or (kernel_blocks > 1 and first.stride(0) * kernel_blocks != page):
        raise Unsupported(f"blocks with strides {first.stride()} do not begin at multiples of their size")
    mla = isinstance(spec, MLAAttentionSpec)
    order = None
    if wanted != "opaque" and kernel_blocks == 1 and not mla:
        order = find_order(first, spec, [probes[name] for name in names if name in probes], len(names))
    if wanted == "canonical" and order is None:
        raise Unsupported(f"layout='canonical': where {backend} keeps K and V could not be found out")
    mine = spec.num_kv_heads
    common = {
        "dtype": dtype,
        "block_tokens": spec.block_size,
        "layer_names": names,
        "buffers": tuple(_from_first_block(tensor) for tensor in tensors),
        "stride": first.stride(0) * kernel_blocks // page,
        "caches": tensors,
    }
    if order is None:
        alone = mla or ranks.tp_size == 1
        place = "" if alone else f" rank {ranks.tp_rank} of {ranks.tp_size}"
        inner = f"{tuple(first.shape[1:])} {first.stride()[1:]} x{kernel_blocks}"
        tag = f"vllm-kv/1 {backend} {inner}{place}"
        layout = OpaqueLayout(tag, len(names), page * first.element_size())
        return Geometry(
            layout=layout, heads=None, part=(0, 1), writes=not mla or ranks.tp_rank == 0, order=None, **common
        )
    writers = ranks.tp_size // ranks.replicas(mine)
    as_is = wanted == "auto" and order.key_order is not None and first[0].is_contiguous()
    same = order.key_order == "token" and first[0].is_contiguous()
    return Geometry(
        layout=CanonicalLayout(
            len(names),
            ranks.kv_heads,
            spec.head_size,
            spec.head_size_v,
            key_order=order.key_order if as_is and order.key_order else "token",
        ),
        heads=ranks.heads(mine),
        part=(ranks.tp_rank // ranks.replicas(mine), writers),
        writes=ranks.writes(mine),
        order=None if as_is or same else order,
        **common,
    )


def find_order(cache: Tensor, spec: AttentionSpec, probes: Sequence[Probe], layers: int) -> Order | None:
    """The order in which all these layers' backends write K and V into blocks like those of `cache`; None if it is none
    that we know, or could not be asked.
    """
    _, heads, tokens, content = cache.shape
    if len(probes) != layers or content != spec.head_size + spec.head_size_v or spec.block_size != tokens:
        return None
    generator = torch.Generator().manual_seed(20)
    keys, values = (
        torch.randn(tokens, heads, dim, generator=generator).to(device=cache.device, dtype=cache.dtype)
        for dim in (spec.head_size, spec.head_size_v)
    )
    found: set[Order | None] = set()
    for probe in probes:
        scratch = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        scratch.zero_()
        try:
            probe(keys, values, scratch)
        except (TypeError, AttributeError, NotImplementedError, RuntimeError):  # a backend that is called otherwise
            return None
        found.add(next((order for order in ORDERS if _fits(order, scratch, keys, values)), None))
    return found.pop() if len(found) == 1 else None


def _fits(order: Order, cache: Tensor, keys: Tensor, values: Tensor) -> bool:
    try:
        views = order.split(cache, keys.shape[-1])
    except RuntimeError:  # these strides can't be looked at in that way
        return False
    return torch.equal(views.keys[0].transpose(0, 1), keys) and torch.equal(views.values[0].transpose(0, 1), values)


def _only_spec(config: KVCacheConfig) -> AttentionSpec:
    """The spec of all layers, if there is one that a prefix of blocks is enough for."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(f"a model with {len(groups)} groups of layers that cache differently")
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise Unsupported(f"a KV cache of kind {type(spec).__name__}")
    if spec.tokens_per_state != 1:
        raise Unsupported(f"a KV cache with {spec.tokens_per_state} tokens a state")
    return spec


def _page_elements(cache: Tensor) -> int:
    """Elements of one block. Raises Unsupported where they don't lie together."""
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size != 1 and stride != expected:
            raise Unsupported(f"a block with shape {tuple(cache.shape[1:])} and strides {cache.stride()[1:]} has gaps")
        expected *= size
    return expected


def _from_first_block(cache: Tensor) -> Tensor:
    """The memory of all blocks, flat."""
    size = cache.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    first = cache.storage_offset() * size
    last = first + (cache.shape[0] - 1) * cache.stride(0) * size + _page_elements(cache) * size
    return whole[first:last]


def _flat_blocks(cache: Tensor) -> Tensor:
    """Each block's elements in the order of memory: [blocks, elements]."""
    return cache.as_strided((cache.shape[0], _page_elements(cache)), (cache.stride(0), 1), cache.storage_offset())


def probes_of(layers: Mapping[str, Any]) -> tuple[dict[str, Probe], str]:
    """How vLLM's attention layers write into their caches, by name, and the names of their backends.

    `layers`: those of vLLM's forward context.
    """
    probes: dict[str, Probe] = {}
    names: set[str] = set()
    for name, layer in layers.items():
        names.add(f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '-')}")
        write = getattr(layer.impl, "do_kv_cache_update", None)
        if write is not None:
            probes[name] = _probe(layer, write)
    return probes, "+".join(sorted(names))


def _probe(layer: Any, write: Callable[..., None]) -> Probe:
    def probe(keys: Tensor, values: Tensor, cache: Tensor) -> None:
        write(layer, keys, values, cache, torch.arange(len(keys), device=keys.device))

    return probe
