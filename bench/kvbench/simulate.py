"""A trace against an eviction policy alone: no server, no bytes, the calls that a shard makes, in their order.

Hit rates are those of `kvbench replay`: for each request the whole chain is looked up and leading hits are counted,
then the chain is put: what is there counts as used, the rest is written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvbench.trace import Trace
from kvstore.server.eviction import NewPolicy

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def simulated_hit_rate(trace: Trace, keys: U64, capacity: int, new_policy: NewPolicy) -> float:
    """Share of all block references that are leading hits.

    Args:
        trace: prompts in order.
        keys: low 64 bits of each block's key, shape (distinct_blocks,).
        capacity: blocks that fit.
        new_policy: makes the policy from a touch board, uint32 of shape (capacity,).
    """
    policy = new_policy(np.zeros(capacity, dtype=np.uint32))
    handle_of: I64 = np.full(trace.distinct_blocks, -1, dtype=np.int64)
    block_of: I64 = np.zeros(capacity, dtype=np.int64)
    free = list(range(capacity))
    hits = 0
    for request in trace.requests:
        blocks = request.blocks[:capacity]
        there = handle_of[blocks] >= 0
        hits += _leading(there)
        policy.note_request(keys[request.blocks])
        policy.touch(handle_of[blocks[there]])
        fresh = blocks[~there]
        if len(fresh) > len(free):
            victims = policy.candidates(len(fresh) - len(free))
            policy.remove(victims)
            handle_of[block_of[victims]] = -1
            free.extend(victims.tolist())
        handles = np.array([free.pop() for _ in range(len(fresh))], dtype=np.int64)
        handle_of[fresh], block_of[handles] = handles, fresh
        policy.admit(handles, keys[fresh])
    return hits / trace.references


def optimal_hit_rate(trace: Trace, capacity: int) -> float:
    """The same for a cache that knows the future: it drops the block whose next use is farthest (Belady), and what is
    never used again at once.
    """
    next_use = _next_uses(trace)
    resident: dict[int, int] = {}  # block -> number of the request that uses it next
    hits = 0
    position = 0
    never = len(trace.requests)
    for request in trace.requests:
        there = np.array([block in resident for block in request.blocks.tolist()])
        hits += _leading(there)
        for block in request.blocks.tolist():
            if next_use[position] < never:
                resident[block] = int(next_use[position])
            else:
                resident.pop(block, None)
            position += 1
        if len(resident) > capacity:
            # Of blocks used next by the same request the deeper ones go: numbers grow with depth.
            farthest = sorted(resident, key=lambda block: (resident[block], block))
            for block in farthest[capacity:]:
                del resident[block]
    return hits / trace.references


def _next_uses(trace: Trace) -> I64:
    """For each reference in order: the number of the request that uses the block next, or that of requests."""
    last_seen: I64 = np.full(trace.distinct_blocks, len(trace.requests), dtype=np.int64)
    parts: list[I64] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        parts.append(last_seen[blocks])
        last_seen[blocks] = number
    return np.concatenate(parts[::-1])


def _leading(there: NDArray[np.bool_]) -> int:
    """How many are True before the first that is not."""
    return len(there) if there.all() else int(np.argmin(there))
