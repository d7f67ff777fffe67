"""The adapter passes the suite of all engines, with a small model of random weights."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

import torch
from torch import Tensor
from transformers import DynamicCache

import kvstore
from engine_adapters.transformers import CacheAdapter
from kvstore import PutResult
from kvstore.testing.engines import EngineConformance, EngineUnderTest, Generated
from tests.engine_adapters.transformers.tiny import BLOCK_TOKENS, TIMEOUT_S, VOCABULARY, tiny_model, tiny_namespace

LONG_S = 30.0  # what only a hang would take


class _Engine:
    """The model with the adapter around it. It has no prefix cache of its own, and takes one request at a time."""

    def __init__(self, address: str | None, revision: str, dtype: str) -> None:
        self.block_tokens = BLOCK_TOKENS
        self._model = tiny_model(getattr(torch, dtype))
        self._storing: Future[PutResult] | None = None
        self._client: kvstore.Client | None = None
        self._adapter: CacheAdapter | None = None
        if address is not None:
            namespace = tiny_namespace(self._model, revision)
            self._client = kvstore.connect(address, namespace=namespace, timeout_s=TIMEOUT_S, checksums=True)
            self._adapter = CacheAdapter(self._client, self._model)

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generated:
        tokens, hit_tokens = list(prompt), 0
        if self._adapter is None:
            cache = DynamicCache(config=self._model.config)
            logits = self._step(torch.tensor([tokens]), cache)
        else:
            prefill = self._adapter.prefill(tokens, self._step, plan=False)
            cache, logits, hit_tokens, self._storing = (
                prefill.cache,
                prefill.output,
                prefill.hit_tokens,
                prefill.stored,
            )
        logprobs: list[float] = []
        while True:
            likely = logits.log_softmax(-1).max(-1)
            tokens.append(int(likely.indices))
            logprobs.append(float(likely.values))
            if len(logprobs) == new_tokens:
                break
            logits = self._step(torch.tensor([tokens[-1:]]), cache)
        if self._adapter is not None:
            self._adapter.store(tokens, cache)
        return Generated(tuple(tokens[len(prompt) :]), tuple(logprobs), hit_tokens)

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Generated]:
        return [self.generate(prompt, new_tokens) for prompt in prompts]

    def forget(self) -> None:
        pass

    def close(self) -> None:
        if self._storing is not None:
            self._storing.result(LONG_S)
        if self._client is not None:
            self._client.close()

    def _step(self, input_ids: Tensor, cache: DynamicCache) -> Tensor:
        with torch.inference_mode():
            return cast(Tensor, self._model(input_ids=input_ids, cache=cache, use_cache=True).logits[0, -1].float())


class TestTransformers(EngineConformance):
    vocabulary = VOCABULARY
    dram = "64MiB"

    def start(self, address: str | None, *, revision: str = "r1", dtype: str = "float32") -> EngineUnderTest:
        return _Engine(address, revision, dtype)
