"""Bodies of the data protocol: six request shapes and one row type per kind of answer, all fixed-width.

A batch is one numpy array, so hundreds of keys are encoded and decoded in a few steps. `decode` checks every length
before it looks at the content; what doesn't fit is a `ProtocolError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.core.keys import KEY_DTYPE

KEYS_MAX = 16384
BY_LAYERS = 1  # flag of a PROMOTE: first the first layers of all blocks; the index tells how far they are
ANY_NAMESPACE = 0xFFFF  # administration: the key alone says which block is meant

LOOKUP_ROW = np.dtype([("state", "u1"), ("tier", "u1"), ("layers_ready", "<u2"), ("size", "<u4")])
RESERVE_ROW = np.dtype([("status", "u1"), ("pad", "V3"), ("handle", "<u4"), ("generation", "<u8"), ("offset", "<u8")])
FINISH_ROW = np.dtype([("status", "u1"), ("pad", "V7"), ("generation", "<u8")])  # `Finish`, and the block's where LAST
FETCH_ROW = np.dtype([("found", "u1"), ("pad", "V3"), ("bytes", "<u4")])
REF = np.dtype([("handle", "<u8"), ("generation", "<u8")])
REPORT_FIELDS = (  # of a REPORT, uint64 each
    "lookup_blocks",
    "hit_blocks",
    "read_blocks",
    "read_bytes",
    "lost_races",
    "checksum_failures",
)
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")


class Found(IntEnum):
    """What a FETCH or LAYERS says of a block."""

    MISS = 0
    HERE = 1  # its bytes follow
    LATER = 2  # it is on its way from the SSD: ask again, once what follows has been received
    UNFINISHED = 3  # it is being written, and these layers are not there yet: ask again


class Finish(IntEnum):
    """What a FINISH says of a part."""

    ENDED = 0  # its reservation had
    DONE = 1
    LAST = 2  # nothing was done: all others are complete. Write the sums of the block's slices, then COMMIT


_KEY_HEAD = struct.Struct("<HHHHIIQ")
_PART_HEAD = struct.Struct("<QQ")
_REF_HEAD = struct.Struct("<HHII4x")  # padded: the rows that follow are 8-byte words
_LEASE_HEAD = struct.Struct("<II")
_LAYERS_HEAD = struct.Struct("<HHIIIII")
_LAYERS_ANSWER_HEAD = struct.Struct("<HHI")


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A request about keys of one namespace. Which fields count depends on the operation."""

    namespace: int  # number that OPEN gave
    keys: NDArray[np.void]  # KEY_DTYPE, shape (n,)
    layers: tuple[int, int] = (0, 0)  # FETCH: half-open range
    flag: int = 0  # PIN: 1 on, 0 off; PROMOTE: BY_LAYERS
    ttl_ms: int = 0  # RESERVE, HOLD; PROMOTE, FETCH: how long to wait for the SSD
    size_bytes: int = 0  # RESERVE: payload bytes of each block

    def encode(self) -> bytes:
        """The body."""
        count = len(self.keys)
        head = _KEY_HEAD.pack(self.namespace, *self.layers, self.flag, self.ttl_ms, count, self.size_bytes)
        return head + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> KeyRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length, or more than KEYS_MAX keys.
        """
        namespace, first, end, flag, ttl_ms, count, size_bytes = _unpack(_KEY_HEAD, body)
        if count > KEYS_MAX:
            raise ProtocolError(f"{count} keys in one message; at most {KEYS_MAX}")
        keys = _array(body, _KEY_HEAD.size, KEY_DTYPE, count, exact=True)
        return cls(namespace, keys, (first, end), flag, ttl_ms, size_bytes)


@dataclass(frozen=True, slots=True)
class PartRequest:
    """RESERVE_PART: a RESERVE of some bytes of each layer; others write the rest."""

    start: int  # of the bytes within each layer
    size: int
    of: KeyRequest

    def encode(self) -> bytes:
        """The body."""
        return _PART_HEAD.pack(self.start, self.size) + self.of.encode()

    @classmethod
    def decode(cls, body: bytes) -> PartRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length, or more than KEYS_MAX keys.
        """
        start, size = _unpack(_PART_HEAD, body)
        return cls(start, size, KeyRequest.decode(body[_PART_HEAD.size :]))


