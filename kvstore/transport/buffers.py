"""The caller's memory: what may be handed in as blocks, checked once, then only addresses and offsets.

Blocks come as one contiguous array of n blocks, as a sequence of n buffers, or as offsets into a registered buffer. The
first and the last are a `Region` (one memory, n offsets), which is copied run by run; a sequence is `Pieces`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatch, UnregisteredBuffer, UsageError
from kvstore.transport.copying import Copy

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_LAYERS_UNLIMITED = 1 << 30
_RAW_DTYPES = {"uint8", "int8", "bytes8"}
# numpy has no bfloat16 or float8 of its own; they travel as unsigned integers of the same width.
_CARRIERS = {"bfloat16": {"uint16"}, "float8_e4m3fn": set[str](), "float8_e5m2": set[str]()}


@dataclass(frozen=True, slots=True)
class Region:
    """n blocks inside one memory."""

    memory: Bytes
    offsets: I64  # of each block, shape (n,)
    keep: object = None  # what owns the memory

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: I64) -> Region:
        """The same memory, some of the blocks."""
        return Region(self.memory, self.offsets[rows], self.keep)

    def piece(self, row: int, size_bytes: int) -> memoryview:
        """Memory of one block."""
        return memoryview(self.array(row, size_bytes))

    def array(self, row: int, size_bytes: int) -> Bytes:
        """The same as an array."""
        start = int(self.offsets[row])
        return self.memory[start : start + size_bytes]


@dataclass(frozen=True, slots=True)
class Pieces:
    """n blocks in n memories."""

    memories: tuple[Bytes, ...]
    keep: object = None  # what owns them

    def __len__(self) -> int:
        return len(self.memories)

    def take(self, rows: I64) -> Pieces:
        """Some of the blocks."""
        chosen: list[int] = rows.tolist()
        return Pieces(tuple(self.memories[row] for row in chosen), self.keep)

    def piece(self, row: int, size_bytes: int) -> memoryview:
        """Memory of one block."""
        return memoryview(self.array(row, size_bytes))

    def array(self, row: int, size_bytes: int) -> Bytes:
        """The same as an array."""
        return self.memories[row][:size_bytes]


Blocks = Region | Pieces


def _no_limit() -> int:
    return _LAYERS_UNLIMITED


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Slices of n blocks, layer by layer, in the caller's memory.

    That of block i and layer l begins at byte `offsets[i] + shifts[l]` of `memories[l]`. Layers may share a place: then
    `limit` says, whenever it is asked, before which layer that memory may be written by now. It never says less than
    before.
    """

    memories: tuple[Bytes, ...]
    shifts: tuple[int, ...]
    offsets: I64  # shape (n,)
    gapless: bool  # the layers of a block lie behind one another in one memory
    keep: object = None  # what owns the memory
    limit: Callable[[], int] = _no_limit
    copy: Copy | None = None  # what copies into it from memory of this host, if not numpy

    def take(self, rows: I64) -> LayerMemory:
        """The same memory, some of the blocks."""
        return replace(self, offsets=self.offsets[rows])

    def of(self, layer: int, rows: I64) -> Region:
        """Slices of some blocks in one layer."""
        return Region(self.memories[layer], self.offsets[rows] + self.shifts[layer], self.keep)


class RegisteredBuffer:
    """A buffer that the client has checked and may use again and again by offset. `close` ends that.

    Args:
        buffer: contiguous, writable: numpy array, torch CPU tensor, bytearray or memoryview.
    """

    def __init__(self, buffer: object, dtype: str) -> None:
        self.memory, self._keep = as_bytes(buffer, "buffer", dtype, writable=True)
        self._open = True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.memory)

    def close(self) -> None:
        """Unregister: later transfers that name it are refused."""
        self._open = False

    def at(self, offsets: object, count: int, size_bytes: int) -> Region:
        """Blocks of that size at these byte offsets.

        Raises:
            UnregisteredBuffer: unregistered, or an offset reaches outside.
            UsageError: not `count` integer offsets.
        """
        if not self._open:
            raise UnregisteredBuffer("the buffer was unregistered; register it again before a transfer names it")
        array = as_offsets(offsets, count)
        if count and (array.min() < 0 or int(array.max()) + size_bytes > self.nbytes):
            raise UnregisteredBuffer(
                f"offsets from {array.min()} to {array.max()} with {size_bytes} bytes each reach outside the registered "
                f"{self.nbytes} bytes"
            )
        return Region(self.memory, array, self)


