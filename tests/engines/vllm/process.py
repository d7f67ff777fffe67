"""vLLM engines in processes of their own, with or without our connector."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kvstore.testing.engines import Generated

ROOT = Path(__file__).parents[3]
BLOCK_TOKENS = 32
START_S = 240.0
ANSWER_S = 120.0


def connector(address: str, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Our connector's part of an engine's configuration, for blocks that are read at once and saved at once."""
    return {
        "kv_connector": "KvStoreConnector",
        "kv_connector_module_path": "engine_adapters.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "plan": False, "checksums": True, **extra},
    }


class VllmEngine:
    """One engine. Whatever it can't answer in time ends it, with the last lines that it wrote.

    Args:
        model: folder of the weights.
        kv: `kv_transfer_config`, or None for an engine of its own.
        events: `kv_events_config`.
        environment: more variables.
        options: more arguments of `vllm.LLM`.
    """

    block_tokens = BLOCK_TOKENS

    def __init__(
        self,
        model: Path,
        kv: dict[str, Any] | None,
        *,
        events: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed by close
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm.engine_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,  # from where `-m` finds this package, and ours
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        settings = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
            "num_gpu_blocks_override": 1024,  # the connector makes them all present: 64 MiB of the tiny model's
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
            **options,
        }
        self.call("start", START_S, connector=kv, events=events, **settings)

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generated:
        """One answer."""
        return self.generate_together([prompt], new_tokens)[0]

    def generate_together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Generated]:
        """Answers to prompts that are in the engine at the same time."""
        told = self.call("generate", prompts=[list(prompt) for prompt in prompts], new_tokens=new_tokens)
        return [Generated(tuple(one["tokens"]), tuple(one["logprobs"]), one["cached"]) for one in told]

    def forget(self) -> None:
        """Drop the engine's own prefix cache."""
        assert self.call("forget", everywhere=False)

    def call(self, name: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """One command of `engine_worker`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(timeout_s, self._kill)  # a read from a pipe has no deadline of its own
        watch.start()
        try:
            self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            raise AssertionError(f"{name}: the engine ended or did not answer within {timeout_s:g} s\n{self.log()}")
        answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise AssertionError(f"{name}: {answer['error']}\n{self.log()}")
        return answer["reply"]

    def log(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(Path(self._log.name).read_text().splitlines()[-60:])

    def close(self) -> None:
        """End it and all its processes."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
