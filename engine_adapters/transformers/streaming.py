"""A cache whose layers wait, each at its first use, for their own KV only; and new KV that leaves layer by layer.

`CacheAdapter.prefill` puts both around one forward pass of the engine.
"""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from engine_adapters.transformers.packing import BlockShape, pack, unpack
from kvstore import BlockKeys, Client, KvStoreError, LayerStream, PutResult, PutStatus

__all__ = ["ArrivingKv", "LayerPublisher", "MissingKvError", "filled_cache", "plain_cache", "streaming_cache"]

_log = logging.getLogger(__name__)


class MissingKvError(Exception):
    """A layer's KV did not come in time, or not for all blocks: the forward pass that needs it is no use."""


class ArrivingKv:
    """The KV of a prompt's first blocks while it is on its way.

    Args:
        stream: of these blocks, into `staged`.
        staged: uint8 [layers, blocks, layer bytes] on the host.
        shape: of a block.
        timeout_s: for all its layers together.
    """

    def __init__(self, stream: LayerStream, staged: Tensor, shape: BlockShape, timeout_s: float) -> None:
        self._stream = stream
        self._staged = staged
        self._shape = shape
        self._left_s = timeout_s
        self.blocks = staged.shape[1]
        self.waited_s = 0.0
        self.unpack_s = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of these blocks."""
        return self.blocks * self._shape.block_tokens

    def join(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's K and V, [1, kv_heads, tokens + new, head dim] each: what arrived, followed by the new tokens'.

        Raises:
            MissingKvError: some of the blocks don't have this layer.
        """
        began_s = time.perf_counter()
        ok = self._stream.wait(layer, self._left_s)[: self.blocks]
        came_s = time.perf_counter()
        self.waited_s += came_s - began_s
        self._left_s = max(0.0, self._left_s - (came_s - began_s))
        if not ok.all():
            raise MissingKvError(f"layer {layer} of {np.count_nonzero(~ok)} of {self.blocks} blocks")
        joined = self._with_room(keys), self._with_room(values)
        old = [tensor[0, :, : self.tokens].unflatten(1, (self.blocks, -1)).unsqueeze(0) for tensor in joined]
        unpack(self._staged[layer, : self.blocks], self._shape.one_layer, old[0], old[1])
        for tensor, new in zip(joined, (keys, values), strict=True):
            tensor[:, :, self.tokens :].copy_(new)
        self.unpack_s += time.perf_counter() - came_s
        return joined

    def settle(self) -> None:
        """See which of the leading blocks have, or still get, all layers; from now on these are the blocks."""
        last = self._stream.layers[-1]
        ok = self._stream.wait(last, self._left_s)[: self.blocks]
        self.blocks = len(ok) if ok.all() else int(np.argmin(ok))

    def _with_room(self, new: Tensor) -> Tensor:
        one, heads, count, dim = new.shape
        return torch.empty(one, heads, self.tokens + count, dim, dtype=new.dtype, device=new.device)


class LayerPublisher:
    """Stores the blocks of a prompt that the engine is computing, layer by layer, on a thread of its own.

    Nothing here makes the engine wait, nor fails it: what can't be stored is FAILED in the result.

    Args:
        client: of the model's namespace.
        keys: of the new blocks.
        first_token: of the first of them, in the prompt.
        shape: of a block.
    """

    def __init__(self, client: Client, keys: BlockKeys, first_token: int, shape: BlockShape) -> None:
        self._client, self._keys, self._first_token, self._shape = client, keys, first_token, shape
        self._end_token = first_token + len(keys) * shape.block_tokens
        self._computed: SimpleQueue[tuple[Tensor, Tensor] | bool] = SimpleQueue()  # K and V; or how it ended
        self._offered = 0
        self.result: Final[Future[PutResult]] = Future()
        if not len(keys):
            self.result.set_result(PutResult(np.empty(0, np.uint8), 0))
            return
        threading.Thread(target=self._run, name="kvstore-publish", daemon=True).start()

    def offer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """K and V of a layer, [1, kv_heads, tokens so far, head dim]; taken once all tokens of the blocks are there."""
        if len(self._keys) and layer == self._offered and keys.shape[2] >= self._end_token:
            self._offered += 1
            self._computed.put((keys, values))

    def end(self, *, commit: bool) -> None:
        """The forward pass is over: make the blocks complete, or drop them. `result` is there soon after."""
        self._computed.put(commit)

    def _run(self) -> None:
        try:
            self.result.set_result(self._publish())
        except (KvStoreError, RuntimeError) as fault:  # torch's errors are RuntimeErrors
            _log.warning("storing %d blocks failed: %s", len(self._keys), fault)
            self.result.set_result(PutResult(np.full(len(self._keys), PutStatus.FAILED, np.uint8), 0))

    def _publish(self) -> PutResult:
        shape = self._shape.one_layer
        staged = torch.empty(len(self._keys), shape.elements * shape.dtype.itemsize, dtype=torch.uint8)
        with self._client.publish_stream(self._keys) as stream:
            layer = 0
            while len(stream.mine):
                computed = self._computed.get()
                if isinstance(computed, bool):
                    if computed and layer == self._shape.layout.layers:
                        return stream.commit()
                    break
                pack([computed], self._first_token, shape, staged)
                stream.write(layer, staged.numpy())
                layer += 1
        return PutResult(stream.statuses, 0)  # others have these blocks, there is no room, or they were dropped


class _StreamingLayer(DynamicLayer):
    """A `DynamicLayer` whose first tokens are still on their way, and which hands on what is computed."""

    def __init__(self, number: int, arriving: ArrivingKv | None, publisher: LayerPublisher | None) -> None:
        super().__init__()
        self._number = number
        self._arriving = arriving
        self._publisher = publisher

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicLayer.update`. Raises MissingKvError."""
        if self._arriving is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
        else:
            self.lazy_initialization(key_states, value_states)
            keys, values = self._arriving.join(self._number, key_states, value_states)
            self.keys, self.values, self._arriving = keys, values, None
        if self._publisher is not None:
            self._publisher.offer(self._number, keys, values)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens that this layer has or will have when it is first used."""
        return super().get_seq_length() if self._arriving is None else self._arriving.tokens


def streaming_cache(
    config: PreTrainedConfig, layers: int, arriving: ArrivingKv | None, publisher: LayerPublisher | None
) -> DynamicCache:
    """A cache for one forward pass over what follows the arriving blocks in the prompt."""
    cache = DynamicCache(config=config)
    cache.layers[:] = [_StreamingLayer(number, arriving, publisher) for number in range(layers)]
    return cache


def plain_cache(config: PreTrainedConfig, streamed: DynamicCache) -> DynamicCache:
    """The same tensors in an ordinary cache, which knows nothing of the store."""
    layers = cast(list[DynamicLayer], streamed.layers)
    return filled_cache(config, [(cast(Tensor, layer.keys), cast(Tensor, layer.values)) for layer in layers])


def filled_cache(config: PreTrainedConfig, layers: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache with these tensors, [1, kv_heads, tokens, head dim] each."""
    cache = DynamicCache(config=config)
    for layer, (keys, values) in zip(cast(list[DynamicLayer], cache.layers), layers, strict=True):
        # Assigned, not `update`d: that would concatenate with nothing, which copies everything once more.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache
