"""The port of device memory: a piece of memory, batches of copies on a side stream, segments that processes share.

A device works on addresses, so that blocks of a pool, of a segment and of the caller's tensors are named in one way.
Copies are asked for in batches and end later: a `Ticket` tells when. All copies of one device end in the order in which
they were asked for (one side stream), beside whatever the engine computes on its own streams. Events order the two
where it matters: `Device.follow` copies after the engine's work, `Ticket.precede` the engine's work after copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

COPY_WAIT_S_MIN = 0.5  # that a call waits for its copies, even when its time is over: what was asked for mostly ends
LEGACY_STREAM = 1  # CUDA's name for the default stream, on which engines compute unless told otherwise


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of bytes that copies may name."""

    address: int
    nbytes: int
    on_device: bool
    keep: object = None  # what owns it; copies under way hold on to it


@dataclass(frozen=True, slots=True)
class Copies:
    """n copies between two memories: byte offsets in the target and in the source, and sizes. Shape (n,) each."""

    target_offsets: I64
    source_offsets: I64
    sizes: I64

    @classmethod
    def of_blocks(cls, target_offsets: I64, source_offsets: I64, size_bytes: int) -> Copies:
        """Copies of one size."""
        return cls(target_offsets, source_offsets, np.full(len(target_offsets), size_bytes, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.sizes)

    def check(self, target: Memory, source: Memory) -> None:
        """Nothing may reach outside: a device does not look.

        Raises:
            IndexError: something would.
        """
        for memory, offsets in ((target, self.target_offsets), (source, self.source_offsets)):
            if len(self) and (int(offsets.min()) < 0 or int((offsets + self.sizes).max()) > memory.nbytes):
                raise IndexError(f"copies at {offsets.min()}..{offsets.max()} in a memory of {memory.nbytes} bytes")

    def merged(self) -> Copies:
        """The same with neighbours joined: what was stored together mostly lies together, and a device's cost is per
        copy.
        """
        if len(self) < 2:
            return self
        ends = self.sizes[:-1]
        joined = (self.target_offsets[1:] == self.target_offsets[:-1] + ends) & (
            self.source_offsets[1:] == self.source_offsets[:-1] + ends
        )
        starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        return Copies(self.target_offsets[starts], self.source_offsets[starts], np.add.reduceat(self.sizes, starts))


@dataclass(frozen=True, slots=True)
class Export:
    """What another process of this host needs to open a segment: a descriptor, or a handle's bytes."""

    nbytes: int
    fd: int = -1
    handle: bytes = b""


class Ticket(Protocol):
    """A batch of copies that was asked for."""

    def done(self) -> bool:
        """Whether it has ended.

        Raises:
            DeviceError: it has failed.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once it has ended.

        Raises:
            DeviceError: it has failed, or goes on after that time. Its target is undefined, and may still be written.
        """
        ...

    def precede(self, stream: int, timeout_s: float) -> None:
        """Whatever is put on that stream of the engine from now on starts after this batch. It is the stream that
        waits; only a device without streams makes the caller wait, for so long at most.

        Raises:
            DeviceError: as `wait`.
        """
        ...


class Device(Protocol):
    """Memory of one accelerator. Threads may share it.

    `kvstore.testing.conformance.DeviceConformance` is the suite to pass.
    """

    name: str  # as `open_device` takes it

    def allocate(self, nbytes: int) -> Memory:
        """Memory on the device, content undefined.

        Raises:
            DeviceError: there is not that much.
        """
        ...

    def free(self, memory: Memory) -> None:
        """Give back what `allocate` or `allocate_shared` gave. No copy may name it any more."""
        ...

    def allocate_shared(self, nbytes: int) -> tuple[Memory, Export]:
        """Memory that other processes of this host can open.

        Raises:
            DeviceError: there is not that much, or this device can't share.
        """
        ...

    def open_shared(self, export: Export) -> Memory:
        """Another process's segment. The descriptor stays the caller's.

        Raises:
            DeviceError: it can't be opened from here.
        """
        ...

    def close_shared(self, memory: Memory) -> None:
        """Let go of what `open_shared` gave. No copy may name it any more."""
        ...

    def register(self, memory: Memory) -> None:
        """Make copies from and to this host memory run at the link's speed. Takes a while for much memory.

        Raises:
            DeviceError: refused; copies work as before.
        """
        ...

    def unregister(self, memory: Memory) -> None:
        """Undo that, before the memory is unmapped. No copy may name it any more."""
        ...

    def copy(self, target: Memory, source: Memory, copies: Copies) -> Ticket:
        """Ask for a batch of copies between device and device, or device and host. Target ranges must not overlap.

        Raises:
            IndexError: outside of one of the memories; nothing was asked for.
            DeviceError: refused.
        """
        ...

    def follow(self, stream: int) -> None:
        """Whatever is asked for from now on starts after what is on that stream of the engine by now."""
        ...

    def idle(self) -> bool:
        """Whether everything that was asked for has ended."""
        ...

    def array(self, memory: Memory, shape: tuple[int, ...]) -> object:
        """The bytes for others to see, uint8 of that shape, without a copy: what numpy, torch or cupy take in."""
        ...

    def close(self) -> None:
        """No more copies. Idempotent."""
        ...


def host_memory(array: Bytes) -> Memory:
    """A contiguous array as one end of copies."""
    return Memory(array.ctypes.data, array.nbytes, on_device=False, keep=array)
