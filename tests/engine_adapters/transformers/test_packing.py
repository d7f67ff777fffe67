"""Blocks are the canonical bytes, and come back as the tensors they were made from, bit for bit."""

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_adapters.transformers.packing import BlockShape, pack, unpack
from kvstore import CanonicalLayout

ITEM_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
FILL = 0xA5
Layers = list[tuple[torch.Tensor, torch.Tensor]]

layouts = st.builds(
    CanonicalLayout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    head_dim_v=st.one_of(st.none(), st.integers(1, 9)),
)
dtypes = st.sampled_from(sorted(ITEM_BYTES, key=str))


def random_layers(layout: CanonicalLayout, tokens: int, dtype: torch.dtype, seed: int) -> Layers:
    """K and V of each layer, [1, kv_heads, tokens, head dim], of random bits: NaNs and infinities too."""
    rng = np.random.default_rng(seed)

    def tensor(dim: int):
        raw = rng.integers(0, 256, (1, layout.kv_heads, tokens, dim * ITEM_BYTES[dtype]), np.uint8)
        return torch.as_tensor(raw).view(dtype)

    return [(tensor(layout.head_dim), tensor(layout.value_dim)) for _ in range(layout.layers)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def canonical_block(layers: Layers, first_token: int, block_tokens: int) -> bytes:
    """The definition, one piece after the other: [layer][kv_head][k|v][token][head_dim]."""
    return b"".join(
        bits(tensor[0, head, first_token : first_token + block_tokens])
        for keys, values in layers
        for head in range(keys.shape[1])
        for tensor in (keys, values)
    )


@settings(deadline=None, max_examples=60)
@given(layouts, dtypes, st.integers(1, 8), st.integers(1, 5), st.integers(0, 3), st.integers(0, 7), st.integers(0, 99))
@example(CanonicalLayout(layers=2, kv_heads=3, head_dim=4), torch.float32, 4, 2, 0, 0, 0)  # ends on a block edge
@example(CanonicalLayout(layers=1, kv_heads=1, head_dim=1), torch.bfloat16, 1, 1, 0, 0, 0)  # the smallest block
def test_packed_blocks_are_the_canonical_bytes_and_unpack_to_the_same_tensors(
    layout: CanonicalLayout, dtype: torch.dtype, block_tokens: int, blocks: int, skipped: int, rest: int, seed: int
) -> None:
    first_token = skipped * block_tokens
    layers = random_layers(layout, first_token + blocks * block_tokens + rest, dtype, seed)
    shape = BlockShape(layout, block_tokens, dtype)
    block_bytes = layout.layers * layout.layer_bytes(block_tokens, ITEM_BYTES[dtype])
    staging = torch.full((blocks, block_bytes), FILL, dtype=torch.uint8)

    pack(layers, first_token, shape, staging)

    for index in range(blocks):
        assert bits(staging[index]) == canonical_block(layers, first_token + index * block_tokens, block_tokens)

    lead = (layout.layers, layout.kv_heads, blocks, block_tokens)
    keys = torch.empty(*lead, layout.head_dim, dtype=dtype)
    values = torch.empty(*lead, layout.value_dim, dtype=dtype)
    unpack(staging, shape, keys, values)
    packed = slice(first_token, first_token + blocks * block_tokens)
    for index, (layer_keys, layer_values) in enumerate(layers):
        assert bits(keys[index].flatten(1, 2)) == bits(layer_keys[0, :, packed])
        assert bits(values[index].flatten(1, 2)) == bits(layer_values[0, :, packed])


def test_a_layer_and_head_range_of_a_packed_block_is_where_the_layout_says() -> None:
    layout = CanonicalLayout(layers=3, kv_heads=2, head_dim=4)
    shape = BlockShape(layout, 2, torch.float32)
    layers = random_layers(layout, 2, torch.float32, seed=1)
    staging = torch.empty(1, layout.layers * layout.layer_bytes(2, 4), dtype=torch.uint8)
    pack(layers, 0, shape, staging)

    [(offset, length)] = layout.head_range(1, 2, 1, 2, block_tokens=2, itemsize=4)

    keys, values = layers[1]
    assert bits(staging[0, offset : offset + length]) == bits(keys[0, 1]) + bits(values[0, 1])
