"""The adapter over a real server: exact across processes, whole blocks only, and never in the engine's way."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import kvstore
from engine_adapters.transformers import CacheAdapter
from engine_adapters.transformers.cache import STAGING_BYTES
from kvstore.testing.cluster import ServerProcess
from tests.engine_adapters.transformers.tiny import (
    BLOCK_TOKENS,
    TIMEOUT_S,
    compute,
    continue_from,
    layer_tensors,
    prefill_and_store,
    prompt,
    tiny_config,
    tiny_model,
    tiny_namespace,
)

Connect = Callable[..., CacheAdapter]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def adapter_on(model: LlamaForCausalLM) -> Iterator[Connect]:
    clients: list[kvstore.Client] = []

    def connect(
        server: ServerProcess,
        model: LlamaForCausalLM = model,
        revision: str = "r1",
        staging_bytes: int = STAGING_BYTES,
    ) -> CacheAdapter:
        client = kvstore.connect(server.address, namespace=tiny_namespace(model, revision), timeout_s=TIMEOUT_S)
        clients.append(client)
        return CacheAdapter(client, model, staging_bytes=staging_bytes)

    yield connect
    for client in clients:
        client.close()


def assert_bits_equal(loaded: DynamicCache, computed: DynamicCache, tokens: int) -> None:
    for (keys, values), (other_keys, other_values) in zip(layer_tensors(loaded), layer_tensors(computed), strict=True):
        assert torch.equal(keys[..., :tokens, :], other_keys[..., :tokens, :])
        assert torch.equal(values[..., :tokens, :], other_values[..., :tokens, :])


@pytest.mark.parametrize("tokens", [5, 16, 17, 48, 100, 333], ids=lambda tokens: f"{tokens}-tokens")
def test_what_one_process_stored_another_continues_with_the_same_logits(
    tokens: int, server: ServerProcess, other_process: ProcessPoolExecutor, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(tokens, seed=1000 + tokens)
    adapter = adapter_on(server)
    assert adapter.load(token_ids)[1] == 0

    stored = other_process.submit(prefill_and_store, server.address, token_ids).result(timeout=60)
    assert stored.stored == stored.present == len(stored.statuses) == tokens // BLOCK_TOKENS

    computed, expected = compute(model, token_ids)
    for _ in range(2):  # the second time must be as good as the first
        cache, hit_tokens = adapter.load(token_ids)
        assert hit_tokens == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS == cache.get_seq_length()
        torch.testing.assert_close(continue_from(model, token_ids, cache), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(layer_tensors(cache), layer_tensors(computed), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_cache_comes_back_bit_for_bit(dtype: torch.dtype, server: ServerProcess, adapter_on: Connect) -> None:
    model = tiny_model(dtype)
    adapter = adapter_on(server, model)
    token_ids = prompt(70, seed=11)
    computed, _ = compute(model, token_ids)
    assert adapter.store(token_ids, computed).stored == 4
    for _ in range(2):
        cache, hit_tokens = adapter.load(token_ids)
        assert hit_tokens == 64
        assert_bits_equal(cache, computed, 64)


def test_a_second_store_of_the_same_prompt_moves_nothing(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(64, seed=12)
    cache, _ = compute(model, token_ids)
    adapter = adapter_on(server)
    first, second = adapter.store(token_ids, cache), adapter.store(token_ids, cache)
    assert (first.stored, first.present) == (4, 4)
    assert first.bytes == 4 * tiny_namespace(model).block_bytes
    assert (second.stored, second.present, second.bytes) == (0, 4, 0)


def test_two_prompts_share_exactly_the_full_blocks_of_their_common_beginning(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    first = prompt(100, seed=13)
    second = [*first[:60], *prompt(40, seed=14)]
    adapter.store(first, compute(model, first)[0])
    computed, expected = compute(model, second)
    for _ in range(2):
        cache, hit_tokens = adapter.load(second)
        assert hit_tokens == 48
        torch.testing.assert_close(continue_from(model, second, cache), expected, rtol=0, atol=1e-5)
    stored = adapter.store(second, computed)
    assert (stored.stored, stored.present) == (3, 6)


def test_a_generation_that_ends_on_a_block_edge_stores_only_the_slots_that_were_computed(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    token_ids = prompt(30, seed=15)
    cache, logits = compute(model, token_ids)
    token_ids = [*token_ids, int(logits.argmax())]
    token_ids = [*token_ids, int(continue_from(model, token_ids, cache).argmax())]
    assert (len(token_ids), cache.get_seq_length()) == (32, 31)  # the last token was sampled, but never computed

    assert adapter.store(token_ids, cache).stored == 1
    assert adapter.load([*token_ids, 1])[1] == 16

    continue_from(model, token_ids, cache)
    assert adapter.store(token_ids, cache).stored == 1
    for _ in range(2):
        loaded, hit_tokens = adapter.load([*token_ids, 1])
        assert hit_tokens == 32
        assert_bits_equal(loaded, cache, 32)


def test_one_token_is_always_left_to_compute_and_a_limit_holds(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    token_ids = prompt(64, seed=16)
    adapter.store(token_ids, compute(model, token_ids)[0])
    assert adapter.load(token_ids)[1] == 48
    assert adapter.load([*token_ids, 1])[1] == 64
    assert adapter.load(token_ids, limit=47)[1] == 32
    assert adapter.load(token_ids, limit=0)[1] == 0
    assert adapter.load(token_ids[:1])[1] == adapter.load([])[1] == 0


def test_a_prompt_larger_than_the_staging_buffer_travels_in_parts(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server, staging_bytes=2 * tiny_namespace(model).block_bytes + 1)
    token_ids = prompt(16 * 5 + 3, seed=17)
    computed, _ = compute(model, token_ids)
    assert adapter.store(token_ids, computed).stored == 5
    for _ in range(2):
        cache, hit_tokens = adapter.load(token_ids)
        assert hit_tokens == 80
        assert_bits_equal(cache, computed, 80)


def test_a_block_that_is_gone_shortens_the_hit_and_is_stored_again_alone(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    token_ids = prompt(100, seed=18)
    computed, expected = compute(model, token_ids)
    adapter.store(token_ids, computed)
    with kvstore.connect(server.address, namespace=tiny_namespace(model)) as client:
        assert client.delete(client.keys(token_ids)[2:3]) == 1

    cache, hit_tokens = adapter.load(token_ids)
    assert hit_tokens == 32
    torch.testing.assert_close(continue_from(model, token_ids, cache), expected, rtol=0, atol=1e-5)
    stored = adapter.store(token_ids, cache)
    assert (stored.stored, stored.present) == (1, 6)
    assert adapter.load(token_ids)[1] == 96


def test_another_revision_or_dtype_gets_no_hit(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(64, seed=19)
    adapter_on(server).store(token_ids, compute(model, token_ids)[0])
    for _ in range(2):
        assert adapter_on(server, revision="r2").load(token_ids)[1] == 0
        assert adapter_on(server, tiny_model(torch.bfloat16)).load(token_ids)[1] == 0
    assert adapter_on(server).load(token_ids)[1] == 48


def test_a_killed_server_is_a_miss_and_the_answer_is_still_right(adapter_on: Connect, model: LlamaForCausalLM) -> None:
    token_ids = prompt(100, seed=20)
    computed, expected = compute(model, token_ids)
    with ServerProcess(dram="64MiB") as server:
        adapter = adapter_on(server)
        adapter.store(token_ids, computed)
        assert adapter.load(token_ids)[1] == 96
        server.kill_all()
        for _ in range(2):
            started_s = time.monotonic()
            cache, hit_tokens = adapter.load(token_ids)
            assert time.monotonic() - started_s < TIMEOUT_S + 1.0
            assert hit_tokens == 0
            torch.testing.assert_close(continue_from(model, token_ids, cache), expected, rtol=0, atol=1e-5)
        assert adapter.store(token_ids, computed).stored == 0


def test_a_frozen_server_delays_the_engine_by_at_most_the_deadline(
    adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    token_ids = prompt(100, seed=21)
    fresh = prompt(100, seed=22)
    with ServerProcess(dram="64MiB") as server:
        adapter = adapter_on(server)
        adapter.store(token_ids, compute(model, token_ids)[0])
        server.freeze()
        try:
            for call in (lambda: adapter.load(token_ids), lambda: adapter.store(fresh, compute(model, fresh)[0])):
                started_s = time.monotonic()
                call()
                assert time.monotonic() - started_s < 2 * TIMEOUT_S + 1.0
        finally:
            server.thaw()


def test_a_cache_that_is_not_this_models_or_holds_a_batch_is_refused(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    token_ids = prompt(40, seed=23)
    batch, _ = compute(model, token_ids)
    batch.batch_repeat_interleave(2)
    half, _ = compute(tiny_model(torch.bfloat16), token_ids)
    static = StaticCache(config=model.config, max_cache_len=64)
    continue_from(model, token_ids, static)  # pyright: ignore[reportArgumentType] # on purpose
    for cache, culprit in ((batch, r"shape \(2, 2, 40, 16\)"), (half, "torch.bfloat16"), (static, "StaticLayer")):
        with pytest.raises(kvstore.UsageError, match=culprit):
            adapter.store(token_ids, cache)  # pyright: ignore[reportArgumentType] # on purpose
    assert adapter.load(token_ids)[1] == 0


def test_token_ids_may_be_a_tensor_a_tokenizer_gave(
    server: ServerProcess, adapter_on: Connect, model: LlamaForCausalLM
) -> None:
    adapter = adapter_on(server)
    token_ids = prompt(40, seed=24)
    adapter.store(torch.tensor([token_ids]), compute(model, token_ids)[0])
    assert adapter.load(torch.tensor(token_ids))[1] == 32
    with pytest.raises(kvstore.UsageError, match=r"shape \(2, 40\)"):
        adapter.load(torch.tensor([token_ids, token_ids]))


def test_a_client_of_another_model_is_refused(server: ServerProcess, model: LlamaForCausalLM) -> None:
    namespace = tiny_namespace(model)
    with (
        kvstore.connect(server.address, namespace=namespace) as client,
        pytest.raises(kvstore.UsageError, match=r"this model's is CanonicalLayout\(layers=2"),
    ):
        CacheAdapter(client, tiny_config(layers=2))
