"""SmolLM2 and real text, in float32: what one process saved and another loaded answers as an engine without a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine_adapters.transformers.model import convert_smollm2
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.engines import Generated
from tests.engines.vllm.process import ROOT, VllmEngine, connector
from tests.engines.vllm.truth import same

pytestmark = pytest.mark.timeout(900)

PROMPTS = 20
NEW_TOKENS = 8
BLOCK_TOKENS = 64


@pytest.fixture(scope="module")
def model() -> Path:
    return convert_smollm2().folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Pieces of a book, each of another length."""
    text = (ROOT / "engine_adapters/transformers/alice.txt").read_text()
    tokens: list[int] = AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]
    step = len(tokens) // (PROMPTS + 1)
    return [tokens[number * step :][: BLOCK_TOKENS + 3 + 11 * number] for number in range(PROMPTS)]


@pytest.fixture(scope="module")
def engines(server: ServerProcess, model: Path) -> Iterator[list[VllmEngine]]:
    """Without a store, the one that saves, the one that loads."""
    kv = connector(server.address)
    with ExitStack() as stack:
        options: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 128}
        yield [stack.enter_context(closing(VllmEngine(model, each, **options))) for each in (None, kv, kv)]


def test_20_prompts_of_real_text_are_answered_alike_without_a_store_by_who_saves_and_by_who_loads(
    engines: list[VllmEngine], prompts: list[list[int]]
) -> None:
    answers: list[list[Generated]] = [[engine.generate(prompt, NEW_TOKENS) for prompt in prompts] for engine in engines]
    for prompt, cold, saved, loaded in zip(prompts, *answers, strict=True):
        assert (cold.hit_tokens, saved.hit_tokens) == (0, 0)
        assert loaded.hit_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert same(saved, cold)
        assert same(loaded, cold)
