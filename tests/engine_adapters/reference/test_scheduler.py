"""Whatever comes and goes: no block is lost or given twice, the budget holds, and every request gets to its end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapters.reference.blocks import BlockPool
from engine_adapters.reference.scheduler import Chunk, Limits, Request, Scheduler
from kvstore import BlockKeys, CanonicalLayout, Namespace, UsageError, chain_keys

BLOCK = 4
NAMESPACE = Namespace(model="m", revision="r", dtype="float32", block_tokens=BLOCK, layout=CanonicalLayout(1, 1, 1))


def keys_of(tokens: Sequence[int], after: BlockKeys | None) -> BlockKeys:
    return chain_keys(NAMESPACE, tokens, after=after)


def new_scheduler(**limits: int) -> Scheduler:
    return Scheduler(Limits(**{"blocks": 12, "step_tokens": 6, "running": 3, "waiting": 100, **limits}), BLOCK, keys_of)


@dataclass
class World:
    """A scheduler, and what the engine around it would do; asserts what must hold after every step."""

    scheduler: Scheduler
    data: Any  # hypothesis decides what the store has, and what of it comes
    finished: list[Request] = field(default_factory=list[Request])
    written: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # block to the tokens before its end

    def step(self) -> int:
        draw = self.data.draw
        chunks = self.scheduler.schedule(lambda _request, _first: draw(st.integers(0, 3)))
        self._check_step(chunks)
        self._check_blocks()
        for chunk in chunks:
            self._compute(chunk, draw(st.integers(0, len(chunk.load))))
        self._check_blocks()
        return len(chunks)

    def _compute(self, chunk: Chunk, loaded: int) -> None:
        request = chunk.request
        assert self.scheduler.keys(request) == keys_of(request.tokens, None)
        samples = self.scheduler.settle(chunk, loaded) and chunk.samples
        for block in range(request.computed // BLOCK):
            held = request.tokens[: (block + 1) * BLOCK]
            if block < chunk.start // BLOCK - len(chunk.load):
                assert self.written[request.blocks[block]] == held, "a shared block is of another prefix"
            self.written[request.blocks[block]] = held
        if samples:
            self.scheduler.append(request, draw_token(request), -1.0)
            if request.finished:
                self.finished.append(request)

    def _check_step(self, chunks: Sequence[Chunk]) -> None:
        limits = self.scheduler.pool
        assert sum(chunk.end - chunk.start for chunk in chunks) <= 6
        assert len({chunk.request.number for chunk in chunks}) == len(chunks)
        assert len(self.scheduler.running) <= 3
        for chunk in chunks:
            assert chunk.start < chunk.end <= len(chunk.request.tokens)
            assert -(-chunk.end // BLOCK) <= len(chunk.request.blocks) <= limits.count
            assert chunk.load.stop * BLOCK == chunk.start or not len(chunk.load)
        written = [block for chunk in chunks for block in chunk.request.blocks[first_own(chunk) :]]
        assert len(set(written)) == len(written), "two requests write one block"

    def _check_blocks(self) -> None:
        scheduler = self.scheduler
        held = Counter(block for request in scheduler.running for block in request.blocks)
        references = [scheduler.pool.references(block) for block in range(scheduler.pool.count)]
        assert references == [held[block] for block in range(scheduler.pool.count)]
        assert scheduler.pool.free == references.count(0)
        assert not any(request.blocks for request in scheduler.waiting)
        for request in scheduler.running:
            assert len(set(request.blocks)) == len(request.blocks)


def first_own(chunk: Chunk) -> int:
    """The first block that this step writes, by computing or loading."""
    return chunk.load.start if len(chunk.load) else chunk.start // BLOCK


def draw_token(request: Request) -> int:
    return sum(request.tokens) % 3


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)  # of two tokens: many share a prefix


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_block_is_lost_or_written_by_two_and_every_request_ends(data: Any) -> None:
    world = World(new_scheduler(), data)
    alive: dict[int, Request] = {}
    aborted = 0
    for number in range(data.draw(st.integers(1, 8))):
        request = Request(number, data.draw(prompts), data.draw(st.integers(1, 12)))
        world.scheduler.add(request)
        alive[number] = request
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
        if data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(sorted(alive)))
            aborted += world.scheduler.abort(victim)
        if data.draw(st.integers(0, 9)) == 0:
            world.scheduler.pool.forget()
            world.written.clear()
            world.written.update(
                (block, running.tokens[: (at + 1) * BLOCK])
                for running in world.scheduler.running
                for at, block in enumerate(running.blocks[: running.computed // BLOCK])
            )
    steps = 0
    while world.step():
        steps += 1
        assert steps < 2000, "the requests do not come to an end"
    assert len(world.finished) + aborted == len(alive)
    assert world.scheduler.pool.free == world.scheduler.pool.count
    for request in world.finished:
        assert len(request.tokens) - request.prompt_tokens == request.new_tokens == len(request.logprobs)


@settings(max_examples=100, deadline=None)
@given(operations=st.lists(st.tuples(st.sampled_from("asrkf"), st.integers(0, 7)), max_size=60))
def test_a_pool_gives_out_each_block_once_and_shares_only_what_was_registered(
    operations: list[tuple[str, int]],
) -> None:
    pool = BlockPool(6)
    held: list[list[int]] = []
    registered: dict[bytes, int] = {}
    for kind, number in operations:
        key = bytes([number])
        match kind:
            case "a":
                blocks = pool.allocate(number)
                assert (blocks is None) == (number > 6 - len({block for each in held for block in each}))
                if blocks is not None:
                    assert not {block for each in held for block in each} & set(blocks)
                    held.append(blocks)
                    registered = {key: block for key, block in registered.items() if block not in blocks}
            case "s":
                assert pool.share([key]) == ([registered[key]] if key in registered else [])
                if key in registered:
                    held.append([registered[key]])
            case "r" if held:
                pool.release(held.pop(number % len(held)))
            case "k" if held and held[number % len(held)]:
                block = held[number % len(held)][0]
                if key not in registered:
                    registered = {other: at for other, at in registered.items() if at != block} | {key: block}
                pool.register(block, key)
            case "f":
                pool.forget()
                registered = {}
            case _:
                pass
        counts = Counter(block for each in held for block in each)
        assert [pool.references(block) for block in range(6)] == [counts[block] for block in range(6)]
        assert pool.free == 6 - len(counts)


def test_of_released_blocks_those_without_a_prefix_are_reused_first_then_the_oldest_and_deepest() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    for block, key in zip([*first, second[0]], (b"1", b"2", b"3"), strict=True):
        pool.register(block, key)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4) == [second[1], first[1], first[0], second[0]]


def test_a_prompt_is_computed_in_chunks_beside_a_request_that_decodes() -> None:
    scheduler = new_scheduler()
    for number, tokens in enumerate((3, 20)):
        scheduler.add(Request(number, list(range(100 * number, 100 * number + tokens)), 5))
    sizes: list[list[int]] = []
    for _ in range(5):
        chunks = scheduler.schedule(lambda _request, _first: 0)
        sizes.append([chunk.end - chunk.start for chunk in chunks])
        for chunk in chunks:
            if scheduler.settle(chunk, 0) and chunk.samples:
                scheduler.append(chunk.request, 7, -1.0)
    assert sizes == [[3, 3], [1, 5], [1, 5], [1, 5], [1, 2]]


def test_what_can_never_run_and_what_is_too_much_is_refused() -> None:
    scheduler = new_scheduler(waiting=1)
    for tokens, new_tokens, culprit in ((0, 1, "0 tokens"), (1, 0, "new_tokens=0"), (40, 10, "KV of 49 tokens")):
        with pytest.raises(UsageError, match=culprit):
            scheduler.add(Request(1, [0] * tokens, new_tokens))
    scheduler.add(Request(1, [0] * 40, 9))
    with pytest.raises(UsageError, match="1 requests wait already"):
        scheduler.add(Request(2, [0], 1))
    with pytest.raises(UsageError, match=r"step_tokens=2: allowed is 3 \(running\) or more"):
        Limits(step_tokens=2, running=3)
