"""Which blocks of a request the store has, found out beside the scheduler's loop.

One thread asks. The loop waits for it a fraction of a millisecond, which over shared memory is enough; what takes
longer is asked for again at the next step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapters.vllm.identity import adapter_digest
from kvstore import BlockKeys, BlockState, Client, KvStoreError
from kvstore.client.results import leading
from kvstore.core.fields import length_prefixed
from kvstore.core.keys import Extra

__all__ = ["Lookups", "Match", "Parts", "extra_of"]

PATIENCE_S = 0.0008
Mask = NDArray[np.bool_]

log = logging.getLogger("vllm.kvstore")


class Parts:
    """The pipeline parts of a model, each with a namespace and a client of its own. Most models have one."""

    def __init__(self, clients: tuple[Client, ...]) -> None:
        self.clients = clients
        self.block_tokens = clients[0].namespace.block_tokens

    def keys(
        self, tokens: NDArray[np.int32], extra: Extra | None = None, after: tuple[BlockKeys, ...] | None = None
    ) -> tuple[BlockKeys, ...]:
        """Of each part, for the full blocks of `tokens`; `after` the keys of what stands before these."""
        before = after or (None,) * len(self.clients)
        return tuple(
            client.keys(tokens, extra=extra, after=previous)
            for client, previous in zip(self.clients, before, strict=True)
        )


@dataclass(slots=True)
class Match:
    """A request's keys, and what the store has of them. The thread fills it, then sets `done`."""

    tokens: NDArray[np.int32]
    extra: Callable[[], dict[int, bytes]]
    done: threading.Event = field(default_factory=threading.Event)
    keys: tuple[BlockKeys, ...] = ()
    committed: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Which blocks are complete in all parts, shape (n,)."""

    started: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Which have at least one layer in each part."""

    reserved: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Which somebody is writing in some part."""

    planned: int = 0
    """How many of the leading blocks are worth fetching."""

    def usable(self, first: int, *, follow: bool, limit: int) -> int:
        """How many blocks from `first` on can be loaded; no block from `limit` on is wanted."""
        if follow:
            return leading(self.started[first:limit])
        return max(0, min(leading(self.committed[first:limit]), self.planned - first))

    def waits_for_writer(self, first: int, *, limit: int) -> bool:
        """Whether the next block that can't be loaded yet is being written."""
        at = first + leading(self.started[first:limit])
        return at < limit and self.reserved[at]

    def fill(self, parts: Parts, *, plan: bool) -> None:
        """Make the keys, if that has not been done, and ask the store."""
        if not self.keys:
            self.keys = parts.keys(self.tokens, self.extra() or None)
        count = len(self.keys[0])
        committed, started, reserved = np.ones(count, np.bool_), np.ones(count, np.bool_), np.zeros(count, np.bool_)
        planned = count
        for client, keys in zip(parts.clients, self.keys, strict=True):
            found = client.lookup(keys, plan=plan, prompt_tokens=max(len(self.tokens), count * parts.block_tokens))
            committed &= found.hit
            started &= found.hit | (found.layers_ready > 0)
            reserved |= found.states == BlockState.RESERVED
            planned = min(planned, found.plan.fetch_blocks if found.plan else count)
        self.committed, self.started, self.reserved, self.planned = committed, started, reserved, planned


class Lookups:
    """The thread that asks. Whatever fails there is a miss."""

    def __init__(self, parts: Parts, *, plan: bool) -> None:
        self._parts = parts
        self._plan = plan
        self._asked: queue.SimpleQueue[Match | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvstore-lookups", daemon=True)
        self._thread.start()

    def ask(self, match: Match) -> None:
        """Have this filled, anew if it was before."""
        match.done.clear()
        self._asked.put(match)

    @staticmethod
    def wait(match: Match) -> bool:
        """Whether the answer is there, after a moment at most."""
        return match.done.wait(PATIENCE_S)

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _run(self) -> None:
        while (match := self._asked.get()) is not None:
            try:
                match.fill(self._parts, plan=self._plan)
            except KvStoreError as fault:
                log.warning("lookup of a prompt of %d tokens failed, it counts as a miss: %s", len(match.tokens), fault)
            except Exception:  # without an answer the request would wait for ever
                log.exception("lookup of a prompt of %d tokens met a bug, it counts as a miss", len(match.tokens))
            finally:
                match.done.set()


def extra_of(request: Any, block_tokens: int) -> dict[int, bytes]:
    """What a request's tokens do not say, by block: its salt, its adapter, its images."""
    first: list[bytes] = []
    if request.cache_salt:
        first.append(b"salt\0" + str(request.cache_salt).encode())
    if request.lora_request is not None:
        first.append(adapter_digest(request.lora_request.lora_name, request.lora_request.lora_path))
    by_block: dict[int, list[bytes]] = {0: first} if first else {}
    for feature in request.mm_features or ():
        offset = feature.mm_position.offset
        item = b"mm\0" + str(feature.identifier).encode() + b"\0" + str(offset % block_tokens).encode()
        by_block.setdefault(offset // block_tokens, []).append(item)
    return {block: length_prefixed(*items) for block, items in by_block.items()}
