"""Chance and time of reuse, learned from the traffic: how soon is a block of some kind wanted again?

Age is the number of requests since a block's last use. For each kind and each span of ages (half an octave) there are
counts, from which follows the hazard: the chance that a block which was not used until that age is used within it
(Kaplan and Meier 1958; blocks that were not used again yet, or were forgotten, count up to the age that they were last
seen at):

    hazard[kind, age] = used at that age / all that reached it

A kind of which little is known is drawn towards others like it. What a block is worth keeping for is the most hits for
each request that it takes up room, over all times that it could be kept (Gittins 1979; for caches, "hit density":
Beckmann et al., LHD, NSDI 2018):

    rank[kind, age] = max over later ages b of  P(used before b) / E[requests until it is used, or b if that is sooner]

What makes a kind. Nothing is in seconds or in a trace's numbers of blocks:

- uses: how often the block was used;
- tail: whether it was the last block of its request, which the next turn of a conversation replaces as a rule;
- length of its request: in which quarter of the requests so far;
- context: whether its request continued another one, whether that was a continuation too, and whether it came soon,
  late or very late for one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.history import KeyHistory

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]

_USES_EDGES: Final = np.array([2, 3, 4, 9, 33])
_LENGTH_SHARES: Final = (0.25, 0.5, 0.75)  # of requests: where one class of lengths ends and the next begins
_GAP_SHARES: Final = (0.6, 0.9)  # most continuations come soon; it is the late ones that differ from one another
_LENGTHS: Final = len(_LENGTH_SHARES) + 1
_GAPS: Final = len(_GAP_SHARES) + 1
_SHAPE: Final = (len(_USES_EDGES) + 1, 2, _LENGTHS, 1 + 2 * _GAPS)  # uses, tail, length, context
_ALIKE: Final = _SHAPE[2] * _SHAPE[3]
_PER_USES: Final = 2 * _ALIKE  # kinds of equal uses
KINDS: Final = _SHAPE[0] * _PER_USES

AGES: Final = 40  # spans: half octaves of age + 1, so that a younger span is never wider than an older one
_STARTS: Final = 2.0 ** (np.arange(AGES) / 2) - 1
_WIDTHS: Final = np.concatenate([np.diff(_STARTS), np.full(AGES + 1, _STARTS[-1])])

# Before anything is known, a block is used again within each half octave with the same chance: the rank falls with age,
# as in LRU.
_PRIOR_HAZARD: Final = 0.05
_PRIOR_BLOCKS: Final = 100.0  # of experience that this counts for
_ALIKE_BLOCKS: Final = 400.0  # the same for what is known of kinds alike
_SMOOTHINGS: Final = 3
_STEP_BLOCKS: Final = 350  # between two steps of learning, each of which renews the ranks of one number of uses
_SCAN_ROWS: Final = 16384  # of the history that each round of steps looks at
_MEMORY: Final = 4  # counts are halved each time that so many times the history's rows have been noted

_ROWS_MIN: Final = 1 << 16
_ROWS_MAX: Final = 1 << 21  # 42 MB
_ROWS_PER_BLOCK: Final = 32  # of the cache: what is reused after it left is learned from as well
_KIND_BITS: Final = 16
_KIND_MASK: Final = np.uint32((1 << _KIND_BITS) - 1)
_USES_MAX: Final = (1 << (32 - _KIND_BITS)) - 1


class Forecast:
    """See the module."""

    def __init__(self) -> None:
        self.now = 1  # requests
        self._history = KeyHistory(_ROWS_MIN, _ROWS_MAX)  # a row's mark: uses and kind
        self._used: F64 = np.zeros((KINDS, AGES))  # blocks that were used again at that age
        self._forgotten: F64 = np.zeros((KINDS, AGES))  # that left the history at that age
        self._waiting: F64 = np.zeros((KINDS, AGES))  # that are in the history and of that age; an estimate
        self._lengths: F64 = np.zeros(AGES)  # requests by length
        self._gaps: F64 = np.zeros(AGES)  # requests by how long ago the one was that they continue
        self._length_edges: I64 = np.zeros(_LENGTHS - 1, dtype=np.int64)
        self._gap_edges: I64 = np.zeros(_GAPS - 1, dtype=np.int64)
        self._ranks: F64 = np.zeros((KINDS, AGES))
        self._step = 0
        self._scanned = 0
        self._noted = 0  # since the last step
        self._noted_all = 0  # since counts were halved
        for _ in range(_SHAPE[0]):
            self._learn()

    def note(self, keys: U64) -> None:
        """A request for this chain, shape (n,)."""
        if not len(keys):
            return
        self.now += 1
        history = self._history
        rows = history.find(keys)
        known = rows >= 0
        before = rows[known]
        marks, spans = history.marks[before], _span(self.now - history.times[before])
        np.add.at(self._used, (marks & _KIND_MASK, spans), 1.0)
        uses: I64 = np.ones(len(keys), dtype=np.int64)
        uses[known] += marks >> np.uint32(_KIND_BITS)
        kinds = self._kinds_of(uses, int(spans[-1]) if len(spans) else None, int(marks[-1]) >> 16 if len(spans) else 0)
        added = history.add(keys[~known], self.now)
        lost = _span(self.now - added.forgotten_times)
        np.add.at(self._forgotten, (added.forgotten_marks & _KIND_MASK, lost), 1.0)
        rows[~known] = added.rows
        placed = rows >= 0
        history.times[rows[placed]] = self.now
        history.marks[rows[placed]] = (np.minimum(uses, _USES_MAX) << _KIND_BITS | kinds)[placed]
        self._noted += len(keys)
        if self._noted >= _STEP_BLOCKS:
            self._noted_all += self._noted
            self._noted = 0
            self._learn()

    def kinds(self, keys: U64) -> I64:
        """The kind of each block as of its last request; -1 of those that nobody asked for lately. Shape (n,)."""
        rows = self._history.find(keys)
        return np.where(rows >= 0, (self._history.marks[rows] & _KIND_MASK).astype(np.int64), -1)

    def ranks(self, kinds: I64, times: I64) -> F64:
        """Hits for each request that blocks of these kinds, used at these times, are worth keeping for. Shape (n,)."""
        return self._ranks[kinds, _span(self.now - times)]

    def reach(self, blocks: int) -> None:
        """The cache may hold that many."""
        self._history.reach(_ROWS_PER_BLOCK * blocks)

    def _kinds_of(self, uses: I64, gap: int | None, uses_before: int) -> I64:
        """Kinds of a request's blocks; `gap` and `uses_before` are those of the last block that was known already."""
        length = int(_span(np.array(len(uses))))
        self._lengths[length] += 1
        context = 0
        if gap is not None:
            self._gaps[gap] += 1
            continued = int(uses_before > 2)
            context = 1 + continued * _GAPS + int(np.count_nonzero(gap > self._gap_edges))
        inner = np.ones(len(uses), dtype=np.int64)
        inner[-1] = 0
        by_uses = np.searchsorted(_USES_EDGES, uses, side="right")
        alike = int(np.count_nonzero(length > self._length_edges)) * _SHAPE[3] + context
        return by_uses * _PER_USES + inner * _ALIKE + alike

    def _learn(self) -> None:
        """One step: the ranks of the next number of uses. The first step of a round also looks at the history."""
        number = self._step
        self._step = (number + 1) % _SHAPE[0]
        if not number:
            self._begin_round()
        unused = self._forgotten + self._waiting
        overall = _hazards(self._used.sum(0), unused.sum(0), _PRIOR_HAZARD, _PRIOR_BLOCKS)
        rows = slice(number * _PER_USES, (number + 1) * _PER_USES)
        used, unused = (counts[rows].reshape(2, _ALIKE, AGES) for counts in (self._used, unused))
        alike = _hazards(used.sum(1), unused.sum(1), overall, _ALIKE_BLOCKS)
        hazards = _hazards(used, unused, alike[:, None], _ALIKE_BLOCKS)
        # A request uses the blocks before a block whenever it uses that: never rank them lower, whatever was measured.
        ranks = np.maximum.accumulate(_ranks(hazards), axis=0).reshape(_PER_USES, AGES)
        if number:
            ranks = np.maximum(ranks, self._ranks[rows.start - _PER_USES : rows.start])
        self._ranks[rows] = ranks

    def _begin_round(self) -> None:
        self._length_edges = _edges(self._lengths, _LENGTH_SHARES)
        self._gap_edges = _edges(self._gaps, _GAP_SHARES)
        history = self._history
        if self._noted_all > _MEMORY * history.rows:
            self._noted_all = 0
            for learned in (self._used, self._forgotten, self._lengths, self._gaps):
                np.multiply(learned, 0.5, out=learned)
        # Keys are uniform hashes, so any stretch of the table is a fair sample.
        rows = slice(self._scanned, min(self._scanned + _SCAN_ROWS, history.rows))
        self._scanned = rows.stop % history.rows
        times = history.times[rows]
        there = np.flatnonzero(times)
        kinds = (history.marks[rows][there] & _KIND_MASK).astype(np.int64)
        counts = np.bincount(kinds * AGES + _span(self.now - times[there]), minlength=KINDS * AGES)
        share = (rows.stop - rows.start) / history.rows
        self._waiting = counts.reshape(KINDS, AGES).astype(np.float64) / share


def _span(ages: I64) -> I64:
    """Which span each age is in."""
    return np.minimum(2 * np.log2(ages + 1), AGES - 1).astype(np.int64)


def _edges(counts: F64, shares: tuple[float, ...]) -> I64:
    """The last span of each part, when parts end at these shares of all. Shape of `shares`."""
    below = np.cumsum(counts)
    ends = below[-1] * np.array(shares)
    return np.array([np.count_nonzero(below < end) for end in ends], dtype=np.int64)


def _hazards(used: F64, unused: F64, prior: F64 | float, prior_blocks: float) -> F64:
    """Hazards from counts of shape (..., AGES); those that were last seen in a span reached half of it."""
    reached = np.cumsum((used + unused)[..., ::-1], axis=-1)[..., ::-1] - unused / 2
    return np.clip((_smooth(used) + prior_blocks * prior) / (_smooth(reached) + prior_blocks), 1e-7, 1.0)


def _smooth(counts: F64) -> F64:
    """Neighbouring spans of age share what they know."""
    for _ in range(_SMOOTHINGS):
        before = np.concatenate([counts[..., :1], counts[..., :-1]], axis=-1)
        after = np.concatenate([counts[..., 1:], counts[..., -1:]], axis=-1)
        counts = (before + 2 * counts + after) / 4
    return counts


def _ranks(hazards: F64) -> F64:
    """See the module. Shape (..., AGES)."""
    later = np.concatenate([hazards, np.zeros_like(hazards)], axis=-1)
    unused = np.ones_like(hazards)
    hits, requests, best = (np.zeros_like(hazards) for _ in range(3))
    for ahead in range(AGES):
        hazard = later[..., ahead : ahead + AGES]
        requests += unused * _WIDTHS[ahead : ahead + AGES] * (1 - hazard / 2)
        hits += unused * hazard
        unused = unused * (1 - hazard)
        np.maximum(best, hits / requests, out=best)
    return best
