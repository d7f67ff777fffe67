"""Frames of the data protocol, as bytes in and bytes out: no socket, no clock.

One protocol for the local socket (beside shared memory) and the TCP data port. Every message is a frame:

```
0   magic      4 bytes  "KVS1"
4   op         uint8    `Op`
5   status     uint8    `Status` in replies, 0 in requests
6   flags      uint16   bit 0 in requests: no reply is wanted
8   request    uint32   chosen by the client, repeated in the reply
12  body       uint32   bytes of the body that follows, at most BODY_BYTES_MAX
16  payload    uint64   bytes of KV that follow the body
```

All little-endian. Sizes are checked before anything is allocated; a frame that breaks a rule is a `ProtocolError`, on
which the connection is closed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from kvstore.core.errors import ProtocolError

MAGIC = b"KVS1"
PROTOCOL_VERSION = 1
HEADER = struct.Struct("<4sBBHIIQ")
HEADER_BYTES = HEADER.size
BODY_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MAX = 1 << 40


class Op(IntEnum):
    """What a frame asks for."""

    HELLO = 1  # data port: token and shard; the first message of a connection
    ATTACH = 2  # local socket: descriptors of the index, the pool and the touch board
    OPEN = 3  # announce a namespace
    LOOKUP = 4
    RESERVE = 5
    PUBLISH = 6
    COMMIT = 7
    ABORT = 8
    LEASE = 9
    RENEW = 10
    RELEASE = 11
    DELETE = 12
    PIN = 13
    FLUSH = 14
    STATS = 15
    REPORT = 16
    FETCH = 17  # data port: keys in, answers and payload out
    WRITE = 18  # data port: payload of reserved blocks in, commits
    TOUCH = 19
    PROMOTE = 20  # bring blocks from the SSD into the pool; answered when they are there, or in time
    CHAINS = 21  # what was asked for by readers that the shard does not hear of
    QUOTAS = 22  # local socket, from the node: what each tenant may have
    HOLD = 23  # data port: keep blocks where they are, unfinished ones too, in place of those before; for LAYERS
    WRITE_LAYER = 24  # data port: the payload of one layer of reserved blocks in, watermark on
    FABRIC = 25  # data port: how one-sided transfers reach the shard's memory; landing space for this connection
    LOCATE = 26  # data port: as LAYERS, but where the blocks lie instead of their payload
    LANDED = 27  # data port: layers of reserved blocks lie in this connection's landing space: take them
    RESERVE_PART = 28  # as RESERVE, for some bytes of each layer: the block is complete when others have the rest
    FINISH = (
        29  # local socket: as COMMIT; but who has the last open part of a block is told so, and writes its sums first
    )
    LAYERS = 30  # data port: the payload of some layers of blocks on hold out, layer by layer


class Status(IntEnum):
    """How a request ended as a whole. Answers for each key are in the body."""

    OK = 0
    BAD_REQUEST = 1  # the body carries one line of text
    UNAUTHENTICATED = 2
    NAMESPACE_MISMATCH = 3
    TOO_LARGE = 4
    EXPIRED = 5
    BUSY = 6  # a limit on connections or sessions


NO_REPLY = 1
_FIRST_OP, _LAST_OP = int(min(Op)), int(max(Op))


class Frame(NamedTuple):
    """A frame's header."""

    op: int
    status: int
    flags: int
    request: int
    body_bytes: int
    payload_bytes: int


def encode(op: int, request: int, body: bytes, payload_bytes: int = 0, status: int = 0, flags: int = 0) -> bytes:
    """Header and body. The payload, if any, is sent after it straight from where it lies."""
    if len(body) > BODY_BYTES_MAX:
        raise ProtocolError(f"a message body of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}")
    return HEADER.pack(MAGIC, op, status, flags, request, len(body), payload_bytes) + body


def decode_header(data: bytes | memoryview) -> Frame:
    """Read a header.

    Raises:
        ProtocolError: wrong magic, unknown operation, or a size over the limit.
    """
    magic, op, status, flags, request, body_bytes, payload_bytes = HEADER.unpack_from(data)
    if magic != MAGIC or flags & ~NO_REPLY:
        raise ProtocolError("not a kvstore frame")
    if not _FIRST_OP <= op <= _LAST_OP:
        raise ProtocolError(f"unknown operation {op}")
    if body_bytes > BODY_BYTES_MAX:
        raise ProtocolError(f"a message body of {body_bytes} bytes is over the limit of {BODY_BYTES_MAX}")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a payload of {payload_bytes} bytes is over the limit of {PAYLOAD_BYTES_MAX}")
    return Frame(op, status, flags, request, body_bytes, payload_bytes)


class FrameReader:
    """Cuts a byte stream without payloads (the local socket) into frames, whatever the chunks it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[Frame, bytes]]:
        """Take in bytes, give out the frames that are complete.

        Raises:
            ProtocolError: the stream is no sequence of frames, or one announces a payload.
        """
        if not self._buffer and len(data) >= HEADER_BYTES:
            frame = decode_header(data)
            if len(data) == HEADER_BYTES + frame.body_bytes and not frame.payload_bytes:
                return [(frame, bytes(data[HEADER_BYTES:]))]  # the usual case: one frame, whole, nothing left over
        self._buffer += data
        frames: list[tuple[Frame, bytes]] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            frame = decode_header(memoryview(self._buffer)[start : start + HEADER_BYTES])
            if frame.payload_bytes:
                raise ProtocolError("payload on a connection that carries none")
            end = start + HEADER_BYTES + frame.body_bytes
            if len(self._buffer) < end:
                break
            frames.append((frame, bytes(memoryview(self._buffer)[start + HEADER_BYTES : end])))
            start = end
        del self._buffer[:start]
        return frames
