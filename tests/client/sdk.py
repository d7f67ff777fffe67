"""What the tests of the SDK share: namespaces of any block size, keys that no other test has, content to compare."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore

BLOCK_TOKENS = 4
_fresh_tokens = itertools.count(0, 100_000)

Bytes = NDArray[np.uint8]


def space(
    layer_bytes: int = 4096, layers: int = 2, *, dtype: str = "uint8", model: str = "sdk", tag: str = "v1"
) -> kvstore.Namespace:
    """A namespace whose blocks have `layers * layer_bytes` bytes."""
    layout = kvstore.OpaqueLayout(tag=tag, layers=layers, layer_bytes_per_block=layer_bytes)
    return kvstore.Namespace(model=model, revision="1", dtype=dtype, block_tokens=BLOCK_TOKENS, layout=layout)


def fresh_tokens(blocks: int) -> NDArray[np.int32]:
    """Tokens that no other prompt of this process has."""
    return np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + next(_fresh_tokens)


def fresh_keys(client: kvstore.Client | kvstore.AsyncClient, blocks: int) -> kvstore.BlockKeys:
    """Keys that nobody has put so far."""
    return client.keys(fresh_tokens(blocks))


def content(keys: kvstore.BlockKeys, namespace: kvstore.Namespace) -> Bytes:
    """The bytes that the tests put under these keys, uint8, shape (n, block bytes): they follow from the keys."""
    size = namespace.block_bytes
    words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (words[None, :] + keys.array["lo"][:, None]) ^ keys.array["hi"][:, None]
    return np.ascontiguousarray(np.ascontiguousarray(mixed).view(np.uint8)[:, :size])


def stored(client: kvstore.Client, blocks: int) -> tuple[kvstore.BlockKeys, Bytes]:
    """Fresh blocks, put: their keys and content."""
    keys = fresh_keys(client, blocks)
    data = content(keys, client.namespace)
    assert client.put(keys, data).stored == blocks
    return keys, data


def is_absent(client: kvstore.Client, keys: kvstore.BlockKeys) -> bool:
    """Whether the store has nothing under these keys, not even a reservation."""
    return not client.lookup(keys).states.any()


@contextmanager
def one_line(kind: type[kvstore.KvStoreError], *parts: str) -> Iterator[None]:
    """The block raises exactly that error: one line, with each of these texts in it."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message, "an error without a message"
    assert "\n" not in message, message
    for part in parts:
        assert part in message
