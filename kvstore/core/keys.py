"""Block keys: a chained 16-byte hash and an independent 8-byte fingerprint per full block of tokens.

A key covers the namespace and every token before it, so a hit on block i implies the whole prefix. docs/keys.md spells
out every byte; tests/vectors/keys.json holds the golden values. Python's own `hash` is never used: it differs from
process to process.

Measured (docs/adr/0002-block-identity.md): 4,096 tokens in 16-token blocks take 0.1 ms as an array and 0.2 ms as a list
with xxh3-128, twice that with blake3; the linear pass over the tokens, not the hash, dominates.
"""

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError, UsageError
from kvstore.core.fields import require_int
from kvstore.core.namespace import Namespace

__all__ = [
    "DEFAULT_SCHEME",
    "FINGERPRINT_BYTES",
    "KEY_BYTES",
    "KEY_DTYPE",
    "BlockKeys",
    "Extra",
    "KeyScheme",
    "TokenIds",
    "chain_keys",
    "keys_from_digests",
]

KEY_DTYPE = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("fp", "<u8")])
"""A record of 24 bytes: raw key bytes 0..7 (hi) and 8..15 (lo), then the raw fingerprint, each read as u64-LE."""

KEY_BYTES = 16
FINGERPRINT_BYTES = 8
MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_EXTRA_BYTES = 2**32 - 1  # its length is a u32 in the hashed bytes
MIN_DIGEST_BYTES = 16  # 64 bits of a hash meet by accident among a few billion blocks
MAX_DIGEST_BYTES = 64

_RECORD_BYTES = KEY_DTYPE.itemsize
_FINGERPRINT_SEED = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: any constant that sets the two hashes' seeds apart
_FINGERPRINT_MAGIC = b"kvstore-fingerprint-v1"
_BLAKE3_KEY_MAGIC = b"kvstore-blake3-key-v1"
_DIGEST_MARK = b"\xff\xff\xff\xff"  # -1 as int32: no token id, so a digest's step is never one of tokens
_ALGORITHMS = ("xxh3-128", "blake3")
_HEX_KEY = re.compile(r"([0-9a-fA-F]{32}):([0-9a-fA-F]{16})")
_ALLOWED_TOKENS = f"allowed is a 1-D sequence or array of ints from 0 to {MAX_TOKEN_ID}"


class ArrayLike(Protocol):
    """What numpy can turn into an array: a CPU tensor, for one."""

    def __array__(self) -> NDArray[Any]: ...


TokenIds = Sequence[int] | NDArray[np.integer[Any]] | ArrayLike
Extra = bytes | Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """Which hash makes the keys, and the deployment's seed. All parties of one store use the same scheme.

    xxh3-128 is fast and not cryptographic: whoever knows the seed can write collisions down. Where tenants do not trust
    one another, use blake3 (package `blake3`). Raises UsageError naming the field, ConfigError without the package.
    """

    algorithm: Literal["xxh3-128", "blake3"] = "xxh3-128"
    seed: int = 0  # unsigned 64 bits

    def __post_init__(self) -> None:
        if self.algorithm not in _ALGORITHMS:
            raise UsageError(f"algorithm={self.algorithm!r}: allowed is one of {', '.join(_ALGORITHMS)}")
        require_int("seed", self.seed, 0, MAX_SEED)
        if self.algorithm == "blake3":
            _blake3()  # refuse now, not at the first request


