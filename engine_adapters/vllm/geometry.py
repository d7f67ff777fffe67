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
from kvstore.transport.memory import prefault

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
class BlockMemory:
    """Where the blocks of each layer are."""

    layer_names: tuple[str, ...]
    caches: tuple[Tensor, ...]
    """Each layer's cache, [blocks, heads, tokens, content], as registered."""

    buffers: tuple[Tensor, ...]
    """The same memory as flat uint8, from block 0 on."""

    slice_bytes: int
    """Of one layer of one block."""

    stride: int
    """From one block to the next, in slices."""

    parts: int
    """How many blocks of the backend make one of the scheduler."""

    @property
    def dtype(self) -> str:
        """Of an element, as namespaces name it."""
        return str(self.caches[0].dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.caches[0].device

    def make_present(self) -> None:
        """Have every page of host memory there: the first load into each would pay ten times what it copies."""
        if self.device.type == "cpu":
            for buffer in self.buffers:
                prefault(buffer.numpy())


@dataclass(frozen=True, slots=True)
class Geometry:
    """A worker's blocks: how the store names them, and how they are reached."""

    memory: BlockMemory
    layout: CanonicalLayout | OpaqueLayout
    block_tokens: int
    heads: tuple[int, int] | None = None
    """This rank's half-open range of the KV heads; None where blocks can't be cut by heads."""

    writes: bool = True
    """False where another rank, which holds the same, writes."""

    order: Order | None = None
    """What has to be changed into the canonical layout and back; None where bytes move as they are."""

    def to_canonical(self, layer: int, block_ids: Tensor) -> Tensor:
        """A layer of these blocks in the store's order: uint8 [n, slice bytes], a copy."""
        views = self._views(layer)
        keys, values = (view.index_select(0, block_ids).flatten(2) for view in (views.keys, views.values))
        return torch.cat([keys, values], dim=-1).flatten(1).contiguous().view(torch.uint8)

    def from_canonical(self, layer: int, block_ids: Tensor) -> None:
        """Arrange anew, in place, what has arrived in the store's order."""
        views = self._views(layer)
        cache = self.memory.caches[layer]
        elements = _page_elements(cache)
        flat = cache.as_strided((cache.shape[0], elements), (cache.stride(0), 1), cache.storage_offset())
        arrived = flat.index_select(0, block_ids).unflatten(-1, (cache.shape[1], -1))
        cut = views.keys[0, 0].numel()
        views.keys[block_ids] = arrived[..., :cut].unflatten(-1, views.keys.shape[2:])
        views.values[block_ids] = arrived[..., cut:].unflatten(-1, views.values.shape[2:])

    def _views(self, layer: int) -> KvViews:
        assert self.order is not None
        assert isinstance(self.layout, CanonicalLayout)
        return self.order.split(self.memory.caches[layer], self.layout.head_dim)


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
    memory = _block_memory(config, caches)
    latent = isinstance(spec, MLAAttentionSpec)
    order = None
    if wanted != "opaque" and memory.parts == 1 and not latent:
        asked = [probes[name] for name in memory.layer_names if name in probes]
        order = find_order(memory.caches[0], spec, asked, len(memory.layer_names))
    if order is not None:
        return _canonical(spec, memory, ranks, order, as_is=wanted == "auto")
    if wanted == "canonical":
        raise Unsupported(f"layout='canonical': where {backend} keeps K and V could not be found out")
    return _opaque(spec, memory, ranks, backend, every_rank_the_same=latent)


def _canonical(spec: AttentionSpec, memory: BlockMemory, ranks: Ranks, order: Order, *, as_is: bool) -> Geometry:
    """Blocks that can be cut by heads: in the engine's own order, if that is wanted and can be, else in the store's."""
    mine = spec.num_kv_heads
    in_a_row = memory.caches[0][0].is_contiguous()
    kept = order.key_order if in_a_row and (as_is or order.key_order == "token") else None
    layers = len(memory.layer_names)
    return Geometry(
        memory,
        CanonicalLayout(layers, ranks.kv_heads, spec.head_size, spec.head_size_v, key_order=kept or "token"),
        spec.block_size,
        heads=ranks.heads(mine),
        writes=ranks.writes(mine),
        order=None if kept else order,
    )


def _opaque(
    spec: AttentionSpec, memory: BlockMemory, ranks: Ranks, backend: str, *, every_rank_the_same: bool
) -> Geometry:
    """Blocks that only engines like this one understand: all that tells such engines apart is in the name."""
    cache = memory.caches[0]
    alone = every_rank_the_same or ranks.tp_size == 1
    place = "" if alone else f" rank {ranks.tp_rank} of {ranks.tp_size}"
    tag = f"vllm-kv/1 {backend} {tuple(cache.shape[1:])} {cache.stride()[1:]} x{memory.parts}{place}"
    layout = OpaqueLayout(tag, len(memory.layer_names), memory.slice_bytes)
    return Geometry(memory, layout, spec.block_size, writes=not every_rank_the_same or ranks.tp_rank == 0)


def _block_memory(config: KVCacheConfig, caches: Mapping[str, Tensor]) -> BlockMemory:
    names = tuple(name for group in config.kv_cache_groups for name in group.layer_names if name in caches)
    if not names:
        raise Unsupported("no layer of this worker has a KV cache")
    tensors = tuple(caches[name] for name in names)
    first = tensors[0]
    if first.dim() != 4 or len({(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}) != 1:
        raise Unsupported("layers differ in shape, dtype or strides")
    parts, uneven = divmod(first.shape[0], config.num_blocks)
    if uneven or not parts:
        raise Unsupported(f"{first.shape[0]} blocks of the backend for {config.num_blocks} of the scheduler")
    page, step = _page_elements(first) * parts, first.stride(0) * parts
    if step % page or (parts > 1 and step != page):
        raise Unsupported(f"blocks with strides {first.stride()} do not begin at multiples of their size")
    memory = BlockMemory(
        names, tensors, tuple(map(_from_first_block, tensors)), page * first.element_size(), step // page, parts
    )
    if memory.dtype not in ITEM_BYTES:
        raise Unsupported(f"a KV cache of {memory.dtype}; allowed is one of {', '.join(ITEM_BYTES)}")
    return memory


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
        except (TypeError, AttributeError, NotImplementedError, RuntimeError):  # called otherwise, or not able: opaque
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
