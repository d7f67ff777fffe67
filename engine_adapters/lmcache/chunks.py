"""What LMCache's chunks are in the store: their namespaces, their keys, and how the last, shorter chunk lies.

A whole chunk is a block of its own bytes, in a namespace that names its shape. A shorter one is in a second namespace:

    magic, 8 bytes | tokens, u32 | 52 bytes of zeros | its own bytes | zeros, as many as the missing tokens would take
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapters.lmcache.options import Options
from kvstore import BlockKeys, KeyScheme, Namespace, OpaqueLayout, UsageError, keys_from_digests
from kvstore.core.fields import length_prefixed
from kvstore.core.namespace import ITEM_BYTES

__all__ = ["Chunks", "chunks_of", "digest_of", "keys_of", "namespaces_of"]

FORMAT = "lmcache-chunk-v1"  # of the tag, the keys and the bytes: a change of any gets a new one
_TOKENS_AXIS = 2  # of [2, layers, tokens, hidden] and, with latent attention, [1, layers, tokens, hidden]
_HEADER = struct.Struct("<8sI52x")
_MAGIC = b"kvslmc-1"

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one engine: one tensor for each group of layers that are alike, one after the other."""

    shapes: tuple[tuple[int, ...], ...]  # of whole chunks
    dtypes: tuple[str, ...]
    item_bytes: tuple[int, ...]
    form: str  # LMCache's name of the order of axes
    tokens: int  # of a whole chunk

    @property
    def bytes(self) -> int:
        """Of a whole chunk."""
        return sum(prod(shape) * size for shape, size in zip(self.shapes, self.item_bytes, strict=True))

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers."""
        return self.bytes // self.tokens

    def shapes_of(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Of a chunk of so many tokens."""
        return tuple((*shape[:_TOKENS_AXIS], tokens, *shape[_TOKENS_AXIS + 1 :]) for shape in self.shapes)

    def tokens_in(self, chunk: Chunks) -> int | None:
        """How many tokens a chunk has that is like these; None if it is another engine's, or another size's."""
        if any(len(shape) != len(self.shapes[0]) for shape in chunk.shapes) or not chunk.shapes:
            return None
        tokens = chunk.shapes[0][_TOKENS_AXIS]
        alike = replace(self, shapes=self.shapes_of(tokens), tokens=tokens) == replace(chunk, tokens=tokens)
        return tokens if alike and 1 <= tokens <= self.tokens else None

    def pack(self, payload: U8, tokens: int) -> U8:
        """The block of a shorter chunk: shape (header and whole chunk,)."""
        block = np.zeros(_HEADER.size + self.bytes, dtype=np.uint8)
        block[: _HEADER.size] = np.frombuffer(_HEADER.pack(_MAGIC, tokens), dtype=np.uint8)
        block[_HEADER.size : _HEADER.size + len(payload)] = payload
        return block

    def unpack(self, block: U8) -> tuple[int, U8] | None:
        """Tokens and bytes of a shorter chunk; None if that isn't one."""
        magic, tokens = _HEADER.unpack_from(block)
        if magic != _MAGIC or not 1 <= tokens <= self.tokens:
            return None
        return tokens, block[_HEADER.size : _HEADER.size + tokens * self.token_bytes]


def chunks_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], form: Any, tokens: int) -> Chunks:
    """From LMCache's own: shapes, torch dtypes and `MemoryFormat`.

    Raises:
        UsageError: the shapes don't have the tokens where LMCache's whole chunks have them.
    """
    told = tuple(tuple(int(size) for size in shape) for shape in shapes)
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if any(len(shape) != 4 or shape[_TOKENS_AXIS] != tokens for shape in told):
        raise UsageError(f"chunks of shapes {told}: allowed is [K and V, layers, {tokens} tokens, hidden]")
    return Chunks(told, names, tuple(dtype.itemsize for dtype in dtypes), str(form.name), tokens)


def namespaces_of(chunks: Chunks, options: Options, metadata: Any) -> tuple[Namespace, Namespace]:
    """Of whole chunks and of shorter ones.

    Args:
        chunks: of this engine.
        options: the plugin's.
        metadata: LMCache's `LMCacheMetadata`: model and number of workers.

    Raises:
        UsageError: something that has to be told apart isn't named.
    """
    shapes = " ".join(
        f"{dtype}[{'x'.join(map(str, shape))}]" for dtype, shape in zip(chunks.dtypes, chunks.shapes, strict=True)
    )
    tag = f"{FORMAT}/{chunks.form}/{shapes}/of {metadata.world_size} workers"

    def named(kind: str, size: int) -> Namespace:
        return Namespace(
            model=_model_of(options, metadata),
            revision=options.revision,
            dtype=chunks.dtypes[0] if chunks.dtypes[0] in ITEM_BYTES else "uint8",
            block_tokens=chunks.tokens,
            layout=OpaqueLayout(f"{tag}/{kind}", 1, size),
            tenant=options.tenant.encode(),
        )

    return named("whole", chunks.bytes), named("shorter", _HEADER.size + chunks.bytes)


def keys_of(namespace: Namespace, keys: Sequence[Any], model: str, scheme: KeyScheme) -> BlockKeys:
    """The store's keys of LMCache's `CacheEngineKey`s, for an engine of that model."""
    return keys_from_digests(namespace, [digest_of(key, model) for key in keys], scheme=scheme)


def digest_of(key: Any, model: str) -> bytes:
    """All of a key: its chunk hash, and what LMCache tells apart besides, the worker above all.

    The worker is here and not in the namespace because with latent attention all workers read the first one's chunks.
    The engine's own model is in the namespace, under a name that may be better than the engine's.
    """
    other_model = "" if key.model_name == model else key.model_name
    tags = [part for name, value in key.tags or () for part in (str(name), str(value))]
    hashed = key.chunk_hash if isinstance(key.chunk_hash, bytes) else f"{key.chunk_hash:x}"
    kind = "bytes" if isinstance(key.chunk_hash, bytes) else "int"
    layer = str(getattr(key, "layer_id", ""))
    told = (FORMAT, other_model, key.world_size, key.worker_id, kind, hashed, str(key.dtype), layer, *tags)
    return hashlib.sha256(length_prefixed(*told)).digest()


def _model_of(options: Options, metadata: Any) -> str:
    if options.model:
        return options.model
    name = metadata.model_name or ""
    if not name or name.startswith((".", "/", "~")) or Path(name).exists():
        raise UsageError(f"option 'model' is missing: the engine's {name!r} is no name that all workers share")
    return name
