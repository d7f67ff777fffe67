"""One worker of the demo: a process with the model, a client of the store, and nothing shared with other workers.

It reads commands from stdin and answers on stdout, one JSON object a line, until stdin ends. A command is
{"do": NAME, ...arguments}; the answer is {"reply": {...}} or {"error": "one line"}, after any {"progress": "text"}.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: the demo never asks a model hub

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvstore
from engine_adapters.transformers.cache import CacheAdapter, LoadResult, namespace_for
from engine_adapters.transformers.model import MODEL_ID, LoadedModel, load_smollm2

__all__ = ["Answer", "Loaded", "Prefilled", "main"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` answers."""

    seconds: float
    model: str
    revision: str
    dtype: str
    threads: int
    block_tokens: int
    block_bytes: int
    torch: str
    transformers: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What `prefill` answers: the KV of a prompt computed, and its full blocks stored."""

    prompt_tokens: int
    stored_blocks: int
    missing_blocks: int
    bytes: int
    compute_ms: float
    store_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What `answer` answers. TTFT counts from the prompt's text to its first new token."""

    prompt_tokens: int
    hit_tokens: int
    bytes: int
    ttft_ms: float
    lookup_ms: float
    transfer_ms: float  # that the model waited for: all of it, or with a stream what did not hide behind computing
    unpack_ms: float
    compute_ms: float  # of the model, up to the first token
    per_token_ms: float  # of the tokens after the first
    tokens: list[int]
    text: str