DEFAULT_SCHEME = KeyScheme()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlockKeys:
    """A frozen batch of block keys: one contiguous, read-only array of shape (n,) and dtype KEY_DTYPE.

    Equal means equal in all 24 bytes: a forged key with another fingerprint is another key. Every call takes a batch,
    so single keys are not offered: no iteration, and slicing gives a batch. Raises UsageError on another kind of array.
    """

    array: NDArray[np.void]

    def __post_init__(self) -> None:
        array = self.array
        if not isinstance(array, np.ndarray):
            raise UsageError(f"block keys of type {type(array).__name__}: allowed is a 1-D array of KEY_DTYPE")
        if array.dtype != KEY_DTYPE or array.ndim != 1:
            told = f"dtype {array.dtype}, shape {array.shape}"
            raise UsageError(f"block keys of {told}: allowed is a 1-D array of KEY_DTYPE")
        # Always a copy (24 bytes a block): even a read-only array may be a view of memory that its owner still writes.
        frozen = np.array(array, order="C")
        frozen.flags.writeable = False
        object.__setattr__(self, "array", frozen)

    @classmethod
    def frombuffer(cls, buffer: bytes | bytearray | memoryview) -> "BlockKeys":
        """Keys from the bytes of `tobytes`. Raises UsageError unless they are whole records of 24 bytes."""
        raw = bytes(buffer)
        if len(raw) % _RECORD_BYTES:
            raise UsageError(f"block keys of {len(raw)} bytes: allowed is a multiple of {_RECORD_BYTES}")
        return cls(np.frombuffer(raw, KEY_DTYPE))

    @classmethod
    def from_hex(cls, texts: Sequence[str]) -> "BlockKeys":
        """Keys from the texts of `hex`. Raises UsageError naming the first text that is none."""
        return cls.frombuffer(b"".join(_record_from_hex(text) for text in texts))

    @classmethod
    def concat(cls, *batches: "BlockKeys") -> "BlockKeys":
        """One batch of all keys of `batches`, in order."""
        return cls.frombuffer(b"".join(batch.tobytes() for batch in batches))

    def hex(self) -> list[str]:
        """Each key as "key:fingerprint", 32 and 16 hexadecimal digits."""
        text = self.tobytes().hex()
        cuts = range(0, len(text), 2 * _RECORD_BYTES)
        return [f"{text[cut : cut + 32]}:{text[cut + 32 : cut + 48]}" for cut in cuts]

    def tobytes(self) -> bytes:
        """24 bytes a key: 16 of the key, 8 of the fingerprint."""
        return self.array.tobytes()

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, span: slice) -> "BlockKeys":
        if not isinstance(span, slice):
            raise TypeError(f"block keys come in batches: slice them, as keys[:n], instead of indexing with {span!r}")
        return BlockKeys(self.array[span])

    __iter__ = None  # or Python would iterate through __getitem__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKeys) and self.tobytes() == other.tobytes()

    def __hash__(self) -> int:
        return hash(self.tobytes())

    def __repr__(self) -> str:
        if len(self) <= 2:
            return f"BlockKeys({', '.join(self.hex())})"
        return f"BlockKeys({len(self)} keys, {self[:1].hex()[0]} to {self[-1:].hex()[0]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockKeys.frombuffer, (self.tobytes(),)  # numpy's own pickling forgets that an array is read-only


def chain_keys(
    namespace: Namespace,
    token_ids: TokenIds,
    *,
    extra: Extra | None = None,
    scheme: KeyScheme = DEFAULT_SCHEME,
    after: BlockKeys | None = None,
) -> BlockKeys:
    """Keys of the full blocks of `token_ids`; a last partial block has none.

    `token_ids`: a sequence of int, a 1-D integer array or a CPU tensor, each id from 0 to 2**31 - 1. `extra`: what the
    tokens do not say. Bytes are a salt, mixed into block 0 and so into every key. A mapping gives digests by block
    index, of images and the like: each changes the keys from its block on; one of the last, partial block changes none.
    `after`: the keys of the same sequence before these tokens, which continue its chain; block 0 is the first one after
    them. Raises UsageError naming the culprit.
    """
    tokens = _tokens(token_ids)
    block_tokens = namespace.block_tokens
    count = len(tokens) // block_tokens
    raw = tokens.tobytes()
    stride = 4 * block_tokens
    steps = [raw[at : at + stride] for at in range(0, count * stride, stride)]
    for index, digest in _extras(extra, block_limit=-(-len(tokens) // block_tokens)).items():
        if index < count:
            steps[index] += len(digest).to_bytes(4, "little") + digest
    if after is not None and len(after):
        last = after.array[-1:].tobytes()
        first = (last[:KEY_BYTES], last[KEY_BYTES:])
    else:
        first = (namespace.digest, _first_fingerprint(namespace))
    chain = _chain_blake3 if scheme.algorithm == "blake3" else _chain_xxh3
    return BlockKeys.frombuffer(b"".join(chain(first, steps, scheme.seed)))


def keys_from_digests(
    namespace: Namespace, digests: Sequence[bytes], *, scheme: KeyScheme = DEFAULT_SCHEME
) -> BlockKeys:
    """Keys of blocks that an engine names by digests of its own, and whose tokens it does not tell.

    `digests`: one per block, 16 to 64 bytes each, in any order; each has to cover every token before the block too, and
    what else tells prompts apart (salt, images). The namespace stands for the rest. These keys never equal those of
    `chain_keys`. Raises UsageError naming the culprit.
    """
    for index, digest in enumerate(digests):
        if not isinstance(digest, bytes) or not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
            allowed = f"allowed is bytes, {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} of them"
            raise UsageError(f"digests[{index}]={digest!r}: {allowed}")
    first = (namespace.digest, _first_fingerprint(namespace))
    chain = _chain_blake3 if scheme.algorithm == "blake3" else _chain_xxh3
    parts = (part for digest in digests for part in chain(first, [_DIGEST_MARK + digest], scheme.seed))
    return BlockKeys.frombuffer(b"".join(parts))


def _chain_xxh3(first: tuple[bytes, bytes], steps: list[bytes], seed: int) -> list[bytes]:
    """The keys and fingerprints of the chain, alternating."""
    key, fingerprint = first
    fingerprint_seed = seed ^ _FINGERPRINT_SEED
    key_of, fingerprint_of = xxhash.xxh3_128_digest, xxhash.xxh64_digest
    chain: list[bytes] = []
    add = chain.append
    for step in steps:
        key = key_of(key + step, seed)
        fingerprint = fingerprint_of(fingerprint + step, fingerprint_seed)
        add(key)
        add(fingerprint)
    return chain


def _chain_blake3(first: tuple[bytes, bytes], steps: list[bytes], seed: int) -> list[bytes]:
    """The records (key, then fingerprint) of the chain: one keyed digest of 24 bytes each."""
    blake3 = _blake3()
    hash_key = hashlib.sha256(_BLAKE3_KEY_MAGIC + seed.to_bytes(8, "little")).digest()
    record = first[0] + first[1]
    chain: list[bytes] = []
    for step in steps:
        record = blake3(record + step, key=hash_key).digest(length=_RECORD_BYTES)
        chain.append(record)
    return chain


def _first_fingerprint(namespace: Namespace) -> bytes:
    return hashlib.sha256(_FINGERPRINT_MAGIC + namespace.encoding).digest()[:FINGERPRINT_BYTES]


def _tokens(token_ids: TokenIds) -> NDArray[np.int32]:
    """Token ids as a contiguous 1-D array of little-endian int32."""
    try:
        tokens: NDArray[Any] = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError, RuntimeError) as cause:
        raise UsageError(f"token_ids: {cause}; {_ALLOWED_TOKENS}") from cause
    if tokens.ndim != 1:
        raise UsageError(f"token_ids of shape {tokens.shape}: {_ALLOWED_TOKENS}")
    if tokens.size == 0:
        return np.empty(0, "<i4")
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID:
        raise _bad_token(token_ids if isinstance(token_ids, Sequence) else tokens.tolist())
    return tokens.astype("<i4", copy=False)


def _bad_token(token_ids: Sequence[object]) -> UsageError:
    """Name the first id that is no int, or is out of range. A bool is none: a mask is not a prompt."""
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token <= MAX_TOKEN_ID:
            return UsageError(f"token_ids[{index}]={token!r}: {_ALLOWED_TOKENS}")
    return UsageError(f"token_ids of type {type(token_ids).__name__}: {_ALLOWED_TOKENS}")


def _extras(extra: Extra | None, block_limit: int) -> dict[int, bytes]:
    """Digests by block index. `block_limit` counts all blocks, a partial one too."""
    if extra is None:
        return {}
    if isinstance(extra, bytes):
        _check_extra("extra", extra)
        return {0: extra}
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra={extra!r}: allowed is bytes (a salt), a mapping of block index to bytes, or None")
    for index, digest in extra.items():
        if type(index) is not int or not 0 <= index < block_limit:
            raise UsageError(
                f"extra[{index!r}]: these tokens have {block_limit} blocks; allowed is an index below that"
            )
        _check_extra(f"extra[{index}]", digest)
    return dict(extra)


def _check_extra(name: str, digest: bytes) -> None:
    """Empty is refused: it would look like no extra at all, which is what a lost image digest looks like, too."""
    if not isinstance(digest, bytes) or not 0 < len(digest) <= MAX_EXTRA_BYTES:
        raise UsageError(f"{name}={digest!r}: allowed is non-empty bytes; leave it out for none")


def _record_from_hex(text: str) -> bytes:
    match = _HEX_KEY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"block key {text!r}: allowed is 'key:fingerprint' with 32 and 16 hexadecimal digits")
    return bytes.fromhex(match[1] + match[2])


def _blake3() -> Any:
    """The hash of the optional package, imported on first use."""
    try:
        return importlib.import_module("blake3").blake3
    except ImportError as cause:
        raise ConfigError(
            "algorithm='blake3': the optional package is missing; install kvstore-llm[blake3] or use xxh3-128"
        ) from cause
