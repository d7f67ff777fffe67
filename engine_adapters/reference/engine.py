"""The loop: schedule a step, run the stages over it with the store's transfers beside them, take in the new tokens.

engine = Engine(model, revision="<commit or digest of the weights>", address="127.0.0.1:7400")
(answer,) = engine.generate([token_ids], new_tokens=16)
answer.tokens, answer.logprobs, answer.hit_tokens
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import kvstore
from engine_adapters.reference.attention import Attention, Batch, Group, KvMemory, PagedAttention
from engine_adapters.reference.model import Stage, head_dim_of, require_llama
from engine_adapters.reference.scheduler import Chunk, Limits, Request, Scheduler
from engine_adapters.reference.store import Load, NoTransfers, Save, StepTransfers, StoreAdapter
from engine_adapters.transformers import namespace_for
from kvstore import UsageError
from kvstore.core.keys import DEFAULT_SCHEME

__all__ = ["Answer", "Engine"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request."""

    number: int
    tokens: tuple[int, ...]  # the new ones
    logprobs: tuple[float, ...]  # natural, of each of them
    hit_tokens: int  # of the prompt, from the store
    preemptions: int


class Engine:
    """A model of the Llama family that serves many requests at once, greedily. One thread uses it; a context manager.

    Args:
        model: weights and config. They are shared, not copied, where dtype and device are the model's.
        revision: commit or digest of the weights.
        model_id: a name that all workers use; the hub's name that the model was loaded by unless given.
        address: of the store; None for none.
        block_tokens: tokens of a block.
        limits: of memory, steps and requests.
        dtype, device: to compute with; the model's unless given.
        stages: where the layers are divided; one run of all layers unless given.
        plan: load only as much as is faster than computing it.
        follow: also load blocks that another worker is computing just now, as it goes on.
        timeout_s, transport, checksums: of the client; see `kvstore.connect`.

    Raises:
        UsageError: an argument is wrong, or the model is no Llama.
        Unavailable: the store can't be reached at the start. Later on that is a miss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        revision: str,
        model_id: str | None = None,
        address: str | None = None,
        block_tokens: int = 16,
        limits: Limits | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stages: Sequence[range] | None = None,
        plan: bool = True,
        follow: bool = False,
        timeout_s: float = 2.0,
        transport: str = "auto",
        checksums: bool = False,
    ) -> None:
        require_llama(model.config)
        config = cast(LlamaConfig, model.config)
        dtype = dtype or model.dtype
        limits = limits or Limits()
        self._device: Final = torch.device(device or model.device)
        self._positions: Final = config.max_position_embeddings
        self._vocabulary: Final = config.vocab_size
        self.block_tokens: Final = block_tokens
        layers = range(config.num_hidden_layers)
        weights = model.state_dict()
        self.stages: Final = [
            Stage(config, run, weights, dtype=dtype, device=self._device) for run in _divided(layers, stages)
        ]
        self.memory: Final = KvMemory(
            layers,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            block_tokens=block_tokens,
            head_dim=head_dim_of(config),
            blocks=limits.blocks,
            dtype=dtype,
            device=self._device,
        )
        self.attention: Attention = PagedAttention(self.memory)
        self.namespace: Final = namespace_for(
            model, revision=revision, model_id=model_id, block_tokens=block_tokens, dtype=dtype
        )
        self._client = None
        self._store: StoreAdapter | None = None
        if address is not None:
            self._client = kvstore.connect(
                address,
                namespace=self.namespace,
                timeout_s=timeout_s,
                transport=transport,
                checksums=checksums,
                device=f"cuda:{self._device.index or 0}" if self._device.type == "cuda" else None,
            )
            self._store = StoreAdapter(self._client, self.memory, plan=plan, follow=follow)
        scheme = self._client.scheme if self._client else DEFAULT_SCHEME
        self.scheduler: Final = Scheduler(
            limits,
            block_tokens,
            lambda tokens, after: kvstore.chain_keys(self.namespace, tokens, scheme=scheme, after=after),
        )
        self._number = 0

    def add(self, prompt: Sequence[int], new_tokens: int, *, stop: Collection[int] = ()) -> int:
        """Queue a request; its number.

        Args:
            prompt: token ids.
            new_tokens: at most so many.
            stop: tokens that end the answer.

        Raises:
            UsageError: it can't be served, or too many wait already.
        """
        tokens = [int(token) for token in prompt]
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} in the prompt: allowed is 0 to {self._vocabulary - 1}")
        if len(tokens) + new_tokens > self._positions:
            raise UsageError(f"{len(tokens)} + {new_tokens} tokens: allowed is up to {self._positions}, the model's")
        self._number += 1
        self.scheduler.add(Request(self._number, tokens, new_tokens, frozenset(stop)))
        return self._number

    def abort(self, number: int) -> bool:
        """Forget a request between two steps; False when it is not there (any more)."""
        return self.scheduler.abort(number)

    def step(self) -> list[Answer]:
        """Compute one step; the answers that it completes."""
        chunks = self.scheduler.schedule(self._stored)
        if not chunks:
            return []
        chunks.sort(key=lambda chunk: chunk.end - chunk.start)  # those that decode are one group
        loads = {chunk.request.number: self._load(chunk) for chunk in chunks if len(chunk.load)}
        began_s = time.perf_counter()
        with self._transfers(chunks, loads) as transfers, torch.inference_mode():
            batch = _batch(chunks, self.block_tokens, self._device)
            hidden = batch.tokens
            for stage in self.stages:
                hidden = stage(hidden, batch, self.attention, transfers)
            transfers.commit()
            tokens, logprobs = self._sample(hidden, chunks)
        self._observe(chunks, time.perf_counter() - began_s - transfers.waited_s)
        return self._take_in(chunks, loads, tokens, logprobs)

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, stop: Collection[int] = ()
    ) -> list[Answer]:
        """Answers to prompts that are served together, in their order.

        Raises:
            UsageError: as `add`, or other requests are there, whose answers would be lost. Nothing is queued then.
        """
        if self.scheduler.running or self.scheduler.waiting:
            raise UsageError("generate while other requests are there: allowed are `add` and `step`")
        numbers: list[int] = []
        answers: dict[int, Answer] = {}
        try:
            numbers.extend(self.add(prompt, new_tokens, stop=stop) for prompt in prompts)
            while len(answers) < len(numbers):
                answers.update((answer.number, answer) for answer in self.step())
        finally:
            for number in numbers:
                self.abort(number)  # those that are not finished, when something was raised
        return [answers[number] for number in numbers]

    def forget(self) -> None:
        """Drop the engine's own prefix cache, not the store's blocks."""
        self.scheduler.pool.forget()

    def close(self) -> None:
        """End the connection to the store. Idempotent."""
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, request: Request, first: int) -> int:
        if self._store is None:
            return 0
        usable = (len(request.tokens) - 1) // self.block_tokens
        keys = self.scheduler.keys(request)[first:usable]
        return self._store.hit(keys, len(request.tokens) - first * self.block_tokens)

    def _load(self, chunk: Chunk) -> Load:
        rows = slice(chunk.load.start, chunk.load.stop)
        return Load(self.scheduler.keys(chunk.request)[rows], chunk.request.blocks[rows])

    def _transfers(self, chunks: Sequence[Chunk], loads: dict[int, Load]) -> StepTransfers | NoTransfers:
        if self._store is None:
            return NoTransfers()
        saves: list[Save] = []
        for chunk in chunks:
            request, done = chunk.request, chunk.completes(self.block_tokens)
            if len(done):
                rows = slice(done.start, done.stop)
                keys = self.scheduler.keys(request)[rows]
                saves.append(Save(keys, request.blocks[rows], loads.get(request.number)))
        return self._store.transfers(list(loads.values()), saves)

    def _sample(self, hidden: Tensor, chunks: Sequence[Chunk]) -> tuple[list[int], list[float]]:
        """The likeliest next token after each chunk, and its log-probability."""
        lengths = torch.tensor([chunk.end - chunk.start for chunk in chunks], device=self._device)
        likely = self.stages[-1].logits(hidden[lengths.cumsum(0) - 1]).log_softmax(-1).max(-1)
        return likely.indices.tolist(), likely.values.tolist()

    def _observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Steps that only prefill tell how fast that is."""
        if self._store is not None and all(chunk.end - chunk.start > 1 for chunk in chunks):
            self._store.observe(sum(chunk.end - chunk.start for chunk in chunks), seconds)

    def _take_in(
        self, chunks: Sequence[Chunk], loads: dict[int, Load], tokens: list[int], logprobs: list[float]
    ) -> list[Answer]:
        answers: list[Answer] = []
        for chunk, token, logprob in zip(chunks, tokens, logprobs, strict=True):
            request = chunk.request
            load = loads.get(request.number)
            loaded = load.loaded if load else 0
            if load and load.failed:
                self.memory.clear(request.blocks[chunk.load.start + loaded :])
            if not self.scheduler.settle(chunk, loaded) or not chunk.samples:
                continue
            self.scheduler.append(request, token, logprob)
            if request.finished:
                answers.append(_answer(request))
        return answers


