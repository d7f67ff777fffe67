"""Traces of real requests: which blocks each prompt consists of. Mooncake's files have one JSON object a line.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}

An id stands for 512 tokens of the prompt, and an equal id means an equal prefix up to and including that block. Here
blocks are numbered along the tree that the prompts span, so that this holds by construction: one number = one prefix.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.core.errors import UsageError
from kvstore.core.keys import KEY_DTYPE, chain_keys

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
Keys = NDArray[np.void]

TOKENS_PER_ID: Final = 512
_ALLOWED: Final = "allowed: a Mooncake trace, one JSON object a line with hash_ids and input_length"
_TOKEN_MASK: Final = np.uint64(0x7FFFFFFF)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    blocks: I64  # numbers of its blocks, first to last, shape (n,)
    ids: I64  # the trace's own, shape (n,)
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in the order of their arrival. Blocks are numbered from 0 in the order of their first use."""

    name: str
    requests: tuple[Request, ...]
    distinct_blocks: int

    @property
    def references(self) -> int:
        """Blocks of all prompts together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Blocks of the longest prompt."""
        return max(len(request.blocks) for request in self.requests)

    def hit_rate_limit(self) -> float:
        """Share of all block references that a cache without bounds would serve as a prefix."""
        known = 0
        hits = 0
        for request in self.requests:
            # Numbers are given at first use, so a block was seen before exactly if its number was given before.
            hits += int(np.count_nonzero(request.blocks < known))
            known = max(known, int(request.blocks.max()) + 1)
        return hits / self.references


def read_trace(path: Path, *, requests_max: int | None = None) -> Trace:
    """Read a trace, or its first `requests_max` requests.

    Raises:
        UsageError: names file, line, and what is allowed.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(islice(((number, line) for number, line in enumerate(file, 1) if line.strip()), requests_max))
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is not text"
        raise UsageError(f"--trace {path}: can't be read: {reason}; {_ALLOWED}") from cause
    if lines and lines[0][1].startswith("TIMESTAMP,"):
        raise UsageError(
            f"--trace {path}: an Azure trace has token counts but no prefix identity, so there is nothing to hit; {_ALLOWED}"
        )
    if not lines:
        raise UsageError(f"--trace {path}: has no requests; {_ALLOWED}")
    tree: dict[tuple[int, int], int] = {}
    requests = tuple(_request(path, number, line, tree) for number, line in lines)
    return Trace(path.stem, requests, len(tree))


def block_keys(trace: Trace, namespace: kvstore.Namespace) -> Keys:
    """Key of each block number under the default scheme with seed 0, KEY_DTYPE of shape (distinct_blocks,)."""
    keys = np.zeros(trace.distinct_blocks, dtype=KEY_DTYPE)
    known = 0
    for request in trace.requests:
        end = int(request.blocks.max()) + 1
        if end > known:
            keys[request.blocks] = chain_keys(namespace, tokens(request.ids)).array
            known = end
    return keys


def tokens(ids: I64) -> I32:
    """The tokens that ids stand for: 512 each, the same ones for the same id. Shape (512 n,)."""
    words = (ids.astype(np.uint64)[:, None] + np.uint64(1)) * _GOLDEN
    words = words + np.arange(TOKENS_PER_ID, dtype=np.uint64) * (_GOLDEN >> np.uint64(7))
    return (words >> np.uint64(32) & _TOKEN_MASK).astype(np.int32).reshape(-1)


def _request(path: Path, number: int, line: str, tree: dict[tuple[int, int], int]) -> Request:
    try:
        value: dict[str, Any] = json.loads(line)
        ids = np.array(value["hash_ids"], dtype=np.int64)
        input_tokens = int(value["input_length"])
    except (ValueError, TypeError, KeyError, OverflowError) as cause:
        raise UsageError(f"--trace {path}: line {number} is no request; {_ALLOWED}") from cause
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or input_tokens < 1:
        raise UsageError(f"--trace {path}: line {number} has no blocks, or a negative number; {_ALLOWED}")
    blocks = np.empty(len(ids), dtype=np.int64)
    parent = -1
    for depth, block_id in enumerate(ids.tolist()):
        parent = tree.setdefault((parent, block_id), len(tree))
        blocks[depth] = parent
    return Request(blocks, ids, input_tokens)
