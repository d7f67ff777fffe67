"""Fetch or recompute: what fetching took lately, what computing took, and which of the two is shorter now.

`TransferModel` and `ComputeModel` remember; `plan_fetch` decides, from their numbers alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from kvstore.core.clock import Clock, SystemClock
from kvstore.core.states import Tier

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

WEIGHT = 0.3  # of the newest sample
STALE_S = 10.0  # a link may be another one after so long
COLD_MAX = 1 << 16  # keys remembered as being on the SSD
PROBE_SHARE = 16  # one block in so many is fetched over a link that was too slow, when that was long ago
_CLOCK = SystemClock()


class Action(StrEnum):
    """What a plan says."""

    FETCH = "fetch"
    FETCH_PREFIX = "fetch prefix"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What to do about a prefix hit; part of the answer to `lookup(plan=True)`. Seconds are nan where nothing is known.

    The time to the end of the prefill is `fetch_s + compute_s - hidden_s`.
    """

    action: Action

    fetch_blocks: int
    """How many of the leading blocks to fetch: all that were found, or fewer, or none."""

    fetch_s: float
    """Fetching them."""

    compute_s: float
    """Computing what they leave of the prompt."""

    hidden_s: float
    """Of `fetch_s`, what goes on while the engine computes. 0 without overlap."""

    recompute_s: float
    """Computing the whole prompt instead."""

    why: str
    """The reason, in one line."""


def overlapped_seconds(transfer_s: F64, compute_s: F64) -> F64:
    """When the last layer has been computed, each layer once the one before it is computed and its own KV is there.

    `A_l = A_{l-1} + T_KV,l` and `F_l = max(F_{l-1}, A_l) + T_F,l` (A: arrival, F: finish), written out: the longest of
    the ways "wait for layer l, then compute all layers from l on".

    Args:
        transfer_s: of each layer's cached KV, shape (layers, ...).
        compute_s: of each layer, shape (layers, ...).

    Returns:
        Seconds, shape (...).
    """
    arrives_s = np.cumsum(transfer_s, axis=0)
    rest_s = np.cumsum(compute_s[::-1], axis=0)[::-1]
    return np.max(arrives_s + rest_s, axis=0)


def plan_fetch(
    fetch_s: F64 | None, compute_s: F64 | None, *, blocks: int, layers: int, overlap: bool, unknown: str = ""
) -> FetchPlan:
    """The shortest of: fetch k blocks and compute the rest, for k from 0 to all. Of equals, the one that fetches more.

    Layers count as equal: each is one part in `layers` of the transfer and of the computing.

    Args:
        fetch_s: of the first k blocks, k = 0 to n, shape (n + 1,), never falling; None when it is not known.
        compute_s: of what k blocks leave of the prompt, shape (n + 1,), never rising; None when it is not known.
        blocks: n.
        layers: of the model.
        overlap: whether layers are computed while later ones arrive.
        unknown: what is not known, for the reason.
    """
    if fetch_s is None or compute_s is None:
        return FetchPlan(
            Action.FETCH,
            blocks,
            fetch_s=nan if fetch_s is None else float(fetch_s[-1]),
            compute_s=nan if compute_s is None else float(compute_s[-1]),
            hidden_s=0.0,
            recompute_s=nan if compute_s is None else float(compute_s[0]),
            why=f"fetch all {blocks} blocks: {unknown}",
        )
    total_s = fetch_s + compute_s
    if overlap:
        shape = (layers, blocks + 1)
        each = overlapped_seconds(np.broadcast_to(fetch_s / layers, shape), np.broadcast_to(compute_s / layers, shape))
        total_s = np.clip(each, np.maximum(fetch_s, compute_s), total_s)  # it is within them, but for rounding
    best = blocks - int(np.argmin(total_s[::-1]))
    action = Action.RECOMPUTE if best == 0 else Action.FETCH if best == blocks else Action.FETCH_PREFIX
    chosen_s, recompute_s = float(total_s[best]), float(compute_s[0])
    return FetchPlan(
        action,
        best,
        fetch_s=float(fetch_s[best]),
        compute_s=float(compute_s[best]),
        hidden_s=min(float(fetch_s[best]), float(fetch_s[best] + compute_s[best]) - chosen_s),
        recompute_s=recompute_s,
        why=_why(best, blocks, chosen_s, float(total_s[-1]), recompute_s),
    )