def _divided(layers: range, stages: Sequence[range] | None) -> Sequence[range]:
    stages = [layers] if stages is None else stages
    if [layer for run in stages for layer in run] != list(layers):
        raise UsageError(f"stages={list(stages)}: allowed are runs that make up {layers} in their order")
    return stages


def _batch(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> Batch:
    """The tokens of all chunks, which are sorted by their length."""
    tokens: list[int] = []
    groups: list[Group] = []
    positions: list[Tensor] = []
    tables: list[Tensor] = []
    for length in sorted({chunk.end - chunk.start for chunk in chunks}):
        alike = [chunk for chunk in chunks if chunk.end - chunk.start == length]
        begin = len(tokens)
        for chunk in alike:
            tokens += chunk.request.tokens[chunk.start : chunk.end]
        table = _tables(alike, block_tokens)
        starts = torch.tensor([chunk.start for chunk in alike])
        at = starts[:, None] + torch.arange(length)
        groups.append(Group(slice(begin, len(tokens)), table.to(device), at.to(device)))
        positions.append(at.flatten())
        tables.append(table.gather(1, at // block_tokens).flatten())
    where = torch.cat(positions)
    return Batch(
        tokens=torch.tensor(tokens).to(device),
        positions=where.to(device),
        blocks=torch.cat(tables).to(device),
        offsets=(where % block_tokens).to(device),
        groups=tuple(groups),
    )


def _tables(chunks: Sequence[Chunk], block_tokens: int) -> Tensor:
    """The blocks of each request up to its chunk's end, filled up with a block of its own: what lies in another
    request's could be no number at all, which no mask hides.
    """
    needed = [-(-chunk.end // block_tokens) for chunk in chunks]
    rows = [
        chunk.request.blocks[:count] + chunk.request.blocks[:1] * (max(needed) - count)
        for chunk, count in zip(chunks, needed, strict=True)
    ]
    return torch.tensor(rows)


def _answer(request: Request) -> Answer:
    return Answer(
        request.number,
        tuple(request.tokens[request.prompt_tokens :]),
        tuple(request.logprobs),
        request.hit_tokens,
        request.preemptions,
    )
