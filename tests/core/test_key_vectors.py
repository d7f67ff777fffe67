"""The golden vectors, checked by the library and by a second implementation written from docs/keys.md alone."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keys import KeyScheme, chain_keys, keys_from_digests
from kvstore.core.layout import CanonicalLayout
from kvstore.core.namespace import Namespace

GOLDEN = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text())
VECTORS: list[dict[str, Any]] = GOLDEN["vectors"]
DIGEST_VECTORS: list[dict[str, Any]] = GOLDEN["digest_vectors"]


def by_name(vector: dict[str, Any]) -> str:
    return vector["name"]


def keys_by_the_document(
    space: dict[str, Any], algorithm: str, seed: int, tokens: list[int], extra: dict[int, bytes]
) -> dict[str, Any]:
    """docs/keys.md from top to bottom. Shares no line with the library, on purpose."""
    layout = space["layout"]
    if layout["kind"] == "canonical":
        parts = ["canonical", layout["layers"], layout["kv_heads"], layout["head_dim"], layout["head_dim_v"]]
    else:
        parts = ["opaque", layout["tag"], layout["layers"], layout["layer_bytes_per_block"]]
    layout_bytes = b""
    for part in parts:
        raw = str(part).encode("utf-8")
        layout_bytes += struct.pack("<I", len(raw)) + raw

    encoding = b"kvstore-namespace-v1"
    for raw in (
        space["model"].encode("utf-8"),
        space["revision"].encode("utf-8"),
        space["dtype"].encode("utf-8"),
        b"%d" % space["block_tokens"],
        layout_bytes,
        b"%d" % space["pipeline"][0],
        b"%d" % space["pipeline"][1],
        bytes.fromhex(space["adapter"]),
        bytes.fromhex(space["tenant"]),
    ):
        encoding += struct.pack("<I", len(raw)) + raw

    digest = hashlib.sha256(encoding).digest()[:16]
    first_fingerprint = hashlib.sha256(b"kvstore-fingerprint-v1" + encoding).digest()[:8]
    hash_key = hashlib.sha256(b"kvstore-blake3-key-v1" + struct.pack("<Q", seed)).digest()

    keys: list[str] = []
    k, f = digest, first_fingerprint
    size = space["block_tokens"]
    for i in range(len(tokens) // size):
        step = b""
        for token in tokens[i * size : (i + 1) * size]:
            step += struct.pack("<i", token)
        if i in extra:
            step += struct.pack("<I", len(extra[i])) + extra[i]
        if algorithm == "xxh3-128":
            # The canonical form, spelled out: the number, most significant byte first.
            k = xxhash.xxh3_128_intdigest(k + step, seed=seed).to_bytes(16, "big")
            f = xxhash.xxh64_intdigest(f + step, seed=seed ^ 0x9E3779B97F4A7C15).to_bytes(8, "big")
        else:
            both = blake3(k + f + step, key=hash_key).digest(length=24)
            k, f = both[:16], both[16:24]
        keys.append(k.hex() + ":" + f.hex())
    answer = {
        "encoding": encoding.hex(),
        "digest": digest.hex(),
        "first_fingerprint": first_fingerprint.hex(),
        "keys": keys,
    }
    return answer | ({"hash_key": hash_key.hex()} if algorithm == "blake3" else {})


@pytest.mark.parametrize("vector", VECTORS, ids=by_name)
def test_the_library_computes_the_golden_vectors(vector: dict[str, Any]) -> None:
    namespace = Namespace.from_description(vector["namespace"])
    scheme = KeyScheme(vector["algorithm"], seed=int(vector["seed"], 16))
    extra = {index: bytes.fromhex(text) for index, text in vector["extra"]}
    assert namespace.encoding.hex() == vector["encoding"]
    assert namespace.digest.hex() == vector["digest"]
    assert chain_keys(namespace, vector["tokens"], extra=extra, scheme=scheme).hex() == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS, ids=by_name)
def test_the_document_alone_computes_the_golden_vectors(vector: dict[str, Any]) -> None:
    extra = {index: bytes.fromhex(text) for index, text in vector["extra"]}
    answer = keys_by_the_document(
        vector["namespace"], vector["algorithm"], int(vector["seed"], 16), vector["tokens"], extra
    )
    assert answer == {name: vector[name] for name in answer}
    assert ("hash_key" in vector) == ("hash_key" in answer)


def test_the_vectors_cover_both_algorithms_both_layouts_seeds_and_extras() -> None:
    assert {vector["algorithm"] for vector in VECTORS} == {"xxh3-128", "blake3"}
    assert {vector["namespace"]["layout"]["kind"] for vector in VECTORS} == {"canonical", "opaque"}
    for algorithm in ("xxh3-128", "blake3"):
        seeds = {vector["seed"] for vector in VECTORS if vector["algorithm"] == algorithm}
        assert len(seeds) > 1
        assert any(vector["extra"] for vector in VECTORS if vector["algorithm"] == algorithm)


@given(
    block_tokens=st.integers(1, 80),
    seed=st.integers(0, 2**64 - 1),
    algorithm=st.sampled_from(["xxh3-128", "blake3"]),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=200),
    data=st.data(),
)
def test_library_and_document_agree_on_any_prompt(
    block_tokens: int, seed: int, algorithm: Any, tokens: list[int], data: st.DataObject
) -> None:
    namespace = Namespace(
        model="m", revision="r", dtype="uint8", block_tokens=block_tokens, layout=CanonicalLayout(1, 1, 1)
    )
    blocks = -(-len(tokens) // block_tokens)
    extras = st.dictionaries(st.integers(0, blocks - 1), st.binary(min_size=1, max_size=300), max_size=3)
    extra: dict[int, bytes] = data.draw(extras) if blocks else {}
    keys = chain_keys(namespace, tokens, extra=extra, scheme=KeyScheme(algorithm, seed))
    assert keys.hex() == keys_by_the_document(namespace.describe(), algorithm, seed, tokens, extra)["keys"]


def digest_keys_by_the_document(vector: dict[str, Any]) -> list[str]:
    """docs/keys.md, section 5, from what section 1 gives. Shares no line with the library, on purpose."""
    seed = int(vector["seed"], 16)
    k, f = bytes.fromhex(vector["digest"]), bytes.fromhex(vector["first_fingerprint"])
    keys: list[str] = []
    for text in vector["digests"]:
        step = struct.pack("<i", -1) + bytes.fromhex(text)
        if vector["algorithm"] == "xxh3-128":
            key = xxhash.xxh3_128_intdigest(k + step, seed=seed).to_bytes(16, "big").hex()
            keys.append(key + ":" + xxhash.xxh64_intdigest(f + step, seed=seed ^ 0x9E3779B97F4A7C15).to_bytes(8).hex())
        else:
            hash_key = hashlib.sha256(b"kvstore-blake3-key-v1" + struct.pack("<Q", seed)).digest()
            both = blake3(k + f + step, key=hash_key).hexdigest(length=24)
            keys.append(both[:32] + ":" + both[32:])
    return keys


@pytest.mark.parametrize("vector", DIGEST_VECTORS, ids=by_name)
def test_library_and_document_compute_the_golden_keys_of_digests(vector: dict[str, Any]) -> None:
    namespace = Namespace.from_description(vector["namespace"])
    scheme = KeyScheme(vector["algorithm"], seed=int(vector["seed"], 16))
    digests = [bytes.fromhex(text) for text in vector["digests"]]
    assert namespace.digest.hex() == vector["digest"]
    assert keys_from_digests(namespace, digests, scheme=scheme).hex() == vector["keys"]
    assert digest_keys_by_the_document(vector) == vector["keys"]
