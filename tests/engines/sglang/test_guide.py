"""docs/sglang.md does what it says: its own command, run on the tiny model, and requests as anyone sends them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.docs.pages import fences, page
from tests.engines.serving import asked, served
from tests.engines.sglang.engines import ENVIRONMENT, ROOT, STAND_INS, START_S, Answer, Judge
from tests.engines.sglang.models import prompt, save_tiny
from tests.engines.sglang.worker import ARGUMENTS

pytestmark = pytest.mark.timeout(500)

GUIDE = page("docs/sglang.md")


def command(model: Path, address: str, port: int) -> list[str]:
    """The guide's command, for this model and this machine without a GPU."""
    (line,) = (block for block in fences(GUIDE, "sh") if "sglang.launch_server" in block)
    python, *words = shlex.split(line.replace("\\\n", " "))  # a shell joins continued lines
    assert python == "python"
    words[words.index("--model-path") + 1] = str(model)
    at = words.index("--hicache-storage-backend-extra-config") + 1
    words[at] = json.dumps(json.loads(words[at]) | {"address": address, "model": "tiny"})
    flags = {"dtype": "float32", "port": port} | ARGUMENTS
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return [sys.executable, "-W", "ignore", *words]


def launched(model: Path, address: str) -> AbstractContextManager[str]:
    """The engine behind HTTP; its address."""
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_INS}"} | ENVIRONMENT
    return served(lambda port: command(model, address, port), environment, START_S)


def ask(url: str, tokens: list[int], new_tokens: int) -> Answer:
    told = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    meta: dict[str, Any] = asked(url + "/generate", told)["meta_info"]
    chosen = meta["output_token_logprobs"]
    return Answer(
        tokens=tuple(token for _, token, _ in chosen),
        logprobs=tuple(logprob for logprob, _, _ in chosen),
        hit_tokens=(meta.get("cached_tokens_details") or {}).get("storage", 0),
        cached_tokens=meta["cached_tokens"],
        seconds=0.0,
    )


def test_the_commands_of_the_guide_share_kv_between_two_engines(tmp_path: Path) -> None:
    """A prefill instance first, then a decode instance; that one has the prompt from the store."""
    model, tokens = save_tiny(tmp_path / "tiny"), prompt(800, 50)
    judge = Judge(model)
    with ServerProcess(dram="64MiB") as server:
        with launched(model, server.address) as prefill:
            assert ask(prefill, tokens, 1).cached_tokens == 0

            def stored() -> bool:
                return server.status()["shards"][0]["counters"]["committed_blocks"] >= 12

            until(stored, 60, "12 pages in the store")
        with launched(model, server.address) as decode:
            answer = ask(decode, tokens, 8)
    assert answer.hit_tokens == 768
    assert judge.is_greedy(tokens, answer)
    assert judge.difference(tokens, answer) < 1e-3
