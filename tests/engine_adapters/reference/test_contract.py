"""The reference engine passes the suite of all engines, with a small model of random weights."""

from collections.abc import Sequence

import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

import torch

from engine_adapters.reference import Engine, Limits
from kvstore.testing.engines import EngineConformance, EngineUnderTest, Generated
from tests.engine_adapters.transformers.tiny import BLOCK_TOKENS, TIMEOUT_S, VOCABULARY, tiny_model


class _Engine:
    def __init__(self, address: str | None, revision: str, dtype: str) -> None:
        self.block_tokens = BLOCK_TOKENS
        self._engine = Engine(
            tiny_model(getattr(torch, dtype)),
            revision=revision,
            model_id="tiny",
            address=address,
            block_tokens=BLOCK_TOKENS,
            limits=Limits(blocks=64, step_tokens=40, running=4),  # prompts come in chunks
            plan=False,
            timeout_s=TIMEOUT_S,
            checksums=True,
        )

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generated:
        return self.generate_together([prompt], new_tokens)[0]

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Generated]:
        answers = self._engine.generate(prompts, new_tokens)
        return [Generated(answer.tokens, answer.logprobs, answer.hit_tokens) for answer in answers]

    def forget(self) -> None:
        self._engine.forget()

    def close(self) -> None:
        self._engine.close()


class TestReference(EngineConformance):
    vocabulary = VOCABULARY
    tolerance = 1e-4
    dram = "64MiB"

    def start(self, address: str | None, *, revision: str = "r1", dtype: str = "float32") -> EngineUnderTest:
        return _Engine(address, revision, dtype)
