"""What may be handed in as blocks, and what one is told otherwise."""

import array
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import LayoutMismatch, UnregisteredBuffer, UsageError
from kvstore.transport.buffers import Pieces, Region, RegisteredBuffer, as_blocks, as_bytes

SIZE = 64


def rows(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(count * SIZE, dtype=np.uint8).reshape(count, SIZE)


def test_one_array_is_a_region_of_its_own_memory() -> None:
    memory = rows(3)
    blocks = as_blocks(memory, 3, SIZE, "blocks", "uint8", writable=True)
    assert isinstance(blocks, Region)
    assert len(blocks) == 3
    assert np.shares_memory(blocks.memory, memory)
    assert blocks.offsets.tolist() == [0, SIZE, 2 * SIZE]
    blocks.array(1, SIZE)[:] = 9
    assert memory[1].tolist() == [9] * SIZE


def test_a_sequence_is_pieces_each_its_own_memory() -> None:
    buffers = [bytearray(SIZE), rows(1), memoryview(bytearray(SIZE))]
    for sequence in (buffers, tuple(buffers)):
        blocks = as_blocks(sequence, 3, SIZE, "into", "uint8", writable=True)
        assert isinstance(blocks, Pieces)
        blocks.piece(0, SIZE)[:] = b"x" * SIZE
    assert buffers[0] == b"x" * SIZE


@pytest.mark.parametrize("as_sequence", [False, True], ids=["region", "pieces"])
def test_some_of_the_blocks_can_be_taken_in_any_order(as_sequence: bool) -> None:
    memory = rows(4)
    blocks = as_blocks(list(memory) if as_sequence else memory, 4, SIZE, "blocks", "uint8", writable=False)
    taken = blocks.take(np.array([3, 1, 1]))
    assert len(taken) == 3
    for row, original in enumerate((3, 1, 1)):
        assert taken.piece(row, SIZE).tobytes() == memory[original].tobytes()
        assert taken.array(row, 10).tolist() == memory[original, :10].tolist()
    assert len(blocks.take(np.array([], dtype=np.int64))) == 0


@pytest.mark.parametrize("count", [0, 1, 5])
def test_bytes_that_are_not_bytes_of_their_own_kind_are_taken_as_they_are(count: int) -> None:
    raw = bytes(range(SIZE)) * count
    for source in (raw, bytearray(raw), memoryview(raw), array.array("B", raw)):
        blocks = as_blocks(source, count, SIZE, "blocks", "bfloat16", writable=False)
        assert [blocks.piece(row, SIZE).tobytes() for row in range(count)] == [bytes(range(SIZE))] * count


@pytest.mark.parametrize(
    ("found", "namespace", "welcome"),
    [
        ("uint8", "float32", True),
        ("int8", "bfloat16", True),
        ("float32", "float32", True),
        ("float16", "float16", True),
        ("float32", "float16", False),
        ("float16", "bfloat16", False),
        ("uint16", "bfloat16", True),
        ("uint16", "float16", False),
        ("int16", "bfloat16", False),
        ("bool", "uint8", False),
        ("uint8", "float8_e4m3fn", True),
        ("float64", "float8_e4m3fn", False),
        ("complex64", "float32", False),
        ("V2", "bfloat16", True),
    ],
)
def test_a_dtype_goes_with_a_namespace_or_is_named(found: str, namespace: str, welcome: bool) -> None:
    memory = np.zeros(SIZE, dtype=found)
    if welcome:
        assert len(as_bytes(memory, "blocks", namespace, writable=True)[0]) == memory.nbytes
        return
    with pytest.raises(LayoutMismatch, match=rf"^blocks: dtype {memory.dtype.name}; this namespace holds {namespace}"):
        as_bytes(memory, "blocks", namespace, writable=True)


def test_an_array_in_fortran_order_is_refused_with_its_strides() -> None:
    with pytest.raises(
        LayoutMismatch, match=r"^into: the array is not C-contiguous \(shape \(4, 64\), strides \(1, 4\)\)$"
    ):
        as_bytes(np.zeros((4, SIZE), np.uint8, order="F"), "into", "uint8", writable=True)


def test_a_view_that_happens_to_be_contiguous_is_taken() -> None:
    memory = np.zeros((4, 2, SIZE), np.uint8)
    assert len(as_bytes(memory[1:3], "into", "uint8", writable=True)[0]) == 4 * SIZE
    assert len(as_bytes(memory[:1, :1].T[..., 0].T, "into", "uint8", writable=True)[0]) == SIZE


def test_a_tensor_is_reached_in_place_and_kept_alive() -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    tensor = torch.zeros(3, SIZE // 2, dtype=torch.bfloat16)
    memory, keep = as_bytes(tensor, "into", "bfloat16", writable=True)
    assert keep is tensor
    memory[:2] = np.frombuffer(np.float32(1.5).tobytes()[2:], np.uint8)
    assert tensor[0, 0].item() == 1.5
    assert len(as_bytes(tensor[:0], "into", "bfloat16", writable=True)[0]) == 0
    assert len(as_bytes(tensor[1:], "into", "bfloat16", writable=True)[0]) == 2 * SIZE
    with pytest.raises(
        LayoutMismatch, match=r"^into: the tensor is not contiguous \(shape \(3, 16\), strides? \(32, 2\)\)$"
    ):
        as_bytes(tensor[:, ::2], "into", "bfloat16", writable=True)
    with pytest.raises(LayoutMismatch, match="dtype float16; this namespace holds bfloat16"):
        as_bytes(tensor.half(), "into", "bfloat16", writable=True)


def test_a_parameter_that_wants_gradients_is_a_tensor_like_any_other() -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    weights = torch.nn.Parameter(torch.ones(SIZE))
    assert len(as_bytes(weights, "blocks", "float32", writable=False)[0]) == 4 * SIZE


def test_a_registered_buffer_gives_blocks_until_it_is_closed() -> None:
    memory = rows(4)
    registered = RegisteredBuffer(memory, "uint8")
    region = registered.at([2 * SIZE, 1], 2, SIZE)
    assert region.piece(0, SIZE).tobytes() == memory[2].tobytes()
    assert region.piece(1, SIZE).tobytes() == memory.reshape(-1)[1 : SIZE + 1].tobytes()
    assert len(registered.at([], 0, SIZE)) == len(registered.at(np.empty(0, np.int64), 0, SIZE)) == 0
    registered.close()
    registered.close()
    with pytest.raises(UnregisteredBuffer, match=r"^the buffer was unregistered; register it again"):
        registered.at([0], 1, SIZE)


def test_what_is_too_small_for_one_block_reaches_outside() -> None:
    with pytest.raises(UnregisteredBuffer, match=r"outside the registered 10 bytes$"):
        RegisteredBuffer(bytearray(10), "uint8").at([0], 1, SIZE)


def test_an_empty_buffer_can_be_registered_but_holds_no_block() -> None:
    registered = RegisteredBuffer(bytearray(), "uint8")
    assert registered.nbytes == 0
    with pytest.raises(UnregisteredBuffer, match="outside"):
        registered.at([0], 1, SIZE)


@pytest.mark.parametrize(
    "value", [3, 2.5, None, "text", {1: 2}, object(), range(3)], ids=lambda value: type(value).__name__
)
def test_what_is_no_buffer_is_named_by_its_type(value: object) -> None:
    with pytest.raises(UsageError, match=rf"^blocks: {type(value).__name__} is no contiguous buffer; pass an array"):
        as_bytes(value, "blocks", "uint8", writable=False)


def test_a_buffer_of_read_only_memory_is_a_source_only() -> None:
    for source in (b"x" * SIZE, memoryview(b"x" * SIZE), np.frombuffer(b"x" * SIZE, np.uint8)):
        assert len(as_bytes(source, "blocks", "uint8", writable=False)[0]) == SIZE
        with pytest.raises(UsageError, match=r"^into: the buffer is read-only$"):
            as_bytes(source, "into", "uint8", writable=True)
