"""Stores a prompt's KV from a `DynamicCache` and loads it into a fresh one, without ever failing the engine.

A fault of the store (dead, slow, evicting, another version) is a miss or a shorter hit, and is logged. Only a call that
is wrong by itself (a cache of another model, a batch of two) raises, and that is a UsageError.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from engine_adapters.transformers.packing import BlockShape, pack, unpack
from engine_adapters.transformers.streaming import (
    ArrivingKv,
    LayerPublisher,
    MissingKvError,
    filled_cache,
    plain_cache,
    streaming_cache,
)
from kvstore import (
    BlockKeys,
    BlockState,
    CanonicalLayout,
    Client,
    FetchPlan,
    KvStoreError,
    Namespace,
    PutResult,
    PutStatus,
    UsageError,
)
from kvstore.core.keys import TokenIds

__all__ = ["CacheAdapter", "LoadResult", "Prefill", "namespace_for"]

STAGING_BYTES = 32 * 2**20  # measured: smaller ones slow the put down, larger ones gain nothing
ARRIVALS_BYTES = 256 * 2**20  # a stream has one buffer for its whole hit; larger ones are not kept for the next

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A cache that holds the first `hit_tokens` tokens, and what getting them took."""

    cache: DynamicCache
    hit_tokens: int
    bytes: int = 0  # fetched from the store
    lookup_s: float = 0.0
    transfer_s: float = 0.0
    unpack_s: float = 0.0


def namespace_for(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    revision: str,
    model_id: str | None = None,
    block_tokens: int = 16,
    dtype: torch.dtype | None = None,
    adapter: bytes = b"",
    tenant: bytes = b"",
) -> Namespace:
    """The namespace of `model`'s KV.

    `revision`: commit or digest of the weights. `model_id`: a name that all workers use; left out, it is the hub's name
    that the model was loaded by. `dtype` of the KV: left out, the model's. `adapter`: digest of the LoRA weights.
    Settings that change the KV of the same weights (RoPE, quantisation) are digested into the revision, so that a
    worker with other settings gets misses and never wrong KV. Raises UsageError when a layer isn't full attention.
    """
    config = _decoder_config(model)
    dtype = dtype or cast(torch.dtype | None, model.dtype) or torch.get_default_dtype()
    return Namespace(
        model=model_id or _hub_name(config),
        revision=f"{revision}+{_settings_digest(config)}" if revision else "",
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        layout=_layout_of(config),
        adapter=adapter,
        tenant=tenant,
    )


@dataclass(frozen=True, slots=True)
class Prefill(Generic[T]):
    """What `prefill` gives."""

    output: T  # of the forward pass that counted
    cache: DynamicCache  # of the whole prompt; an ordinary one
    hit_tokens: int  # of the prompt, from the store
    stored: Future[PutResult]  # of the blocks after the hit; the last ones may still be on their way
    plan: FetchPlan | None = None
    bytes: int = 0  # fetched from the store
    lookup_s: float = 0.0
    waited_s: float = 0.0  # the forward pass, for layers that were not there yet
    unpack_s: float = 0.0
    forward_s: float = 0.0  # with both


