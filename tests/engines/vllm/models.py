"""A tiny model of random weights for the tests."""

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
