"""The engine's way to the store: what is worth loading, and the transfers that go along with a step, layer by layer.

Nothing here fails a request. What does not come is computed; what can't be saved is not saved, and both are logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine_adapters.reference.attention import KvMemory
from kvstore import BlockKeys, Client, DeviceError, KvStoreError, LayerStream, PublishStream

__all__ = ["Load", "NoTransfers", "Save", "StepTransfers", "StoreAdapter"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of one request that come from the store."""

    keys: BlockKeys
    blocks: list[int]  # where they go
    loaded: int = field(init=False)  # leading blocks of which all layers have come, as far as they have been needed

    def __post_init__(self) -> None:
        self.loaded = len(self.blocks)

    @property
    def failed(self) -> bool:
        """Whether a block did not come: what is computed on top of it is worth nothing."""
        return self.loaded < len(self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """Blocks of one request that this step completes."""

    keys: BlockKeys
    blocks: list[int]
    load: Load | None  # what they are computed on top of


class NoTransfers:
    """Of an engine without a store."""

    waited_s = 0.0

    def __enter__(self) -> NoTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def before(self, layer: int) -> None:
        """Nothing to wait for."""

    def after(self, layer: int) -> None:
        """Nothing to save."""

    def commit(self) -> None:
        """Nothing to make complete."""


class StoreAdapter:
    """Moves blocks between the engine's memory and the store.

    Args:
        client: of the model's namespace; for memory of a GPU, connected with that device.
        memory: all layers and heads.
        plan: load only as much as is faster than computing it, as far as that is known.
        follow: also load blocks that another worker is computing just now, as it goes on.
    """

    def __init__(self, client: Client, memory: KvMemory, *, plan: bool, follow: bool) -> None:
        self._client, self._plan, self._follow = client, plan, follow
        self._buffers: Final = memory.buffers()

    def hit(self, keys: BlockKeys, tokens: int) -> int:
        """How many of the leading blocks to load. `tokens`: to compute if none of them is."""
        try:
            found = self._client.lookup(keys, plan=self._plan, prompt_tokens=tokens)
        except KvStoreError as fault:
            _log.warning("lookup failed, %d blocks count as a miss: %s", len(keys), fault)
            return 0
        hit = found.plan.fetch_blocks if found.plan else found.hit_blocks
        return found.started_blocks if self._follow and hit == found.hit_blocks else hit

    def transfers(self, loads: Sequence[Load], saves: Sequence[Save]) -> StepTransfers:
        """Begin a step's transfers."""
        return StepTransfers(self._client, self._buffers, loads, saves)

    def observe(self, tokens: int, seconds: float) -> None:
        """How long computing so many tokens of a prompt took: the plan compares with it."""
        self._client.observe_compute(tokens, max(seconds, 1e-9))


class StepTransfers:
    """Loads and saves of one step; a context manager. Outside of it nothing touches the engine's memory.

    All waiting of a step together is bounded by the client's `timeout_s`.
    """

    def __init__(self, client: Client, buffers: list[object], loads: Sequence[Load], saves: Sequence[Save]) -> None:
        self._client, self._buffers = client, buffers
        self._loads, self._saves = loads, saves
        self._stack = ExitStack()
        self._arriving: list[tuple[Load, LayerStream]] = []
        self._leaving: list[tuple[Save, PublishStream]] = []
        self.waited_s = 0.0

    def __enter__(self) -> StepTransfers:
        with ExitStack() as stack:
            for load in self._loads:
                self._begin_load(load, stack)
            for save in self._saves:
                self._begin_save(save, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()  # cancels what still comes, and drops what was not committed

    def before(self, layer: int) -> None:
        """Wait for this layer of all loads, and only for that; see afterwards which loads have failed."""
        for load, stream in self._arriving:
            if not load.loaded:
                continue
            began_s = time.perf_counter()
            try:
                came = stream.wait(layer, max(0.0, self._client.timeout_s - self.waited_s))[: load.loaded]
                load.loaded = len(came) if came.all() else int(np.argmin(came))
            except DeviceError:
                raise  # it may still write to the engine's memory: there is no going on
            except KvStoreError as fault:
                _log.warning("layer %d of %d blocks: %s", layer, load.loaded, fault)
                load.loaded = 0
            self.waited_s += time.perf_counter() - began_s

    def after(self, layer: int) -> None:
        """Save this layer of all blocks that the step completes."""
        for save, stream in list(self._leaving):
            try:
                if _is_sound(save) and len(stream.mine):
                    stream.write(layer, self._buffers[layer], slots=save.blocks)
                    continue
            except KvStoreError as fault:
                _log.warning("saving layer %d of %d blocks failed: %s", layer, len(save.blocks), fault)
            self._leaving.remove((save, stream))

    def commit(self) -> None:
        """All layers are computed: make the blocks complete whose loads have come."""
        for load in self._loads:
            if load.failed:
                _log.warning(
                    "%d of %d blocks did not come, computing them", len(load.blocks) - load.loaded, len(load.blocks)
                )
        for save, stream in self._leaving:
            try:
                if _is_sound(save):
                    stream.commit()
            except KvStoreError as fault:
                _log.warning("saving %d blocks failed: %s", len(save.blocks), fault)

    def _begin_load(self, load: Load, stack: ExitStack) -> None:
        try:
            stream = self._client.layer_stream(load.keys, self._buffers, slots=load.blocks)
            self._arriving.append((load, stack.enter_context(stream)))
        except DeviceError:
            raise  # as above
        except KvStoreError as fault:
            _log.warning("no stream of %d blocks, they count as a miss: %s", len(load.blocks), fault)
            load.loaded = 0

    def _begin_save(self, save: Save, stack: ExitStack) -> None:
        try:
            stream = self._client.publish_stream(save.keys)
            self._leaving.append((save, stack.enter_context(stream)))
        except KvStoreError as fault:
            _log.warning("saving %d blocks failed: %s", len(save.blocks), fault)


def _is_sound(save: Save) -> bool:
    return save.load is None or not save.load.failed
