"""Messages between a shard and its disk worker, as bytes in and bytes out: fixed-width rows, whole batches.

```
0   op         uint8    `Op`
4   request    uint32   chosen by the shard, repeated in the reply; 0 in what the worker says by itself
8   body       uint32   bytes of the body that follows, at most BODY_BYTES_MAX
```

Both ends come from one installation and start together, so there is no version to agree on.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.core.keys import KEY_DTYPE
from kvstore.server.eviction.tenants import Quota
from kvstore.wire.messages import decode_json, decode_prefix, decode_rows, encode_json

U8 = NDArray[np.uint8]
Rows = NDArray[np.void]

BLOCKS_MAX: Final = 4096  # of one message
BODY_BYTES_MAX: Final = 1 << 20
DIGEST_BYTES: Final = 16
LABEL_BYTES: Final = 152  # of a namespace's label, as UTF-8; NAMESPACES_MAX of them fit one message
TENANT_BYTES: Final = 32
NAMESPACES_MAX: Final = 4096
_HEAD = struct.Struct("<BxxxII")
_STORE_HEAD = struct.Struct("<16sIIQ")
_REMOVE_HEAD = struct.Struct("<QI")
_SCAN_HEAD = struct.Struct("<III")
_COUNT = struct.Struct("<Q")

STORE_ROW = np.dtype([("key", KEY_DTYPE), ("generation", "<u8"), ("offset", "<u8")])
LOAD_ROW = np.dtype(
    [
        ("key", KEY_DTYPE),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("first", "<u2"),
        ("end", "<u2"),
        ("pad", "V4"),
    ]
)
SCANNED_NAMESPACE = np.dtype(
    [
        ("digest", "V16"),
        ("number", "<u4"),
        ("layers", "<u4"),
        ("layer_bytes", "<u8"),
        ("tenant", f"S{TENANT_BYTES}"),
        ("label", f"S{LABEL_BYTES}"),
    ]
)
SCANNED_BLOCK = np.dtype([("key", KEY_DTYPE), ("namespace", "<u4"), ("size", "<u4")])


class Op(IntEnum):
    """What a message asks for or answers."""

    STORE = 1
    LOAD = 2
    REMOVE = 3
    FLUSH = 4
    SCAN = 5
    STATS = 6
    GONE = 7
    NAMESPACE = 8
    QUOTAS = 9


class StoreStatus(IntEnum):
    """What became of one block of a STORE. Values fit a uint8."""

    DURABLE = 0
    """Payload and catalog row are on the medium; a LOAD finds it from now on, also after a crash."""

    EXISTS = 1
    """It was durable already."""

    STALE = 2
    """Its key or namespace was removed after the generation that it was stored under; it stays removed."""

    NO_ROOM = 3
    """No slot, and nothing that may go."""

    FAILED = 4
    """The disk refused."""

    BUSY = 5
    """The same key is being written, or has just left: later, perhaps."""


class LoadStatus(IntEnum):
    """What became of one block of a LOAD. Values fit a uint8."""

    OK = 0
    """The layers asked for are in the pool, and every checksum matched."""

    MISS = 1
    """It isn't on the disk."""

    FAILED = 2
    """It could not be read, or its bytes were wrong: it is dropped, and GONE follows. The slot's bytes mean nothing."""


# --- requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a namespace is: to be told before its first STORE. No answer."""

    op: ClassVar[Op] = Op.NAMESPACE
    digest: bytes
    layers: int
    layer_bytes: int
    tenant: str  # whose quota its blocks count on
    label: str  # for people

    def encode(self) -> bytes:
        return encode_json({**asdict(self), "digest": self.digest.hex()})

    @classmethod
    def decode(cls, body: bytes) -> Namespace:
        told = decode_json(body)
        try:
            digest = bytes.fromhex(told["digest"])
            return cls(digest, int(told["layers"]), int(told["layer_bytes"]), str(told["tenant"]), str(told["label"]))
        except (KeyError, TypeError, ValueError) as cause:
            raise ProtocolError("a namespace that is not described") from cause


@dataclass(frozen=True, slots=True)
class Quotas:
    """What each tenant may have of the SSD, in place of all that was told before. No answer."""

    op: ClassVar[Op] = Op.QUOTAS
    quotas: dict[str, Quota]  # by tenant; bytes

    def encode(self) -> bytes:
        return encode_json({tenant: asdict(quota) for tenant, quota in self.quotas.items()})

    @classmethod
    def decode(cls, body: bytes) -> Quotas:
        try:
            return cls({tenant: Quota(**values) for tenant, values in decode_json(body).items()})
        except TypeError as cause:
            raise ProtocolError("quotas that are none") from cause


