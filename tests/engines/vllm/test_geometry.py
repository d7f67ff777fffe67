"""Where K and V lie in a worker's cache is found by asking; blocks survive the way to the store's order and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from engine_adapters.vllm.geometry import ORDERS, Geometry, Order, Ranks, Unsupported, find_order, measure
from kvstore import CanonicalLayout, OpaqueLayout

current_platform.import_kernels()

BLOCKS, TOKENS = 5, 32
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def spec_of(heads: int = 2, head: int = 64, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=head, dtype=torch.float32, **more)


def config_of(spec: Any, blocks: int = BLOCKS, groups: int = 1) -> KVCacheConfig:
    grouped = [KVCacheGroupSpec(list(NAMES), spec) for _ in range(groups)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=grouped)


def caches_of(spec: FullAttentionSpec, *, token_major: bool = False, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """Caches as vLLM registers them: logical [blocks, heads, tokens, content], head-major in memory or token-major."""
    heads, content = spec.num_kv_heads, spec.head_size + spec.head_size_v
    if token_major:
        made = [torch.randn(blocks, TOKENS, heads, content).transpose(1, 2) for _ in NAMES]
    else:
        made = [torch.randn(blocks, heads, TOKENS, content) for _ in NAMES]
    return dict(zip(NAMES, made, strict=True))


def writes_in(order: Order) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A backend that arranges K and V in this order."""

    def probe(keys: Tensor, values: Tensor, cache: Tensor) -> None:
        views = order.split(cache, keys.shape[-1])
        views.keys[0].copy_(keys.transpose(0, 1))
        views.values[0].copy_(values.transpose(0, 1))

    return probe


