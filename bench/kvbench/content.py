"""What the benchmark writes, and the proof that what it reads is that.

A block's bytes follow from (seed, block id), so that every process can say by itself what a block must hold:

    page 0                          page 1                    ...   4,096 bytes each
    [stamp 8][---- pool ---------]  [stamp 8][---- pool -----]

The body is a window of a pool of random words, at an offset that depends on the block's place; each page begins with a
stamp that depends on seed, block id and page. A page of another block, of an older put, or never written, has a wrong
stamp; any other damage shows when the whole block is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.plan import MIB, PAGE_BYTES

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_WORD_BYTES: Final = 8
_PAGE_WORDS: Final = PAGE_BYTES // _WORD_BYTES
_WINDOWS_BYTES: Final = 8 * MIB  # span of the offsets at which a window may begin
_WINDOW_STEP: Final = 64
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


class Content:
    """Fills and checks blocks of one size.

    Args:
        seed: everything follows from it.
        block_bytes: a multiple of 4,096.
        blocks: places. A block id is `place + version * blocks`; versions of a place differ in their stamps only.
    """

    def __init__(self, seed: int, block_bytes: int, blocks: int) -> None:
        self._seed = np.uint64(seed)
        self._blocks = blocks
        self._block_words = block_bytes // _WORD_BYTES
        self._pages = np.arange(block_bytes // PAGE_BYTES, dtype=np.uint64)
        self._pool = _mix(np.arange((_WINDOWS_BYTES + block_bytes) // _WORD_BYTES, dtype=np.uint64) + _mix_one(seed))
        self._scratch = np.empty(self._block_words, dtype=np.uint64)

    def fill(self, rows: U8, ids: I64) -> None:
        """Write the blocks `ids`, shape (n,), into `rows`, uint8 of shape (n, block_bytes)."""
        for row, block_id in zip(rows, ids.tolist(), strict=True):
            self._write(row.view(np.uint64), block_id)

    def stamp(self, rows: U8, ids: I64) -> None:
        """Turn blocks of the same places into the blocks `ids` by writing their stamps alone."""
        for row, block_id in zip(rows, ids.tolist(), strict=True):
            row.view(np.uint64)[::_PAGE_WORDS] = self._stamps(block_id)

    def blot(self, rows: U8) -> None:
        """Spoil every page's stamp, so that a page which the next read does not write is noticed."""
        rows.view(np.uint64).reshape(-1)[::_PAGE_WORDS] = 0

    def damaged(self, rows: U8 | Sequence[U8], ids: I64, *, whole: bool) -> list[int]:
        """The ids among `ids` whose bytes are wrong.

        Args:
            rows: n buffers of block_bytes uint8.
            ids: shape (n,), what they should hold.
            whole: compare every byte; else the stamp of every page.
        """
        return [
            block_id
            for row, block_id in zip(rows, ids.tolist(), strict=True)
            if not self._is_right(np.asarray(row).view(np.uint64), block_id, whole=whole)
        ]

    def _is_right(self, words: U64, block_id: int, *, whole: bool) -> bool:
        if whole:
            self._write(self._scratch, block_id)
            return np.array_equal(words, self._scratch)
        return np.array_equal(words[::_PAGE_WORDS], self._stamps(block_id))

    def _write(self, words: U64, block_id: int) -> None:
        place = block_id % self._blocks
        offset = (
            int(_mix_one(int(self._seed) ^ place)) % (_WINDOWS_BYTES // _WINDOW_STEP) * (_WINDOW_STEP // _WORD_BYTES)
        )
        words[:] = self._pool[offset : offset + self._block_words]
        words[::_PAGE_WORDS] = self._stamps(block_id)

    def _stamps(self, block_id: int) -> U64:
        """One odd word a page (so never the 0 that `blot` leaves), shape (pages,)."""
        return _mix(self._pages + _mix_one(int(self._seed) + 1 + block_id)) | np.uint64(1)


def _mix(words: U64) -> U64:
    """The splitmix64 step of each word: close words come out unrelated."""
    mixed = words * _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _mix_one(word: int) -> np.uint64:
    return _mix(np.array([word & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0]