@dataclass(frozen=True, slots=True)
class Store:
    """Write blocks of one namespace out of the pool. Their slots must not change until the answer."""

    op: ClassVar[Op] = Op.STORE
    digest: bytes
    layers: int
    layer_bytes: int
    rows: Rows  # STORE_ROW (n,): key, generation of the block in the shard, pool offset

    def encode(self) -> bytes:
        head = _STORE_HEAD.pack(self.digest, self.layers, len(self.rows), self.layer_bytes)
        return head + self.rows.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Store:
        digest, layers, count, layer_bytes = _unpack(_STORE_HEAD, body)
        if not layers or not layer_bytes:
            raise ProtocolError("blocks without layers")
        return cls(digest, layers, layer_bytes, decode_rows(body, STORE_ROW, count, _STORE_HEAD.size))


@dataclass(frozen=True, slots=True)
class Load:
    """Read blocks into the pool. Their slots are the worker's until the answer, however long that takes.

    A row's layers are half-open; end 0 stands for all. With the last layer the trailer is written, under the row's
    generation. Besides, nothing outside of a range has changed.
    """

    op: ClassVar[Op] = Op.LOAD
    rows: Rows  # LOAD_ROW (n,)

    def encode(self) -> bytes:
        return self.rows.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Load:
        return cls(decode_rows(body, LOAD_ROW, len(body) // LOAD_ROW.itemsize))


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete blocks for good: also any that was stored under a generation before this one and arrives later."""

    op: ClassVar[Op] = Op.REMOVE
    generation: int
    keys: Rows  # KEY_DTYPE (n,)

    def encode(self) -> bytes:
        return _REMOVE_HEAD.pack(self.generation, len(self.keys)) + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Remove:
        generation, count = _unpack(_REMOVE_HEAD, body)
        return cls(generation, decode_rows(body, KEY_DTYPE, count, _REMOVE_HEAD.size))


@dataclass(frozen=True, slots=True)
class Flush:
    """The same for a whole namespace, or for all with an empty digest."""

    op: ClassVar[Op] = Op.FLUSH
    generation: int
    digest: bytes

    def encode(self) -> bytes:
        return _COUNT.pack(self.generation) + self.digest

    @classmethod
    def decode(cls, body: bytes) -> Flush:
        digest = body[_COUNT.size :]
        if len(digest) not in {0, DIGEST_BYTES}:
            raise ProtocolError(f"a digest of {len(digest)} bytes")
        return cls(_unpack(_COUNT, body)[0], digest)


@dataclass(frozen=True, slots=True)
class Scan:
    """Say what is on the disk, newest first, in as many answers as it takes. Asked once, at the start."""

    op: ClassVar[Op] = Op.SCAN

    def encode(self) -> bytes:
        return b""

    @classmethod
    def decode(cls, body: bytes) -> Scan:
        del body
        return cls()


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for gauges and counters."""

    op: ClassVar[Op] = Op.STATS

    def encode(self) -> bytes:
        return b""

    @classmethod
    def decode(cls, body: bytes) -> Stats:
        del body
        return cls()


# --- answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a STORE."""

    op: ClassVar[Op] = Op.STORE
    request: int
    statuses: U8  # StoreStatus (n,)

    def encode(self) -> bytes:
        return self.statuses.tobytes()

    @classmethod
    def decode(cls, request: int, body: bytes) -> Stored:
        return cls(request, np.frombuffer(body, np.uint8))


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a LOAD."""

    op: ClassVar[Op] = Op.LOAD
    request: int
    statuses: U8  # LoadStatus (n,)

    def encode(self) -> bytes:
        return self.statuses.tobytes()

    @classmethod
    def decode(cls, request: int, body: bytes) -> Loaded:
        return cls(request, np.frombuffer(body, np.uint8))


@dataclass(frozen=True, slots=True)
class Removed:
    """A REMOVE is durable: how many of the blocks were here."""

    op: ClassVar[Op] = Op.REMOVE
    request: int
    blocks: int

    def encode(self) -> bytes:
        return _COUNT.pack(self.blocks)

    @classmethod
    def decode(cls, request: int, body: bytes) -> Removed:
        return cls(request, _unpack(_COUNT, body)[0])


@dataclass(frozen=True, slots=True)
class Flushed:
    """A FLUSH is durable: how many blocks that were known so far it removed."""

    op: ClassVar[Op] = Op.FLUSH
    request: int
    blocks: int

    def encode(self) -> bytes:
        return _COUNT.pack(self.blocks)

    @classmethod
    def decode(cls, request: int, body: bytes) -> Flushed:
        return cls(request, _unpack(_COUNT, body)[0])


@dataclass(frozen=True, slots=True)
class Scanned:
    """A piece of what is on the disk: the namespaces come with the first one."""

    op: ClassVar[Op] = Op.SCAN
    request: int
    namespaces: Rows  # SCANNED_NAMESPACE (m,)
    blocks: Rows  # SCANNED_BLOCK (n,); `namespace` is a `number`
    complete: bool  # nothing more comes

    def encode(self) -> bytes:
        head = _SCAN_HEAD.pack(len(self.namespaces), len(self.blocks), self.complete)
        return head + self.namespaces.tobytes() + self.blocks.tobytes()

    @classmethod
    def decode(cls, request: int, body: bytes) -> Scanned:
        namespaces, blocks, complete = _unpack(_SCAN_HEAD, body)
        start = _SCAN_HEAD.size + namespaces * SCANNED_NAMESPACE.itemsize
        return cls(
            request,
            decode_prefix(body, SCANNED_NAMESPACE, namespaces, _SCAN_HEAD.size),
            decode_rows(body, SCANNED_BLOCK, blocks, start),
            bool(complete),
        )


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    """Gauges and counters by name."""

    op: ClassVar[Op] = Op.STATS
    request: int
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    def encode(self) -> bytes:
        return encode_json(self.values)

    @classmethod
    def decode(cls, request: int, body: bytes) -> StatsAnswer:
        return cls(request, decode_json(body))


@dataclass(frozen=True, slots=True)
class Gone:
    """Blocks that left the disk without having been removed: evicted, unreadable, or lost with a damaged catalog."""

    op: ClassVar[Op] = Op.GONE
    keys: Rows  # KEY_DTYPE (n,)
    request: int = 0

    def encode(self) -> bytes:
        return self.keys.tobytes()

    @classmethod
    def decode(cls, request: int, body: bytes) -> Gone:
        return cls(decode_rows(body, KEY_DTYPE, len(body) // KEY_DTYPE.itemsize), request)


Request: TypeAlias = Namespace | Quotas | Store | Load | Remove | Flush | Scan | Stats
Answer: TypeAlias = Stored | Loaded | Removed | Flushed | Scanned | StatsAnswer | Gone

_REQUESTS: dict[int, type[Request]] = {
    int(kind.op): kind for kind in (Namespace, Quotas, Store, Load, Remove, Flush, Scan, Stats)
}
_ANSWERS: dict[int, type[Stored | Loaded | Removed | Flushed | Scanned | StatsAnswer | Gone]] = {
    int(kind.op): kind for kind in (Stored, Loaded, Removed, Flushed, Scanned, StatsAnswer, Gone)
}


def encode_request(request: int, message: Request) -> bytes:
    """A request under its number."""
    return _frame(message.op, request, message.encode())


def encode_answer(answer: Answer) -> bytes:
    """An answer."""
    return _frame(answer.op, answer.request, answer.encode())


def decode_request(op: int, body: bytes) -> Request:
    """Read a request.

    Raises:
        ProtocolError: unknown operation or ragged body.
    """
    if op not in _REQUESTS:
        raise ProtocolError(f"unknown operation {op}")
    return _REQUESTS[op].decode(body)


def decode_answer(op: int, request: int, body: bytes) -> Answer:
    """Read an answer.

    Raises:
        ProtocolError: unknown operation or ragged body.
    """
    if op not in _ANSWERS:
        raise ProtocolError(f"unknown operation {op}")
    return _ANSWERS[op].decode(request, body)


class MessageReader:
    """Cuts a byte stream into messages, whatever the chunks it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Take in bytes, give out (op, request, body) of the messages that are complete.

        Raises:
            ProtocolError: a body over the limit.
        """
        self._buffer += data
        messages: list[tuple[int, int, bytes]] = []
        start = 0
        while len(self._buffer) - start >= _HEAD.size:
            op, request, size = _HEAD.unpack_from(self._buffer, start)
            if size > BODY_BYTES_MAX:
                raise ProtocolError(f"a message body of {size} bytes is over the limit of {BODY_BYTES_MAX}")
            end = start + _HEAD.size + size
            if len(self._buffer) < end:
                break
            messages.append((op, request, bytes(memoryview(self._buffer)[start + _HEAD.size : end])))
            start = end
        del self._buffer[:start]
        return messages


def _frame(op: int, request: int, body: bytes) -> bytes:
    assert len(body) <= BODY_BYTES_MAX, "the sender cuts what is too much for one message"
    return _HEAD.pack(op, request, len(body)) + body


def _unpack(head: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < head.size:
        raise ProtocolError(f"a message body of {len(body)} bytes is too short")
    return head.unpack_from(body)