def cpu_backend(isa: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The kernel of vLLM itself."""

    def probe(keys: Tensor, values: Tensor, cache: Tensor) -> None:
        blocks, heads, tokens, _ = cache.shape
        k, v = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        slots = torch.arange(tokens)
        ops.cpu_attn_reshape_and_cache(keys, values, k, v, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    return probe


def measured(spec: FullAttentionSpec, order: Order, wanted: Any = "auto", *, token_major: bool = False) -> Geometry:
    probes = dict.fromkeys(NAMES, writes_in(order))
    caches = caches_of(spec, token_major=token_major)
    return measure(config_of(spec), caches, probes, Ranks(kv_heads=spec.num_kv_heads), wanted=wanted, backend="TEST")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [32, 64, 128])
def test_vllms_cpu_backend_keeps_k_transposed_and_that_is_found_out(head: int, dtype: torch.dtype) -> None:
    spec = spec_of(3, head)
    cache = torch.zeros(BLOCKS, 3, TOKENS, 2 * head, dtype=dtype)
    found = find_order(cache, spec, [cpu_backend("vec")] * 2, 2)
    assert found is not None
    assert found.name == "k transposed, v"


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_each_known_order_is_told_from_the_others(order: Order) -> None:
    cache = caches_of(spec_of())[NAMES[0]]
    assert find_order(cache, spec_of(), [writes_in(order)] * 2, 2) is order


def test_an_order_that_nobody_knows_a_backend_that_cannot_be_asked_and_two_that_differ_are_no_order() -> None:
    cache = caches_of(spec_of())[NAMES[0]]

    def swapped(keys: Tensor, values: Tensor, scratch: Tensor) -> None:
        writes_in(ORDERS[0])(values, keys, scratch)

    def refusing(keys: Tensor, values: Tensor, scratch: Tensor) -> None:
        raise NotImplementedError

    for probes in ([swapped] * 2, [refusing] * 2, [writes_in(ORDERS[0]), writes_in(ORDERS[1])], [writes_in(ORDERS[0])]):
        assert find_order(cache, spec_of(), probes, 2) is None


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_blocks_in_the_canonical_order_hold_each_heads_k_and_then_its_v(order: Order, token_major: bool) -> None:
    if token_major and order.key_order is not None:
        pytest.skip("planes within a head go with head-major memory")
    spec = spec_of()
    geometry = measured(spec, order, "canonical", token_major=token_major)
    keys, values = torch.randn(TOKENS, 2, 64), torch.randn(TOKENS, 2, 64)
    writes_in(order)(keys, values, geometry.memory.caches[1][3:4])
    expected = torch.stack([keys.transpose(0, 1), values.transpose(0, 1)], 1).flatten()
    if geometry.order is None:  # the engine's own bytes are those already
        found = geometry.memory.buffers[1].view(-1, geometry.memory.slice_bytes)[3]
    else:
        found = geometry.to_canonical(1, torch.tensor([3]))[0]
    assert torch.equal(found.view(torch.float32), expected)


@pytest.mark.parametrize("token_major", [False, True])
@settings(deadline=None)
@given(ids=st.permutations(range(BLOCKS)), count=st.integers(1, BLOCKS))
def test_what_left_in_the_canonical_order_comes_back_as_it_was_and_nothing_else_changes(
    ids: list[int], count: int, token_major: bool
) -> None:
    for order in (ORDERS[0], ORDERS[2]):
        if token_major and order.key_order is not None:
            continue
        geometry = measured(spec_of(), order, "canonical", token_major=token_major)
        before = geometry.memory.caches[1].clone()
        chosen = torch.tensor(ids[:count])
        leaving = geometry.to_canonical(1, chosen)
        arriving = geometry.memory.buffers[1].view(-1, geometry.memory.slice_bytes)
        arriving[chosen * geometry.memory.stride] = leaving
        geometry.from_canonical(1, chosen)
        assert torch.equal(geometry.memory.caches[1], before)


def test_head_major_blocks_of_the_cpu_backend_move_as_they_are_and_say_so_in_their_layout() -> None:
    geometry = measured(spec_of(), ORDERS[0])
    assert geometry.layout == CanonicalLayout(2, 2, 64, key_order="dim")
    assert geometry.order is None
    assert measured(spec_of(), ORDERS[0], "canonical").layout == CanonicalLayout(2, 2, 64)


def test_an_opaque_layout_names_backend_strides_and_rank() -> None:
    def tag(ranks: Ranks, *, token_major: bool = False, backend: str = "A") -> str:
        spec = spec_of()
        caches = caches_of(spec, token_major=token_major)
        found = measure(config_of(spec), caches, {}, ranks, wanted="opaque", backend=backend)
        assert isinstance(found.layout, OpaqueLayout)
        assert found.heads is None
        return found.layout.tag

    two = [tag(Ranks(rank, 2, 4)) for rank in (0, 1)]
    tags = [tag(Ranks(kv_heads=2)), tag(Ranks(kv_heads=2), token_major=True), tag(Ranks(kv_heads=2), backend="B"), *two]
    assert len(set(tags)) == len(tags)


def test_every_rank_has_the_same_latent_blocks_and_the_first_one_writes_them() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, head_size_v=0, dtype=torch.float32)
    caches = {name: torch.randn(BLOCKS, 1, TOKENS, 576) for name in NAMES}
    found = [measure(config_of(spec), caches, {}, Ranks(rank, 4, 1), wanted="auto", backend="MLA") for rank in range(4)]
    assert len({geometry.layout for geometry in found}) == 1
    assert [geometry.writes for geometry in found] == [True, False, False, False]


@given(kv_heads=st.sampled_from([1, 2, 3, 4, 8, 32]), tp_size=st.sampled_from([1, 2, 4, 8, 16]))
def test_the_ranks_that_write_hold_every_head_exactly_once(kv_heads: int, tp_size: int) -> None:
    if max(kv_heads, tp_size) % min(kv_heads, tp_size):
        return  # vLLM refuses such a split
    mine = max(1, kv_heads // tp_size)
    written: list[int] = []
    for rank in range(tp_size):
        ranks = Ranks(rank, tp_size, kv_heads)
        first, end = ranks.heads(mine)
        assert end - first == mine
        if ranks.writes(mine):
            written += range(first, end)
    assert sorted(written) == list(range(kv_heads))


def test_blocks_of_all_layers_side_by_side_are_reached_by_their_stride() -> None:
    """The block-outermost layouts of vLLM: a block's layers lie together, and the next block comes after them."""
    spec = spec_of()
    memory = torch.randn(BLOCKS, len(NAMES), 2, TOKENS, 128)
    caches = {name: memory[:, layer] for layer, name in enumerate(NAMES)}
    probes = dict.fromkeys(NAMES, writes_in(ORDERS[0]))
    geometry = measure(config_of(spec), caches, probes, Ranks(kv_heads=2), wanted="auto", backend="TEST")
    assert geometry.memory.stride == len(NAMES)
    for layer in range(len(NAMES)):
        slices = geometry.memory.buffers[layer]
        for block in range(BLOCKS):
            at = block * geometry.memory.stride * geometry.memory.slice_bytes
            found = slices[at : at + geometry.memory.slice_bytes].view(torch.float32)
            assert torch.equal(found, memory[block, layer].flatten())


@pytest.mark.parametrize(
    ("config", "caches", "reason"),
    [
        (config_of(spec_of(), groups=2), caches_of(spec_of()), "2 groups of layers that cache differently"),
        (
            config_of(MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,))),
            caches_of(spec_of()),
            "a KV cache of kind MambaSpec",
        ),
        (config_of(spec_of()), {}, "no layer of this worker has a KV cache"),
        (config_of(spec_of(), blocks=3), caches_of(spec_of()), "5 blocks of the backend for 3 of the scheduler"),
        (
            config_of(spec_of()),
            {NAMES[0]: torch.zeros(5, 2, 32, 128), NAMES[1]: torch.zeros(5, 2, 32, 64)},
            "layers differ in shape",
        ),
        (
            config_of(spec_of()),
            {name: torch.zeros(5, 2, 32, 256)[..., :128] for name in NAMES},
            "has gaps",
        ),
    ],
)
def test_what_the_store_cannot_hold_is_named_in_one_line(
    config: KVCacheConfig, caches: dict[str, Tensor], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        measure(config, caches, {}, Ranks(kv_heads=2), wanted="auto", backend="TEST")


def test_the_canonical_layout_is_refused_where_the_order_is_not_known() -> None:
    with pytest.raises(Unsupported, match="layout='canonical': where TEST keeps K and V could not be found out"):
        measure(config_of(spec_of()), caches_of(spec_of()), {}, Ranks(kv_heads=2), wanted="canonical", backend="TEST")
