"""docs/vllm.md does what it says: its own commands, for SmolLM2 and this machine, and requests as anyone sends them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.docs.pages import fences, page
from tests.engines.vllm.models import save_smollm2
from tests.engines.vllm.process import ROOT, START_S

pytestmark = pytest.mark.timeout(900)

HERE = shlex.split("--dtype float32 --block-size 64 --max-model-len 1024 --enforce-eager --gpu-memory-utilization 0.1")
COMMANDS = [block for block in fences(page("docs/vllm.md"), "sh") if block.startswith("vllm serve")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct")


def command(block: str, model: Path, address: str, port: int) -> list[str]:
    """A command of the guide, for this folder, this store and this machine without a GPU."""
    vllm, serve, _, *words = shlex.split(block)
    assert (vllm, serve) == ("vllm", "serve")
    at = words.index("--kv-transfer-config") + 1
    told = json.loads(words[at])
    told["kv_connector_extra_config"] |= {
        "address": address,
        "plan": False,
    }  # a small model computes faster than it asks
    words[at] = json.dumps(told)
    # `vllm serve` asks for the version of a distribution named vllm, which its build for CPUs is not. The same server:
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, *server, *words, *HERE, "--port", str(port)]


@contextlib.contextmanager
def launched(block: str, model: Path, address: str) -> Iterator[str]:
    """The engine behind HTTP; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        command(block, model, address, port), env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    )

    def is_up() -> bool:
        assert process.poll() is None, f"the engine ended with code {process.returncode}"
        with contextlib.suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        return False

    try:
        until(is_up, START_S, "the engine")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the engine's processes, all of them ours
        process.wait()


def ask(url: str, prompt: str, new_tokens: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    told = {"model": json.loads(_get(url + "/v1/models"))["data"][0]["id"], "prompt": prompt}
    answer: dict[str, Any] = json.loads(
        _get(url + "/v1/completions", told | {"max_tokens": new_tokens, "temperature": 0})
    )
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def _get(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=120
    ) as r:
        return r.read()


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
            ask(second, text[3100:4600], 4)  # at the same time: it takes what is there by then
            computing.join()
            answer, cached = ask(second, text[3000:4500], 12)
            assert cached >= 256
            assert answer == apart
