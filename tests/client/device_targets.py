"""Device memory to read blocks into, whatever the device is, and what a server's device segment does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.device.base import Copies, Device, Memory, host_memory
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.client.sdk import space

SPACE = space(layer_bytes=8192)
SIZE = SPACE.block_bytes


class Target:
    """n blocks of device memory, as an object that engines know."""

    def __init__(self, device: Device, blocks: int, size_bytes: int = SIZE) -> None:
        self._device = device
        self._shape = (blocks, size_bytes)
        self._memory: Memory = device.allocate(blocks * size_bytes)
        self.tensor: Any = device.array(self._memory, self._shape)

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of what is there."""
        array = np.zeros(self._shape, dtype=np.uint8)
        self._device.copy(host_memory(array.reshape(-1)), self._memory, self._whole()).wait(30)
        return array

    def fill(self, data: NDArray[np.uint8]) -> None:
        self._device.copy(self._memory, host_memory(np.ascontiguousarray(data).reshape(-1)), self._whole()).wait(30)

    def _whole(self) -> Copies:
        zero = np.zeros(1, dtype=np.int64)
        return Copies(zero, zero, np.array([self._shape[0] * self._shape[1]]))


class Tensor:
    """What a torch tensor on a CUDA device says of itself, over memory of the stand-in."""

    class Place:
        type = "cuda"

        def __init__(self, index: int) -> None:
            self.index = index

        def __str__(self) -> str:
            return f"cuda:{self.index}"

    def __init__(self, memory: Memory, *, index: int = 0, dtype: str = "uint8", contiguous: bool = True) -> None:
        self._memory, self.dtype, self._contiguous = memory, f"torch.{dtype}", contiguous
        self.device, self.shape = Tensor.Place(index), (memory.nbytes,)

    def data_ptr(self) -> int:
        return self._memory.address

    def numel(self) -> int:
        return self._memory.nbytes

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (1,)


def device_of(client: kvstore.Client) -> Device:
    assert client.device is not None
    return client.device


def from_segment(client: kvstore.Client) -> int:
    return client.stats()["links"][0].get("segment_blocks", 0)


def heat(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    """Read these blocks until all of them come from the segment."""
    target = Target(device_of(client), len(keys))

    def all_near() -> bool:
        before = from_segment(client)
        assert client.get_into(keys, target.tensor).ok.all()
        return from_segment(client) - before == len(keys)

    until(all_near, timeout_s=30, what="the blocks in the segment")


def gpu(server: ServerProcess) -> dict[str, Any]:
    return server.status()["shards"][0]["gpu"]
