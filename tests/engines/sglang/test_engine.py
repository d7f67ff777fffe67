"""Real SGLang engines, each in a process of its own, share their KV through a real server.

On the CPU, with the stand-ins of `stand_ins/sitecustomize.py`: the copies between the engine's "device" and its host
pool are not the real ones. All answers are judged by transformers, which knows no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.cluster import ServerProcess
from tests.engines.sglang.engines import PAGE_TOKENS, EngineProcess, Judge, wait_until_stored
from tests.engines.sglang.models import prompt, save_tiny

pytestmark = pytest.mark.timeout(400)  # engines take 15 s to start, alone

TOLERANCE = 1e-3  # of log-probabilities, float32
LONG, MEDIUM, SHORT = prompt(1030, 1), prompt(421, 2), prompt(PAGE_TOKENS - 1, 3)
BOUNDED_S = 15.0  # for an answer while the store is dead or frozen; its timeout is 1 s a call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="128MiB") as running:
        yield running


@pytest.fixture(scope="module")
def filled(server: ServerProcess, folder: Path, judge: Judge) -> ServerProcess:
    """The server, after an engine that has ended by now has saved what follows."""
    with EngineProcess(folder, server.address) as engine:
        for tokens in (LONG, MEDIUM, SHORT):
            answer = engine.generate(tokens)
            assert answer.hit_tokens == 0
            assert judge.difference(tokens, answer) < TOLERANCE
        wait_until_stored(engine, LONG, 1024)
        wait_until_stored(engine, MEDIUM, 384)
    return server


def test_a_prompt_saved_by_one_process_is_a_hit_in_another(filled: ServerProcess, folder: Path, judge: Judge) -> None:
    """Also: prompts that share a beginning hit that; a prompt below a page is no hit; all are asked twice; several at
    once; a generation that ends on a page's edge.
    """
    diverging = [*LONG[:700], *prompt(200, 9)]
    with EngineProcess(folder, filled.address) as engine:
        for tokens, stored in ((LONG, 1024), (MEDIUM, 384), (SHORT, 0), (diverging, 640)):
            engine.forget()
            first, second = engine.generate(tokens), engine.generate(tokens)
            assert first.hit_tokens == stored
            assert first.tokens == second.tokens
            for answer in (first, second):
                assert judge.difference(tokens, answer) < TOLERANCE
                assert judge.is_greedy(tokens, answer)
        engine.forget()
        together = [[*LONG[:960], *prompt(50, seed)] for seed in range(20, 24)]
        for tokens, answer in zip(together, engine.generate_together(together), strict=True):
            assert answer.cached_tokens == 960
            assert judge.difference(tokens, answer) < TOLERANCE
        edge = prompt(2 * PAGE_TOKENS - 8, 30)
        turn = [*edge, *engine.generate(edge, 8).tokens]  # the KV of the last of these tokens was never computed
        engine.forget()
        next_turn = [*turn, 5, 6, 7]
        answer = engine.generate(next_turn)
        assert answer.hit_tokens <= PAGE_TOKENS
        assert judge.difference(next_turn, answer) < TOLERANCE


def test_an_engine_of_another_revision_has_no_hit_and_is_right_and_so_are_updated_weights(
    filled: ServerProcess, folder: Path, tmp_path: Path, judge: Judge
) -> None:
    """Other weights under the same name: wrong KV would show at once. Then the weights of r1 come by an update."""
    other = save_tiny(tmp_path / "other", seed=8)
    with EngineProcess(other, filled.address, options={"revision": "r2"}) as engine:
        answer = engine.generate(LONG)
        assert answer.cached_tokens == 0
        assert Judge(other).difference(LONG, answer) < TOLERANCE
        assert judge.difference(LONG, answer) > 10 * TOLERANCE, "both models say the same: this test would see nothing"
        wait_until_stored(engine, LONG, 1024)
        engine.update_weights(folder, "updated")
        answer = engine.generate(LONG)
        assert answer.cached_tokens == 0
        assert judge.difference(LONG, answer) < TOLERANCE
        assert judge.difference(LONG, wait_until_stored(engine, LONG, 1024)) < TOLERANCE


def test_an_engine_survives_a_killed_a_restarted_and_a_frozen_store(folder: Path, judge: Judge) -> None:
    """Layout layer_first, whose pages lie in 2 x layers places. Every answer is right and comes in bounded time."""
    with (
        ServerProcess(dram="64MiB") as server,
        EngineProcess(folder, server.address, options={"timeout_s": 1.0}, hicache_mem_layout="layer_first") as engine,
    ):

        def ask(seed: int) -> int:
            tokens = prompt(300, seed)
            answer = engine.generate(tokens)
            assert judge.difference(tokens, answer) < TOLERANCE
            assert answer.seconds < BOUNDED_S
            return answer.hit_tokens

        assert ask(100) == 0
        wait_until_stored(engine, prompt(300, 100), 256)
        server.kill()
        engine.forget()
        assert [ask(seed) for seed in (100, 101, 102)] == [0, 0, 0]
        server.start()
        engine.forget()
        ask(103)
        wait_until_stored(engine, prompt(300, 103), 256)
        server.freeze()
        try:
            engine.forget()
            assert [ask(seed) for seed in (103, 104, 105)] == [0, 0, 0]
        finally:
            server.thaw()
        wait_until_stored(engine, prompt(300, 103), 256)


def test_storage_calls_that_fail_at_random_change_no_answer(filled: ServerProcess, folder: Path, judge: Judge) -> None:
    """The engine's own fault injector in front of our backend: one call of three fails."""
    injector = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3"}
    with EngineProcess(folder, filled.address, environment=injector) as engine:
        seen: set[int] = set()
        for _ in range(8):
            engine.forget()
            answer = engine.generate(LONG)
            assert judge.difference(LONG, answer) < TOLERANCE
            seen.add(answer.hit_tokens)
        assert seen <= {0, 1024}
        assert len(seen) == 2, "8 rounds without a failure, or with nothing else"
