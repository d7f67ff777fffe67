import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import NamespaceMismatch, UsageError
from kvstore.core.keys import KeyScheme, chain_keys
from kvstore.core.layout import CanonicalLayout, Layout, OpaqueLayout
from kvstore.core.namespace import ITEM_BYTES, Namespace

CANONICAL = CanonicalLayout(layers=4, kv_heads=2, head_dim=8)
OPAQUE = OpaqueLayout(tag="engine/v1", layers=4, layer_bytes_per_block=1024)
BASE: dict[str, Any] = {
    "model": "org/model",
    "revision": "0a1b2c3d",
    "dtype": "float16",
    "block_tokens": 4,
    "layout": CANONICAL,
    "pipeline": (0, 2),
    "adapter": b"adapter digest",
    "tenant": b"salt",
}
# At least one other value of every field; a new field without one fails test_every_field_of_a_noun_has_another_value.
NAMESPACE_CHANGES: dict[str, list[Any]] = {
    "model": ["org/model2", "org/Model", "org/model "],
    "revision": ["0a1b2c3e"],
    "dtype": ["bfloat16", "int8"],
    "block_tokens": [2],
    "layout": [OPAQUE],
    "pipeline": [(1, 2), (0, 1), (0, 3)],
    "adapter": [b"", b"another digest"],
    "tenant": [b"", b"Salt"],
}
CANONICAL_CHANGES: dict[str, list[Any]] = {
    "layers": [5],
    "kv_heads": [4],
    "head_dim": [16],
    "head_dim_v": [16, 0],
    "key_order": ["dim"],
}
OPAQUE_CHANGES: dict[str, list[Any]] = {"tag": ["engine/v2"], "layers": [5], "layer_bytes_per_block": [2048]}

NAMESPACE = Namespace(**BASE)
TOKENS = list(range(40))
SCHEMES = [KeyScheme(), KeyScheme("blake3")]


def flat(changes: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in changes.items() for value in values]


def assert_nothing_shared(ours: Namespace, theirs: Namespace, scheme: KeyScheme) -> None:
    assert ours != theirs
    assert ours.digest != theirs.digest
    ours_keys, theirs_keys = (chain_keys(space, TOKENS, scheme=scheme).array for space in (ours, theirs))
    for word in ("hi", "lo", "fp"):
        assert not set(ours_keys[word].tolist()) & set(theirs_keys[word].tolist())


@pytest.mark.parametrize(
    ("noun", "changes"),
    [(Namespace, NAMESPACE_CHANGES), (CanonicalLayout, CANONICAL_CHANGES), (OpaqueLayout, OPAQUE_CHANGES)],
)
def test_every_field_of_a_noun_has_another_value_in_these_tests(noun: Any, changes: dict[str, list[Any]]) -> None:
    assert set(changes) == {field.name for field in dataclasses.fields(noun) if field.init}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "value"), flat(NAMESPACE_CHANGES))
def test_a_change_of_any_one_field_changes_the_digest_and_every_key(name: str, value: Any, scheme: KeyScheme) -> None:
    assert_nothing_shared(NAMESPACE, dataclasses.replace(NAMESPACE, **{name: value}), scheme)


@pytest.mark.parametrize(("name", "value"), flat(CANONICAL_CHANGES))
def test_a_change_of_any_one_field_of_a_canonical_layout_changes_every_key(name: str, value: Any) -> None:
    layout = dataclasses.replace(CANONICAL, **{name: value})
    assert_nothing_shared(NAMESPACE, dataclasses.replace(NAMESPACE, layout=layout), KeyScheme())


@pytest.mark.parametrize(("name", "value"), flat(OPAQUE_CHANGES))
def test_a_change_of_any_one_field_of_an_opaque_layout_changes_every_key(name: str, value: Any) -> None:
    ours = dataclasses.replace(NAMESPACE, layout=OPAQUE)
    theirs = dataclasses.replace(NAMESPACE, layout=dataclasses.replace(OPAQUE, **{name: value}))
    assert_nothing_shared(ours, theirs, KeyScheme())


short_text = st.text("ab1", min_size=1, max_size=3)  # few letters, so that concatenations without lengths would collide
counts = st.integers(1, 12)
layouts: st.SearchStrategy[Layout] = st.one_of(
    st.builds(
        CanonicalLayout,
        layers=counts,
        kv_heads=counts,
        head_dim=counts,
        head_dim_v=st.none() | counts,
        key_order=st.sampled_from(["token", "dim"]),
    ),
    st.builds(OpaqueLayout, tag=short_text, layers=counts, layer_bytes_per_block=counts),
)
namespaces = st.builds(
    Namespace,
    model=short_text,
    revision=short_text,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    block_tokens=counts,
    layout=layouts,
    pipeline=st.tuples(st.integers(0, 3), st.integers(4, 6)),
    adapter=st.binary(max_size=2),
    tenant=st.binary(max_size=2),
)


@given(one=namespaces, other=namespaces)
def test_namespaces_are_equal_exactly_when_their_digests_are(one: Namespace, other: Namespace) -> None:
    assert (one == other) == (one.encoding == other.encoding) == (one.digest == other.digest)


@given(namespace=namespaces)
def test_a_description_survives_json(namespace: Namespace) -> None:
    assert Namespace.from_description(json.loads(json.dumps(namespace.describe()))) == namespace


@given(namespace=namespaces)
def test_a_copy_or_pickle_of_a_namespace_is_the_same_namespace(namespace: Namespace) -> None:
    for twin in (copy.copy(namespace), copy.deepcopy(namespace), pickle.loads(pickle.dumps(namespace))):
        assert twin == namespace
        assert hash(twin) == hash(namespace)
        assert (twin.digest, twin.encoding) == (namespace.digest, namespace.encoding)


