"""The small model of the transformers adapter's tests behind the reference engine, and answers to compare with."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from engine_adapters.reference import Answer, Engine, Limits
from tests.engine_adapters.transformers.tiny import BLOCK_TOKENS, TIMEOUT_S

LIMITS = Limits(blocks=64, step_tokens=512, running=8)


def tiny_engine(model: PreTrainedModel, address: str | None = None, **options: Any) -> Engine:
    """An engine without cost checks; `options` as the engine's."""
    torch.set_num_threads(1)  # more of them wait for one another where other processes compute, too
    settings: dict[str, Any] = {
        "revision": "r1",
        "model_id": "tiny",
        "block_tokens": BLOCK_TOKENS,
        "limits": LIMITS,
        "plan": False,
        "timeout_s": TIMEOUT_S,
    }
    return Engine(model, address=address, **{**settings, **options})


def transformers_answer(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> Answer:
    """What transformers' own forward says, greedily."""
    cache, tokens, logprobs = DynamicCache(config=model.config), list(prompt), list[float]()
    inputs = torch.tensor([tokens])
    for _ in range(new_tokens):
        with torch.inference_mode():
            logits = model(input_ids=inputs, cache=cache, use_cache=True).logits[0, -1].float()
        likely = logits.log_softmax(-1).max(-1)
        tokens.append(int(likely.indices))
        logprobs.append(float(likely.values))
        inputs = torch.tensor([tokens[-1:]])
    return Answer(0, tuple(tokens[len(prompt) :]), tuple(logprobs), 0, 0)


def assert_same(answer: Answer, expected: Answer, tolerance: float = 1e-4) -> None:
    """Equal tokens, and log-probabilities within the tolerance."""
    assert answer.tokens == expected.tokens
    assert len(answer.logprobs) == len(expected.logprobs)
    difference = max(abs(one - other) for one, other in zip(answer.logprobs, expected.logprobs, strict=True))
    assert difference <= tolerance


def assert_all_free(engine: Engine) -> None:
    """No request, and no block that belongs to one."""
    scheduler = engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.free == scheduler.pool.count
    assert not any(scheduler.pool.references(block) for block in range(scheduler.pool.count))
