"""The suite that every engine with our adapter must pass: answers are those of the engine without a store, whatever the
store does, and what one engine saved another one finds. Subclass it in a test file and say how yours is started.

class TestMyEngine(EngineConformance):
    vocabulary = 32_000

    def start(self, address, *, revision="r1", dtype="float32"):
        return MyEngine(...)
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.damage import damage_blocks
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient

__all__ = ["EngineConformance", "EngineUnderTest", "Generated"]

NEW_TOKENS = 4
SAVED_S = 30.0  # until what was computed is in the store
RECOVERED_S = 60.0  # until an engine uses a server that is back

FreshPrompt = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer."""

    tokens: tuple[int, ...]
    """The new tokens, greedy."""

    logprobs: tuple[float, ...]
    """Log-probability (natural) of each of them."""

    hit_tokens: int
    """Tokens of the prompt whose KV came from the store; not those from the engine's own prefix cache."""


class EngineUnderTest(Protocol):
    """One running engine. Called from one thread at a time, not always the same one."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block in the store."""
        ...

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generated:
        """Exactly `new_tokens` tokens, whatever they are: an end-of-text token does not end the answer."""
        ...

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Generated]:
        """Answers to several prompts that are in the engine at the same time; one by one where it takes only one."""
        ...

    def forget(self) -> None:
        """Drop the engine's own prefix cache, not the store's blocks."""
        ...

    def close(self) -> None:
        """End it and all its processes."""
        ...


