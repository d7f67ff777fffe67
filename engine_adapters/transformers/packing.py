"""Between an engine's per-layer tensors and canonical blocks, by strided copies only: no loop over blocks.

One layer of a `DynamicCache` is K and V of shape [1, kv_heads, tokens, head_dim]. A batch of n canonical blocks is

    staging [n, layers, kv_heads, block_tokens * (head_dim + head_dim_v)]
                                  | K: token x head_dim | V: token x head_dim_v |

Seen from one layer, only the block axis and the head axis change places, so each run that stays together is one
block's K (or V) of one head: block_tokens * head_dim elements, 4 KiB for 16 tokens of 64 floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstore import CanonicalLayout

__all__ = ["BlockShape", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one canonical block: what a flat buffer must be seen as."""

    layout: CanonicalLayout
    block_tokens: int
    dtype: torch.dtype

    @property
    def one_layer(self) -> "BlockShape":
        """The shape of a layer slice: what a block of a model with one layer has."""
        return replace(self, layout=replace(self.layout, layers=1))

    @property
    def elements(self) -> int:
        """Elements of one block."""
        return self.layout.layers * self.layout.kv_heads * self._head_elements

    @property
    def _head_elements(self) -> int:
        return self.block_tokens * (self.layout.head_dim + self.layout.value_dim)

    def split(self, staging: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of uint8 `staging` [n, block bytes], as views [n, layers, kv_heads, block_tokens, head dim]."""
        tokens, layout = self.block_tokens, self.layout
        heads = staging.view(self.dtype).view(-1, layout.layers, layout.kv_heads, self._head_elements)
        cut = tokens * layout.head_dim
        keys = heads[..., :cut].unflatten(-1, (tokens, layout.head_dim))
        return keys, heads[..., cut:].unflatten(-1, (tokens, layout.value_dim))


def pack(layers: Sequence[tuple[Tensor, Tensor]], first_token: int, shape: BlockShape, staging: Tensor) -> None:
    """Fill every block of `staging` (uint8 [n, block bytes]) from `layers`, from position `first_token` on.

    `layers`: K and V of each layer, [1, kv_heads, tokens, head dim] on any device; n * block_tokens tokens are read.
    """
    keys, values = shape.split(staging)
    for index, (layer_keys, layer_values) in enumerate(layers):
        keys[:, index].copy_(_blocks(layer_keys, first_token, keys))
        values[:, index].copy_(_blocks(layer_values, first_token, values))


def unpack(staging: Tensor, shape: BlockShape, keys: Tensor, values: Tensor) -> None:
    """Spread the blocks of `staging` (uint8 [n, block bytes]) over `keys` and `values`, all layers in one copy each.

    `keys`, `values`: [layers, kv_heads, n, block_tokens, head dim], on any device; the last three axes are one layer's
    token axis once flattened.
    """
    staged_keys, staged_values = shape.split(staging)
    keys.copy_(staged_keys.permute(1, 2, 0, 3, 4))
    values.copy_(staged_values.permute(1, 2, 0, 3, 4))


def _blocks(tensor: Tensor, first_token: int, like: Tensor) -> Tensor:
    """A view [n, kv_heads, block_tokens, head dim] of one layer's tensor, cut to the blocks of `like`."""
    count, block_tokens = like.shape[0], like.shape[3]
    span = tensor[0, :, first_token : first_token + count * block_tokens]
    return span.unflatten(1, (count, block_tokens)).transpose(0, 1)