class CacheAdapter:
    """Moves KV between a `DynamicCache` and the store, over one client whose namespace is `namespace_for(model, ...)`.

    Loaded tensors are placed on `device` (left out: the model's). Transfers go through one staging buffer, at most
    `staging_bytes` (or one block) large, that is allocated and touched on first use and kept: longer prompts go in
    several parts. `prefill` has one more, of the size of its hit. Calls from several threads take turns. Raises
    UsageError when the client's namespace is of another shape than the model.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        device: torch.device | str | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._config = _decoder_config(model)
        self._client: Final = client
        self._shape: Final = _shape_of(client.namespace, _layout_of(self._config))
        self._device = torch.device(device or (model.device if isinstance(model, PreTrainedModel) else "cpu"))
        self._staging: Final = _Staging(client.namespace.block_bytes, staging_bytes)
        self._arrivals: Final = _Staging(client.namespace.block_bytes, ARRIVALS_BYTES)
        self._lock: Final = threading.Lock()

    def load(self, token_ids: TokenIds, limit: int | None = None, *, plan: bool = True) -> tuple[DynamicCache, int]:
        """A cache that holds the leading tokens of a prompt, and how many: whole blocks, 0 for a miss.

        At least one token is left for the engine to compute, because logits aren't stored. `limit`: the most
        tokens wanted. `plan`: fetch only as much as is faster than recomputing it, as far as that is known; see
        `Client.lookup`.
        """
        fetched = self.fetch(token_ids, limit, plan=plan)
        return fetched.cache, fetched.hit_tokens

    def fetch(self, token_ids: TokenIds, limit: int | None = None, *, plan: bool = True) -> LoadResult:
        """`load`, with bytes and seconds."""
        tokens = _as_array(token_ids)
        usable = max(0, len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit))
        with self._lock:
            try:
                return self._fetch(tokens[: usable - usable % self._shape.block_tokens], len(tokens), plan=plan)
            except KvStoreError as fault:
                _log.warning("lookup failed, prompt of %d tokens counts as a miss: %s", len(tokens), fault)
                return LoadResult(self._empty_cache(), 0)

    def prefill(
        self,
        token_ids: TokenIds,
        forward: Callable[[Tensor, DynamicCache], T],
        *,
        plan: bool = True,
        follow: bool = False,
        store: bool = True,
    ) -> Prefill[T]:
        """Run the engine's forward pass over what the store doesn't have of a prompt, while the rest arrives layer by
        layer: a layer waits for its own KV only. New KV is stored in the same way, a layer as soon as it is computed.

        When a layer does not come, or not for all blocks, the pass is given up and run again over what is missing. All
        layers together are waited for as long as the client's `timeout_s`.

        Args:
            token_ids: of the prompt, at least one.
            forward: `forward(input_ids, cache)`, input_ids [1, n] on the adapter's device, int64. It hands the cache to
            the model, in one call or several, and returns what it likes. May be called twice.
            plan: fetch only as much as is faster than recomputing it; see `Client.lookup`. Else all that is there.
            follow: also take blocks that another worker is computing just now, as it goes on.
            store: whether to store new blocks.

        What `forward` raises is raised; nothing is stored then.
        """
        tokens = _as_array(token_ids)
        if not len(tokens):
            raise UsageError("token_ids is empty: allowed is one token or more")
        with self._lock:
            began_s = time.perf_counter()
            keys, hit, planned = self._hit(tokens, plan=plan, follow=follow)
            lookup_s = time.perf_counter() - began_s
            with ExitStack() as stack:
                arriving = self._arriving(keys[:hit], stack) if hit else None
                run = partial(self._run, tokens, keys if store else keys[:0], forward)
                try:
                    output, cache, publisher, forward_s = run(arriving)
                except MissingKvError as missing:
                    assert arriving is not None
                    arriving.settle()
                    _log.warning("%s did not come, going on with %d blocks", missing, arriving.blocks)
                    output, cache, publisher, forward_s = run(arriving if arriving.blocks else None)
        blocks = arriving.blocks if arriving else 0
        waited_s, unpack_s = (arriving.waited_s, arriving.unpack_s) if arriving else (0.0, 0.0)
        return Prefill(
            output,
            plain_cache(self._config, cache),
            hit_tokens=blocks * self._shape.block_tokens,
            stored=publisher.result,
            plan=planned,
            bytes=blocks * self._client.namespace.block_bytes,
            lookup_s=lookup_s,
            waited_s=waited_s,
            unpack_s=unpack_s,
            forward_s=forward_s,
        )

    def store(self, token_ids: TokenIds, cache: DynamicCache) -> PutResult:
        """Put the full blocks whose KV is in `cache` and which the store doesn't have yet.

        `token_ids`: prompt, and what was generated. The last sampled token has no KV yet (it was never fed to the
        model), so a block that would need it is left out, as is the incomplete block at the end. Raises UsageError
        when `cache` isn't this model's, or holds a batch.
        """
        tokens = _as_array(token_ids)
        layers = _layers_of(cache, self._shape)
        blocks = min(len(tokens), cache.get_seq_length()) // self._shape.block_tokens
        with self._lock:
            try:
                return self._store(tokens[: blocks * self._shape.block_tokens], layers)
            except KvStoreError as fault:
                _log.warning("storing %d blocks failed: %s", blocks, fault)
                return PutResult(np.full(blocks, PutStatus.FAILED, np.uint8), 0)

    def _fetch(self, tokens: NDArray[np.integer[Any]], prompt_tokens: int, *, plan: bool) -> LoadResult:
        started_s = time.perf_counter()
        keys = self._client.keys(tokens)
        found = self._client.lookup(keys, plan=plan, prompt_tokens=prompt_tokens, overlap=False)
        hit = found.plan.fetch_blocks if found.plan else found.hit_blocks
        lookup_s = time.perf_counter() - started_s
        if hit == 0:
            return LoadResult(self._empty_cache(), 0, lookup_s=lookup_s)
        target = self._layer_tensors(hit)
        good, clock = self._transfer(keys[:hit], target)
        return LoadResult(
            cache=self._filled_cache(target, good),
            hit_tokens=good * self._shape.block_tokens,
            bytes=good * self._client.namespace.block_bytes,
            lookup_s=lookup_s,
            transfer_s=clock.transfer_s,
            unpack_s=clock.unpack_s,
        )

    def _hit(
        self, tokens: NDArray[np.integer[Any]], *, plan: bool, follow: bool
    ) -> tuple[BlockKeys, int, FetchPlan | None]:
        """The keys of a prompt's full blocks, how many of the first of them to fetch, and the plan."""
        keys = self._client.keys(tokens)
        usable = (len(tokens) - 1) // self._shape.block_tokens  # logits aren't stored: a token is left to compute
        try:
            found = self._client.lookup(keys, plan=plan, prompt_tokens=len(tokens))
        except KvStoreError as fault:
            _log.warning("lookup failed, prompt of %d tokens counts as a miss: %s", len(tokens), fault)
            return keys, 0, None
        hit = found.plan.fetch_blocks if found.plan else found.hit_blocks
        if follow and hit == found.hit_blocks:
            hit = found.started_blocks
        return keys, min(hit, usable), found.plan

    def _arriving(self, keys: BlockKeys, stack: ExitStack) -> ArrivingKv | None:
        """A stream of these blocks, which ends with the stack; None when there can't be one."""
        layers = self._shape.layout.layers
        staged = self._arrivals.first(len(keys)).view(-1).view(layers, len(keys), -1)
        try:
            stream = stack.enter_context(self._client.layer_stream(keys, list(staged.numpy())))
        except KvStoreError as fault:
            _log.warning("no stream of %d blocks, they count as a miss: %s", len(keys), fault)
            return None
        return ArrivingKv(stream, staged, self._shape, self._client.timeout_s)

    def _run(
        self,
        tokens: NDArray[np.integer[Any]],
        keys: BlockKeys,
        forward: Callable[[Tensor, DynamicCache], T],
        arriving: ArrivingKv | None,
    ) -> tuple[T, DynamicCache, LayerPublisher, float]:
        """One forward pass after the blocks that arrive; the blocks behind them are stored under `keys`."""
        first = arriving.blocks if arriving else 0
        first_token = first * self._shape.block_tokens
        inputs = torch.from_numpy(tokens[first_token:].astype(np.int64)).unsqueeze(0).to(self._device)
        publisher = LayerPublisher(self._client, keys[first:], first_token, self._shape)
        cache = streaming_cache(self._config, self._shape.layout.layers, arriving, publisher)
        waited_s = arriving.waited_s + arriving.unpack_s if arriving else 0.0
        began_s = time.perf_counter()
        done = False
        try:
            output = forward(inputs, cache)
            done = True
        finally:
            publisher.end(commit=done)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the pass has only been queued
        took_s = time.perf_counter() - began_s
        if arriving:
            waited_s = arriving.waited_s + arriving.unpack_s - waited_s
        self._client.observe_compute(inputs.shape[1], max(took_s - waited_s, 1e-9))
        return output, cache, publisher, took_s

    def _transfer(self, keys: BlockKeys, target: tuple[Tensor, Tensor]) -> tuple[int, "_Clock"]:
        """Fill `target` (see `_layer_tensors`) up to the first block that fails: blocks filled, and time taken."""
        all_keys, all_values = target
        clock = _Clock()
        good = 0
        for start in range(0, len(keys), self._staging.blocks):
            part = keys[start : start + self._staging.blocks]
            staged = self._staging.first(len(part))
            began_s = time.perf_counter()
            try:
                arrived = self._client.get_into(part, staged.numpy()).hit_blocks
            except KvStoreError as fault:
                _log.warning("get failed after %d of %d blocks, the rest counts as a miss: %s", good, len(keys), fault)
                break
            fetched_s = time.perf_counter()
            if arrived:
                spread = slice(start, start + arrived)
                unpack(staged[:arrived], self._shape, all_keys[:, :, spread], all_values[:, :, spread])
            clock.transfer_s += fetched_s - began_s
            clock.unpack_s += time.perf_counter() - fetched_s
            good += arrived
            if arrived < len(part):
                break
        return good, clock

    def _store(self, tokens: NDArray[np.integer[Any]], layers: Sequence[tuple[Tensor, Tensor]]) -> PutResult:
        keys = self._client.keys(tokens)
        if len(keys) == 0:
            return PutResult(np.empty(0, np.uint8), 0)
        states = self._client.lookup(keys).states
        statuses = np.where(states == BlockState.COMMITTED, PutStatus.EXISTS, PutStatus.PENDING).astype(np.uint8)
        absent = np.flatnonzero(states == BlockState.ABSENT)
        if len(absent) == 0:
            return PutResult(statuses, 0)
        # Absent blocks are nearly always the tail. Where eviction left holes, what lies between is offered again.
        end = int(absent[-1]) + 1
        written = 0
        for start in range(int(absent[0]), end, self._staging.blocks):
            part = slice(start, min(end, start + self._staging.blocks))
            staged = self._staging.first(part.stop - part.start)
            pack(layers, start * self._shape.block_tokens, self._shape, staged)
            result = self._client.put(keys[part], staged.numpy())
            statuses[part] = result.statuses
            written += result.bytes
            lost = np.flatnonzero((result.statuses == PutStatus.FAILED) | (result.statuses == PutStatus.NO_ROOM))
            if len(lost):  # a prefix with a hole is no use beyond it: don't push more at a full or failing store
                statuses[part.stop : end] = result.statuses[lost[0]]
                break
        return PutResult(statuses, written)

    def _layer_tensors(self, blocks: int) -> tuple[Tensor, Tensor]:
        """K and V of all layers, uninitialised: [layers, kv_heads, blocks, block_tokens, head dim] each."""
        layout, tokens = self._shape.layout, self._shape.block_tokens
        shape = (layout.layers, layout.kv_heads, blocks, tokens)
        return (
            torch.empty(*shape, layout.head_dim, dtype=self._shape.dtype, device=self._device),
            torch.empty(*shape, layout.value_dim, dtype=self._shape.dtype, device=self._device),
        )

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._config)

    def _filled_cache(self, target: tuple[Tensor, Tensor], blocks: int) -> DynamicCache:
        if blocks == 0:
            return self._empty_cache()
        keys, values = (tensor[:, :, :blocks].flatten(2, 3).unsqueeze(1) for tensor in target)
        return filled_cache(self._config, list(zip(keys, values, strict=True)))


