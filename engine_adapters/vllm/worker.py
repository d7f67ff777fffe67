"""A worker's side: blocks go between the store and the engine's KV cache, layer by layer, during the forward pass.

One stream brings all that a step loads, one takes all that it saves. A layer waits for its own blocks and for no
others. Once a block did not come, what the step computes after it is wrong for some request: saving stops at that
layer, before anybody could see more of it, and the engine recomputes.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapters.vllm.geometry import Geometry
from engine_adapters.vllm.sight import Tally
from engine_adapters.vllm.step import Batch, StepPlan, StepReport
from kvstore import BlockKeys, Client, KvStoreError, LayerStream, PublishStream, PutStatus

__all__ = ["Moving"]

PREFILL_TOKENS = 32  # a step with fewer says nothing about how fast the engine computes a prompt
LEASE_S = 30.0

_log = logging.getLogger("vllm.kvstore")


@dataclass(slots=True)
class _Load:
    """Blocks on their way in."""

    stream: LayerStream
    block_ids: NDArray[np.int64]
    began_s: float
    deadline_s: float
    arrived: NDArray[np.bool_]
    next_layer: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class _Save:
    """Blocks on their way out."""

    stream: PublishStream
    slots: NDArray[np.int64]
    block_ids: Tensor
    next_layer: int = 0


@dataclass(slots=True)
class Moving:
    """Carries out a worker's share of each step's plan. The worker's thread is its only caller."""

    client: Client
    geometry: Geometry
    pipeline_part: int
    tally: Tally = field(default_factory=Tally)
    _plan: StepPlan | None = None
    _load: _Load | None = None
    _save: _Save | None = None
    _layers: dict[str, int] = field(default_factory=dict[str, int])
    _broken: bool = False  # a block did not come in this step
    _failed_ids: set[int] = field(default_factory=set[int])
    _report: StepReport | None = None
    _began_s: float = 0.0
    _paused_s: float = 0.0  # the forward pass, for loads and saves

    def __post_init__(self) -> None:
        self._layers = {name: number for number, name in enumerate(self.geometry.memory.layer_names)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that it could write to what it only reads here
            torch.from_numpy(np.frombuffer(bytes(8), np.uint8))

    # --- a step, in the order of its calls ---------------------------------------------------------------------------

    def start(self, plan: StepPlan) -> None:
        """Begin the step's loads. Comes before the forward pass when there are any, after it otherwise."""
        self._begin(plan)
        if len(plan.load):
            self._start_load(plan.load, plan.patience_s)

    def before_layer(self, plan: StepPlan, name: str) -> None:
        """The engine needs this layer's blocks now."""
        self._begin(plan)
        if self._load is not None and name in self._layers:
            self._wait(self._load, self._layers[name])

    def after_layer(self, plan: StepPlan, name: str) -> None:
        """The KV of this layer has been written."""
        self._begin(plan)
        if not len(plan.save) or self._broken or not self.geometry.writes or name not in self._layers:
            return
        began_s = time.perf_counter()
        layer = self._layers[name]
        if layer == 0 and self._save is None:
            self._save = self._start_save(plan.save)
        if self._save is not None and not self._publish(self._save, layer):
            self._drop_save()
        self._pause("save_s", began_s)

    def end(self, plan: StepPlan) -> None:
        """The step is over: nothing is under way any more when this returns."""
        self._begin(plan)
        load, layers = self._load, len(self._layers)
        load_s = 0.0
        if load is not None:
            self._wait(load, layers - 1)  # a pass without attention did not ask for every layer
            load_s = self._end_load(load)
        began_s = time.perf_counter()
        saved = self._end_save(plan.save)
        self._pause("save_s", began_s)
        compute_s = time.perf_counter() - self._began_s - self._paused_s
        if len(plan.load) or len(plan.save) or plan.tokens >= PREFILL_TOKENS:
            prefill = plan.tokens >= PREFILL_TOKENS and not self._broken
            self._report = StepReport(
                plan.number,
                loaded=not self._broken,
                load_s=load_s,
                compute_tokens=plan.tokens,
                compute_s=max(compute_s, 1e-6) if prefill else 0.0,
                saved=saved,
            )
        self._plan, self._broken = None, False

    # --- between steps -----------------------------------------------------------------------------------------------

    def take_failed(self) -> set[int]:
        """Blocks that did not come, since this was last asked."""
        failed, self._failed_ids = self._failed_ids, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Of the step that ended, once."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Let go of everything but the client."""
        if self._load is not None:
            self._end_load(self._load)
        self._drop_save()

    def _begin(self, plan: StepPlan) -> None:
        if self._plan is plan:
            return
        self._plan, self._broken = plan, False
        self._began_s, self._paused_s = time.perf_counter(), 0.0

    def _pause(self, name: str, began_s: float) -> None:
        took_s = time.perf_counter() - began_s
        self._paused_s += took_s
        self.tally.add(**{name: took_s})

    # --- loading -----------------------------------------------------------------------------------------------------

    def _start_load(self, batch: Batch, patience_s: float) -> None:
        keys = BlockKeys.frombuffer(batch.keys[self.pipeline_part])
        geometry = self.geometry
        try:
            stream = self.client.layer_stream(
                keys,
                list(geometry.memory.buffers),
                heads=geometry.heads,
                slots=batch.block_ids * geometry.memory.stride,
                ttl_s=LEASE_S,
                stream=_current_stream(geometry.memory.device),
                copy=copy_with_all_threads if geometry.memory.device.type == "cpu" else None,
            )
        except KvStoreError as fault:
            _log.warning("no stream of %d blocks, they are recomputed: %s", len(batch), fault)
            self._fail(batch.block_ids)
            return
        now_s = time.monotonic()
        self._load = _Load(stream, batch.block_ids, now_s, now_s + patience_s, np.ones(len(batch), np.bool_))

    def _wait(self, load: _Load, layer: int) -> None:
        """Until this layer is there, of all blocks that still can have it."""
        for number in range(load.next_layer, layer + 1):
            began_s = time.perf_counter()
            try:
                left_s = max(load.deadline_s - time.monotonic(), 0.0)
                arrived = load.stream.wait(number, left_s) if load.arrived.any() else load.arrived
            except KvStoreError as fault:
                _log.warning("layer %d of %d blocks did not come: %s", number, len(load.block_ids), fault)
                arrived = np.zeros_like(load.arrived)
            lost = load.arrived & ~arrived
            if lost.any():
                load.arrived &= arrived
                self._fail(load.block_ids[lost])
            if self.geometry.order is not None and load.arrived.any():
                self.geometry.from_canonical(number, self._on_device(load.block_ids[load.arrived]))
            load.next_layer = number + 1
            self._pause("load_wait_s", began_s)

    def _fail(self, block_ids: NDArray[np.int64]) -> None:
        self._broken = True
        self._failed_ids.update(block_ids.tolist())
        self.tally.add(failed_blocks=len(block_ids))
        self._drop_save()

    def _end_load(self, load: _Load) -> float:
        """Seconds to the last layer; 0 where not all came."""
        self._load = None
        arrived_s = load.stream.arrived_s
        try:
            load.stream.cancel()
        except KvStoreError as fault:
            _log.warning("a load of %d blocks did not end well: %s", len(load.block_ids), fault)
            lost = load.block_ids[load.arrived]
            load.arrived[:] = False
            self._fail(lost)
        came = int(load.arrived.sum())
        took_s = arrived_s[-1] - load.began_s if arrived_s else 0.0
        self.tally.add(loads=1, load_blocks=came, load_bytes=came * self._block_bytes, load_s=took_s)
        return max(took_s, 1e-6) if came == len(load.block_ids) else 0.0

    # --- saving ------------------------------------------------------------------------------------------------------

    def _start_save(self, batch: Batch) -> _Save | None:
        keys = BlockKeys.frombuffer(batch.keys[self.pipeline_part])
        geometry = self.geometry
        try:
            stream = self.client.publish_stream(keys, heads=geometry.heads, ttl_s=LEASE_S)
        except KvStoreError as fault:
            _log.warning("no stream to save %d blocks: %s", len(batch), fault)
            return None
        return _Save(stream, batch.block_ids * geometry.memory.stride, self._on_device(batch.block_ids))

    def _publish(self, save: _Save, layer: int) -> bool:
        """Hand on a layer; False when the rest is not worth it."""
        if layer != save.next_layer:
            return layer < save.next_layer  # a draft model's second pass over it, or a pass that left one out
        save.next_layer += 1
        if not len(save.stream.mine):
            return False  # others have these blocks, or there is no room
        try:
            if self.geometry.order is None:
                save.stream.write(layer, self.geometry.memory.buffers[layer], slots=save.slots)
            else:
                save.stream.write(layer, self.geometry.to_canonical(layer, save.block_ids))
        except KvStoreError as fault:
            _log.warning("saving layer %d of %d blocks failed: %s", layer, len(save.slots), fault)
            return False
        return True

    def _drop_save(self) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        try:
            save.stream.abort()
        except KvStoreError as fault:
            _log.warning("%d unfinished blocks were not taken back, they expire: %s", len(save.slots), fault)

    def _end_save(self, batch: Batch) -> NDArray[np.bool_]:
        """Which blocks of the batch are in the store."""
        save, self._save = self._save, None
        saved = np.full(len(batch), not self.geometry.writes)  # who has nothing to write is in nobody's way
        if save is None:
            return saved
        if save.next_layer < len(self._layers):
            self._save = save
            self._drop_save()
            return saved
        mine = len(save.stream.mine)
        try:
            result = save.stream.commit()
        except KvStoreError as fault:
            _log.warning("%d blocks could not be made complete: %s", mine, fault)
            return saved
        if result.stored < mine:
            _log.warning(
                "%d of %d blocks were not stored: the store did not answer in time", mine - result.stored, mine
            )
        saved |= (result.statuses == PutStatus.STORED) | (result.statuses == PutStatus.EXISTS)
        self.tally.add(
            saves=1,
            save_blocks=result.stored,
            save_bytes=result.stored * self._block_bytes,
            unsaved_blocks=int(np.count_nonzero(result.statuses >= PutStatus.NO_ROOM)),
        )
        return saved

    @property
    def _block_bytes(self) -> int:
        """Of this rank's part of one block."""
        return self.geometry.memory.slice_bytes * len(self._layers)

    def _on_device(self, block_ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(block_ids).to(self.geometry.memory.device)


def copy_with_all_threads(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """`numpy.copyto` of two arrays (n, size), by the threads with which torch computes."""
    aligned = source.shape[1] | target.strides[0] | source.strides[0]
    wide = next(kind for kind in (np.int64, np.int32, np.int16, np.int8) if aligned % np.dtype(kind).itemsize == 0)
    # torch knows no steps backwards: then row by row.
    rows = zip(target, source, strict=True) if min(target.strides[0], source.strides[0]) < 0 else [(target, source)]
    for to, what in rows:
        torch.from_numpy(to.view(wide)).copy_(torch.from_numpy(what.view(wide)))


def _current_stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
