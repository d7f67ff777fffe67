"""The trailer of a slot: one xxh3-64 per layer slice, behind the payload.

```
payload                       size bytes
(to the next 8-byte boundary)
generation                    uint64   the entry that the sums belong to: sums of a former occupant never match
sums                          layers x uint64
```

A producer that writes through shared memory may leave the sums out; the data port then computes them for itself.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.transport.copying import copy_blocks

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
SUM_BYTES = 8


def trailer_offset(payload_bytes: int) -> int:
    """Where the trailer begins in a slot."""
    return -(-payload_bytes // 8) * 8


def slot_payload_bytes(payload_bytes: int, layers: int) -> int:
    """Bytes that a slot needs for a block and its trailer."""
    return trailer_offset(payload_bytes) + SUM_BYTES * (1 + layers)


def sums_of(payload: memoryview, layer_bytes: int) -> list[int]:
    """xxh3-64 of each whole layer slice of the payload."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(payload[start : start + layer_bytes]) for start in range(0, len(payload), layer_bytes)]


def read_trailers(pool: Bytes, offsets: I64, payload_bytes: int, layers: int) -> U64:
    """Trailers of n blocks, shape (n, 1 + layers): generation, then the sums."""
    trailers = np.empty((len(offsets), 1 + layers), dtype=np.uint64)
    width = SUM_BYTES * (1 + layers)
    rows = np.arange(len(offsets), dtype=np.int64) * width
    copy_blocks(trailers.reshape(-1).view(np.uint8), rows, pool, offsets + trailer_offset(payload_bytes), width)
    return trailers


def write_trailers(pool: Bytes, offsets: I64, payload_bytes: int, generations: U64, sums: U64) -> None:
    """Write the sums of n blocks (n, layers), and only then the generation that makes them count."""
    start = offsets + trailer_offset(payload_bytes)
    width = SUM_BYTES * sums.shape[1]
    rows = np.arange(len(offsets), dtype=np.int64)
    source = np.ascontiguousarray(sums)
    copy_blocks(pool, start + SUM_BYTES, source.reshape(-1).view(np.uint8), rows * width, width)
    heads = np.ascontiguousarray(generations, dtype=np.uint64)
    copy_blocks(pool, start, heads.view(np.uint8), rows * SUM_BYTES, SUM_BYTES)