@dataclass(frozen=True, slots=True)
class RefRequest:
    """A request about blocks named by handle and generation: reserved ones of the sender, or ones to be leased."""

    refs: NDArray[np.void]  # REF, shape (n,)
    namespace: int = 0  # WRITE
    layers_ready: int = 0  # PUBLISH, WRITE_LAYER
    ttl_ms: int = 0  # LEASE; PUBLISH, WRITE_LAYER: the reservation's new time

    def encode(self) -> bytes:
        """The body."""
        head = _REF_HEAD.pack(self.layers_ready, self.namespace, self.ttl_ms, len(self.refs))
        return head + self.refs.tobytes()

    @classmethod
    def of(
        cls,
        handles: NDArray[Any],
        generations: NDArray[Any],
        namespace: int = 0,
        layers_ready: int = 0,
        ttl_ms: int = 0,
    ) -> RefRequest:
        """Blocks by their handles and generations, shape (n,) each."""
        words = np.empty((len(handles), 2), dtype=np.uint64)
        words[:, 0], words[:, 1] = handles, generations
        return cls(words.view(REF).reshape(-1), namespace, layers_ready, ttl_ms)

    @classmethod
    def decode(cls, body: bytes) -> RefRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length, or more than KEYS_MAX blocks.
        """
        layers_ready, namespace, ttl_ms, count = _unpack(_REF_HEAD, body)
        if count > KEYS_MAX:
            raise ProtocolError(f"{count} blocks in one message; at most {KEYS_MAX}")
        return cls(_array(body, _REF_HEAD.size, REF, count, exact=True), namespace, layers_ready, ttl_ms)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """RENEW or RELEASE of leases."""

    leases: NDArray[np.uint64]
    ttl_ms: int = 0

    def encode(self) -> bytes:
        """The body."""
        return _LEASE_HEAD.pack(self.ttl_ms, len(self.leases)) + self.leases.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> LeaseRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length.
        """
        ttl_ms, count = _unpack(_LEASE_HEAD, body)
        return cls(cast("NDArray[np.uint64]", _array(body, _LEASE_HEAD.size, U64, count, exact=True)), ttl_ms)


@dataclass(frozen=True, slots=True)
class LayersRequest:
    """LAYERS: some bytes of some layers of blocks that HOLD named."""

    rows: NDArray[np.uint32]  # of the HOLD's keys, shape (n,)
    layers: tuple[int, int]  # half-open range
    start: int  # of the wanted bytes within each layer
    size: int
    wait_ms: int = 0  # how long to wait when none of the blocks has the first layer yet
    group: int = 1  # layers of a block that come behind one another, before the next block's

    def encode(self) -> bytes:
        """The body."""
        head = _LAYERS_HEAD.pack(*self.layers, self.start, self.size, self.wait_ms, self.group, len(self.rows))
        return head + self.rows.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> LayersRequest:
        """Read a body.

        Raises:
            ProtocolError: wrong length, or more than KEYS_MAX rows.
        """
        first, end, start, size, wait_ms, group, count = _unpack(_LAYERS_HEAD, body)
        if count > KEYS_MAX:
            raise ProtocolError(f"{count} rows in one message; at most {KEYS_MAX}")
        rows = cast("NDArray[np.uint32]", _array(body, _LAYERS_HEAD.size, U32, count, exact=True))
        return cls(rows, (first, end), start, size, wait_ms, group)


