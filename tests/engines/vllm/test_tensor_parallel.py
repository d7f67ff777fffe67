"""What one tensor-parallel size wrote another one reads: blocks in the canonical layout are written by head range."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.engines.vllm.models import VOCABULARY
from tests.engines.vllm.process import BLOCK_TOKENS, VllmEngine, connector
from tests.engines.vllm.truth import Truth, same

pytestmark = pytest.mark.timeout(900)

NEW_TOKENS = 6


@pytest.fixture(scope="module", params=["auto", "canonical"])
def engines(
    request: pytest.FixtureRequest, server: ServerProcess, tiny: Path
) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    """One engine of TP 1, one of TP 2, on the same store."""
    kv = connector(server.address, layout=request.param)
    pinned = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # without it vLLM wants a NUMA node for each rank
    with (
        closing(VllmEngine(tiny, kv)) as one,
        closing(VllmEngine(tiny, kv, environment=pinned, tensor_parallel_size=2)) as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def truth(tiny: Path) -> Truth:
    return Truth(tiny)


@pytest.mark.parametrize("writer", [0, 1], ids=["tp 1 writes", "tp 2 writes"])
def test_a_prompt_that_one_size_computed_is_a_hit_for_the_other_with_the_right_answer(
    writer: int, engines: tuple[VllmEngine, VllmEngine], truth: Truth
) -> None:
    chance = random.Random(writer)
    for length in (BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS + 3):
        prompt = [chance.randrange(VOCABULARY) for _ in range(length)]
        right = truth.answer(prompt, NEW_TOKENS)
        first = engines[writer].generate(prompt, NEW_TOKENS)
        assert first.hit_tokens == 0
        assert same(first, right)
        for engine in (engines[1 - writer], engines[writer]):
            engine.forget()
            found = engine.generate(prompt, NEW_TOKENS)
            assert found.hit_tokens == length // BLOCK_TOKENS * BLOCK_TOKENS
            assert same(found, right)


def test_a_block_that_is_gone_for_one_rank_is_recomputed_by_all(
    engines: tuple[VllmEngine, VllmEngine], truth: Truth, server: ServerProcess
) -> None:
    chance = random.Random(3)
    prompt = [chance.randrange(VOCABULARY) for _ in range(4 * BLOCK_TOKENS + 7)]
    right = truth.answer(prompt, NEW_TOKENS)
    two = engines[1]
    assert same(two.generate(prompt, NEW_TOKENS), right)
    server.kill_all()
    try:
        two.forget()
        assert same(two.generate(prompt, NEW_TOKENS), right)
    finally:
        server.start()

    def back() -> bool:
        two.forget()
        found = two.generate(prompt, NEW_TOKENS)
        assert same(found, right)
        return found.hit_tokens > 0

    until(back, 60, "a hit in the store that is back")
