"""The caller's memory for layers of blocks, the host's or a device's: what is taken, and where each slice is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatch, UsageError
from kvstore.device.base import LEGACY_STREAM, Device, Memory
from kvstore.device.opening import HOST
from kvstore.transport.buffers import LayerMemory, as_bytes
from kvstore.transport.device_blocks import DeviceTensor, as_device_tensor, is_on_device

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the caller's memory has to hold."""

    count: int  # blocks
    layers: int  # of each block
    size: int  # bytes of a slice
    dtype: str  # the namespace's


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """Slices of n blocks, layer by layer, in a device's memory; see `LayerMemory`."""

    device: Device
    memories: tuple[Memory, ...]
    shifts: tuple[int, ...]
    offsets: I64  # shape (n,)
    streams: tuple[int, ...]  # of the engine, for each layer: on which it is used
    follows: frozenset[int]  # of the engine: copies start after what is on them when the stream begins


def layer_memory(value: object, slots: object, shape: Shape, *, name: str, writable: bool) -> LayerMemory:
    """What the caller handed in as host memory for layers of blocks.

    Args:
        value: one buffer that holds block after block, each with its layers; or a sequence of one buffer a layer.
        slots: with one buffer a layer, which slice of it each block has, shape (count,); 0, 1, ... unless given.
        shape: what it has to hold.
        name: of the argument, for messages.
        writable: whether it is written to.

    Raises:
        LayoutMismatch: wrong size or dtype, not contiguous, or not one buffer a layer.
        UsageError: no buffer, or slots that reach outside or are named twice.
    """

    def look(buffer: object, what: str) -> tuple[tuple[U8, object], int]:
        memory, keep = as_bytes(buffer, what, shape.dtype, writable=writable)
        return (memory, keep), len(memory)

    laid = _lay_out(value, slots, shape, name, look)
    memories = tuple(memory for memory, _ in laid.buffers)
    return LayerMemory(memories, laid.shifts, laid.offsets, laid.gapless, keep=laid.buffers)


def device_layers(
    device: Device, value: object, slots: object, shape: Shape, *, name: str, stream: int | None, writable: bool
) -> DeviceLayers | None:
    """What the caller handed in as memory of a device for layers of blocks; None where it is host memory. Where the
    device is the host's own memory, all of that is.

    Args:
        device: the client's.
        value: as for `layer_memory`, of tensors or arrays there.
        slots: as there.
        shape: as there.
        name: as there.
        stream: of the engine, where that is not the one that the tensors name.
        writable: as there.

    Raises:
        LayoutMismatch, UsageError: as there, or a tensor of another device.
    """
    buffers = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else [value]
    if not any(is_on_device(buffer) for buffer in buffers):
        if device.name != HOST:
            return None
        laid = layer_memory(cast("object", value), slots, shape, name=name, writable=writable)
        memories = tuple(
            Memory(memory.ctypes.data, memory.nbytes, on_device=True, keep=laid) for memory in laid.memories
        )
        named = LEGACY_STREAM if stream is None else stream
        return DeviceLayers(device, memories, laid.shifts, laid.offsets, (named,) * shape.layers, frozenset())

    def look(buffer: object, what: str) -> tuple[DeviceTensor, int]:
        tensor = as_device_tensor(device, buffer, what, shape.dtype)
        return tensor, tensor.memory.nbytes

    found = _lay_out(cast("object", value), slots, shape, name, look)
    streams = tuple(tensor.stream if stream is None else stream for tensor in found.buffers)
    return DeviceLayers(
        device,
        tuple(tensor.memory for tensor in found.buffers),
        found.shifts,
        found.offsets,
        tuple(LEGACY_STREAM if named is None else named for named in streams),
        frozenset(named for named in streams if named is not None),
    )


@dataclass(frozen=True, slots=True)
class _LaidOut(Generic[T]):
    buffers: tuple[T, ...]  # one a layer
    shifts: tuple[int, ...]
    offsets: I64
    gapless: bool


def _lay_out(
    value: object, slots: object, shape: Shape, name: str, look: Callable[[object, str], tuple[T, int]]
) -> _LaidOut[T]:
    """Where each slice is. `look` checks one buffer, of that name, and says how many bytes it has."""
    count, layers, size = shape.count, shape.layers, shape.size
    if not isinstance(value, (list, tuple)):
        if slots is not None:
            raise UsageError(f"{name}: slots= goes with one buffer a layer")
        memory, nbytes = look(value, name)
        if nbytes != count * layers * size:
            raise LayoutMismatch(f"{name}: {nbytes} bytes for {count} blocks of {layers} layers of {size} bytes")
        offsets = np.arange(count, dtype=np.int64) * (layers * size)
        return _LaidOut((memory,) * layers, tuple(range(0, layers * size, size)), offsets, gapless=True)
    buffers = cast("Sequence[object]", value)
    if len(buffers) != layers:
        raise LayoutMismatch(f"{name}: {len(buffers)} buffers for {layers} layers")
    offsets = _slots(slots, count, name) * size
    memories: list[T] = []
    for layer, buffer in enumerate(buffers):
        memory, nbytes = look(buffer, f"{name}[{layer}]")
        if slots is None and nbytes != count * size:
            raise LayoutMismatch(f"{name}[{layer}]: {nbytes} bytes for {count} slices of {size} bytes")
        if count and int(offsets.max()) + size > nbytes:
            raise UsageError(
                f"{name}[{layer}]: slot {int(offsets.max()) // size} is outside of its {nbytes // size} slices"
            )
        memories.append(memory)
    return _LaidOut(tuple(memories), (0,) * layers, offsets, gapless=False)


def _slots(slots: object, count: int, name: str) -> I64:
    if slots is None:
        return np.arange(count, dtype=np.int64)
    needed = f"{count} different integers from 0 on are needed, one per key"
    try:
        array = np.asarray(slots)
    except (TypeError, ValueError) as cause:
        raise UsageError(f"{name}: slots of {type(slots).__name__}; {needed}") from cause
    if array.shape != (count,) or (count and (array.dtype.kind not in "iu" or int(array.min()) < 0)):
        raise UsageError(f"{name}: slots of shape {array.shape} and dtype {array.dtype}; {needed}")
    if len(np.unique(array)) != count:
        raise UsageError(f"{name}: a slot is named twice; {needed}")
    return array.astype(np.int64)
