"""Paged KV memory in the canonical layout, and attention over a set of KV heads behind a small port.

    memory [layers, blocks, kv_heads, 2 (k, v), block_tokens, head_dim]

One layer of one block is one contiguous piece, with the bytes that a canonical block has for it, and so is a range of
its heads. The store therefore reads and writes the memory in place, a layer at a time, block numbers being the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Attention", "Batch", "Group", "KvMemory", "PagedAttention", "Partial", "SplitAttention"]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of a step with equally many new tokens: they are attended to in one go."""

    rows: slice  # of the step's tokens: request by request
    tables: Tensor  # int64 [requests, blocks]: the blocks of each, filled up with any block
    positions: Tensor  # int64 [requests, new tokens]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a step, n in all, and where their KV belongs."""

    tokens: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    blocks: Tensor  # int64 [n]
    offsets: Tensor  # int64 [n], within the block
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some query heads. Of heads computed apart, outputs are put side by side; of token ranges computed
    apart, they are weighted by the exponential of `lse`.
    """

    out: Tensor  # [n, query heads, head_dim]
    lse: Tensor  # float32 [n, query heads]: log of the sum of exponentials of the scores


class Attention(Protocol):
    """Attention over KV heads that may lie anywhere."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Partial:
        """Append the new tokens' K and V, then attend to everything up to each token.

        Args:
            layer: as numbered in the model.
            queries: [n, query heads, head_dim]; the query heads of a KV head are neighbours.
            keys: of the new tokens, after RoPE, [n, kv heads, head_dim].
            values: likewise.
            batch: which requests these are.
        """
        ...


class KvMemory:
    """KV of some layers and heads: zeros at first, because what is masked out is still multiplied.

    Args:
        layers: of the model.
        kv_heads, block_tokens, head_dim: of a layer of a block.
        blocks: how many.
        dtype, device: of the tensor.
    """

    def __init__(
        self,
        layers: range,
        *,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.block_tokens = layers, block_tokens
        self.tensor = torch.zeros(len(layers), blocks, kv_heads, 2, block_tokens, head_dim, dtype=dtype, device=device)

    def layer(self, layer: int) -> Tensor:
        """[blocks, kv_heads, 2, block_tokens, head_dim]."""
        return self.tensor[layer - self.layers.start]

    def buffers(self) -> list[object]:
        """One buffer a layer, as the SDK takes them: slot i is that layer of block i."""
        if self.tensor.device.type == "cpu":
            return list(self.tensor.view(torch.uint8).flatten(1).numpy())
        return list(self.tensor.flatten(1))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros, after a transfer that may have left anything there."""
        self.tensor[:, torch.tensor(blocks, dtype=torch.int64, device=self.tensor.device)] = 0


class PagedAttention:
    """`Attention` over a `KvMemory` of this process."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Partial:
        memory = self._memory.layer(layer)
        memory[batch.blocks, :, 0, batch.offsets] = keys
        memory[batch.blocks, :, 1, batch.offsets] = values
        parts = [_attend(memory, queries[group.rows], group) for group in batch.groups]
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _attend(memory: Tensor, queries: Tensor, group: Group) -> Partial:
    """Of one group, whose K and V are gathered from its blocks."""
    requests, new = group.positions.shape
    kv_heads, head_dim = memory.shape[1], memory.shape[-1]
    # [requests, blocks, kv_heads, 2, tokens, dim] -> [2, requests, kv_heads, all tokens, dim]
    keys, values = memory[group.tables].permute(3, 0, 2, 1, 4, 5).flatten(3, 4)
    shape = (requests, new, kv_heads, -1, head_dim)
    asked = queries.view(shape).permute(0, 2, 3, 1, 4)  # [requests, kv_heads, queries per kv head, new, dim]
    scores = (asked.flatten(2, 3) @ keys.transpose(-1, -2)).float() * head_dim**-0.5
    scores = scores.view(*asked.shape[:-1], -1)
    future = torch.arange(keys.shape[2], device=keys.device) > group.positions[:, :, None]
    scores = scores.masked_fill(future[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(values.dtype)
    out = (weights.flatten(2, 3) @ values).view(asked.shape)
    return Partial(
        out.permute(0, 3, 1, 2, 4).reshape(queries.shape), lse.permute(0, 3, 1, 2).reshape(queries.shape[:2])
    )


class SplitAttention:
    """`Attention` whose KV heads are divided among others, in their order; the parts are put side by side."""

    def __init__(self, parts: Sequence[tuple[int, Attention]]) -> None:
        """`parts`: how many KV heads each has, and who attends to them."""
        self._sizes = [heads for heads, _ in parts]
        self._parts = [attention for _, attention in parts]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Partial:
        per_head = queries.shape[1] // keys.shape[1]
        cut = zip(
            queries.split([size * per_head for size in self._sizes], dim=1),
            keys.split(self._sizes, dim=1),
            values.split(self._sizes, dim=1),
            strict=True,
        )
        done = [part.attend(layer, *tensors, batch) for part, tensors in zip(self._parts, cut, strict=True)]
        return Partial(torch.cat([part.out for part in done], dim=1), torch.cat([part.lse for part in done], dim=1))
