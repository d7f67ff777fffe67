"""docs/vllm.md does what it says: its own commands, for SmolLM2 and this machine, and requests as anyone sends them."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from engine_adapters.transformers.model import convert_smollm2
from kvstore.testing.cluster import ServerProcess
from tests.docs.pages import fences, page
from tests.engines.serving import asked, served
from tests.engines.vllm.process import ROOT, START_S

pytestmark = pytest.mark.timeout(900)

HERE = shlex.split("--dtype float32 --block-size 64 --max-model-len 1024 --enforce-eager --gpu-memory-utilization 0.1")
COMMANDS = [block for block in fences(page("docs/vllm.md"), "sh") if block.startswith("vllm serve")]


@pytest.fixture(scope="module")
def model() -> Path:
    return convert_smollm2().folder


def command(block: str, model: Path, address: str, port: int) -> list[str]:
    """A command of the guide, for this folder, this store and this machine without a GPU."""
    vllm, serve, _, *words = shlex.split(block)
    assert (vllm, serve) == ("vllm", "serve")
    at = words.index("--kv-transfer-config") + 1
    told = json.loads(words[at])
    # Without a plan: a small model computes faster than it asks.
    told["kv_connector_extra_config"] |= {"address": address, "plan": False}
    words[at] = json.dumps(told)
    # `vllm serve` asks for the version of a distribution named vllm, which its build for CPUs is not. The same server:
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, *server, *words, *HERE, "--port", str(port)]


def launched(block: str, model: Path, address: str) -> AbstractContextManager[str]:
    """The engine behind HTTP; its address."""
    return served(lambda port: command(block, model, address, port), {"PYTHONPATH": str(ROOT)}, START_S)


def ask(url: str, prompt: str, new_tokens: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    told = {"model": asked(url + "/v1/models")["data"][0]["id"], "prompt": prompt}
    answer = asked(url + "/v1/completions", told | {"max_tokens": new_tokens, "temperature": 0})
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def test_the_commands_of_the_guide_share_kv_between_engines(model: Path) -> None:
    """One engine alone, then a prefill and a decode instance, on one store."""
    text = (ROOT / "engine_adapters/transformers/alice.txt").read_text()
    alone, prefill, decode = COMMANDS
    with ServerProcess(dram="256MiB") as server:
        with launched(alone, model, server.address) as one:
            expected, cached = ask(one, text[:1500], 12)
            assert cached == 0
            apart, _ = ask(one, text[3000:4500], 12)
        with launched(prefill, model, server.address) as first, launched(decode, model, server.address) as second:
            answer, cached = ask(second, text[:1500], 12)
            assert cached >= 256
            assert answer == expected
            computing = threading.Thread(target=ask, args=(first, text[3100:4600], 1))
            computing.start()
            together, _ = ask(second, text[3100:4600], 4)  # at the same time: it takes what is there by then
            computing.join()
            assert together == ask(first, text[3100:4600], 4)[0]
            answer, cached = ask(second, text[3000:4500], 12)
            assert cached >= 256
            assert answer == apart
