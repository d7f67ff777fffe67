"""Blocks whose content follows from their key, so that every reader can tell whether the bytes it got are right."""

import numpy as np
from numpy.typing import NDArray

import kvstore

LAYERS = 4
TOKENS = 16


def namespace(layer_bytes: int = 4096) -> kvstore.Namespace:
    """Blocks of four layers."""
    return kvstore.Namespace(
        model="chaos",
        revision="1",
        dtype="uint8",
        block_tokens=TOKENS,
        layout=kvstore.OpaqueLayout(tag="chaos v1", layers=LAYERS, layer_bytes_per_block=layer_bytes),
    )


TINY = namespace(512)  # over TCP, a get of a few is a copy that is checked afterwards; of larger ones it takes a lease
SMALL = namespace()
LARGE = namespace(64 << 10)
HEADS = 8
HEADED = kvstore.Namespace(
    model="chaos", revision="1", dtype="uint8", block_tokens=TOKENS, layout=kvstore.CanonicalLayout(LAYERS, HEADS, 64)
)


def keys_of(client: kvstore.Client, prompt: int, blocks: int) -> kvstore.BlockKeys:
    """Keys of one of many prompts that have nothing in common."""
    return client.keys(np.arange(blocks * TOKENS, dtype=np.int32) + prompt * 100_000)


def content(keys: kvstore.BlockKeys, space: kvstore.Namespace, author: int = 0) -> NDArray[np.uint8]:
    """What belongs under these keys, uint8, shape (n, block bytes): each word follows from key, place and author."""
    places = np.arange(space.block_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (keys.array["lo"][:, None] + places[None, :]) ^ (keys.array["hi"][:, None] + np.uint64(author))
    return np.ascontiguousarray(words).view(np.uint8)


def wrong(keys: kvstore.BlockKeys, got: kvstore.GetResult, space: kvstore.Namespace) -> int:
    """How many of the blocks that were got are not what belongs under their key."""
    expected = content(keys, space)
    return sum(block is not None and not same(block, expected[row]) for row, block in enumerate(got.blocks))


def same(block: NDArray[np.uint8] | None, expected: NDArray[np.uint8]) -> bool:
    """Whether there is a block, and it has exactly these bytes."""
    return block is not None and np.array_equal(block, expected)


def put_all(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    """Store blocks that nobody has."""
    assert client.put(keys, content(keys, client.namespace)).stored == len(keys)


def has_all(client: kvstore.Client, keys: kvstore.BlockKeys) -> bool:
    """Whether all of them can be got, with the right content."""
    got = client.get(keys)
    assert wrong(keys, got, client.namespace) == 0
    return got.hit_blocks == len(keys)
