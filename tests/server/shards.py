"""A `Shard` over private memory, and calls of it in few words."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KEY_DTYPE
from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.server.eviction import POLICIES
from kvstore.server.shard.blocks import NamespaceInfo
from kvstore.server.shard.shard import IndexSegment, Session, Shard
from kvstore.wire.messages import REF, KeyRequest, PartRequest

CHUNK = 32 << 10
TTL_MS = 10_000
Rows = NDArray[np.void]


def segment(size_bytes: int) -> IndexSegment:
    """Index memory that nobody else maps."""
    return IndexSegment(-1, np.zeros(-(-size_bytes // 16), dtype=np.complex128).view(np.uint8))


def new_shard(
    chunks: int = 6, *, index_entries: int = 16, watermark_bytes: int = 0, policy: str = "lru"
) -> tuple[Shard, NDArray[np.uint32]]:
    """A small shard and its touch board."""
    board = np.zeros(chunks * CHUNK // 4096, dtype=np.uint32)
    shard = Shard(
        pool_bytes=chunks * CHUNK,
        chunk_bytes=CHUNK,
        new_segment=segment,
        make_policy=lambda: POLICIES[policy](board),
        index_entries=index_entries,
        watermark_bytes=watermark_bytes,
    )
    return shard, board


def namespace(number: int, layers: int, layer_bytes: int, tenant: str = DEFAULT_TENANT) -> NamespaceInfo:
    """A namespace with a made-up digest."""
    return NamespaceInfo(bytes([number]) * 16, layers, layer_bytes, f"model-{number}", tenant)


def keys(*numbers: int) -> Rows:
    """Keys that are spread like hashes, one for each number."""
    words = [((n + 1) * 0x9E3779B97F4A7C15 % 2**64, (n + 1) * 0xC2B2AE3D27D4EB4F % 2**64, n) for n in numbers]
    return np.array(words, dtype=KEY_DTYPE)


def reserve(
    shard: Shard, session: Session, space: int, numbers: Sequence[int], now_s: float = 0.0, ttl_ms: int = TTL_MS
) -> Rows:
    """Reserve blocks of that namespace: `RESERVE_ROW` of each."""
    size = shard.namespace(space).block_bytes
    return shard.reserve(session, KeyRequest(space, keys(*numbers), ttl_ms=ttl_ms, size_bytes=size), now_s)


def reserve_part(
    shard: Shard,
    session: Session,
    space: int,
    numbers: Sequence[int],
    part: tuple[int, int],
    now_s: float = 0.0,
    ttl_ms: int = TTL_MS,
) -> Rows:
    """Reserve bytes [start, end) of each layer of blocks."""
    request = KeyRequest(space, keys(*numbers), ttl_ms=ttl_ms, size_bytes=shard.namespace(space).block_bytes)
    return shard.reserve_part(session, PartRequest(part[0], part[1] - part[0], request), now_s)


def refs(rows: Rows) -> Rows:
    """`REF` of reserved rows."""
    named = np.zeros(len(rows), dtype=REF)
    named["handle"], named["generation"] = rows["handle"], rows["generation"]
    return named


def store(shard: Shard, session: Session, space: int, numbers: Sequence[int], now_s: float = 0.0) -> list[int]:
    """Reserve and commit: `PutStatus` of each."""
    rows = reserve(shard, session, space, numbers, now_s)
    granted = rows[rows["status"] == 0]
    assert shard.commit(session, refs(granted)).all()
    return rows["status"].tolist()


def states(shard: Shard, space: int, numbers: Sequence[int]) -> list[int]:
    """`BlockState` of each."""
    return shard.lookup(KeyRequest(space, keys(*numbers)))["state"].tolist()
