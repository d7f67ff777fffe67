"""A small Llama with random weights in a folder, as an engine loads it; the same weights for one seed everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 997


def save_tiny(folder: Path, *, seed: int = 7) -> Path:
    """The folder, with the model of that seed in it. Its weights are large, so that other KV gives other answers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.default_generator.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids; prompts of one seed begin alike."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, VOCABULARY, (4096,), generator=generator)[:tokens]]
