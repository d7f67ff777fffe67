"""Models for the tests: a tiny one of random weights, and SmolLM2 in the form that vLLM loads."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
TINY = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    # Wide enough that two tokens are hardly ever equally likely: answers are compared token by token.
    initializer_range=0.3,
)


def save_tiny(folder: Path, *, seed: int = 5, config: LlamaConfig = TINY) -> Path:
    """Save the tiny model, float32."""
    torch.manual_seed(seed)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def save_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct from its package, as a folder that vLLM loads. Takes half a minute."""
    from engine_adapters.transformers.model import load_smollm2  # imports much

    loaded = load_smollm2(lambda _: None)
    config = LlamaConfig(**{n: v for n, v in loaded.model.config.to_dict().items() if n != "quantization_config"})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.model.state_dict())
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder
