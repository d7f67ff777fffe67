"""Timing an operation and its limit side by side.

Memory bandwidth on a virtual machine moves by half within seconds, so a limit measured before or after says little.
Here each turn times both, once each, and the next turn in the other order (A B, B A, ...): whatever the machine does,
it does to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Timed = Callable[
    [int], float
]  # turn -> seconds that the timed part took; set-up and checks of the turn happen inside too

_WARM_UP_TURNS: Final = 2
_TURNS_MIN: Final = 5
_TURNS_MAX: Final = 5000


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each turn, float64 of shape (turns,)."""

    op_s: NDArray[np.float64]
    limit_s: NDArray[np.float64] | None  # None: the operation has no limit to compare with

    def rate(self, amount: float) -> float:
        """Median amount per second of the operation, each turn handling `amount`."""
        return float(np.median(amount / self.op_s))

    def limit_rate(self, amount: float) -> float | None:
        """The same for the limit."""
        return None if self.limit_s is None else float(np.median(amount / self.limit_s))

    def percentile_us(self, percent: float) -> float:
        """Percentile of the operation's time in microseconds."""
        return float(np.percentile(self.op_s, percent)) * 1e6


def alternate(op: Timed, limit: Timed | None, *, seconds: float) -> Samples:
    """Run both in turn for about `seconds` of wall-clock time: 5 to 5,000 turns, after 2 that don't count."""
    op_s: list[float] = []
    limit_s: list[float] = []
    turn = 0
    deadline: float | None = None
    while True:
        counted = turn >= _WARM_UP_TURNS
        if counted and deadline is None:
            deadline = time.monotonic() + seconds
        took_op, took_limit = _one_turn(op, limit, turn)
        turn += 1
        if not counted:
            continue
        op_s.append(took_op)
        limit_s.append(took_limit)
        enough = len(op_s) >= _TURNS_MIN and deadline is not None and time.monotonic() >= deadline
        if enough or len(op_s) >= _TURNS_MAX:
            return Samples(np.array(op_s), np.array(limit_s) if limit is not None else None)


def _one_turn(op: Timed, limit: Timed | None, turn: int) -> tuple[float, float]:
    if limit is None:
        return op(turn), 0.0
    if turn % 2:
        took_limit = limit(turn)
        return op(turn), took_limit
    took_op = op(turn)
    return took_op, limit(turn)
