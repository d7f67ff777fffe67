"""The block index's fixed layout in shared memory: what the one writer writes and every reader may rely on.

```
header    4,096 bytes   64-bit words, `Header` names them
tags      buckets x 8 x uint16       0 = empty, else bits of the key: one 16-byte line a bucket
entries   buckets x 8 x 64 bytes     one cache line an entry, `Word` names its eight 64-bit words
```

A key lives in one of two buckets, both computed from the key alone, so a probe reads two tag lines and, for a tag that
matches, one entry: no chain to walk, no call to the server, the same few vectorised steps for 1 key or 10,000.

How a racing reader stays right, without a lock:

- Words 0-5 only change when a block moves between tiers, under a new generation; word 7 is a checksum over them. A
  reader that catches an entry half written sees a wrong checksum, or no status, and tries again.
- Word 6, the status, is the only word that changes. It is written with one aligned 8-byte store, and carries the low
  half of the generation, so it can't be mistaken for the status of another entry that was in the same place.
- A generation is never used twice by one writer. Who copied bytes out of the pool reads the generation again
  afterwards: if it stands, the slot was not given away meanwhile (stores become visible in order on x86-64; on other
  processors the client takes a lease instead, see docs/adr/0003).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = int.from_bytes(b"KVSINDEX", "little")
VERSION: Final = 1
HEADER_BYTES: Final = 4096
SLOTS_PER_BUCKET: Final = 8
TAG_LINE_BYTES: Final = 16
ENTRY_BYTES: Final = 64
POOL_UNIT_BYTES: Final = 4096  # pool offsets are stored in these units: 32 bits reach 16 TiB
BLOCK_BYTES_MAX: Final = (1 << 32) - POOL_UNIT_BYTES

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


class Header:
    """Words of the header. Plain integers: looking up an enum's member costs as much as a step of the probe."""

    MAGIC: Final = 0
    VERSION: Final = 1
    BUCKETS: Final = 2
    MOVES: Final = 3  # grows whenever an entry changes its place: a miss seen across a change is looked up again
    RETIRED: Final = 4  # non-zero: a larger table has taken over, attach again
    RESIDENT: Final = 5  # entries in use
    WARM: Final = 6  # bytes of the pool, from its start, whose pages are present


class Word:
    """Words of an entry."""

    KEY_HI: Final = 0
    KEY_LO: Final = 1
    FINGERPRINT: Final = 2
    GENERATION: Final = 3
    LOCATION: Final = 4  # pool offset in POOL_UNIT_BYTES (low 32 bits) | size in bytes << 32
    META: Final = 5  # handle (low 32 bits) | namespace id << 32 | layers << 48
    STATUS: Final = 6  # state | tier << 8 | layers ready << 16 | low 32 bits of the generation << 32
    CHECK: Final = 7


CHECK_FACTORS: Final[U64] = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
    ],
    dtype=np.uint64,
)
CHECK_FACTOR_INTS: Final = tuple(int(factor) for factor in CHECK_FACTORS)

_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_SHIFT48 = np.uint64(48)
_ONE = np.uint16(1)


def index_bytes(buckets: int) -> int:
    """Size in bytes of a table of `buckets` buckets."""
    return HEADER_BYTES + buckets * SLOTS_PER_BUCKET * ENTRY_BYTES + buckets * TAG_LINE_BYTES


def buckets_for(entries: int, load: float = 0.8) -> int:
    """Buckets that hold `entries` entries at the given share of used slots."""
    return max(4, int(entries / (load * SLOTS_PER_BUCKET)) + 1)


def checksum(entries: U64) -> U64:
    """The word `Word.CHECK` of entries: shape (n, 8) or (n, 6) to (n,)."""
    return entries[:, :6] @ CHECK_FACTORS  # wraps modulo 2**64, as it should


def home_buckets(keys: U64, buckets: int) -> I64:
    """The two buckets of each key, shape (n, 2), from key words of shape (n, 2 or more): hi, lo.

    Keys are uniform hashes, so 32 bits scaled to the range spread evenly.
    """
    return (((keys[:, 1::-1] & _LOW32) * np.uint64(buckets)) >> _SHIFT32).view(np.int64)


def tags_of(lo: U64) -> NDArray[np.uint16]:
    """The 16-bit tag of each key, never 0, which means an empty slot."""
    return (lo >> _SHIFT48).astype(np.uint16) | _ONE


class Table:
    """One index mapped into this process: header words, tag lines and entries as arrays over the same memory."""

    __slots__ = ("buckets", "entries", "header", "memory", "status", "tag_lines", "tags", "words")

    def __init__(self, memory: NDArray[np.uint8], buckets: int) -> None:
        if len(memory) < index_bytes(buckets):
            raise ValueError(f"index memory of {len(memory)} bytes is too small for {buckets} buckets")
        tag_end = HEADER_BYTES + buckets * TAG_LINE_BYTES
        end = index_bytes(buckets)
        self.memory = memory
        self.buckets = buckets
        self.header: U64 = memory[:HEADER_BYTES].view(np.uint64)
        self.tags: NDArray[np.uint16] = memory[HEADER_BYTES:tag_end].view(np.uint16).reshape(buckets, SLOTS_PER_BUCKET)
        # A 16-byte item moves a whole tag line in one step of `take`; complex128 is numpy's plain item of that size.
        self.tag_lines = memory[HEADER_BYTES:tag_end].view(np.complex128)
        self.entries: U64 = memory[tag_end:end].view(np.uint64).reshape(buckets * SLOTS_PER_BUCKET, 8)
        self.status: U64 = self.entries[:, Word.STATUS]
        self.words = memoryview(memory[tag_end:end]).cast("Q")
