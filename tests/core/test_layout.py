import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.core.errors import UsageError
from kvstore.core.layout import CanonicalLayout, OpaqueLayout

small = st.integers(1, 5)
canonical_layouts = st.builds(
    CanonicalLayout, layers=small, kv_heads=small, head_dim=small, head_dim_v=st.none() | st.integers(0, 5)
)
opaque_layouts = st.builds(
    OpaqueLayout,
    tag=st.text("ab/1", min_size=1, max_size=5),
    layers=small,
    layer_bytes_per_block=small,
)
LAYOUT = CanonicalLayout(layers=3, kv_heads=4, head_dim=8)


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut [0, size) into consecutive ranges, empty ones among them."""
    inner = st.lists(st.integers(0, size), max_size=4).map(sorted)
    return inner.map(lambda at: list(zip([0, *at], [*at, size], strict=True)))


def bytes_of(layout: CanonicalLayout, block_tokens: int, itemsize: int) -> NDArray[np.int64]:
    """The offset of each byte of a block, by [layer][head][byte of the head]."""
    shape = (layout.layers, layout.kv_heads, layout.head_bytes(block_tokens, itemsize))
    return np.arange(layout.layers * layout.layer_bytes(block_tokens, itemsize)).reshape(shape)


@given(layout=canonical_layouts, block_tokens=small, itemsize=st.sampled_from([1, 2, 4]), data=st.data())
def test_layer_ranges_times_head_ranges_tile_the_block_exactly(
    layout: CanonicalLayout, block_tokens: int, itemsize: int, data: st.DataObject
) -> None:
    touched = np.zeros(layout.layers * layout.layer_bytes(block_tokens, itemsize), np.uint8)
    heads = data.draw(cuts(layout.kv_heads))
    for layer_lo, layer_hi in data.draw(cuts(layout.layers)):
        for head_lo, head_hi in heads:
            for offset, length in layout.head_range(layer_lo, layer_hi, head_lo, head_hi, block_tokens, itemsize):
                touched[offset : offset + length] += 1
    assert np.all(touched == 1)


@given(layout=canonical_layouts, block_tokens=small, itemsize=st.sampled_from([1, 2, 4]), data=st.data())
def test_a_range_is_its_layers_and_heads_in_order_in_the_fewest_runs(
    layout: CanonicalLayout, block_tokens: int, itemsize: int, data: st.DataObject
) -> None:
    layer_lo, layer_hi = sorted(data.draw(st.tuples(*[st.integers(0, layout.layers)] * 2)))
    head_lo, head_hi = sorted(data.draw(st.tuples(*[st.integers(0, layout.kv_heads)] * 2)))
    runs = layout.head_range(layer_lo, layer_hi, head_lo, head_hi, block_tokens, itemsize)
    expected = bytes_of(layout, block_tokens, itemsize)[layer_lo:layer_hi, head_lo:head_hi].ravel()
    assert [byte for offset, length in runs for byte in range(offset, offset + length)] == expected.tolist()
    assert all(length > 0 for _, length in runs)
    ends = [offset + length for offset, length in runs]
    assert all(end < offset for end, (offset, _) in zip(ends, runs[1:], strict=False))  # else they were one run


def test_all_heads_of_any_layer_range_are_one_run() -> None:
    layer_bytes = LAYOUT.layer_bytes(16, 2)
    assert LAYOUT.head_range(1, 3, 0, 4, 16, 2) == [(layer_bytes, 2 * layer_bytes)]


def test_writers_of_four_parts_and_readers_of_two_share_a_block() -> None:
    block = np.arange(3 * LAYOUT.layer_bytes(16, 2)).astype(np.uint8)
    written = np.zeros_like(block)
    for rank in range(4):
        for offset, length in LAYOUT.head_range(0, 3, rank, rank + 1, 16, 2):
            written[offset : offset + length] = block[offset : offset + length]
    halves = bytes_of(LAYOUT, 16, 2)
    for rank in range(2):
        runs = LAYOUT.head_range(0, 3, 2 * rank, 2 * rank + 2, 16, 2)
        read = np.concatenate([written[offset : offset + length] for offset, length in runs])
        assert np.array_equal(read, block[halves[:, 2 * rank : 2 * rank + 2].ravel()])


def test_a_head_is_its_keys_then_its_values() -> None:
    layout = CanonicalLayout(layers=2, kv_heads=3, head_dim=8, head_dim_v=4)
    keys_bytes, values_bytes = 16 * 8 * 2, 16 * 4 * 2  # tokens x dim x itemsize
    assert layout.head_bytes(16, 2) == keys_bytes + values_bytes
    assert layout.head_range(1, 2, 1, 2, 16, 2) == [(4 * (keys_bytes + values_bytes), keys_bytes + values_bytes)]


def test_a_latent_cache_has_no_values() -> None:
    layout = CanonicalLayout(layers=61, kv_heads=1, head_dim=576, head_dim_v=0)
    assert layout.value_dim == 0
    assert layout.layer_bytes(64, 1) == 64 * 576


def test_an_opaque_layer_has_the_size_it_declares() -> None:
    assert OpaqueLayout("engine/v1", 12, 98_304).layer_bytes(block_tokens=7, itemsize=3) == 98_304


@given(layout=canonical_layouts | opaque_layouts)
def test_a_copy_or_pickle_of_a_layout_is_the_same_layout(layout: CanonicalLayout | OpaqueLayout) -> None:
    for twin in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert twin.encode() == layout.encode()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("layers", 0, "an int from 1 to 65535"),
        ("layers", 65_536, "an int from 1 to 65535"),
        ("layers", "3", "an int from 1 to 65535"),
        ("kv_heads", 0, "an int from 1 to 65535"),
        ("kv_heads", 2.0, "an int from 1 to 65535"),
        ("head_dim", -8, "an int from 1 to 65535"),
        ("head_dim", True, "an int from 1 to 65535"),
        ("head_dim_v", -1, "an int from 0 to 65535"),
    ],
)
def test_a_wrong_field_of_a_canonical_layout_is_named(name: str, value: Any, allowed: str) -> None:
    fields: dict[str, Any] = {"layers": 3, "kv_heads": 4, "head_dim": 8, name: value}
    with pytest.raises(UsageError) as refusal:
        CanonicalLayout(**fields)
    assert str(refusal.value) == f"{name}={value!r}: allowed is {allowed}"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("tag", "", "allowed is a non-empty str"),
        ("tag", None, "allowed is a non-empty str"),
        ("layers", 0, "allowed is an int from 1 to 65535"),
        ("layer_bytes_per_block", 0, "allowed is an int from 1 to 1099511627776"),
    ],
)
def test_a_wrong_field_of_an_opaque_layout_is_named(name: str, value: Any, allowed: str) -> None:
    fields: dict[str, Any] = {"tag": "t", "layers": 3, "layer_bytes_per_block": 8, name: value}
    with pytest.raises(UsageError) as refusal:
        OpaqueLayout(**fields)
    assert str(refusal.value).startswith(f"{name}={value!r}: {allowed}")


@pytest.mark.parametrize(
    ("bounds", "culprit"),
    [
        ((0, 4, 0, 4), "layer range [0, 4): allowed is 0 <= low <= high <= 3"),
        ((-1, 2, 0, 4), "layer range [-1, 2): allowed is 0 <= low <= high <= 3"),
        ((2, 1, 0, 4), "layer range [2, 1): allowed is 0 <= low <= high <= 3"),
        ((0, 3, 0, 5), "head range [0, 5): allowed is 0 <= low <= high <= 4"),
    ],
)
def test_a_range_that_leaves_the_block_is_refused(bounds: tuple[int, int, int, int], culprit: str) -> None:
    with pytest.raises(UsageError) as refusal:
        LAYOUT.head_range(*bounds, block_tokens=16, itemsize=2)
    assert str(refusal.value) == culprit
