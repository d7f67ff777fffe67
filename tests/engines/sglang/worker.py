"""One SGLang engine in a process of its own: reads requests as lines of JSON, writes the answers to a pipe.

python -m tests.engines.sglang.worker ARGUMENTS_JSON ANSWERS_FD < requests
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "enable_cache_report": True,
    "log_level": "warning",
}
"""What an engine on the CPU needs, whatever is tested."""


def main() -> None:
    """Start, say so, and answer until the requests end."""
    arguments, answers_fd = json.loads(sys.argv[1]), int(sys.argv[2])
    import sglang  # here, for the processes that the engine spawns import this module, too

    engine: Any = sglang.Engine(**(ARGUMENTS | arguments))
    with os.fdopen(answers_fd, "w") as answers:

        def tell(answer: object) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            tell("ready")
            for line in sys.stdin:
                tell(answer(engine, json.loads(line)))
        finally:
            engine.shutdown()


def answer(engine: Any, request: dict[str, Any]) -> Any:
    """What the engine says to one request."""
    match request:
        case {"generate": list(prompts), "new_tokens": int(new_tokens)}:
            parameters = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
            began_s = time.monotonic()
            outputs = engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True)
            took_s = time.monotonic() - began_s
            return [generated(output) | {"seconds": took_s} for output in outputs]
        case {"forget": True}:
            return bool(engine.flush_cache().success)
        case {"update": str(folder), "version": str(version)}:
            success, message, *_ = engine.update_weights_from_disk(folder, weight_version=version)
            assert success, message
            return True
        case _:
            raise ValueError(f"request {request!r}")


def generated(output: dict[str, Any]) -> dict[str, Any]:
    """Tokens, their log-probabilities and where the prompt's KV came from."""
    meta = output["meta_info"]
    chosen = meta["output_token_logprobs"]
    return {
        "tokens": [token for _, token, _ in chosen],
        "logprobs": [logprob for logprob, _, _ in chosen],
        "cached_tokens": meta["cached_tokens"],
        "details": meta.get("cached_tokens_details"),
    }


if __name__ == "__main__":
    main()
