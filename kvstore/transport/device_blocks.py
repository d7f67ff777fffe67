"""The caller's device memory: which tensors may be handed in as blocks where a client has a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatch, UsageError
from kvstore.device.base import LEGACY_STREAM, Device, Memory
from kvstore.device.opening import HOST
from kvstore.transport.buffers import Blocks, Region, as_offsets, check_dtype

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """n blocks in one memory of a device."""

    device: Device
    memory: Memory
    offsets: I64  # of each block, shape (n,)
    stream: int | None = None  # of the engine: copies start after what is on it; None: nothing to wait for

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: I64) -> DeviceBlocks:
        """The same memory, some of the blocks."""
        return replace(self, offsets=self.offsets[rows])


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """One tensor of the caller's."""

    memory: Memory
    stream: int | None  # of the engine, as the tensor names it
    device: str  # empty where the object does not say


def is_on_device(value: object) -> bool:
    """Whether this is memory of a CUDA device: a torch tensor there, or anything with `__cuda_array_interface__`."""
    if hasattr(value, "data_ptr") and hasattr(value, "is_contiguous"):
        return cast("Any", value).device.type == "cuda"
    return hasattr(value, "__cuda_array_interface__")


def as_device_blocks(
    device: Device, value: object, offsets: object, count: int, size_bytes: int, name: str, dtype: str
) -> DeviceBlocks:
    """The caller's n blocks of `size_bytes` each in a device's memory: one contiguous tensor of them, or, with the byte
    offset of each block, a tensor that they lie in.

    Raises:
        LayoutMismatch: wrong size or dtype, or not contiguous.
        UsageError: a tensor of another device; offsets that reach outside.
    """
    found = as_device_tensor(device, value, name, dtype)
    nbytes = found.memory.nbytes
    if offsets is None:
        if nbytes != count * size_bytes:
            raise LayoutMismatch(
                f"{name}: {nbytes} bytes for {count} keys of {size_bytes} bytes each ({count * size_bytes} in all)"
            )
        places = np.arange(count, dtype=np.int64) * size_bytes
    else:
        places = as_offsets(offsets, count)
        if count and (places.min() < 0 or int(places.max()) + size_bytes > nbytes):
            raise UsageError(
                f"{name}: offsets from {places.min()} to {places.max()} with {size_bytes} bytes each reach outside "
                f"the {nbytes} bytes"
            )
    return DeviceBlocks(device, found.memory, places, found.stream)


def as_device_tensor(device: Device, value: object, name: str, dtype: str) -> DeviceTensor:
    """One contiguous tensor in a device's memory.

    Raises:
        LayoutMismatch: wrong dtype, or not contiguous.
        UsageError: a tensor of another device, or of none.
    """
    if not is_on_device(value):
        raise UsageError(f"{name}: {type(value).__name__} in host memory, among tensors on {device.name}")
    found = _tensor(value, name, dtype) if hasattr(value, "data_ptr") else _array(value, name, dtype)
    if found.device and found.device != device.name:
        raise UsageError(f"{name}: a tensor on {found.device}; this client's device is {device.name}")
    return found


def on_device(device: Device | None, blocks: Blocks) -> Blocks | DeviceBlocks:
    """Blocks in host memory as a device sees them: for the host's own, that is device memory."""
    if device is None or device.name != HOST or not isinstance(blocks, Region):
        return blocks
    memory = Memory(blocks.memory.ctypes.data, blocks.memory.nbytes, on_device=True, keep=(blocks.memory, blocks.keep))
    return DeviceBlocks(device, memory, blocks.offsets)


def _tensor(tensor: Any, name: str, dtype: str) -> DeviceTensor:
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            f"{name}: the tensor is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        )
    check_dtype(str(tensor.dtype).removeprefix("torch."), name, dtype)
    memory = Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), on_device=True, keep=tensor)
    # A tensor does not say on which stream it is worked on. Who uses another one than the default calls `follow`.
    return DeviceTensor(memory, LEGACY_STREAM, str(tensor.device))


def _array(value: Any, name: str, dtype: str) -> DeviceTensor:
    described: dict[str, Any] = value.__cuda_array_interface__
    element = np.dtype(described["typestr"])
    shape: tuple[int, ...] = tuple(described["shape"])
    check_dtype(element.name, name, dtype)
    strides = described.get("strides")
    if strides is not None and tuple(strides) != _contiguous(shape, element.itemsize):
        raise LayoutMismatch(f"{name}: the array is not C-contiguous (shape {shape}, strides {tuple(strides)})")
    memory = Memory(int(described["data"][0]), math.prod(shape) * element.itemsize, on_device=True, keep=value)
    return DeviceTensor(memory, described.get("stream", LEGACY_STREAM), "")


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))