@dataclass(frozen=True, slots=True)
class LayersAnswer:
    """Answer to LAYERS. The payload follows: layer by layer, or group by group, the wanted bytes of each block that is
    HERE.

    Those have all layers before `end`; it may be lower than what was asked for.
    """

    end: int
    found: NDArray[np.uint8]  # `Found` of each row, shape (n,)
    sums: NDArray[np.uint64]  # xxh3-64 of the bytes that follow, shape (layers, blocks that are HERE)

    def encode(self) -> bytes:
        """The body."""
        head = _LAYERS_ANSWER_HEAD.pack(self.end, 0, self.sums.shape[1])
        return head + self.found.tobytes() + bytes(-len(self.found) % 8) + np.ascontiguousarray(self.sums).tobytes()

    @classmethod
    def decode(cls, body: bytes, rows: int, first: int, end: int) -> LayersAnswer:
        """Read the answer to a request for layers [first, end) of so many rows.

        Raises:
            ProtocolError: wrong length, or an answer to something else.
        """
        known_end, _, here = _unpack(_LAYERS_ANSWER_HEAD, body)
        found = cast("NDArray[np.uint8]", _array(body, _LAYERS_ANSWER_HEAD.size, np.dtype("u1"), rows, exact=False))
        if not first <= known_end <= end or here != np.count_nonzero(found == Found.HERE) or (found > max(Found)).any():
            raise ProtocolError(
                f"an answer about layers {first}:{known_end} of {here} blocks, which were not asked for"
            )
        offset = _LAYERS_ANSWER_HEAD.size + -(-rows // 8) * 8
        sums = decode_rows(body, U64, (known_end - first) * here, offset=offset)
        return cls(known_end, found, sums.reshape(known_end - first, here))


@dataclass(frozen=True, slots=True)
class Chains:
    """CHAINS: the keys of requests for reading, hits and misses, in prefix order, oldest request first.

    The body is words of 64 bits: how many chains, the length of each, then the low words of all their keys.
    """

    chains: list[NDArray[np.uint64]]

    def encode(self) -> bytes:
        """The body."""
        heads = np.array([len(self.chains), *map(len, self.chains)], dtype=U64)
        return heads.tobytes() + b"".join(chain.tobytes() for chain in self.chains)

    @classmethod
    def decode(cls, body: bytes) -> Chains:
        """Read a body.

        Raises:
            ProtocolError: wrong length, or a chain of more than KEYS_MAX keys.
        """
        words = decode_rows(body, U64, len(body) // U64.itemsize)
        if not len(words) or int(words[0]) >= len(words):
            raise ProtocolError("a message of chains that does not say how long they are")
        count = int(words[0])
        lengths = words[1 : 1 + count]
        if (lengths > KEYS_MAX).any():
            raise ProtocolError(f"a chain of {lengths.max()} keys; at most {KEYS_MAX}")
        ends = np.cumsum(lengths.astype(np.int64)) + 1 + count
        if (int(ends[-1]) if count else 1) != len(words):
            raise ProtocolError(f"{len(words)} words do not hold {count} chains")
        starts = [1 + count, *ends[:-1].tolist()] if count else []
        return cls([words[start:end] for start, end in zip(starts, ends.tolist(), strict=True)])


def encode_json(value: dict[str, Any]) -> bytes:
    """Body of the rare messages (HELLO, ATTACH, OPEN, STATS)."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_json(body: bytes) -> dict[str, Any]:
    """Read such a body.

    Raises:
        ProtocolError: no JSON object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("a message body is not JSON") from cause
    if not isinstance(value, dict):
        raise ProtocolError("a message body is no JSON object")
    return cast("dict[str, Any]", value)


def decode_rows(body: bytes, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
    """An answer's rows.

    Raises:
        ProtocolError: the body is not exactly `count` rows after `offset`.
    """
    return _array(body, offset, dtype, count, exact=True)


def decode_prefix(body: bytes, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
    """Rows that something else follows.

    Raises:
        ProtocolError: the body is too short.
    """
    return _array(body, offset, dtype, count, exact=False)


def _unpack(head: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) < head.size:
        raise ProtocolError(f"a message body of {len(body)} bytes is too short")
    return head.unpack_from(body)


def _array(body: bytes, offset: int, dtype: np.dtype[Any], count: int, *, exact: bool) -> NDArray[Any]:
    end = offset + count * dtype.itemsize
    if len(body) < end or (exact and len(body) != end):
        raise ProtocolError(f"a message body of {len(body)} bytes does not hold {count} rows of {dtype.itemsize} bytes")
    return np.frombuffer(body, dtype=dtype, count=count, offset=offset)
