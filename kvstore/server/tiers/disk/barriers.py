"""What was deleted lately, so that a write-behind that was on its way meanwhile does not bring it back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KEY_DTYPE
from kvstore.server.tiers.disk.catalog import Barrier

KEY_BARRIERS_MAX = 1 << 16
_KEY_BYTES = KEY_DTYPE.itemsize
Keys = NDArray[np.void]
Mask = NDArray[np.bool_]


class Barriers:
    """Barriers by what they stand for: a key (24 bytes), a namespace's digest (16), or all (none).

    Args:
        boot: 16 bytes; only generations of this boot of the shard can be compared.
        known: what the catalog remembers.
    """

    def __init__(self, boot: bytes, known: dict[bytes, Barrier]) -> None:
        self._boot = boot
        self._known = known
        self._keys = sum(len(what) == _KEY_BYTES for what in known)

    def items(self) -> Iterator[tuple[bytes, Barrier]]:
        """All of them."""
        return iter(self._known.items())

    def raise_to(self, what: bytes, generation: int, sequence: int) -> Barrier:
        """Nothing of an earlier generation is stored from now on, no row of an earlier sequence counts."""
        held = self._known.get(what)
        if held is not None and held.boot == self._boot:
            generation = max(generation, held.generation)
        elif len(what) == _KEY_BYTES and held is None:
            self._keys += 1
        barrier = Barrier(self._boot, generation, sequence)
        self._known[what] = barrier
        return barrier

    def stale(self, digest: bytes, keys: Keys, generations: NDArray[np.uint64]) -> Mask:
        """Blocks of a namespace that were removed after they had got their generation. Shape (n,)."""
        stale = generations < np.uint64(max(self._generation(b""), self._generation(digest)))
        if self._keys:
            for row, key in enumerate(_each(keys)):
                if key in self._known and int(generations[row]) < self._generation(key):
                    stale[row] = True
        return stale

    def removed(self, keys: Keys, sequences: NDArray[np.uint64]) -> Mask:
        """Rows, as scanned, that were removed before the scan came to them. Shape (n,)."""
        removed = np.zeros(len(keys), dtype=np.bool_)
        if self._keys:
            for row, key in enumerate(_each(keys)):
                barrier = self._known.get(key)
                if barrier is not None and int(sequences[row]) < barrier.sequence:
                    removed[row] = True
        return removed

    def forget_other_boots(self) -> list[bytes]:
        """After the scan: those of earlier boots have nothing left to guard. What they stood for."""
        return self._forget([what for what, barrier in self._known.items() if barrier.boot != self._boot])

    def fold(self) -> tuple[list[bytes], int]:
        """Keep the number of keys bounded: drop the older half of them, and the generation that `all` must be raised
        to in their place; ([], 0) while there are few. What is refused in excess is a copy of a block in DRAM, no more.
        """
        if self._keys <= KEY_BARRIERS_MAX:
            return [], 0
        oldest = [what for what in self._known if len(what) == _KEY_BYTES][: self._keys // 2]
        generation = max(self._known[what].generation for what in oldest)
        return self._forget(oldest), generation

    def _forget(self, names: list[bytes]) -> list[bytes]:
        for what in names:
            del self._known[what]
            self._keys -= len(what) == _KEY_BYTES
        return names

    def _generation(self, what: bytes) -> int:
        barrier = self._known.get(what)
        return barrier.generation if barrier is not None and barrier.boot == self._boot else 0


def _each(keys: Keys) -> Iterator[bytes]:
    raw = keys.tobytes()
    return (raw[at : at + _KEY_BYTES] for at in range(0, len(raw), _KEY_BYTES))
