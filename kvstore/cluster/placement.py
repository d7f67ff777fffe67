"""Weighted rendezvous hashing, vectorised over keys.

Each member gets a score for each key, `-weight / ln(u)` with `u` in (0, 1) from a hash of key and member; the highest
score wins. A member's share of the keys is its share of the weights, and adding or removing one moves only the keys
that it gains or loses. (Mosharaf, Schindelhauer: "Weighted distributed hash tables"; the logarithmic method.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.cluster.membership import Member

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MANTISSA_SHIFT = np.uint64(11)


def place(keys: NDArray[np.void], members: Sequence[Member]) -> NDArray[np.int64]:
    """Index of the member that owns each key (`KEY_DTYPE`, shape (n,)): shape (n,)."""
    if len(members) == 1:
        return np.zeros(len(keys), dtype=np.int64)
    mixed: NDArray[np.uint64] = np.bitwise_xor(keys["lo"], keys["hi"])
    best = np.zeros(len(keys), dtype=np.int64)
    best_score = np.full(len(keys), -np.inf)
    for index, member in enumerate(members):
        score = -member.weight / np.log(_uniform(mixed, member.name))
        better = score > best_score
        best[better] = index
        best_score[better] = score[better]
    return best


def _uniform(keys: NDArray[np.uint64], name: str) -> NDArray[np.float64]:
    """A number in (0, 1) per key, independent between members (splitmix64 of the key xor the member's own hash)."""
    mixed = (keys ^ np.uint64(xxhash.xxh3_64_intdigest(name.encode()))) + _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX_2
    mixed ^= mixed >> _SHIFTS[2]
    return ((mixed >> _MANTISSA_SHIFT).astype(np.float64) + 0.5) * 2.0**-53
