"""Messages about one-sided transfers: where a shard's memory is reached, where blocks lie in it, what has landed there.

They travel on the data port beside the others (`kvstore.wire.messages`), and what doesn't fit is a `ProtocolError`.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.wire.messages import (
    KEYS_MAX,
    U64,
    LayersAnswer,
    decode_json,
    decode_prefix,
    decode_rows,
    encode_json,
)

I64 = NDArray[np.int64]

LANDED_ROW = np.dtype([("handle", "<u8"), ("generation", "<u8"), ("at", "<u8")])
_I64 = np.dtype("<i8")
_HERE = struct.Struct("<4xI")  # of the head of an answer to LAYERS
_LANDED_HEAD = struct.Struct("<HHHHII")
_PUBLISH = 1


@dataclass(frozen=True, slots=True)
class FabricInfo:
    """Answer to FABRIC: what a peer needs to reach a shard's memory."""

    protocol: str  # tcp, rdma
    segment: str  # name of the shard's engine: host:port
    pool: int  # address of the pool in it
    landing: int = 0  # address of the landing space that is this connection's alone
    landing_bytes: int = 0  # of it; 0: there is none left

    def encode(self) -> bytes:
        """The body."""
        return encode_json(asdict(self))

    @classmethod
    def decode(cls, body: bytes) -> FabricInfo:
        """Read a body.

        Raises:
            ProtocolError: a field is missing, or no such thing.
        """
        known: dict[str, Any] = decode_json(body)
        texts = [known.get(name) for name in ("protocol", "segment")]
        numbers = [known.get(name) for name in ("pool", "landing", "landing_bytes")]
        whole = all(isinstance(number, int) and 0 <= number < 1 << 64 for number in numbers)
        if not whole or not all(isinstance(text, str) for text in texts):
            raise ProtocolError("an answer about a fabric lacks something")
        protocol, segment = cast("list[str]", texts)
        pool, landing, landing_bytes = cast("list[int]", numbers)
        return cls(protocol, segment, pool, landing, landing_bytes)


@dataclass(frozen=True, slots=True)
class LocateAnswer:
    """Answer to LOCATE: that to LAYERS, and where the blocks lie instead of their bytes."""

    layers: LayersAnswer
    offsets: I64  # in the pool, of each block that is HERE

    def encode(self) -> bytes:
        """The body."""
        return self.layers.encode() + self.offsets.astype(_I64).tobytes()

    @classmethod
    def decode(cls, body: bytes, rows: int, first: int, end: int, pool_bytes: int) -> LocateAnswer:
        """Read the answer to a request for layers [first, end) of so many rows in a pool of that size.

        Raises:
            ProtocolError: wrong length, an answer to something else, or a place outside of the pool.
        """
        here = _HERE.unpack_from(body)[0] if len(body) >= _HERE.size else 0
        start = len(body) - here * _I64.itemsize
        if start < _HERE.size:
            raise ProtocolError(f"a message body of {len(body)} bytes does not hold {here} places")
        layers = LayersAnswer.decode(body[:start], rows, first, end)
        offsets = cast("I64", decode_rows(body, _I64, here, offset=start))
        if here and not 0 <= int(offsets.min()) <= int(offsets.max()) < pool_bytes:
            raise ProtocolError(f"places {offsets.min()} to {offsets.max()} in a pool of {pool_bytes} bytes")
        return cls(layers, offsets)


@dataclass(frozen=True, slots=True)
class LandedRequest:
    """LANDED: layers [first, end) of reserved blocks lie in the sender's landing space."""

    namespace: int
    layers: tuple[int, int]
    rows: NDArray[np.void]  # LANDED_ROW, shape (n,): whose, and at which byte of the landing space they begin
    sums: NDArray[np.uint64]  # xxh3-64 of each layer slice, shape (n, layers)
    publish: bool = False  # and readers may see them: the watermark goes to `end`
    ttl_ms: int = 0  # with `publish`: the reservation's new time

    def encode(self) -> bytes:
        """The body."""
        flags = _PUBLISH if self.publish else 0
        head = _LANDED_HEAD.pack(self.namespace, *self.layers, flags, self.ttl_ms, len(self.rows))
        return head + self.rows.tobytes() + np.ascontiguousarray(self.sums).tobytes()

    @classmethod
    def decode(cls, body: bytes) -> LandedRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length, no layers, or more than KEYS_MAX blocks.
        """
        if len(body) < _LANDED_HEAD.size:
            raise ProtocolError(f"a message body of {len(body)} bytes is too short")
        namespace, first, end, flags, ttl_ms, count = _LANDED_HEAD.unpack_from(body)
        if count > KEYS_MAX or end <= first or flags & ~_PUBLISH:
            raise ProtocolError(f"layers {first}:{end} of {count} blocks have not landed with flags {flags}")
        sums_at = _LANDED_HEAD.size + count * LANDED_ROW.itemsize
        rows = decode_prefix(body, LANDED_ROW, count, offset=_LANDED_HEAD.size)
        sums = cast("NDArray[np.uint64]", decode_rows(body, U64, count * (end - first), offset=sums_at))
        return cls(namespace, (first, end), rows, sums.reshape(count, end - first), bool(flags & _PUBLISH), ttl_ms)