@dataclass(slots=True)
class Worker:
    """The commands. Order: `load`, `connect`, then any."""

    progress: Callable[[str], None]
    _loaded: LoadedModel | None = None
    _client: kvstore.Client | None = None
    _adapter: CacheAdapter | None = None
    _logprobs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def load(self, threads: int) -> Loaded:
        """Load the model; all of torch's work runs on so many threads from now on."""
        started_s = time.perf_counter()
        torch.set_num_threads(threads)
        self._loaded = load_smollm2(self.progress)
        namespace = self._namespace()
        return Loaded(
            seconds=time.perf_counter() - started_s,
            model=MODEL_ID,
            revision=self._loaded.revision,
            dtype=namespace.dtype,
            threads=torch.get_num_threads(),
            block_tokens=namespace.block_tokens,
            block_bytes=namespace.block_bytes,
            torch=torch.__version__,
            transformers=sys.modules["transformers"].__version__,
        )

    def connect(self, address: str, transport: str = "auto", timeout_s: float = 2.0) -> dict[str, Any]:
        """Connect to the store at "host:port", from now on in place of any other."""
        if self._client is not None:
            self._client.close()
        self._client = kvstore.connect(address, namespace=self._namespace(), transport=transport, timeout_s=timeout_s)
        self._adapter = CacheAdapter(self._client, self._model)
        return {}

    def warm_up(self, prompt: str) -> dict[str, Any]:
        """Go both ways once, with the prompt's tokens backwards: as long, but no block of it is the prompt's."""
        tokens = self._tokens(prompt)[::-1]
        self.progress("warming up: computing a prompt")
        cache, _ = self._prefill(tokens)
        self.progress("warming up: storing and loading it")
        self._store.store(tokens, cache)
        fetched = self._store.fetch(tokens)
        self._generate(self._step(self._rest(tokens, fetched.cache), fetched.cache), fetched.cache, 2)
        return {"hit_tokens": fetched.hit_tokens}

    def prefill(self, prompt: str) -> Prefilled:
        """Compute a prompt's KV and store it."""
        tokens = self._tokens(prompt)
        self.progress(f"computing the KV of {len(tokens):,} tokens")
        started_s = time.perf_counter()
        cache, _ = self._prefill(tokens)
        computed_s = time.perf_counter()
        stored = self._store.store(tokens, cache)
        return Prefilled(
            prompt_tokens=len(tokens),
            stored_blocks=stored.stored,
            missing_blocks=len(stored.statuses) - stored.present,
            bytes=stored.bytes,
            compute_ms=(computed_s - started_s) * 1e3,
            store_ms=(time.perf_counter() - computed_s) * 1e3,
        )

    def answer(self, prompt: str, way: str, new_tokens: int, label: str) -> Answer:
        """Answer a prompt greedily. The log-probabilities are kept under `label`.

        `way`: "cold" computes all of it; "fetch" computes what the store doesn't have, after the fetch; "stream" does
        that while the KV arrives layer by layer.
        """
        self.progress(f"answering ({way})")
        started_s = time.perf_counter()
        tokens = self._tokens(prompt)
        if way == "stream":
            store = self._store.prefill(tokens, self._step, plan=False, store=False)
            cache, logits, waited_s = store.cache, store.output, store.waited_s
        else:
            store = self._store.fetch(tokens, plan=False) if way == "fetch" else LoadResult(self._empty_cache(), 0)
            cache, waited_s = store.cache, store.transfer_s
            logits = self._step(self._rest(tokens, cache), cache)
        new, logprobs, first_s = self._generate(logits, cache, new_tokens)
        self._logprobs[label] = logprobs
        lookup_ms, transfer_ms, unpack_ms = (seconds * 1e3 for seconds in (store.lookup_s, waited_s, store.unpack_s))
        ttft_ms = (first_s - started_s) * 1e3
        return Answer(
            prompt_tokens=len(tokens),
            hit_tokens=store.hit_tokens,
            bytes=store.bytes,
            ttft_ms=ttft_ms,
            lookup_ms=lookup_ms,
            transfer_ms=transfer_ms,
            unpack_ms=unpack_ms,
            compute_ms=ttft_ms - lookup_ms - transfer_ms - unpack_ms,
            per_token_ms=(time.perf_counter() - first_s) * 1e3 / max(1, len(new) - 1),
            tokens=new,
            text=cast(str, self._model_and_tokenizer.tokenizer.decode(new, skip_special_tokens=True)),
        )

    def compare(self, one: str, other: str) -> dict[str, Any]:
        """The largest difference of any log-probability: whole vocabulary, all steps that both answers have."""
        steps = min(len(self._logprobs[one]), len(self._logprobs[other]))
        difference = (self._logprobs[one][:steps] - self._logprobs[other][:steps]).abs().max()
        return {"logprob_max_abs_diff": float(difference), "steps": steps}

    def shared_tokens(self, one: str, other: str) -> dict[str, Any]:
        """How many leading tokens two prompts have in common."""
        first, second = self._tokens(one), self._tokens(other)
        length = min(len(first), len(second))
        differing = np.flatnonzero(first[:length] != second[:length])
        return {"tokens": int(differing[0]) if len(differing) else length}

    def memcpy(self, size_bytes: int) -> dict[str, Any]:
        """The limit: GiB/s of copying so many bytes within this process, median of 9, both sides touched before."""
        source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        seconds: list[float] = []
        for _ in range(9):
            started_s = time.perf_counter()
            np.copyto(target, source)
            seconds.append(time.perf_counter() - started_s)
        return {"gib_s": size_bytes / float(np.median(seconds)) / 2**30}

    @property
    def _model_and_tokenizer(self) -> LoadedModel:
        assert self._loaded is not None, "load comes first"
        return self._loaded

    @property
    def _model(self) -> PreTrainedModel:
        return self._model_and_tokenizer.model

    @property
    def _store(self) -> CacheAdapter:
        assert self._adapter is not None, "connect comes first"
        return self._adapter

    def _namespace(self) -> kvstore.Namespace:
        return namespace_for(self._model, revision=self._model_and_tokenizer.revision, model_id=MODEL_ID)

    def _tokens(self, prompt: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        tokenizer: Any = self._model_and_tokenizer.tokenizer
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def _prefill(self, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[DynamicCache, Tensor]:
        cache = self._empty_cache()
        return cache, self._step(torch.from_numpy(tokens.copy())[None], cache)

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _rest(self, tokens: np.ndarray[Any, np.dtype[np.int64]], cache: DynamicCache) -> Tensor:
        """The tokens that the cache doesn't hold, as the model takes them."""
        return torch.from_numpy(tokens[cache.get_seq_length() :].copy())[None]

    def _generate(self, first: Tensor, cache: DynamicCache, new_tokens: int) -> tuple[list[int], Tensor, float]:
        """The new tokens, the log-probabilities at each [steps, vocabulary], and when the first one was there.

        `first`: the prompt's logits, whose KV `cache` holds.
        """
        end = cast(int, self._model.config.eos_token_id)
        logits = [first]
        new = [int(first.argmax())]
        first_s = time.perf_counter()
        while len(new) < new_tokens and end not in new:
            logits.append(self._step(torch.tensor([[new[-1]]]), cache))
            new.append(int(logits[-1].argmax()))
        return new, torch.stack(logits).log_softmax(-1), first_s

    def _step(self, inputs: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last position [vocabulary]; the KV of `inputs` [1, n] is appended to `cache`."""
        with torch.inference_mode():
            return self._model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def main() -> None:
    """Serve commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not land between the answers
    worker = Worker(lambda text: _say(answers, progress=text))
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            reply = getattr(worker, command.pop("do"))(**command)
        except (kvstore.KvStoreError, OSError, ImportError, RuntimeError) as fault:  # torch's errors are RuntimeErrors
            _say(answers, error=f"{type(fault).__name__}: {fault}".splitlines()[0])
        else:
            _say(answers, reply=reply if isinstance(reply, dict) else asdict(reply))


def _say(answers: IO[str], **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
