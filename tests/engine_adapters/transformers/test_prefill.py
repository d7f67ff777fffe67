"""`prefill` over a real server: KV arrives and leaves layer by layer, and the answer is right whatever happens."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import kvstore
from engine_adapters.transformers import CacheAdapter, Prefill
from kvstore import Action, BlockState
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.relay import Relay
from kvstore.testing.waiting import until
from tests.engine_adapters.transformers.tiny import (
    BLOCK_TOKENS,
    compute,
    continue_from,
    layer_tensors,
    prompt,
    tiny_model,
    tiny_namespace,
)

TIMEOUT_S = 2.0
LONG_S = 30.0  # what only a hang would take
LAYERS = 3
PROMPT_TOKENS = 100  # 6 full blocks and 4 tokens

Connect = Callable[..., CacheAdapter]
Forward = Callable[[Tensor, DynamicCache], Tensor]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def connect(server: ServerProcess, model: LlamaForCausalLM) -> Iterator[Connect]:
    clients: list[kvstore.Client] = []

    def new(address: str = server.address, *, transport: str = "auto", timeout_s: float = TIMEOUT_S) -> CacheAdapter:
        client = kvstore.connect(address, namespace=tiny_namespace(model), transport=transport, timeout_s=timeout_s)
        clients.append(client)
        return CacheAdapter(client, model)

    yield new
    for client in clients:
        client.close()


@pytest.fixture
def client(server: ServerProcess, model: LlamaForCausalLM) -> Iterator[kvstore.Client]:
    """Looks into the store beside the adapter."""
    with kvstore.connect(server.address, namespace=tiny_namespace(model), timeout_s=TIMEOUT_S) as connected:
        yield connected


def forward_of(model: LlamaForCausalLM, passes: list[int] | None = None) -> Forward:
    """Logits of the last token; notes how many tokens each pass computes."""

    def forward(input_ids: Tensor, cache: DynamicCache) -> Tensor:
        if passes is not None:
            passes.append(input_ids.shape[1])
        with torch.inference_mode():
            return model(input_ids=input_ids, cache=cache, use_cache=True).logits[0, -1]

    return forward


@contextmanager
def before_layer(model: LlamaForCausalLM, layer: int, do: Callable[[], None]) -> Iterator[None]:
    """Has something done each time that a pass comes to a layer."""

    def hook(_module: torch.nn.Module, _arguments: tuple[Any, ...]) -> None:
        do()

    handle = model.model.layers[layer].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_as_computed(cache: DynamicCache, logits: Tensor, computed: tuple[DynamicCache, Tensor]) -> None:
    torch.testing.assert_close(logits, computed[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(layer_tensors(cache), layer_tensors(computed[0]), rtol=0, atol=1e-5)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * LAYERS


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("tokens", [5, 16, 17, 48, 100, 333])
def test_what_one_prefill_stored_the_next_one_streams_in_with_the_same_logits(
    tokens: int, transport: str, connect: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(tokens, seed=5000 + 2 * tokens + (transport == "tcp"))
    computed = compute(model, token_ids)
    adapter = connect(transport=transport)
    passes: list[int] = []

    first = adapter.prefill(token_ids, forward_of(model, passes), plan=False)
    assert (first.hit_tokens, first.bytes) == (0, 0)
    assert first.stored.result(LONG_S).stored == tokens // BLOCK_TOKENS
    assert_as_computed(first.cache, first.output, computed)

    second = adapter.prefill(token_ids, forward_of(model, passes), plan=False)
    assert second.hit_tokens == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.bytes == second.hit_tokens // BLOCK_TOKENS * tiny_namespace(model).block_bytes
    assert passes == [tokens, tokens - second.hit_tokens]
    assert second.stored.result(LONG_S).stored == 0
    assert_as_computed(second.cache, second.output, computed)


def test_the_cache_of_a_prefill_goes_on_like_any_other(connect: Connect, model: LlamaForCausalLM) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=31)
    adapter = connect()
    adapter.store(token_ids, compute(model, token_ids)[0])
    prefilled = adapter.prefill(token_ids, forward_of(model))
    longer = [*token_ids, *prompt(40, seed=32)]
    logits = continue_from(model, longer, prefilled.cache)
    assert_as_computed(prefilled.cache, logits, compute(model, longer))
    assert adapter.store(longer, prefilled.cache).stored == 2


def test_a_hit_larger_than_the_buffer_that_is_kept_streams_in_too(
    connect: Connect, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_adapters.transformers.cache.ARRIVALS_BYTES", 2 * tiny_namespace(model).block_bytes)
    token_ids = prompt(PROMPT_TOKENS, seed=43)
    adapter = connect()
    adapter.store(token_ids, compute(model, token_ids)[0])
    for tokens in (33, PROMPT_TOKENS, 33):
        prefilled = adapter.prefill(token_ids[:tokens], forward_of(model), plan=False)
        assert prefilled.hit_tokens == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert_as_computed(prefilled.cache, prefilled.output, compute(model, token_ids[:tokens]))


def test_a_pass_in_several_calls_is_stored_whole(connect: Connect, model: LlamaForCausalLM) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=33)
    adapter = connect()
    adapter.store(token_ids[:32], compute(model, token_ids[:32])[0])

    def in_chunks(input_ids: Tensor, cache: DynamicCache) -> Tensor:
        forward = forward_of(model)
        return [forward(input_ids[:, first : first + 24], cache) for first in range(0, input_ids.shape[1], 24)][-1]

    prefilled = adapter.prefill(token_ids, in_chunks)
    assert prefilled.hit_tokens == 32
    assert prefilled.stored.result(LONG_S).stored == 4
    computed = compute(model, token_ids)
    assert_as_computed(prefilled.cache, prefilled.output, computed)
    loaded, hit_tokens = connect().load(token_ids)
    assert hit_tokens == 96
    torch.testing.assert_close(continue_from(model, token_ids, loaded), computed[1], rtol=0, atol=1e-5)


def test_a_layer_waits_for_its_own_kv_only(server: ServerProcess, connect: Connect, model: LlamaForCausalLM) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=34)
    computed = compute(model, token_ids)
    connect().store(token_ids, computed[0])
    with Relay(server.address, bytes_per_s=1e9) as relay:
        adapter = connect(relay.address, transport="tcp", timeout_s=LONG_S)
        # The last layer's bytes come only once the pass has come to that layer, with the first ones' KV in use.
        hit_bytes = 6 * tiny_namespace(model).block_bytes
        relay.stall_after(hit_bytes * (LAYERS - 1) // LAYERS + hit_bytes // (2 * LAYERS))
        with before_layer(model, LAYERS - 1, relay.resume):
            prefilled = adapter.prefill(token_ids, forward_of(model), store=False)
    assert prefilled.hit_tokens == 96
    assert_as_computed(prefilled.cache, prefilled.output, computed)


def test_a_second_worker_follows_a_prefill_that_has_not_ended(
    connect: Connect, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=35)
    keys = client.keys(token_ids)
    computed = compute(model, token_ids)
    second_model = tiny_model()
    second_is_inside = threading.Event()
    first, second = connect(), connect()
    states: list[int] = []

    def hold() -> None:
        until(lambda: bool((client.lookup(keys).layers_ready >= LAYERS - 1).all()), LONG_S, "published layers")
        follower.start()
        assert second_is_inside.wait(LONG_S)
        states.extend(client.lookup(keys).states.tolist())

    def follow() -> None:
        with before_layer(second_model, 1, second_is_inside.set):
            results.append(second.prefill([*token_ids, 1], forward_of(second_model), follow=True))

    results: list[Prefill[Tensor]] = []
    follower = threading.Thread(target=follow)
    with before_layer(model, LAYERS - 1, hold):
        prefilled = first.prefill(token_ids, forward_of(model))
    follower.join(LONG_S)
    assert states == [BlockState.RESERVED] * 6  # the second one had the first layer before the first one committed
    assert prefilled.stored.result(LONG_S).stored == 6
    assert_as_computed(prefilled.cache, prefilled.output, computed)
    [followed] = results
    assert followed.hit_tokens == 96
    assert_as_computed(followed.cache, followed.output, compute(model, [*token_ids, 1]))


@pytest.mark.parametrize("layers", [1, LAYERS], ids=["before-its-last-layers", "after-its-last-layer"])
def test_a_pass_that_fails_stores_nothing_and_its_error_is_the_callers(
    layers: int, connect: Connect, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=100 + layers)
    keys = client.keys(token_ids)

    def fail() -> None:
        until(lambda: bool((client.lookup(keys).layers_ready >= layers).all()), LONG_S, "published layers")
        raise RuntimeError("out of memory")

    def failing(input_ids: Tensor, cache: DynamicCache) -> Tensor:
        if layers < LAYERS:
            with before_layer(model, layers, fail):
                return forward_of(model)(input_ids, cache)
        forward_of(model)(input_ids, cache)
        fail()
        raise AssertionError("it has failed before")

    adapter = connect()
    with pytest.raises(RuntimeError, match="out of memory"):
        adapter.prefill(token_ids, failing)
    until(lambda: not client.lookup(keys).states.any(), LONG_S, "an empty store")
    again = adapter.prefill(token_ids, forward_of(model))
    assert (again.hit_tokens, again.stored.result(LONG_S).stored) == (0, 6)


def test_a_follower_of_a_prefill_that_fails_computes_it_itself(
    connect: Connect, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=37)
    keys = client.keys(token_ids)
    computed = compute(model, token_ids)
    with client.publish_stream(keys) as stream:
        stream.write(0, np.zeros((6, tiny_namespace(model).layer_bytes), dtype=np.uint8))
        passes: list[int] = []
        with before_layer(model, 1, stream.abort):
            prefilled = connect().prefill(token_ids, forward_of(model, passes), follow=True)
    assert passes == [PROMPT_TOKENS - 96, PROMPT_TOKENS]
    assert prefilled.hit_tokens == 0
    assert_as_computed(prefilled.cache, prefilled.output, computed)


def test_blocks_that_are_gone_are_recomputed_with_what_follows_them(
    connect: Connect, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=38)
    keys = client.keys(token_ids)
    computed = compute(model, token_ids)
    connect().store(token_ids[:48], compute(model, token_ids[:48])[0])
    layer = np.zeros((3, tiny_namespace(model).layer_bytes), dtype=np.uint8)
    with client.publish_stream(keys[3:]) as stream:  # three whole blocks, and three that never get their second layer
        stream.write(0, layer)
        passes: list[int] = []
        with before_layer(model, 1, stream.abort):
            prefilled = connect().prefill(token_ids, forward_of(model, passes), follow=True)
    assert passes == [PROMPT_TOKENS - 96, PROMPT_TOKENS - 48]
    assert prefilled.hit_tokens == 48
    assert_as_computed(prefilled.cache, prefilled.output, computed)
    assert prefilled.stored.result(LONG_S).stored == 3


@pytest.mark.parametrize("end", ["stall", "cut", "trickle"])
def test_a_link_that_ends_within_a_layer_costs_at_most_the_deadline_and_the_answer_is_right(
    end: str, server: ServerProcess, connect: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=39)
    computed = compute(model, token_ids)
    connect().store(token_ids, computed[0])
    passes: list[int] = []
    with Relay(server.address, bytes_per_s=1e9) as relay:
        adapter = connect(relay.address, transport="tcp", timeout_s=0.5)
        hit_bytes = 6 * tiny_namespace(model).block_bytes
        if end == "trickle":
            relay.bytes_per_s = hit_bytes / 3  # a second for each layer
        else:
            relay.stall_after(hit_bytes // LAYERS + hit_bytes // (2 * LAYERS))  # one layer and a half
        do = relay.cut if end == "cut" else lambda: None
        started_s = time.monotonic()
        with before_layer(model, 1, do):
            prefilled = adapter.prefill(token_ids, forward_of(model, passes), plan=False)
        assert time.monotonic() - started_s < 0.5 + 2.0
    assert len(passes) == 2
    assert_as_computed(prefilled.cache, prefilled.output, computed)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("hurt", ["kill", "freeze"])
def test_a_server_that_dies_or_freezes_during_the_pass_does_not_change_the_answer(
    hurt: str, transport: str, connect: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=40)
    computed = compute(model, token_ids)
    with ServerProcess(dram="64MiB") as server:
        connect(server.address).store(token_ids[:64], compute(model, token_ids[:64])[0])
        adapter = connect(server.address, transport=transport, timeout_s=1.0)
        done: list[str] = []

        def once() -> None:
            if not done:
                done.append(hurt)
                getattr(server, hurt)()

        try:
            with before_layer(model, 0, once):
                prefilled = adapter.prefill(token_ids, forward_of(model), plan=False)
            assert done
            assert_as_computed(prefilled.cache, prefilled.output, computed)
            assert prefilled.stored.result(LONG_S).stored in (0, 2, 6)  # all that was missing, or nothing
        finally:
            if hurt == "freeze":
                server.thaw()


def test_a_hit_that_is_slower_than_recomputing_is_declined(
    server: ServerProcess, connect: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(PROMPT_TOKENS, seed=41)
    computed = compute(model, token_ids)
    connect().store(token_ids, computed[0])
    with Relay(server.address, bytes_per_s=1e9) as relay:
        adapter = connect(relay.address, transport="tcp", timeout_s=LONG_S)
        assert adapter.load(token_ids)[1] == 96  # nothing is known yet
        adapter.prefill(prompt(PROMPT_TOKENS, seed=42), forward_of(model), store=False)  # the speed of computing
        relay.bytes_per_s = 6 * tiny_namespace(model).block_bytes / 1.0
        adapter.load(token_ids, plan=False)
        for _ in range(2):
            declined = adapter.prefill(token_ids, forward_of(model), store=False)
            assert declined.plan is not None
            assert (declined.plan.action, declined.hit_tokens) == (Action.RECOMPUTE, 0)
            assert_as_computed(declined.cache, declined.output, computed)
            assert adapter.load(token_ids)[1] == 0


def test_a_prompt_without_tokens_is_refused(connect: Connect, model: LlamaForCausalLM) -> None:
    with pytest.raises(kvstore.UsageError, match="token_ids is empty"):
        connect().prefill([], forward_of(model))
