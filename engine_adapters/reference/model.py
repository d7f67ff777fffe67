"""A Llama model in stages: runs of layers with weights of their own, built from transformers' modules.

A stage takes token ids (the first one) or hidden states, and gives hidden states or logits (the last one). It knows no
KV: each layer hands its queries and new K and V to an `Attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine_adapters.reference.attention import Attention, Batch
from kvstore import UsageError

__all__ = ["LayerWatch", "Stage", "head_dim_of", "require_llama"]

_FIXED_ROPE = ("default", "linear", "llama3")  # others turn with the length of the prompt, which cached K does not


class LayerWatch(Protocol):
    """Is told where a pass is: the store's transfers go along with it."""

    def before(self, layer: int) -> None:
        """The layer's cached KV is needed now."""
        ...

    def after(self, layer: int) -> None:
        """The layer's new KV has been written."""
        ...


class Stage(nn.Module):
    """Layers `layers` of a model, on one device.

    Args:
        config: of the whole model.
        layers: of this stage; the first stage also embeds, the last one also gives logits.
        weights: tensors by their names in `LlamaForCausalLM`; only those of this stage are read, and they are not
        copied unless dtype or device differ.
        dtype, device: to compute with.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: range,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        require_llama(config)
        if not 0 <= layers.start < layers.stop <= config.num_hidden_layers or layers.step != 1:
            raise UsageError(f"layers={layers}: allowed is a run of the {config.num_hidden_layers} layers")
        self.run = layers
        with torch.device("meta"):  # without memory: the tensors are given
            if layers.start == 0:
                self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleDict({str(layer): LlamaDecoderLayer(config, layer) for layer in layers})
            if layers.stop == config.num_hidden_layers:
                self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        tensors = {name: _weight(weights, config, name).to(device, dtype) for name, _ in self.named_parameters()}
        self.load_state_dict(tensors, assign=True)
        self.rotary = LlamaRotaryEmbedding(config).to(device)
        self._head_dim = head_dim_of(config)
        self.requires_grad_(False).eval()

    def forward(self, inputs: Tensor, batch: Batch, attention: Attention, watch: LayerWatch) -> Tensor:
        """Token ids [n] or hidden states [n, hidden] to hidden states [n, hidden]; of n tokens."""
        hidden = self.embed_tokens(inputs) if self.run.start == 0 else inputs
        cos, sin = self.rotary(hidden, batch.positions)
        for number in self.run:
            layer = cast(Any, self.layers[str(number)])
            normed = layer.input_layernorm(hidden)
            projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            queries, keys, values = (project(normed).unflatten(-1, (-1, self._head_dim)) for project in projections)
            queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
            watch.before(number)
            attended = attention.attend(number, queries, keys, values, batch).out
            watch.after(number)
            hidden = hidden + layer.self_attn.o_proj(attended.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the last stage: hidden states [m, hidden] to float32 logits [m, vocabulary]."""
        return self.lm_head(self.norm(hidden)).float()


def head_dim_of(config: LlamaConfig) -> int:
    """Elements of one head."""
    return cast(int | None, getattr(config, "head_dim", None)) or config.hidden_size // config.num_attention_heads


def require_llama(config: object) -> None:
    """Raises UsageError for a model that this engine does not compute as transformers does."""
    if not isinstance(config, LlamaConfig):
        raise UsageError(f"a model with a {type(config).__name__}: allowed is LlamaConfig")
    rope = cast(dict[str, Any], config.rope_parameters)["rope_type"]
    if rope not in _FIXED_ROPE:
        raise UsageError(f"rope_type={rope!r}: allowed is one of {', '.join(_FIXED_ROPE)}")


def _weight(weights: Mapping[str, Tensor], config: LlamaConfig, name: str) -> Tensor:
    full = name if name.startswith("lm_head") else f"model.{name}"
    if full == "lm_head.weight" and config.tie_word_embeddings:
        full = "model.embed_tokens.weight"
    try:
        return weights[full].detach()
    except KeyError as cause:
        raise UsageError(f"weights: {full} is missing") from cause