def as_offsets(offsets: object, count: int) -> I64:
    """The caller's byte offsets, one per key.

    Raises:
        UsageError: not `count` integers.
    """
    needed = f"{count} integers are needed, one per key"
    try:
        array = np.asarray(offsets)
    except (TypeError, ValueError) as cause:
        raise UsageError(f"offsets: {type(offsets).__name__} is no array of numbers; {needed}") from cause
    if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
        raise UsageError(f"offsets of shape {array.shape} and dtype {array.dtype}: {needed}")
    return array.astype(np.int64)


def as_blocks(value: object, count: int, size_bytes: int, name: str, dtype: str, *, writable: bool) -> Blocks:
    """The caller's n blocks of `size_bytes` each.

    Raises:
        LayoutMismatch: wrong size, shape or dtype, or not contiguous.
        UsageError: not a buffer at all, read-only where it is written to, or not in host memory.
    """
    if _is_sequence(value):
        items = cast("Sequence[object]", value)
        if len(items) != count:
            raise LayoutMismatch(f"{name}: {len(items)} buffers for {count} keys")
        checked = [as_bytes(item, f"{name}[{row}]", dtype, writable=writable) for row, item in enumerate(items)]
        for row, (memory, _) in enumerate(checked):
            if len(memory) != size_bytes:
                raise LayoutMismatch(f"{name}[{row}]: {len(memory)} bytes; a block here has {size_bytes} bytes")
        return Pieces(tuple(memory for memory, _ in checked), items)
    memory, keep = as_bytes(value, name, dtype, writable=writable)
    if len(memory) != count * size_bytes:
        raise LayoutMismatch(
            f"{name}: {len(memory)} bytes for {count} keys of {size_bytes} bytes each ({count * size_bytes} in all)"
        )
    return Region(memory, np.arange(count, dtype=np.int64) * size_bytes, keep)


def as_bytes(value: object, name: str, dtype: str, *, writable: bool) -> tuple[Bytes, object]:
    """A contiguous buffer as uint8 of shape (nbytes,), and the object that owns the memory."""
    if hasattr(value, "data_ptr") and hasattr(value, "is_contiguous"):
        return _tensor_bytes(value, name, dtype)
    array = _as_array(value, name)
    if array.dtype.hasobject:
        raise LayoutMismatch(f"{name}: an array of Python objects holds no bytes")
    check_dtype(array.dtype.name, name, dtype)
    if not array.flags.c_contiguous:
        raise LayoutMismatch(f"{name}: the array is not C-contiguous (shape {array.shape}, strides {array.strides})")
    if writable and not array.flags.writeable:
        raise UsageError(f"{name}: the buffer is read-only")
    return array.reshape(-1).view(np.uint8), value


def _as_array(value: object, name: str) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value)
    try:
        return np.frombuffer(cast("Any", value), dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as cause:
        kind = type(value).__name__
        raise UsageError(
            f"{name}: {kind} is no contiguous buffer; pass an array, a tensor or something bytes-like"
        ) from cause


def _tensor_bytes(tensor: Any, name: str, dtype: str) -> tuple[Bytes, object]:
    if tensor.device.type != "cpu":
        raise UsageError(f"{name}: a tensor on {tensor.device}; only host memory is reached here")
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            f"{name}: the tensor is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        )
    check_dtype(str(tensor.dtype).removeprefix("torch."), name, dtype)
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return np.zeros(0, dtype=np.uint8), tensor
    raw = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(raw, dtype=np.uint8), tensor


def check_dtype(found: str, name: str, dtype: str) -> None:
    """Elements of that type may carry blocks of this dtype.

    Raises:
        LayoutMismatch: they may not.
    """
    if found in _RAW_DTYPES or found == dtype or found.startswith("void") or found in _CARRIERS.get(dtype, ()):
        return
    raise LayoutMismatch(f"{name}: dtype {found}; this namespace holds {dtype} (raw bytes as uint8 are welcome)")


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple))
