"""What the next step computes: decisions about requests, blocks and the token budget, without a tensor and without I/O.

    waiting ──admit──► running ──last token──► gone
       ▲                  │
       └─────preempt──────┘        abort: gone, from either

Every running request has a number of tokens whose KV is not computed yet: one while it decodes, many while its prompt
is prefilled. A step computes some of them, of all requests together no more than the budget, so long prompts are
computed in chunks beside other requests' decoding. Running requests come first. When blocks run out, the request that
was admitted last gives its blocks back and is computed again later; it keeps what it has generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_adapters.reference.blocks import BlockPool
from kvstore import BlockKeys, UsageError
from kvstore.core.keys import KEY_DTYPE

__all__ = ["Chunk", "Limits", "Request", "Scheduler"]

KeysOf = Callable[[Sequence[int], BlockKeys | None], BlockKeys]

_KEY_BYTES = KEY_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an engine. Raises UsageError naming the field."""

    blocks: int = 1024  # of KV memory
    step_tokens: int = 512  # computed in one step, of all requests together: the budget
    running: int = 32  # requests with blocks
    waiting: int = 1024  # requests without

    def __post_init__(self) -> None:
        for name in ("blocks", "step_tokens", "running", "waiting"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: allowed is 1 or more")
        if self.step_tokens < self.running:
            raise UsageError(f"step_tokens={self.step_tokens}: allowed is {self.running} (running) or more")


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to an answer."""

    number: int
    tokens: list[int]  # the prompt, then what was generated
    new_tokens: int  # at most so many
    stop: frozenset[int] = frozenset()  # tokens that end the answer
    prompt_tokens: int = field(init=False)
    logprobs: list[float] = field(default_factory=list[float])
    hit_tokens: int = 0  # of the prompt, loaded from the store when it was first admitted
    preemptions: int = 0
    computed: int = 0  # tokens whose KV is in `blocks`
    blocks: list[int] = field(default_factory=list[int])
    keys: BlockKeys | None = None  # of the full blocks of `tokens`, when they were last made

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        generated = len(self.tokens) - self.prompt_tokens
        return generated >= self.new_tokens or (generated > 0 and self.tokens[-1] in self.stop)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request that a step computes: positions `start` to `end`, whose blocks are allocated."""

    request: Request
    start: int
    end: int
    load: range = range(0)  # blocks of the request, just before `start`, that come from the store meanwhile

    @property
    def samples(self) -> bool:
        """Whether the step gives the request its next token."""
        return self.end == len(self.request.tokens)

    def completes(self, block_tokens: int) -> range:
        """Blocks of the request that this chunk fills to their end."""
        return range(self.start // block_tokens, self.end // block_tokens)


class Scheduler:
    """The requests of an engine and their blocks. One thread uses it.

    Args:
        limits: of the engine.
        block_tokens: tokens of a block.
        keys_of: keys of the full blocks of a token sequence, which may continue one that has keys already.
    """

    def __init__(self, limits: Limits, block_tokens: int, keys_of: KeysOf) -> None:
        self.pool = BlockPool(limits.blocks)
        self._limits, self._block_tokens, self._keys_of = limits, block_tokens, keys_of
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Raises UsageError when it could never run, or the queue is full."""
        if not request.tokens or request.new_tokens < 1:
            raise UsageError(
                f"a prompt of {len(request.tokens)} tokens, new_tokens={request.new_tokens}: allowed is 1 or more"
            )
        tokens, room = len(request.tokens) + request.new_tokens - 1, self.pool.count * self._block_tokens
        if tokens > room:
            raise UsageError(f"the KV of {tokens} tokens: allowed is up to {room}, the engine's memory")
        if len(self.waiting) >= self._limits.waiting:
            raise UsageError(f"{len(self.waiting)} requests wait already: allowed is up to {self._limits.waiting}")
        self.waiting.append(request)

    def abort(self, number: int) -> bool:
        """Forget a request and give its blocks back; False when there is none of that number (any more)."""
        for requests in (self.running, self.waiting):
            for request in requests:
                if request.number == number:
                    requests.remove(request)
                    self._give_back(request)
                    return True
        return False

    def schedule(self, stored: Callable[[Request, int], int]) -> list[Chunk]:
        """The next step; no chunk when there is no request.

        Args:
            stored: how many blocks of a request, from the given one on, the store should bring. Asked when the request
            is about to be admitted, and held to what leaves a token to compute.
        """
        chunks: list[Chunk] = []
        budget = self._limits.step_tokens
        preempted = False
        for request in list(self.running):
            if request not in self.running:  # preempted for one before it
                continue
            end = min(len(request.tokens), request.computed + budget)
            if end == request.computed:
                break
            while request in self.running and not self._grow(request, end):
                self._preempt(self.running[-1])
                preempted = True
            if request in self.running:
                chunks.append(Chunk(request, request.computed, end))
                budget -= end - request.computed
        while self.waiting and budget and not preempted and len(self.running) < self._limits.running:
            chunk = self._admit(self.waiting[0], budget, stored)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        return chunks

    def settle(self, chunk: Chunk, loaded: int) -> bool:
        """A chunk was computed, and the first `loaded` blocks of its load came. Whether the result counts: where blocks
        did not come, the chunk and what follows it is to be computed again.
        """
        request, whole = chunk.request, loaded == len(chunk.load)
        if len(chunk.load) and not request.preemptions and not request.logprobs:
            request.hit_tokens = loaded * self._block_tokens
        request.computed = chunk.end if whole else (chunk.load.start + loaded) * self._block_tokens
        first = chunk.load.start if len(chunk.load) else chunk.start // self._block_tokens
        done = slice(first, request.computed // self._block_tokens)
        if done.start < done.stop:
            for block, key in zip(request.blocks[done], _key_bytes(self.keys(request)[done]), strict=True):
                self.pool.register(block, key)
        return whole

    def append(self, request: Request, token: int, logprob: float) -> None:
        """The next token of a request. If it is the last one, the request is gone and its blocks are free."""
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.finished:
            self.running.remove(request)
            self._give_back(request)

    def keys(self, request: Request) -> BlockKeys:
        """Keys of the full blocks of what the request has so far."""
        known = request.keys
        if known is None:
            request.keys = self._keys_of(request.tokens, None)
        elif len(known) < len(request.tokens) // self._block_tokens:
            fresh = request.tokens[len(known) * self._block_tokens :]
            request.keys = BlockKeys.concat(known, self._keys_of(fresh, known))
        assert request.keys is not None
        return request.keys

    def _admit(self, request: Request, budget: int, stored: Callable[[Request, int], int]) -> Chunk | None:
        """Give the first waiting request blocks for its first chunk, if there are enough."""
        usable = (len(request.tokens) - 1) // self._block_tokens  # a token is left to compute: logits aren't cached
        request.blocks = self.pool.share(_key_bytes(self.keys(request)[:usable]))
        shared = len(request.blocks)
        load = range(shared, shared + (min(stored(request, shared), usable - shared) if shared < usable else 0))
        start = load.stop * self._block_tokens
        end = min(len(request.tokens), start + budget)
        if not self._grow(request, end):
            self._give_back(request)
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.computed = shared * self._block_tokens  # `settle` counts the load, once it is there
        return Chunk(request, start, end, load)

    def _grow(self, request: Request, tokens: int) -> bool:
        """Have blocks for so many tokens; False (and nothing done) when there are too few."""
        fresh = self.pool.allocate(max(0, -(-tokens // self._block_tokens) - len(request.blocks)))
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0


def _key_bytes(keys: BlockKeys) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[at : at + _KEY_BYTES] for at in range(0, len(raw), _KEY_BYTES)]