def _why(best: int, blocks: int, chosen_s: float, all_s: float, recompute_s: float) -> str:
    if best == 0:
        return f"recompute: {_ms(recompute_s)}, and with all {blocks} blocks fetched {_ms(all_s)}"
    if best == blocks:
        return f"fetch all {blocks} blocks: {_ms(chosen_s)} to the end of the prefill, recomputing {_ms(recompute_s)}"
    return (
        f"fetch {best} of {blocks} blocks: {_ms(chosen_s)} to the end of the prefill, with all of them {_ms(all_s)}, "
        f"recomputing {_ms(recompute_s)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


@dataclass(slots=True)
class _Class:
    """Moving averages of one size class."""

    size: float
    seconds: float
    seen_s: float


class _Curve:
    """Seconds by size (bytes, tokens): exponentially weighted averages, one for each power of two.

    Between two classes seconds lie on a line, outside of them size per second stays what it was. A sample that is older
    than `stale_s` counts only as long as there is no newer one, of whatever size: that one says more about now. Any
    thread may use it.
    """

    def __init__(self, clock: Clock, stale_s: float) -> None:
        self._clock, self._stale_s = clock, stale_s
        self._lock = threading.Lock()
        self._classes: dict[int, _Class] = {}

    def observe(self, size: int, seconds: float) -> None:
        """One sample. The first of a class counts in full, and so does the first one after a long time. Nothing, or in
        no time, says nothing.
        """
        if size <= 0 or seconds <= 0:
            return
        number, now_s = size.bit_length(), self._clock.monotonic()
        with self._lock:
            known = self._classes.get(number)
            if known is None or now_s - known.seen_s > self._stale_s:
                self._classes[number] = _Class(size, seconds, now_s)
                return
            known.size += WEIGHT * (size - known.size)
            known.seconds += WEIGHT * (seconds - known.seconds)
            known.seen_s = now_s

    def fresh(self) -> bool:
        """Whether there is a sample that is not stale."""
        now_s = self._clock.monotonic()
        with self._lock:
            return any(now_s - known.seen_s <= self._stale_s for known in self._classes.values())

    def seconds(self, sizes: I64) -> F64 | None:
        """Estimate for each size, same shape, never falling with the size; None before the first sample."""
        now_s = self._clock.monotonic()
        with self._lock:
            rows = [(known.size, known.seconds, now_s - known.seen_s) for known in self._classes.values()]
        if not rows:
            return None
        table = np.array(sorted(rows))
        fresh = table[:, 2] <= self._stale_s
        if fresh.any():
            table = table[fresh]
        known, took_s = table[:, 0], np.maximum.accumulate(table[:, 1])
        estimate = np.interp(sizes, known, took_s)
        small, large = sizes < known[0], sizes > known[-1]
        estimate[small] = sizes[small] * (took_s[0] / known[0])
        estimate[large] = sizes[large] * (took_s[-1] / known[-1])
        return estimate


@dataclass(frozen=True, slots=True)
class Route:
    """Which way blocks come: over which transport, out of which tier, into which memory."""

    transport: str
    tier: Tier
    to_device: bool = False

    def __str__(self) -> str:
        target = " to the device" if self.to_device else ""
        return f"{self.transport} from {self.tier.name}{target}"


class TransferModel:
    """What fetching took, by route and size. Any thread may observe and ask."""

    def __init__(self, clock: Clock = _CLOCK) -> None:
        self._clock = clock
        self._curves: dict[Route, _Curve] = {}

    def observe(self, route: Route, size_bytes: int, seconds: float) -> None:
        """So many bytes took so long over one link."""
        self._curves.setdefault(route, _Curve(self._clock, STALE_S)).observe(size_bytes, seconds)

    def seconds(self, route: Route, sizes: I64) -> F64 | None:
        """Estimate for each number of bytes, same shape; None when nothing has come this way yet."""
        curve = self._curves.get(route)
        return None if curve is None else curve.seconds(sizes)

    def fresh(self, route: Route) -> bool:
        """Whether something has come this way lately."""
        curve = self._curves.get(route)
        return curve is not None and curve.fresh()


class ComputeModel:
    """What computing took, by number of tokens. Any thread may observe and ask.

    Tokens are counted without those before them: that attention takes longer after a longer context is in the estimate
    only as far as the samples had such a context.
    """

    def __init__(self, clock: Clock = _CLOCK) -> None:
        self._curve = _Curve(clock, inf)

    def observe(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long."""
        self._curve.observe(tokens, seconds)

    def seconds(self, tokens: I64) -> F64 | None:
        """Estimate for each number of tokens, same shape; None before the first sample."""
        return self._curve.seconds(tokens)


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that lie behind one link."""

    transport: str

    rows: I64
    """Their places among the keys of the lookup, rising, shape (n,)."""

    tiers: U8
    """`Tier` of each, shape (n,)."""


class Planner:
    """The plans of one client, and what it has learned for them. Any thread may use it.

    Args:
        layers: of the model.
        block_bytes: of the namespace.
        block_tokens: of the namespace.
        to_device: whether blocks go to an accelerator's memory.
        clock: for tests.
    """

    def __init__(
        self, *, layers: int, block_bytes: int, block_tokens: int, to_device: bool, clock: Clock = _CLOCK
    ) -> None:
        self._layers, self._block_bytes, self._block_tokens = layers, block_bytes, block_tokens
        self._to_device = to_device
        self._lock = threading.Lock()
        self._cold = np.zeros(0, dtype=np.uint64)  # keys that a lookup saw on the SSD, and no fetch has asked for since
        self.transfers = TransferModel(clock)
        self.computing = ComputeModel(clock)

    def note_tiers(self, keys: U64, tiers: U8) -> None:
        """What a lookup said; `keys` are the low words of the block keys, shape (n,)."""
        cold = keys[tiers != Tier.DRAM]  # what is on its way comes as slowly
        with self._lock:
            if len(cold) or len(self._cold):
                self._cold = np.concatenate([self._cold[~np.isin(self._cold, keys)], cold])[-COLD_MAX:]

    def observe_fetch(
        self, transport: str, keys: U64, size_bytes: int, seconds: float, *, to_device: bool, waited: bool = False
    ) -> None:
        """Blocks came, or did not come in time, over one link. They count for the tier in which the last lookup saw
        them; if that was not the same for all, the sample says nothing about either.

        `waited`: there was nothing to fetch for a while. Where that was not for the SSD it was for a writer, and says
        nothing about the link.
        """
        with self._lock:
            cold = int(np.count_nonzero(np.isin(keys, self._cold))) if len(self._cold) else 0
            if cold:
                self._cold = self._cold[~np.isin(self._cold, keys)]
        if cold == len(keys) or not (cold or waited):
            tier = Tier.DISK if cold else Tier.DRAM
            self.transfers.observe(Route(transport, tier, to_device), size_bytes, seconds)

    def plan(self, hits: Sequence[Hit], blocks: int, prompt_tokens: int, *, overlap: bool) -> FetchPlan:
        """What to do about a hit of `blocks` blocks at the beginning of a prompt.

        Links over sockets work side by side, those over shared memory one after the other: so do the client's calls.
        """
        if not blocks:
            return FetchPlan(Action.RECOMPUTE, 0, 0.0, nan, 0.0, nan, "recompute: nothing is there")
        routes: set[Route] = set()
        unknown: list[str] = []
        links_s: list[F64] = []
        for hit in hits:
            link_s = np.zeros(blocks + 1)
            for tier in (Tier.DRAM, Tier.DISK):
                rows = hit.rows[(hit.tiers != Tier.DRAM) == (tier != Tier.DRAM)]
                rows = rows[rows < blocks]
                if not len(rows):
                    continue
                route = Route(hit.transport, tier, self._to_device)
                routes.add(route)
                seconds = self.transfers.seconds(
                    route, np.searchsorted(rows, np.arange(blocks + 1)) * self._block_bytes
                )
                if seconds is None:
                    unknown.append(f"nothing has come over {route} yet")
                else:
                    link_s += seconds
            links_s.append(link_s)
        left = np.maximum(0, prompt_tokens - np.arange(blocks + 1) * self._block_tokens)
        compute_s = self.computing.seconds(left)
        if compute_s is None:
            unknown.append("how fast the engine computes is not known")
        in_turn = all(hit.transport == "shm" for hit in hits)
        fetch_s = (
            None
            if len(unknown) > (compute_s is None)
            else np.add.reduce(links_s)
            if in_turn
            else np.max(links_s, axis=0)
        )
        plan = plan_fetch(
            fetch_s, compute_s, blocks=blocks, layers=self._layers, overlap=overlap, unknown=" and ".join(unknown)
        )
        stale = [route for route in routes if not self.transfers.fresh(route)]
        if plan.fetch_blocks or not stale or fetch_s is None or compute_s is None:
            return plan
        probe = -(-blocks // PROBE_SHARE)
        return FetchPlan(
            Action.FETCH_PREFIX if probe < blocks else Action.FETCH,
            probe,
            fetch_s=float(fetch_s[probe]),
            compute_s=float(compute_s[probe]),
            hidden_s=0.0,
            recompute_s=plan.recompute_s,
            why=f"fetch {probe} of {blocks} blocks, to see whether {stale[0]} is still so slow: {plan.why}",
        )