class EngineConformance(ABC):
    """What an engine with a store promises. Seven engines are started for the whole class, at most five live at once;
    raise pytest-timeout's limit (`pytestmark = pytest.mark.timeout(600)`) where a start takes long.
    """

    vocabulary: ClassVar[int]
    """Prompts are made of token ids from 0 up to this, at random."""

    tolerance: ClassVar[float] = 1e-3
    """Largest difference of a log-probability."""

    answer_s: ClassVar[float] = 30.0
    """The longest that one answer may take while the store is down."""

    other_dtype: ClassVar[str] = "bfloat16"
    """For the engine that must not meet the others' blocks."""

    dram: ClassVar[str] = "256MiB"
    """Of each server."""

    @abstractmethod
    def start(self, address: str | None, *, revision: str = "r1", dtype: str = "float32") -> EngineUnderTest:
        """An engine of always the same weights, with the store at `address`, or without one (None).

        Switch the cost check off, because these prompts are faster to recompute than to look at, and checksums on,
        because blocks are damaged. A block that is saved goes to the store at once, not at its second use.

        Args:
            address: "host:port" of the store.
            revision: what names the weights in the namespace.
            dtype: of weights and KV.
        """

    # --- what is running ---------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[ServerProcess]:
        """A server that nothing happens to."""
        with ServerProcess(dram=cls.dram) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, server: ServerProcess) -> Iterator[EngineUnderTest]:
        """An engine with that store."""
        with contextlib.closing(cls().start(server.address)) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, server: ServerProcess) -> Iterator[EngineUnderTest]:
        """One more like `engine`."""
        with contextlib.closing(cls().start(server.address)) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def cold(cls) -> Iterator[EngineUnderTest]:
        """The engine without a store, whose answers are right."""
        with contextlib.closing(cls().start(None)) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def fragile(cls) -> Iterator[ServerProcess]:
        """A server that is killed, frozen, emptied and damaged. It runs at the start of each test."""
        with ServerProcess(dram=cls.dram) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def survivor(cls, fragile: ServerProcess) -> Iterator[EngineUnderTest]:
        """The engine with that store."""
        with contextlib.closing(cls().start(fragile.address)) as running:
            yield running

    @pytest.fixture
    def fresh(self, request: pytest.FixtureRequest) -> FreshPrompt:
        """Makes prompts that no other test has, of so many tokens; the same ones in every run."""
        random = np.random.default_rng(zlib.crc32(request.node.name.encode()))
        return lambda tokens: random.integers(0, self.vocabulary, tokens).tolist()

    # --- hits --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("blocks", "more"), [(1, 1), (1, 0), (3, 5), (4, 0), (9, 1)])
    def test_a_prompt_that_one_engine_saved_is_a_hit_in_another_with_the_same_answer(
        self,
        blocks: int,
        more: int,
        server: ServerProcess,
        engine: EngineUnderTest,
        other: EngineUnderTest,
        cold: EngineUnderTest,
        fresh: FreshPrompt,
    ) -> None:
        prompt = fresh(blocks * engine.block_tokens + more)
        expected = _ask(cold, prompt)
        with _saving(server, blocks):
            first = _ask(engine, prompt)
        assert first.hit_tokens == 0
        for _ in range(2):  # the second time must be as good as the first
            found = _ask(other, prompt)
            self._assert_hit(found, len(prompt), prompt, other)
            self._assert_same(found, expected)
        self._assert_same(first, expected)

    def test_at_least_one_token_of_a_prompt_is_computed(
        self, server: ServerProcess, engine: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        prompt = fresh(2 * engine.block_tokens)
        expected = _ask(cold, prompt)
        with _saving(server, 2):
            _ask(engine, prompt)
        for new_tokens in (1, NEW_TOKENS):
            again = _ask(engine, prompt, new_tokens)
            assert 0 < again.hit_tokens < len(prompt)
            self._assert_same(again, _first(expected, new_tokens))

    def test_a_prompt_shorter_than_a_block_is_neither_stored_nor_hit(
        self, server: ServerProcess, engine: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        longer, longer_too, short = (fresh(2 * engine.block_tokens + 1) for _ in range(3))
        short = short[: engine.block_tokens - 1]
        with _saving(server, 2) as alone:
            _ask(engine, longer, 1)
        with _saving(server, 2) as together:
            answers = [_ask(engine, short, 1) for _ in range(2)]
            _ask(engine, longer_too, 1)
        assert together.blocks == alone.blocks
        for answer in answers:
            assert answer.hit_tokens == 0
            self._assert_same(answer, _ask(cold, short, 1))

    def test_a_prompt_that_leaves_a_known_one_in_the_middle_hits_the_common_blocks_only(
        self,
        server: ServerProcess,
        engine: EngineUnderTest,
        other: EngineUnderTest,
        cold: EngineUnderTest,
        fresh: FreshPrompt,
    ) -> None:
        block = engine.block_tokens
        known = fresh(5 * block + 2)
        with _saving(server, 5):
            _ask(engine, known)
        for common in (2 * block, 2 * block + block // 2, block - 1):
            prompt = known[:common] + fresh(2 * block)
            prompt[common] = (known[common] + 1) % self.vocabulary
            found = _ask(other, prompt)
            assert found.hit_tokens == common // block * block
            self._assert_same(found, _ask(cold, prompt))

    @pytest.mark.parametrize("beyond", [-1, 0, 1])
    def test_a_generation_that_ends_at_a_block_edge_leaves_no_slot_in_the_store_that_was_not_computed(
        self,
        beyond: int,
        server: ServerProcess,
        engine: EngineUnderTest,
        other: EngineUnderTest,
        cold: EngineUnderTest,
        fresh: FreshPrompt,
    ) -> None:
        """The last token of an answer is sampled and never fed to the model, so its slot holds nothing."""
        block = engine.block_tokens
        prompt = fresh(3 * block - NEW_TOKENS + beyond)
        computed = len(prompt) + NEW_TOKENS - 1
        with _saving(server, 2):
            answer = _ask(engine, prompt)
        next_turn = [*prompt, *answer.tokens, *fresh(block // 2)]
        expected = _ask(cold, next_turn)
        first = _ask(other, next_turn)
        assert 2 * block <= first.hit_tokens <= computed // block * block
        self._assert_same(first, expected)
        for _ in range(2):
            self._assert_same(_ask(other, next_turn), expected)

    def test_every_prompt_that_is_sent_twice_is_answered_twice_in_the_same_way(
        self, engine: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        block = engine.block_tokens
        prompts = [fresh(tokens) for tokens in (1, block - 1, block, block + 1, 2 * block, 6 * block + 3)]
        expected = [_ask(cold, prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, expected, strict=True):
            engine.forget()
            for _ in range(2):  # the second time from the engine's own prefix cache
                self._assert_same(engine.generate(prompt, NEW_TOKENS), answer)
        for prompt, answer in zip(prompts, expected, strict=True):
            self._assert_same(_ask(engine, prompt), answer)

    def test_several_requests_with_one_prefix_at_once_are_answered_as_each_alone(
        self,
        server: ServerProcess,
        engine: EngineUnderTest,
        other: EngineUnderTest,
        cold: EngineUnderTest,
        fresh: FreshPrompt,
    ) -> None:
        prefix = fresh(4 * engine.block_tokens)
        prompts = [prefix + fresh(3 + turn) for turn in range(4)]
        expected = [_ask(cold, prompt) for prompt in prompts]
        with _saving(server, 4):
            engine.forget()
            new = engine.generate_together(prompts, NEW_TOKENS)
        other.forget()
        known = other.generate_together(prompts, NEW_TOKENS)
        assert max(answer.hit_tokens for answer in known) >= len(prefix)
        for answers in (new, known):
            assert len(answers) == len(prompts)
            for answer, right in zip(answers, expected, strict=True):
                self._assert_same(answer, right)

    def test_two_engines_that_meet_one_new_prompt_at_the_same_time_both_answer_rightly(
        self, engine: EngineUnderTest, other: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        with ThreadPoolExecutor(1) as beside:
            for _ in range(3):
                prompt = fresh(6 * engine.block_tokens + 1)
                expected = _ask(cold, prompt)
                there = beside.submit(_ask, other, prompt)
                self._assert_same(_ask(engine, prompt), expected)
                self._assert_same(there.result(self.answer_s), expected)

    # --- strangers ---------------------------------------------------------------------------------------------------

    def test_an_engine_of_another_revision_gets_no_hit_and_both_answer_rightly(
        self, server: ServerProcess, engine: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        prompt = fresh(3 * engine.block_tokens + 1)
        with contextlib.closing(self.start(server.address, revision="r2")) as stranger:
            self._assert_strangers(server, engine, stranger, prompt, (_ask(cold, prompt), _ask(cold, prompt)))

    def test_an_engine_of_another_dtype_gets_no_hit_and_both_answer_rightly(
        self, server: ServerProcess, engine: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        prompt = fresh(3 * engine.block_tokens + 1)
        with contextlib.closing(self.start(None, dtype=self.other_dtype)) as alone:
            expected = _ask(alone, prompt)
        with contextlib.closing(self.start(server.address, dtype=self.other_dtype)) as stranger:
            self._assert_strangers(server, engine, stranger, prompt, (_ask(cold, prompt), expected))

    def _assert_strangers(
        self,
        server: ServerProcess,
        engine: EngineUnderTest,
        stranger: EngineUnderTest,
        prompt: list[int],
        expected: tuple[Generated, Generated],
    ) -> None:
        """Each of the two has the prompt for itself."""
        with _saving(server, len(prompt) // engine.block_tokens):
            _ask(engine, prompt)
        with _saving(server, len(prompt) // stranger.block_tokens):
            first = _ask(stranger, prompt)
        assert first.hit_tokens == 0
        self._assert_same(first, expected[1])
        for each, right in zip((engine, stranger), expected, strict=True):
            found = _ask(each, prompt)
            self._assert_hit(found, len(prompt), prompt, each)
            self._assert_same(found, right)

    # --- faults ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", ["killed", "frozen", "restarted", "emptied", "damaged"])
    def test_whatever_happens_to_the_server_every_answer_is_right_and_in_time(
        self, fault: str, fragile: ServerProcess, survivor: EngineUnderTest, cold: EngineUnderTest, fresh: FreshPrompt
    ) -> None:
        prompts = [fresh(3 * survivor.block_tokens + 5) for _ in range(4)]
        expected = [_ask(cold, prompt) for prompt in prompts]
        self._until_hit(survivor, prompts[0])
        for prompt in prompts[1:2]:  # half of them are in the store
            self._until_hit(survivor, prompt)
        answered: list[Generated] = []
        struck = threading.Event()

        def strike() -> None:
            until(lambda: len(answered) >= 2, 2 * self.answer_s, "two answers")
            _strike(fragile, fault)
            struck.set()

        try:
            with ThreadPoolExecutor(1) as beside:
                striking = beside.submit(strike)
                after = 0
                for turn in itertools.count():
                    after += struck.is_set()  # and then each of them once more
                    began_s = time.monotonic()
                    answer = _ask(survivor, prompts[turn % 4])
                    assert time.monotonic() - began_s < self.answer_s
                    self._assert_same(answer, expected[turn % 4])
                    answered.append(answer)
                    if after > len(prompts) or (striking.done() and striking.exception()):
                        break
                striking.result()
        finally:
            _mend(fragile, fault)
        for prompt, right in zip(prompts, expected, strict=True):
            self._until_hit(survivor, prompt)
            self._assert_same(_ask(survivor, prompt), right)

    def _until_hit(self, engine: EngineUnderTest, prompt: list[int]) -> None:
        """Ask until the store has the prompt: the engine has to find a server that is back, and to save."""
        until(lambda: _ask(engine, prompt, 1).hit_tokens, RECOVERED_S, "a hit")

    # --- assertions --------------------------------------------------------------------------------------------------

    def _assert_same(self, answer: Generated, expected: Generated) -> None:
        assert answer.tokens == expected.tokens
        assert len(answer.logprobs) == len(expected.logprobs) == len(expected.tokens)
        assert answer.logprobs == pytest.approx(expected.logprobs, rel=0, abs=self.tolerance)

    def _assert_hit(self, answer: Generated, stored: int, prompt: list[int], engine: EngineUnderTest) -> None:
        """All whole blocks of the first `stored` tokens were hit, but for the token that is always computed: some
        engines compute the block that it is in, others only the token.
        """
        block = engine.block_tokens
        allowed = {min(stored, len(prompt) - 1) // block * block}
        if stored >= len(prompt) and len(prompt) % block == 0:
            allowed.add(len(prompt) - 1)
        assert answer.hit_tokens in allowed


@dataclass(slots=True)
class _Saved:
    blocks: int = 0


@contextlib.contextmanager
def _saving(server: ServerProcess, blocks: int) -> Iterator[_Saved]:
    """At the end, so many blocks or more have been stored, and none is being stored any more."""
    before, saved = _counted(server, "counters", "committed_blocks"), _Saved()
    yield saved

    def done() -> bool:
        saved.blocks = _counted(server, "counters", "committed_blocks") - before
        return saved.blocks >= blocks and not _counted(server, "gauges", "reserved_blocks_now")

    until(done, SAVED_S, f"{blocks} blocks in the store")


def _counted(server: ServerProcess, kind: str, name: str) -> int:
    return sum(shard[kind][name] for shard in server.status()["shards"])


def _ask(engine: EngineUnderTest, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> Generated:
    """The answer without the engine's own prefix cache."""
    engine.forget()
    return engine.generate(prompt, new_tokens)


def _first(answer: Generated, tokens: int) -> Generated:
    return Generated(answer.tokens[:tokens], answer.logprobs[:tokens], answer.hit_tokens)


def _strike(server: ServerProcess, fault: str) -> None:
    match fault:
        case "killed":
            server.kill_all()
        case "frozen":
            server.freeze()
        case "restarted":
            server.kill_all()
            server.start()
        case "emptied":
            with ControlClient(server.address, timeout_s=10.0) as control:
                assert control.flush(None)
        case _:
            assert damage_blocks(server)


def _mend(server: ServerProcess, fault: str) -> None:
    match fault:
        case "killed":
            server.start()
        case "frozen":
            server.thaw()
        case _:
            pass
