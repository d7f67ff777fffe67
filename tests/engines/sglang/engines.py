"""SGLang engines as processes of their own, and what they must say, computed by transformers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from kvstore.testing.engines import Generated
from kvstore.testing.waiting import until

ROOT = Path(__file__).parents[3]
STAND_INS = Path(__file__).parent / "stand_ins"
PAGE_TOKENS = 64
START_S = 240.0  # alone 15 s; the first one of a machine also compiles the engine's hash extension
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer(Generated):
    """What an engine generated for one prompt."""

    cached_tokens: int  # of the prompt: those from the store and from the engine's own caches
    seconds: float  # of the call


class EngineProcess:
    """An engine that starts at once; a context manager, and a `kvstore.testing.engines.EngineUnderTest`.

    Args:
        model: its folder.
        address: of the store; None: the engine keeps its KV to itself.
        options: further options of the adapter.
        environment: further variables.
        arguments: further arguments of the engine.
    """

    def __init__(
        self,
        model: Path,
        address: str | None,
        *,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        told: dict[str, Any] = {"model_path": str(model), "dtype": "float32", "page_size": PAGE_TOKENS}
        if address is not None:
            told |= with_store({"address": address, "revision": "r1", "model": "tiny"} | (options or {}))
        answers, answers_end = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.worker"),
                *(json.dumps(told | arguments), str(answers_end)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(answers_end,),
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_INS}"} | ENVIRONMENT | (environment or {}),
        )
        os.close(answers_end)
        self._answers = os.fdopen(answers)
        try:
            self._read(START_S)
        except BaseException:
            self.close()
            raise

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return PAGE_TOKENS

    def generate(self, prompt: Sequence[int], new_tokens: int = 8) -> Answer:
        """Greedy."""
        return self.generate_together([prompt], new_tokens)[0]

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int = 8) -> list[Answer]:
        """Several prompts at once."""
        told = self._ask({"generate": [list(prompt) for prompt in prompts], "new_tokens": new_tokens})
        return [
            Answer(
                tokens=tuple(one["tokens"]),
                logprobs=tuple(one["logprobs"]),
                cached_tokens=one["cached_tokens"],
                hit_tokens=(one["details"] or {}).get("storage", 0),
                seconds=one["seconds"],
            )
            for one in told
        ]

    def forget(self) -> None:
        """Drop the engine's own caches, on its device and in host memory, as soon as it is idle."""
        until(lambda: self._ask({"forget": True}), 30, "an idle engine")

    def update_weights(self, folder: Path, version: str) -> None:
        """Other weights, while it runs."""
        self._ask({"update": str(folder), "version": version})

    def close(self) -> None:
        """End it. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read(ANSWER_S)

    def _read(self, timeout_s: float) -> Any:
        readable, _, _ = select.select([self._answers], [], [], timeout_s)
        if not readable:
            raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine ended with code {self._process.wait(30)}")
        return json.loads(line)


ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def with_store(options: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments for HiCache with our store behind it."""
    extra = {
        "backend_name": "kvstore",
        "module_path": "engine_adapters.sglang.backend",
        "class_name": "KvStoreHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra | options),
    }


class Judge:
    """Knows what an engine with this model must say: transformers, without any cache of prompts."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def difference(self, prompt: Sequence[int], answer: Answer) -> float:
        """The largest difference of a log-probability of the answer's tokens."""
        return float((self._expected(prompt, answer).gather(1, _column(answer))[:, 0] - _told(answer)).abs().max())

    def is_greedy(self, prompt: Sequence[int], answer: Answer) -> bool:
        """Whether each token is the most likely one."""
        return self._expected(prompt, answer).argmax(1).tolist() == list(answer.tokens)

    def _expected(self, prompt: Sequence[int], answer: Answer) -> torch.Tensor:
        """Log-probabilities [new tokens, vocabulary], each after the tokens before."""
        ids = torch.tensor([[*prompt, *answer.tokens[:-1]]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, logits_to_keep=len(answer.tokens)).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def _column(answer: Answer) -> torch.Tensor:
    return torch.tensor(answer.tokens)[:, None]


def _told(answer: Answer) -> torch.Tensor:
    return torch.tensor(answer.logprobs)


def wait_until_stored(engine: EngineProcess, prompt: Sequence[int], tokens: int, timeout_s: float = 60.0) -> Answer:
    """Ask again, the engine's own caches forgotten, until that much of the prompt comes from the store: the engine
    saves in the background.

    Raises:
        TimeoutError: it didn't by then.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        engine.forget()
        answer = engine.generate(prompt)
        if answer.hit_tokens >= tokens:
            return answer
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{answer.hit_tokens} tokens from the store, {tokens} were expected")
