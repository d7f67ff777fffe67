"""A small Llama with random weights, the same ones in every process, and what the tests do with it."""

from typing import Any, cast

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvstore
from engine_adapters.transformers import CacheAdapter, namespace_for

BLOCK_TOKENS = 16
VOCABULARY = 997
TIMEOUT_S = 2.0


def tiny_config(layers: int = 3) -> LlamaConfig:
    """4 heads over 2 KV heads."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
    )


def tiny_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model; equal weights in every process, rounded to `dtype`."""
    torch.set_num_threads(1)  # the machine's other cores are for the server and the other process
    torch.default_generator.manual_seed(7)
    model: Any = LlamaForCausalLM(tiny_config())
    return model.to(dtype).eval()


def tiny_namespace(model: LlamaForCausalLM, revision: str = "r1") -> kvstore.Namespace:
    """The namespace of the tiny model's KV."""
    return namespace_for(model, revision=revision, model_id="tiny", block_tokens=BLOCK_TOKENS)


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids; prompts of one seed begin alike."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, VOCABULARY, (4096,), generator=generator)[:tokens]]


def layer_tensors(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, [1, kv_heads, tokens, head_dim]."""
    return [(layer.keys, layer.values) for layer in cast(list[Any], cache.layers)]


def continue_from(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Logits of the last token [vocabulary], computing what `cache` doesn't hold; `cache` then holds all of it."""
    rest = torch.tensor([token_ids[cache.get_seq_length() :]])
    with torch.inference_mode():
        return model(input_ids=rest, cache=cache, use_cache=True).logits[0, -1].float()


def compute(model: LlamaForCausalLM, token_ids: list[int]) -> tuple[DynamicCache, torch.Tensor]:
    """The prompt's cache and the last token's logits, without a store."""
    cache = DynamicCache(config=model.config)
    return cache, continue_from(model, token_ids, cache)


def prefill_and_store(address: str, token_ids: list[int], dtype_name: str = "float32") -> kvstore.PutResult:
    """What a prefill worker does; run in another process."""
    model = tiny_model(getattr(torch, dtype_name))
    with kvstore.connect(address, namespace=tiny_namespace(model), timeout_s=TIMEOUT_S) as client:
        return CacheAdapter(client, model).store(token_ids, compute(model, token_ids)[0])
