"""What a reader asked for, kept until the shard is told: reads through shared memory never pass there.

A request for reading is often several calls (`lookup`, then `get` of what leads as hits, then `put` of the rest), and
should be told once. So a chain that begins like one of the last few, for as long as the shorter of the two goes, is
taken for the same request, unless a put has ended that or a second has passed; the longer one is told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.wire.messages import KEYS_MAX, U64, Chains

Keys = NDArray[np.void]

SAME_REQUEST_S: Final = 1.0
COMPARED_MAX: Final = 8
KEPT_MAX: Final = 1024  # chains; the oldest are forgotten when nobody takes them
MESSAGE_KEYS_MAX: Final = 4 * KEYS_MAX  # half of what a message's body may hold


@dataclass(slots=True)
class _Asked:
    words: bytes  # low words of the keys
    at_s: float
    told: bool = False
    ended: bool = False


class ChainLog:
    """See the module. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque(maxlen=KEPT_MAX)
        self._untold = False

    def note(self, keys: Keys) -> None:
        """These were asked for just now, KEY_DTYPE of shape (n,)."""
        words = keys["lo"][:KEYS_MAX].tobytes()
        if not words:
            return
        now_s = time.monotonic()
        with self._lock:
            same = self._same_request(words, now_s)
            if same is None:
                self._asked.append(_Asked(words, now_s))
                self._untold = True
            elif len(words) > len(same.words):
                same.words, same.told = words, False
                self._untold = True

    def end(self, keys: Keys) -> None:
        """The request for this chain ends with a put: whoever asks for it again asks anew."""
        words = keys["lo"][:KEYS_MAX].tobytes()
        with self._lock:
            same = self._same_request(words, time.monotonic())
            if same is not None:
                same.ended = True

    def take(self) -> list[bytes]:
        """Bodies of CHAINS messages for what was not told yet."""
        if not self._untold:
            return []
        with self._lock:
            self._untold = False
            chains: list[NDArray[np.uint64]] = []
            for asked in self._asked:
                if not asked.told:
                    asked.told = True
                    chains.append(np.frombuffer(asked.words, dtype=U64))
            while len(self._asked) > COMPARED_MAX:
                self._asked.popleft()
        return list(_messages(chains))

    def _same_request(self, words: bytes, now_s: float) -> _Asked | None:
        for back in range(1, min(COMPARED_MAX, len(self._asked)) + 1):
            asked = self._asked[-back]
            if asked.at_s < now_s - SAME_REQUEST_S:
                return None
            if not asked.ended and (asked.words.startswith(words) or words.startswith(asked.words)):
                return asked
        return None


def _messages(chains: list[NDArray[np.uint64]]) -> list[bytes]:
    """As few as can be without exceeding MESSAGE_KEYS_MAX."""
    bodies: list[bytes] = []
    first = keys = 0
    for number, chain in enumerate(chains):
        if keys + len(chain) > MESSAGE_KEYS_MAX:
            bodies.append(Chains(chains[first:number]).encode())
            first, keys = number, 0
        keys += len(chain)
    if chains:
        bodies.append(Chains(chains[first:]).encode())
    return bodies
