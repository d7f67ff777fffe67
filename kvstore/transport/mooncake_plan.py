"""Which transfers bring blocks from the pool into a lane's memory, and what is done with the bytes that have come.

Blocks that were stored together lie side by side in the pool, with little between them. Such a run is one transfer,
gaps included: another transfer would cost more than they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.transport.base import Mask
from kvstore.transport.mooncake_engine import TRANSFERS_MAX
from kvstore.transport.trailer import sums_of

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

GAP_SHARE = 16  # gaps of up to one part in so many of a block are read as well,
GAP_BYTES = 4096  # or of so many bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + size) of some blocks, which are brought together."""

    rows: I64  # of the blocks, shape (n,)
    start: int
    size: int
    places: I64  # of each block's bytes in the piece's memory
    ours: I64  # of each transfer: where it goes in the piece's memory,
    theirs: I64  # where it comes from, relative to the first byte of the pool that is meant,
    sizes: I64  # and its bytes


def pieces_of(offsets: I64, size: int, slice_bytes: int, piece_bytes: int) -> Iterator[Piece]:
    """Cut up `size` bytes of each block, which lie at these offsets.

    Args:
        offsets: shape (n,).
        size: a multiple of `slice_bytes`.
        slice_bytes: what one checksum is over; a piece has whole slices where they fit.
        piece_bytes: memory of a piece.
    """
    if size > piece_bytes:
        step = piece_bytes // slice_bytes * slice_bytes or piece_bytes
        ends = range(slice_bytes, size + 1, slice_bytes) if slice_bytes > piece_bytes else [size]
        for row, offset in enumerate(offsets.tolist()):
            begin = 0
            for end in ends:
                for start in range(begin, end, step):
                    yield _one(row, offset, start, min(step, end - start))
                begin = end
        return
    distances = np.diff(offsets)
    joined = (distances >= size) & (distances <= size + max(GAP_BYTES, size // GAP_SHARE))
    extents = np.full(len(offsets), size, dtype=np.int64)
    extents[:-1][joined] = distances[joined]
    begins = np.cumsum(extents) - extents  # in one endless memory
    first = 0
    while first < len(offsets):
        room = int(begins[first]) + piece_bytes - size
        fitting = int(np.searchsorted(begins, room, side="right"))
        end = min(max(fitting, first + 1), first + TRANSFERS_MAX)
        places = begins[first:end] - begins[first]
        breaks = np.flatnonzero(~joined[first : end - 1]) + 1
        starts, lasts = np.append(0, breaks), np.append(breaks - 1, end - first - 1)
        ours = places[starts]
        yield Piece(
            np.arange(first, end), 0, size, places, ours, offsets[first:end][starts], places[lasts] + size - ours
        )
        first = end


def _one(row: int, offset: int, start: int, size: int) -> Piece:
    zero = np.zeros(1, dtype=np.int64)
    return Piece(np.array([row]), start, size, zero, zero, zero + (offset + start), zero + size)


class Verifier:
    """Compares slices with their sums, also slices that come in several pieces.

    Args:
        slice_bytes: what one sum is over.
        sums: expected, shape (blocks, slices).
    """

    def __init__(self, slice_bytes: int, sums: NDArray[np.uint64]) -> None:
        self._slice_bytes, self._sums = slice_bytes, sums
        self._hash = xxhash.xxh3_64()
        self.matching: Mask = np.ones(len(sums), dtype=np.bool_)
        """Blocks of which nothing wrong has come so far, shape (blocks,)."""

    def look(self, piece: Piece, memory: Bytes) -> None:
        """Look at a piece that has come. Those of one slice come in their order."""
        size, each = piece.size, self._slice_bytes
        places: list[int] = piece.places.tolist()
        first, view = piece.start // each, memoryview(memory)
        received: list[int] = []
        if size % each == 0 and piece.start % each == 0:
            for place in places:
                received += sums_of(view[place : place + size], each)
            expected = self._sums[piece.rows, first : first + size // each]
            equal = np.array(received, dtype=np.uint64).reshape(expected.shape) == expected
            self.matching[piece.rows] &= equal.all(axis=1)
            return
        if piece.start % each == 0:
            self._hash.reset()
        self._hash.update(view[:size])
        if (piece.start + size) % each == 0:
            row = int(piece.rows[0])
            self.matching[row] &= self._hash.intdigest() == int(self._sums[row, first])