def test_a_left_out_value_head_size_is_the_key_head_size() -> None:
    assert CanonicalLayout(4, 2, 8) == CanonicalLayout(4, 2, 8, 8)
    spelled_out = dataclasses.replace(NAMESPACE, layout=CanonicalLayout(4, 2, 8, 8))
    assert spelled_out.digest == NAMESPACE.digest


def test_sizes_follow_from_layout_dtype_and_block_tokens() -> None:
    assert (NAMESPACE.layers, NAMESPACE.itemsize) == (4, 2)
    assert NAMESPACE.layer_bytes == 2 * (8 + 8) * 4 * 2  # heads x (K + V) x tokens x bytes
    assert NAMESPACE.block_bytes == 4 * NAMESPACE.layer_bytes
    opaque = dataclasses.replace(NAMESPACE, layout=OPAQUE, block_tokens=64, dtype="float32")
    assert (opaque.layer_bytes, opaque.block_bytes) == (1024, 4096)


def test_a_namespace_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NAMESPACE.model = "other"  # pyright: ignore[reportAttributeAccessIssue] - this is what must not work


def test_the_tenant_salt_is_in_neither_repr_nor_messages() -> None:
    namespace = dataclasses.replace(NAMESPACE, tenant=b"hunter2")
    assert "hunter2" not in repr(namespace)
    wrong: dict[str, Any] = {"tenant": "hunter2"}
    with pytest.raises(UsageError, match="tenant=<str>: allowed is bytes"):
        Namespace(**BASE | wrong)
    with pytest.raises(UsageError, match="tenant=<str>: allowed is text of hexadecimal bytes"):
        Namespace.from_description(namespace.describe() | wrong)


def test_a_revision_is_required() -> None:
    with pytest.raises(TypeError, match="revision"):
        Namespace(**{name: value for name, value in BASE.items() if name != "revision"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", "", "non-empty str"),
        ("model", None, "non-empty str"),
        ("model", "\ud800", "UTF-8"),
        ("revision", "", "non-empty str, the commit or digest of the weights"),
        ("revision", "  ", "non-empty str"),
        ("revision", 7, "non-empty str"),
        ("dtype", "fp16", "one of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8"),
        ("dtype", float, "one of float32"),
        ("dtype", ["float16"], "one of float32"),
        ("block_tokens", 0, "an int from 1 to 65535"),
        ("block_tokens", -16, "an int from 1 to 65535"),
        ("block_tokens", 16.0, "an int from 1 to 65535"),
        ("block_tokens", True, "an int from 1 to 65535"),
        ("layout", "canonical", "a CanonicalLayout or an OpaqueLayout"),
        ("pipeline", (2, 2), "0 <= part < parts"),
        ("pipeline", (-1, 2), "0 <= part < parts"),
        ("pipeline", (0, 0), "0 <= part < parts"),
        ("pipeline", (0, True), "ints"),
        ("pipeline", (False, 1), "ints"),
        ("pipeline", (0,), "a tuple"),
        ("pipeline", [0, 1], "a tuple"),
        ("pipeline", 0, "a tuple"),
        ("adapter", "my-lora", "bytes, a digest of the content"),
        ("adapter", 1, "bytes, a digest of the content"),  # a load index depends on the order of loading
        ("adapter", None, "bytes"),
    ],
)
def test_a_wrong_field_is_named_in_one_line_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Namespace(**BASE | {name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name}={value!r}: allowed is ")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"colour": "red"}, "'colour' is unknown; the fields are model, revision"),
        ({"layout": None}, "layout description None: allowed is a mapping"),
        ({"layout": {"kind": "fused"}}, "layout kind='fused': allowed is one of canonical, opaque"),
        ({"layout": {"kind": ["canonical"]}}, "allowed is one of canonical, opaque"),
        ({"layout": CANONICAL.describe() | {"key_order": "head"}}, "key_order='head': allowed is 'token' or 'dim'"),
        ({"layout": OPAQUE.describe() | {"key_order": "dim"}}, "opaque layout description: 'key_order' is unknown"),
        ({"layout": {"kind": "opaque", "tag": "t"}}, "opaque layout description: 'layer_bytes_per_block' is missing"),
        ({"adapter": "no hex"}, "adapter='no hex': allowed is text of hexadecimal bytes"),
        ({"adapter": None}, "adapter=None: allowed is text of hexadecimal bytes"),
        ({"pipeline": [3, 2]}, "0 <= part < parts"),
        ({"block_tokens": 16.5}, "block_tokens=16.5: allowed is an int"),
    ],
)
def test_a_wrong_description_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Namespace.from_description(NAMESPACE.describe() | change)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in NAMESPACE.describe() if name != "digest"])
def test_a_description_without_a_field_is_refused_by_name(name: str) -> None:
    description = NAMESPACE.describe()
    del description[name]
    with pytest.raises(UsageError, match=f"'{name}' is missing"):
        Namespace.from_description(description)


def test_a_description_that_is_no_mapping_is_refused() -> None:
    wrong: Any = ["model", "revision"]
    with pytest.raises(UsageError, match="allowed is a mapping"):
        Namespace.from_description(wrong)


def test_a_description_whose_digest_does_not_fit_its_fields_is_a_mismatch() -> None:
    with pytest.raises(NamespaceMismatch, match=f"digest='{NAMESPACE.digest.hex()}': the described fields give"):
        Namespace.from_description(NAMESPACE.describe() | {"revision": "another"})