@dataclass(slots=True)
class _Clock:
    transfer_s: float = 0.0
    unpack_s: float = 0.0


@dataclass(slots=True)
class _Staging:
    """One buffer for the blocks in transit, uint8 [blocks, block_bytes]; it is kept and grows, up to a limit."""

    block_bytes: int
    limit_bytes: int
    _buffer: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))

    @property
    def blocks(self) -> int:
        """The most blocks that fit into what is kept; at least one."""
        return max(1, self.limit_bytes // self.block_bytes)

    def first(self, count: int) -> Tensor:
        """The first `count` rows. The next call gives the same memory again, unless that is more than `blocks`."""
        if count > self.blocks:
            return torch.empty(count, self.block_bytes, dtype=torch.uint8)
        if len(self._buffer) < count:
            # Zeros, written now: the first touch of fresh memory costs many times a copy, and belongs here, once.
            self._buffer = torch.empty(count, self.block_bytes, dtype=torch.uint8).fill_(0)
        return self._buffer[:count]


def _as_array(token_ids: TokenIds) -> NDArray[np.integer[Any]]:
    """One-dimensional integers: a list, an array, a tensor, or the [1, n] that a tokenizer gives."""
    tokens = np.asarray(token_ids)
    tokens = tokens[0] if tokens.ndim == 2 and len(tokens) == 1 else tokens
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise UsageError(
            f"token_ids of shape {tokens.shape} and dtype {tokens.dtype}: allowed are n integers of one prompt"
        )
    return tokens if tokens.size else np.empty(0, np.int64)


def _decoder_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config(decoder=True)


def _hub_name(config: PreTrainedConfig) -> str:
    name = cast(str, config.name_or_path)
    if not name or Path(name).exists():
        raise UsageError(
            f"model_id=None with a model from {name or 'no file'!r}: give the name that all workers use for it"
        )
    return name


def _settings_digest(config: PreTrainedConfig) -> str:
    settings = {name: getattr(config, name, None) for name in ("rope_parameters", "quantization_config")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _layout_of(config: PreTrainedConfig) -> CanonicalLayout:
    layers = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd:
        raise UsageError(
            f"{config.model_type} model with cache layers {', '.join(odd)}: only full attention (DynamicLayer) can be stored"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(
            f"{config.model_type} model with latent attention (kv_lora_rank): only plain K and V can be stored"
        )
    heads = cast(int, config.num_attention_heads)
    return CanonicalLayout(
        layers=len(layers),
        kv_heads=cast(int | None, getattr(config, "num_key_value_heads", None)) or heads,
        head_dim=cast(int | None, getattr(config, "head_dim", None)) or cast(int, config.hidden_size) // heads,
    )


def _shape_of(namespace: Namespace, layout: CanonicalLayout) -> BlockShape:
    if namespace.layout != layout:
        raise UsageError(f"client's namespace has {namespace.layout}: this model's is {layout}")
    return BlockShape(layout, namespace.block_tokens, cast(torch.dtype, getattr(torch, namespace.dtype)))


def _layers_of(cache: DynamicCache, shape: BlockShape) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer, checked: a store never takes what it can't give back. Empty for a cache without tokens."""
    tokens, layout = cache.get_seq_length(), shape.layout
    if tokens == 0:
        return []
    layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    if not len(layers) == len(cache.layers) == layout.layers:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise UsageError(
            f"cache of {len(cache.layers)} layers ({kinds}): allowed are this model's {layout.layers} of DynamicLayer"
        )
    expected = tuple((1, layout.kv_heads, tokens, dim) for dim in (layout.head_dim, layout.value_dim))
    pairs = [(cast(Tensor, layer.keys), cast(Tensor, layer.values)) for layer in layers]
    for index, pair in enumerate(pairs):
        for tensor, wanted in zip(pair, expected, strict=True):
            if tuple(tensor.shape) != wanted or tensor.dtype != shape.dtype:
                raise UsageError(
                    f"cache layer {index} of shape {tuple(tensor.shape)} and {tensor.dtype}: "
                    f"allowed is {wanted} and {shape.dtype}, one sequence of this model"
                )
    return pairs
