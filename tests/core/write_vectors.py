"""Writes tests/vectors/keys.json from the cases below: `python tests/core/write_vectors.py`.

Run it only to add a case. It refuses to change or drop a vector that is already in the file: keys are for ever, and a
change of the rules is a new version of the scheme.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.core.keys import BlockKeys, KeyScheme, chain_keys, keys_from_digests
from kvstore.core.layout import CanonicalLayout, OpaqueLayout
from kvstore.core.namespace import Namespace

VECTORS = Path(__file__).parents[1] / "vectors" / "keys.json"

SMALL = Namespace(
    model="org/model", revision="0a1b2c3d", dtype="float16", block_tokens=4, layout=CanonicalLayout(30, 3, 64)
)
USUAL = Namespace(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    dtype="bfloat16",
    block_tokens=16,
    layout=CanonicalLayout(layers=30, kv_heads=3, head_dim=64),
)
LATENT = Namespace(
    model="org/latent",
    revision="r1",
    dtype="float8_e4m3fn",
    block_tokens=64,
    layout=CanonicalLayout(layers=61, kv_heads=1, head_dim=576, head_dim_v=0),
)
EVERYTHING = Namespace(
    model="模型/größe",
    revision="v2",
    dtype="float32",
    block_tokens=8,
    layout=OpaqueLayout(tag="engine-x/paged-v3/tp1of4", layers=12, layer_bytes_per_block=98_304),
    pipeline=(1, 3),
    adapter=hashlib.sha256(b"adapter weights").digest(),
    tenant=b"tenant salt \x00\xff",
)
WIDE = Namespace(model="m", revision="r", dtype="int8", block_tokens=256, layout=CanonicalLayout(2, 8, 128, 64))

IMAGE = hashlib.sha256(b"an image").digest()
XXH3, SEEDED = KeyScheme(), KeyScheme(seed=0x0123456789ABCDEF)
BLAKE3, BLAKE3_SEEDED = KeyScheme("blake3"), KeyScheme("blake3", seed=2**64 - 1)

Case = tuple[str, Namespace, KeyScheme, Sequence[int], dict[int, bytes]]
CASES: list[Case] = [
    ("two blocks and a partial one", SMALL, XXH3, range(1, 11), {}),
    ("no full block has no key", SMALL, XXH3, [7, 8, 9], {}),
    ("the smallest and the largest token id", SMALL, XXH3, [0, 0, 0, 0, 2**31 - 1, 0, 1, 2**31 - 1], {}),
    ("usual block size", USUAL, XXH3, [(i * 2_654_435_761) % 49_152 for i in range(50)], {}),
    ("usual block size, seeded", USUAL, SEEDED, [(i * 2_654_435_761) % 49_152 for i in range(50)], {}),
    ("usual block size, blake3", USUAL, BLAKE3, [(i * 2_654_435_761) % 49_152 for i in range(50)], {}),
    ("largest seed, blake3", USUAL, BLAKE3_SEEDED, [(i * 2_654_435_761) % 49_152 for i in range(50)], {}),
    ("a salt is an extra of block 0", SMALL, XXH3, range(1, 13), {0: b"salt"}),
    ("an image begins in block 1", SMALL, XXH3, range(1, 13), {1: IMAGE}),
    ("extras of several blocks, one of them partial", SMALL, SEEDED, range(1, 15), {0: b"s", 2: IMAGE, 3: IMAGE}),
    ("an image begins in block 1, blake3", SMALL, BLAKE3_SEEDED, range(1, 13), {1: IMAGE}),
    ("a latent cache keeps no values", LATENT, XXH3, [i % 997 for i in range(128)], {}),
    ("all fields of a namespace", EVERYTHING, XXH3, range(100, 120), {1: b"\x00"}),
    ("all fields of a namespace, blake3", EVERYTHING, BLAKE3, range(100, 120), {1: b"\x00"}),
    ("steps of more than 1,024 bytes", WIDE, SEEDED, [i * i for i in range(512)], {0: bytes(range(256)) * 5}),
]

HASHES = [hashlib.sha256(page).digest() for page in (b"page 0", b"page 1")]
DigestCase = tuple[str, Namespace, KeyScheme, list[bytes]]
DIGEST_CASES: list[DigestCase] = [
    ("SHA-256 of two pages", SMALL, XXH3, HASHES),
    ("SHA-256 of two pages, seeded", EVERYTHING, SEEDED, HASHES),
    ("SHA-256 of two pages, blake3", EVERYTHING, BLAKE3_SEEDED, HASHES),
    ("the shortest and the longest digest", SMALL, XXH3, [b"\x00" * 16, bytes(range(64))]),
    ("no digest has no key", SMALL, XXH3, []),
]


def vector(name: str, namespace: Namespace, scheme: KeyScheme, tokens: Sequence[int], extra: dict[int, bytes]) -> Any:
    """One entry of the file; docs/keys.md, section 8."""
    told = {"tokens": list(tokens), "extra": [[index, digest.hex()] for index, digest in sorted(extra.items())]}
    return _entry(name, namespace, scheme, told, chain_keys(namespace, tokens, extra=extra, scheme=scheme))


def digest_vector(name: str, namespace: Namespace, scheme: KeyScheme, digests: list[bytes]) -> Any:
    """One entry of the file's second list; docs/keys.md, section 8."""
    told = {"digests": [digest.hex() for digest in digests]}
    return _entry(name, namespace, scheme, told, keys_from_digests(namespace, digests, scheme=scheme))


def _entry(name: str, namespace: Namespace, scheme: KeyScheme, told: dict[str, Any], keys: BlockKeys) -> Any:
    described = namespace.describe()
    del described["digest"]
    first_fingerprint = hashlib.sha256(b"kvstore-fingerprint-v1" + namespace.encoding).digest()[:8]
    hash_key = hashlib.sha256(b"kvstore-blake3-key-v1" + scheme.seed.to_bytes(8, "little")).hexdigest()
    return {
        "name": name,
        "namespace": described,
        "algorithm": scheme.algorithm,
        "seed": f"{scheme.seed:016x}",
        **told,
        "encoding": namespace.encoding.hex(),
        "digest": namespace.digest.hex(),
        "first_fingerprint": first_fingerprint.hex(),
        **({"hash_key": hash_key} if scheme.algorithm == "blake3" else {}),
        "keys": keys.hex(),
    }


def main() -> None:
    """Add the cases that the file lacks."""
    new = {
        "vectors": [vector(*case) for case in CASES],
        "digest_vectors": [digest_vector(*case) for case in DIGEST_CASES],
    }
    old: dict[str, Any] = json.loads(VECTORS.read_text()) if VECTORS.exists() else {}
    lists: list[str] = []
    for name, vectors in new.items():
        known: list[Any] = old.get(name, [])
        if vectors[: len(known)] != known:
            raise SystemExit("a vector in the file would change: that is a new version of the scheme, not a new vector")
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in vectors)  # one a line: a new case is one line of diff
        lists.append(f'"{name}": [\n{lines}\n]')
    VECTORS.write_text(f'{{"version": 1, {", ".join(lists)}}}\n')


if __name__ == "__main__":
    main()
