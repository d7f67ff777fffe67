"""Right answers, from transformers' own model of the same weights: no engine, no cache, no store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from kvstore.testing.engines import Generated

TOLERANCE = 1e-3


class Truth:
    """Greedy answers in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # engines have the cores
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, prompt: Sequence[int], new_tokens: int) -> Generated:
        """The new tokens, and the log-probability of each."""
        tokens, logprobs = list(prompt), list[float]()
        with torch.inference_mode():
            for _ in range(new_tokens):
                last = self._model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
                tokens.append(int(last.argmax()))
                logprobs.append(float(last.max()))
        return Generated(tuple(tokens[len(prompt) :]), tuple(logprobs), 0)


def same(answer: Generated, right: Generated) -> bool:
    """Whether the tokens are equal and the log-probabilities nearly so."""
    pairs = zip(answer.logprobs, right.logprobs, strict=True)
    return answer.tokens == right.tokens and all(abs(ours - theirs) < TOLERANCE for ours, theirs in pairs)
