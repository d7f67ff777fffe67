"""The blocks that somebody reads layer by layer: kept where they are by leases, whether they are finished or not.

A finished block needs no further look. Of one that is being written the index says how far its writer has come; the
lease keeps the slot from being given away, and what the watermark covers is not written again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import Unavailable
from kvstore.transport.base import Keys, Mask
from kvstore.transport.channel import Deadline
from kvstore.wire.frames import Op
from kvstore.wire.messages import BY_LAYERS, KeyRequest

if TYPE_CHECKING:
    from kvstore.transport.shm import LocalSession

I64 = NDArray[np.int64]

PROMOTION_SHARE = 0.8  # of the time left: a slow disk ends the wait, not the connection
_UNHELD = -1
_ALL_LAYERS = 1 << 16  # more than any watermark: only what is committed has them all
_RENEW_TIMEOUT_S = 1.0
_REWRITTEN_S = 0.1  # what was on the SSD and is absent for longer has been deleted
_ASK_S = 0.05  # between two requests to bring back what had no slot so far


class LayerHold:
    """n blocks of one shard. One thread calls `take` and `look`; `renew` and `release` may come from others.

    Args:
        session: with the shard, and its memory.
        number: of the namespace on this shard.
        layers, block_bytes: of each block.
        ttl_s: what is not renewed for so long is let go of.
    """

    def __init__(
        self, session: LocalSession, number: int, layers: int, block_bytes: int, keys: Keys, ttl_s: float
    ) -> None:
        self._session, self._number = session, number
        self._layers, self._block_bytes = layers, block_bytes
        self._keys, self._ttl_s = keys, ttl_s
        self._lock = threading.Lock()  # of the leases
        self._open = True
        self._leases: list[int] = []
        self._valid_until_s = self._renew_at_s = float("inf")
        count = len(keys)
        self.offsets: I64 = np.full(count, _UNHELD, dtype=np.int64)
        self.generations = np.zeros(count, dtype=np.uint64)
        self.ready: I64 = np.zeros(count, dtype=np.int64)
        """Layers of each block that can be read, shape (n,): all of them once it is committed."""
        self.cold: Mask = np.zeros(count, dtype=np.bool_)
        """Blocks that are on the SSD and have no place in the pool yet: `look` for them."""
        self._ask_at_s = 0.0
        self._cold_until_s = self._cold_seen_s = 0.0
        self.gone: Mask = np.zeros(count, dtype=np.bool_)
        """Blocks that are nowhere, or not any more. What was read of them before is right, unless `take` says so."""

    def take(self, rows: I64, deadline: Deadline, meanwhile: Callable[[], None] = lambda: None) -> I64:
        """Hold those of the rows that are in the pool. Rows that were lost while the shard was asked: what `meanwhile`,
        which is run during that time, has read of them is void.
        """
        probe = self._session.index(deadline).probe(self._keys[rows])
        cold = probe.on_disk(self._number, self._block_bytes) & ~probe.loading
        there = (probe.states_in(self._number) > 0) & (probe.sizes == self._block_bytes) & ~cold
        # An entry reads as absent while it is rewritten, which is what happens to those that are to be brought back.
        now_s = time.monotonic()
        rewritten = ~there & ~cold & self.cold[rows] & (now_s < self._cold_seen_s + _REWRITTEN_S)
        self.cold[rows] = cold | rewritten
        self.gone[rows] |= ~there & ~cold & ~rewritten
        if cold.any():
            self._cold_seen_s = now_s
            self._bring_back(rows[cold], deadline)
        at = np.flatnonzero(there)
        if not len(at):
            return at
        found = probe if len(at) == len(rows) else probe.take(at)
        mine = rows[at]
        self.offsets[mine], self.generations[mine] = found.offsets, found.generations
        whole = found.readable(self._number, _ALL_LAYERS, self._block_bytes)
        self.ready[mine] = np.where(whole, self._layers, np.minimum(found.layers_ready, self._layers))
        asked_s = time.monotonic()
        lease, held = self._session.lease(found, self._ttl_s, deadline, meanwhile)
        with self._lock:
            if not self._open:  # meanwhile; `release` has given back what was there
                self._session.release([lease], deadline)
                raise Unavailable("the blocks were given up")
            self._leases.append(lease)
            self._valid_until_s = min(self._valid_until_s, asked_s + self._ttl_s)
            self._renew_at_s = min(self._renew_at_s, asked_s + self._ttl_s / 3)
        self._session.shared.note_use(found.handles)
        lost = mine[~held]
        self.offsets[lost], self.ready[lost], self.gone[lost] = _UNHELD, 0, True
        return lost

    def look(self, rows: I64, deadline: Deadline) -> None:
        """Find out how far the writers of these rows have come; rows that have come back meanwhile are held."""
        rows = rows[(self.ready[rows] < self._layers) & ~self.gone[rows]]
        unheld = rows[self.offsets[rows] == _UNHELD]
        if len(unheld):
            self.take(unheld, deadline)
        rows = rows[(self.offsets[rows] != _UNHELD) & ~self.gone[rows]]
        if not len(rows):
            return
        probe = self._session.index(deadline).probe(self._keys[rows])
        same = probe.generations == self.generations[rows]
        self.gone[rows[~same]] = True  # aborted, deleted, or another one by now
        whole = probe.readable(self._number, _ALL_LAYERS, self._block_bytes)
        ready = np.where(whole, self._layers, np.minimum(probe.layers_ready, self._layers))
        self.ready[rows[same]] = ready[same]

    def _bring_back(self, rows: I64, deadline: Deadline) -> None:
        """Ask for blocks on the SSD, from time to time: there may be no slots for them just now. At last, give up."""
        now_s = time.monotonic()
        if not self._ask_at_s:
            self._cold_until_s = now_s + deadline.left_s() * PROMOTION_SHARE
        elif now_s >= self._cold_until_s:
            self.gone[rows] = True
        if now_s >= self._ask_at_s:
            self._ask_at_s = now_s + _ASK_S
            request = KeyRequest(self._number, self._keys[rows], flag=BY_LAYERS)
            self._session.channel.post(Op.PROMOTE, request.encode(), deadline)

    def require_valid(self) -> None:
        """Make sure that the leases have lasted until now.

        Raises:
            Unavailable: they have not, or the shard is gone: what was read may be other blocks' bytes.
        """
        if not self._session.channel.usable or time.monotonic() >= self._valid_until_s:
            raise Unavailable(f"{self._session.channel.stream.peer}: the hold on the blocks ended")

    def renew(self, now_s: float) -> None:
        """Prolong, when a third of the time has passed."""
        with self._lock:
            if now_s < self._renew_at_s or not self._open:
                return
            self._renew_at_s = now_s + self._ttl_s / 3
            with contextlib.suppress(Unavailable):  # `require_valid` will tell
                deadline = Deadline(_RENEW_TIMEOUT_S)
                renewed = [self._session.renew(lease, self._ttl_s, deadline) for lease in self._leases]
                if all(renewed):
                    self._valid_until_s = now_s + self._ttl_s

    def release(self, deadline: Deadline) -> None:
        """Let go of all. Idempotent."""
        with self._lock, contextlib.suppress(Unavailable):  # else the session is over, and its leases with it
            self._open = False
            leases, self._leases = self._leases, []
            if leases:
                self._session.release(leases, deadline)
