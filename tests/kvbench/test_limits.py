"""The limits really move the bytes they are timed for."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.limits import MemcpyLimit, RawPeer, SocketLimit
from kvbench.memory import U8, arena

BLOCK_BYTES = 3 << 18  # not a multiple of a piece
BLOCKS = 4
BATCH = 2


def noise(seed: int) -> U8:
    memory = arena(BLOCKS * BLOCK_BYTES)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
    return memory


@pytest.fixture
def far() -> U8:
    return noise(1)


@pytest.fixture
def peer(far: U8) -> Iterator[RawPeer]:
    peer = RawPeer(far)
    yield peer
    peer.close()


def test_memcpy_copies_one_batch_a_turn_and_all_of_them_in_a_round() -> None:
    source, destination = noise(2), noise(3)
    limit = MemcpyLimit(source, destination, block_bytes=BLOCK_BYTES, blocks=BLOCKS, batch=BATCH)
    half = BATCH * BLOCK_BYTES
    assert limit(0) > 0
    assert np.array_equal(destination[:half], source[:half])
    assert not np.array_equal(destination[half:], source[half:])
    limit(1)
    assert np.array_equal(destination, source)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("upload", [False, True])
def test_sockets_move_every_byte_whatever_the_number_of_connections(
    peer: RawPeer, far: U8, connections: int, upload: bool
) -> None:
    near = noise(4)
    source = (near if upload else far).copy()
    limit = SocketLimit(
        peer.port,
        near,
        block_bytes=BLOCK_BYTES,
        blocks=BLOCKS,
        batch=BATCH,
        connections=connections,
        upload=upload,
    )
    try:
        assert limit(0) > 0
        assert limit(1) > 0
    finally:
        limit.close()
    assert np.array_equal(far if upload else near, source)
