"""A process with one vLLM engine, which reads commands from stdin and answers on stdout, one JSON object a line.

A command is {"do": NAME, ...arguments}; the answer is {"reply": ...} or {"error": "one line"}. Started by `process.py`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.inputs import TokensPrompt


class Worker:
    """The commands. `start` comes first."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._number = 0

    @property
    def llm(self) -> LLM:
        assert self._llm is not None, "start comes first"
        return self._llm

    def start(self, connector: dict[str, Any] | None, events: dict[str, Any] | None, **options: Any) -> None:
        """Start the engine."""
        self._llm = LLM(
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
            kv_events_config=KVEventsConfig(**events) if events else None,
            **options,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int, **more: Any) -> list[dict[str, Any]]:
        """Greedy answers, all prompts at once."""
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt, **more) for prompt in prompts], _greedy(new_tokens), use_tqdm=False
        )
        return [_told(output) for output in outputs]

    def abort_midway(self, prompts: list[list[int]], steps: int) -> int:
        """Begin all these requests and abort them after so many steps of the engine; how many were still going on."""
        engine = self.llm.llm_engine
        names: list[str] = []
        for prompt in prompts:
            self._number += 1
            names.append(f"aborted-{self._number}")
            engine.add_request(names[-1], TokensPrompt(prompt_token_ids=prompt), _greedy(64))
        finished = 0
        for _ in range(steps):
            finished += sum(output.finished for output in engine.step())
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return len(prompts) - finished

    def forget(self, everywhere: bool) -> bool:
        """Drop the engine's prefix cache; `everywhere`: the connector's, too."""
        return bool(self.llm.reset_prefix_cache(reset_connector=everywhere))

    def metrics(self) -> dict[str, float]:
        """Prometheus counters of the connector, as vLLM has them."""
        return {
            metric.name: metric.value for metric in self.llm.get_metrics() if metric.name.startswith("vllm:kvstore_")
        }


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0, logprobs=1, ignore_eos=True, detokenize=False)


def _told(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)],
        "cached": output.num_cached_tokens,
        "ttft_s": output.metrics.first_token_latency if output.metrics else 0.0,
    }


def main() -> None:
    """Serve commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not land between the answers
    worker = Worker()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            reply = getattr(worker, command.pop("do"))(**command)
        except Exception as fault:  # noqa: BLE001 - whatever it is, the test has to see it
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(fault).__name__}: {fault}".splitlines()[0]}) + "\n")
        else:
            answers.write(json.dumps({"reply": reply}) + "\n")


if __name__ == "__main__":
    main()
