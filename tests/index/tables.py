"""Small indexes in private memory, and keys made to meet in few buckets."""

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KEY_DTYPE
from kvstore.index import IndexReader, IndexWriter, index_bytes
from kvstore.index.layout import U64

Keys = NDArray[np.void]


def new_memory(buckets: int) -> NDArray[np.uint8]:
    """Zeroed memory of an index, aligned like a mapping."""
    return np.zeros(index_bytes(buckets) // 16, dtype=np.complex128).view(np.uint8)


def new_table(buckets: int, handles: int = 1) -> tuple[IndexWriter, IndexReader]:
    """A writer and a reader over the same memory."""
    memory = new_memory(buckets)
    writer = IndexWriter(memory, buckets, handles)
    return writer, IndexReader(memory)


def keys_of(triples: list[tuple[int, int, int]]) -> Keys:
    """`KEY_DTYPE` of (hi, lo, fp)."""
    return np.array(triples, dtype=KEY_DTYPE)


def random_keys(count: int, seed: int) -> Keys:
    """Distinct keys, spread like hashes."""
    words = np.random.default_rng(seed).integers(1, 1 << 63, size=(count, 3), dtype=np.uint64)
    return words.view(KEY_DTYPE).reshape(count)


def insert(writer: IndexWriter, keys: Keys, *, first_handle: int = 0, first_generation: int = 1) -> U64:
    """Insert with made-up facts that tell every entry from every other; the generations."""
    count = len(keys)
    handles = np.arange(first_handle, first_handle + count, dtype=np.int64)
    generations = np.arange(first_generation, first_generation + count, dtype=np.uint64)
    writer.insert(keys, generations, handles * 4096, handles % 1000 + 1, handles, namespace=1, layers=2)
    return generations
