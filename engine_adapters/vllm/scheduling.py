"""The scheduler's side: which blocks each step loads and saves.

A block is saved in the step that completes it: all its tokens are known then, and their KV has been written once the
step is over. The last sampled token has no KV yet, so a block that would need it waits for the next step, or is never
saved.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine_adapters.vllm.matching import Lookups, Match, Parts, extra_of
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.sight import Tally
from engine_adapters.vllm.step import Batch, StepPlan, StepReport
from kvstore import BlockKeys, KvStoreError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Planned", "Scheduling"]

STEPS_KEPT = 64  # plans whose reports may still come

_log = logging.getLogger("vllm.kvstore")


@dataclass(slots=True)
class Tracked:
    """What is known of one request."""

    request: Request
    match: Match
    preemptions: int = 0
    """Of the request, when it was last looked up."""

    block_ids: list[int] = field(default_factory=list[int])
    computed: int = 0
    """Tokens whose KV is there after the steps planned so far."""

    next_save: int = 0
    """The first block that has not been considered for saving."""

    matched_from: int = 0
    """Tokens that the engine had itself when it last asked for more."""

    load: tuple[int, int] | None = None
    """Half-open range of blocks that the next step loads."""

    follow_until_s: float = 0.0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """Blocks of one request in a plan."""

    request: Request
    first: int
    known: NDArray[np.bool_]  # which of them the store had already: those are not in the plan

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Those that are in the plan, by their place in the request."""
        return self.first + np.flatnonzero(~self.known)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan whose report is awaited."""

    saves: tuple[Saved, ...]
    loads: tuple[tuple[str, int, int], ...]
    load_keys: tuple[bytes, ...]


class Scheduling:
    """Decides; belongs to the scheduler's loop, which is its only caller.

    Args:
        parts: where blocks are looked up.
        options: the connector's.
        reads: whether `kv_role` and options allow loads.
        writes: whether they allow saves.
        events: whether stored blocks are to be told of.
    """

    def __init__(self, parts: Parts, options: Options, *, reads: bool, writes: bool, events: bool) -> None:
        self._parts = parts
        self._options = options
        self._reads, self._writes = reads, writes
        self._lookups = Lookups(parts, plan=options.plan)
        self.block_tokens = self._block_tokens = parts.block_tokens
        self._requests: dict[str, Tracked] = {}
        self._plans: OrderedDict[int, Planned] = OrderedDict()
        self._number = 0
        self._events = events
        self._stored: list[tuple[Request, int]] = []
        self.tally = Tally()

    # --- matching ----------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> Tracked | None:
        """A request is there: ask about it. None where its KV doesn't follow from tokens."""
        known = self._requests.get(request.request_id)
        if known is not None:
            return known
        if request.prompt_embeds is not None:
            return None
        match = self._match(request)
        tracked = self._requests[request.request_id] = Tracked(request, match)
        self._lookups.ask(match)
        return tracked

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Tokens after the first `computed` that can be loaded; None: ask again."""
        tracked = self.arrive(request)
        if tracked is None:
            return 0
        if tracked.preemptions != request.num_preemptions:
            tracked.preemptions = request.num_preemptions
            tracked.match = self._match(request)
            self._lookups.ask(tracked.match)
        tracked.matched_from = computed
        match = tracked.match
        if not Lookups.wait(match):
            return None
        if not self._reads:
            return 0
        first, limit = computed // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        if self._options.follow and self._should_follow(tracked, first, limit):
            return None
        usable = match.usable(first, follow=self._options.follow, limit=limit)
        if not tracked.counted:
            tracked.counted = True
            self.tally.add(lookups=1, asked_tokens=max(0, limit - first) * self._block_tokens)
            declined = match.usable(first, follow=True, limit=limit) - usable
            self.tally.add(hit_tokens=usable * self._block_tokens, declined_tokens=declined * self._block_tokens)
        return usable * self._block_tokens

    def _should_follow(self, tracked: Tracked, first: int, limit: int) -> bool:
        """Whether to wait for a writer's first layers; looks again if so."""
        now_s = time.monotonic()
        if not tracked.match.waits_for_writer(first, limit=limit):
            return False
        if not tracked.follow_until_s:
            tracked.follow_until_s = now_s + self._options.follow_timeout_s
        if now_s > tracked.follow_until_s:
            return False
        self._lookups.ask(tracked.match)
        return True

    def _match(self, request: Request) -> Match:
        tokens = np.fromiter(request.all_token_ids[:], np.int32, request.num_tokens)  # a slice is a list: half the time
        return Match(tokens, lambda: extra_of(request, self._block_tokens))

    def allocated(self, request: Request, external_tokens: int) -> None:
        """The engine has room for them: the next step loads so many tokens after those that it has."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        first = tracked.matched_from // self._block_tokens
        tracked.load = (first, first + external_tokens // self._block_tokens) if external_tokens > 0 else None

    # --- planning a step ---------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers do in this step."""
        self._number += 1
        loads: list[tuple[str, int, int]] = []
        saves: list[Saved] = []
        for tracked, computed in self._scheduled(output):
            req_id = tracked.request.request_id
            if tracked.load is not None:
                loads.append((req_id, *tracked.load))
                tracked.load = None
            tracked.computed = computed + output.num_scheduled_tokens[req_id]
            if self._writes and (saved := self._complete(tracked)) is not None:
                saves.append(saved)
        self._save_once(saves)
        load = self._batch([(req_id, np.arange(first, end)) for req_id, first, end in loads])
        save = self._batch([(saved.request.request_id, saved.blocks) for saved in saves])
        if loads or len(save):
            self._plans[self._number] = Planned(tuple(saves), tuple(loads), load.keys)
            while len(self._plans) > STEPS_KEPT:
                self._plans.popitem(last=False)
        patience_s = self._options.follow_timeout_s if self._options.follow else self._options.timeout_s
        return StepPlan(self._number, output.total_num_scheduled_tokens, load, save, patience_s)

    def _scheduled(self, output: SchedulerOutput) -> Iterable[tuple[Tracked, int]]:
        """Requests of this step and the tokens computed before it; their block ids are brought up to date."""
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                yield tracked, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for row, req_id in enumerate(cached.req_ids):
            tracked = self._requests.get(req_id)
            if tracked is None:
                continue
            new_ids = cached.new_block_ids[row]
            if req_id in cached.resumed_req_ids:
                tracked.block_ids = []
            if new_ids is not None:
                tracked.block_ids += new_ids[0]
            yield tracked, cached.num_computed_tokens[row]

    def _complete(self, tracked: Tracked) -> Saved | None:
        """The blocks that this step completes, of those that were not saved before."""
        request = tracked.request
        known_tokens = request.num_tokens if self._options.save_generated else request.num_prompt_tokens
        end = min(tracked.computed, known_tokens) // self._block_tokens
        first = tracked.next_save
        if end <= first or not tracked.match.done.is_set():
            return None
        tracked.next_save = end
        try:
            self._extend_keys(tracked, end)
        except KvStoreError as fault:
            _log.warning("blocks of request %s can't be named, and are not saved: %s", request.request_id, fault)
            return None
        known = np.zeros(end - first, dtype=np.bool_)
        committed = tracked.match.committed[first:end]
        known[: len(committed)] = committed
        return None if known.all() else Saved(request, first, known)

    def _save_once(self, saves: list[Saved]) -> None:
        """Requests of one step may share blocks: the first of them saves those."""
        seen = np.zeros(0, dtype=np.uint64)
        for saved in saves if len(saves) > 1 else ():
            words = (
                self._requests[saved.request.request_id].match.keys[0].array["lo"][saved.first :][: len(saved.known)]
            )
            saved.known[:] |= np.isin(words, seen)
            seen = np.union1d(seen, words)

    def _extend_keys(self, tracked: Tracked, blocks: int) -> None:
        """Continue the chains of keys over tokens that came after the lookup."""
        match, size = tracked.match, self._block_tokens
        have = len(match.keys[0]) if match.keys else 0
        if have >= blocks:
            return
        request = tracked.request
        tokens = np.asarray(request.all_token_ids[have * size : blocks * size], np.int32)
        extra = {block - have: item for block, item in match.extra().items() if have <= block < blocks}
        more = self._parts.keys(tokens, extra or None, match.keys or None)
        match.keys = (
            tuple(BlockKeys.concat(keys, new) for keys, new in zip(match.keys, more, strict=True))
            if match.keys
            else more
        )

    def _batch(self, rows: list[tuple[str, NDArray[np.int64]]]) -> Batch:
        rows = [(req_id, blocks) for req_id, blocks in rows if len(blocks)]
        if not rows:
            return Batch()
        tracked = [(self._requests[req_id], blocks) for req_id, blocks in rows]
        keys = tuple(
            np.concatenate([one.match.keys[part].array[blocks] for one, blocks in tracked]).tobytes()
            for part in range(len(self._parts.clients))
        )
        ids = [np.asarray(one.block_ids, np.int64)[blocks] for one, blocks in tracked]
        return Batch(keys, np.concatenate(ids))

    # --- learning ----------------------------------------------------------------------------------------------------

    def learn(self, report: StepReport) -> None:
        """What came of a step."""
        planned = self._plans.pop(report.number, None)
        if report.compute_s > 0:
            for client in self._parts.clients:
                client.observe_compute(report.compute_tokens, report.compute_s)
        if planned is None:
            return
        if planned.loads and report.load_s > 0:
            for client, keys in zip(self._parts.clients, planned.load_keys, strict=True):
                client.observe_fetch(BlockKeys.frombuffer(keys), report.load_s)
        if not report.loaded:
            self._take_back(planned)
            return
        at = 0
        for saved in planned.saves:
            blocks = saved.blocks
            stored = report.saved[at : at + len(blocks)]
            at += len(blocks)
            if self._events and len(stored) == len(blocks):
                self._stored += [(saved.request, int(block)) for block in blocks[stored]]

    def _take_back(self, planned: Planned) -> None:
        """A load failed: what the step computed was not saved, and what it should have loaded is not known any more."""
        for saved in planned.saves:
            tracked = self._requests.get(saved.request.request_id)
            if tracked is not None:
                tracked.next_save = min(tracked.next_save, saved.first)
        for req_id, first, _ in planned.loads:
            tracked = self._requests.get(req_id)
            if tracked is not None:
                tracked.next_save = min(tracked.next_save, first)
                tracked.match.committed[first:] = False

    def finish(self, request: Request) -> None:
        """A request is over, in whatever way."""
        self._requests.pop(request.request_id, None)

    def take_stored(self) -> list[tuple[Request, int]]:
        """Blocks stored since the last call: a request, and which of its blocks."""
        stored, self._stored = self._stored, []
        return stored

    def forget(self) -> int:
        """Remove all blocks of this engine's namespaces from the store; how many."""
        removed = sum(client.flush() for client in self._parts.clients)
        for tracked in self._requests.values():
            tracked.match.committed[:] = False
            tracked.match.started[:] = False
        return removed

    def close(self) -> None:
        """End the lookups. The clients are whoever's they were."""
        self._lookups.close()
