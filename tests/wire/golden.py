"""One example of every message, by name. tests/wire/golden.json keeps their bytes; see test_golden.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.core.keys import KEY_DTYPE
from kvstore.wire._pb import control_pb2 as pb
from kvstore.wire.fabric import LANDED_ROW, FabricInfo, LandedRequest, LocateAnswer
from kvstore.wire.frames import NO_REPLY, PROTOCOL_VERSION, Op, Status, encode
from kvstore.wire.messages import (
    FETCH_ROW,
    FINISH_ROW,
    LOOKUP_ROW,
    REF,
    REPORT_FIELDS,
    RESERVE_ROW,
    U64,
    Chains,
    KeyRequest,
    LayersAnswer,
    LayersRequest,
    LeaseRequest,
    PartRequest,
    RefRequest,
    encode_json,
)

KEYS = np.array([(0x0102030405060708, 0x1112131415161718, 0x2122232425262728), (1, 2, 3)], dtype=KEY_DTYPE)
REFS = np.array([(7, 0x3132333435363738), (8, 9)], dtype=REF)
ROWS = np.array([0, 5], dtype=np.uint32)
LANDED = np.array([(7, 0x3132333435363738, 0), (8, 9, 512)], dtype=LANDED_ROW)
LEASES = np.array([5, 6], dtype=np.uint64)


def rows(dtype: np.dtype[Any], **columns: list[int]) -> bytes:
    """Two rows of an answer."""
    array = np.zeros(2, dtype=dtype)
    for name, values in columns.items():
        array[name] = values
    return array.tobytes()


def frames() -> dict[str, bytes]:
    """Frames of the data protocol: each operation's request, and its answer where that has bytes of its own."""
    keys = KeyRequest(namespace=3, keys=KEYS)
    opened = {"digest": "00" * 16, "layers": 2, "layer_bytes": 512, "label": "model@rev", "tenant": "default"}
    amounts = np.arange(len(REPORT_FIELDS), dtype=U64).tobytes()
    reserve = KeyRequest(namespace=3, keys=KEYS, ttl_ms=30_000, size_bytes=1024)
    answers = {
        "LOOKUP answer": encode(
            Op.LOOKUP,
            4,
            rows(LOOKUP_ROW, state=[2, 2], tier=[0, 1], layers_ready=[2, 1], size=[1024, 1024]),
            status=Status.OK,
        ),
        "RESERVE answer": encode(
            Op.RESERVE, 5, rows(RESERVE_ROW, status=[0, 1], handle=[7, 0], generation=[9, 0], offset=[4096, 0])
        ),
        "FINISH answer": encode(Op.FINISH, 29, rows(FINISH_ROW, status=[1, 2], generation=[0, 9])),
        "FETCH answer": encode(
            Op.FETCH, 17, rows(FETCH_ROW, found=[1, 0], bytes=[512, 0]) + np.array([77], dtype=U64).tobytes(), 512
        ),
        "LAYERS answer": encode(
            Op.LAYERS, 30, LayersAnswer(2, np.array([1, 3], np.uint8), np.array([[77]], np.uint64)).encode(), 256
        ),
        "FABRIC answer": encode(Op.FABRIC, 25, FabricInfo("tcp", "10.0.0.7:15000", 4096, 8192, 1 << 20).encode()),
        "LOCATE answer": encode(
            Op.LOCATE,
            26,
            LocateAnswer(
                LayersAnswer(2, np.array([1, 3], np.uint8), np.array([[77]], np.uint64)), np.array([4096])
            ).encode(),
        ),
        "refusal": encode(Op.RESERVE, 5, b"why", status=Status.NAMESPACE_MISMATCH),
    }
    requests = {
        Op.HELLO: encode_json({"version": PROTOCOL_VERSION, "token": "ab", "shard": 1}),
        Op.ATTACH: encode_json({"version": PROTOCOL_VERSION}),
        Op.OPEN: encode_json(opened),
        Op.LOOKUP: keys.encode(),
        Op.RESERVE: reserve.encode(),
        Op.RESERVE_PART: PartRequest(256, 128, reserve).encode(),
        Op.PUBLISH: RefRequest(REFS, layers_ready=1).encode(),
        Op.COMMIT: RefRequest(REFS).encode(),
        Op.ABORT: RefRequest(REFS).encode(),
        Op.FINISH: RefRequest(REFS).encode(),
        Op.LEASE: RefRequest(REFS, ttl_ms=10_000).encode(),
        Op.RENEW: LeaseRequest(LEASES, ttl_ms=10_000).encode(),
        Op.DELETE: keys.encode(),
        Op.PIN: KeyRequest(namespace=3, keys=KEYS, flag=1).encode(),
        Op.FLUSH: b"\x01" * 16,
        Op.STATS: b"",
        Op.REPORT: amounts,
        Op.FETCH: KeyRequest(namespace=3, keys=KEYS, layers=(0, 2)).encode(),
        Op.TOUCH: keys.encode(),
        Op.PROMOTE: keys.encode(),
        Op.HOLD: KeyRequest(namespace=3, keys=KEYS, ttl_ms=10_000).encode(),
        Op.LAYERS: LayersRequest(ROWS, layers=(1, 3), start=128, size=256, wait_ms=20).encode(),
        Op.FABRIC: encode_json({"landing": 1 << 20}),
        Op.LOCATE: LayersRequest(ROWS, layers=(1, 3), start=128, size=256, wait_ms=20).encode(),
        Op.LANDED: LandedRequest(3, (1, 2), LANDED, np.array([[77], [78]], np.uint64), True, 30_000).encode(),
        Op.QUOTAS: encode_json({"default": [8, 4, 0, 0]}),
    }
    named = {op.name: encode(op, op, body) for op, body in requests.items()}
    named["RELEASE"] = encode(Op.RELEASE, Op.RELEASE, LeaseRequest(LEASES).encode(), flags=NO_REPLY)
    chains = Chains([KEYS["lo"].copy(), KEYS["lo"][:1].copy()])
    named["CHAINS"] = encode(Op.CHAINS, Op.CHAINS, chains.encode(), flags=NO_REPLY)
    named["WRITE"] = encode(Op.WRITE, Op.WRITE, RefRequest(REFS, namespace=3).encode(), payload_bytes=2 * (1024 + 16))
    layer = RefRequest(REFS, namespace=3, layers_ready=1, ttl_ms=30_000)
    named["WRITE_LAYER"] = encode(Op.WRITE_LAYER, Op.WRITE_LAYER, layer.encode(), payload_bytes=2 * (512 + 8))
    return named | answers


def controls() -> dict[str, bytes]:
    """Messages of the control plane."""
    shard = pb.Shard(number=1, boot_id="bb", socket_path="/run/s", pool_bytes=1 << 30, block_bytes_max=1 << 26)
    messages = [
        pb.HelloRequest(protocol_version=1, client="me"),
        pb.HelloReply(
            protocol_version=1,
            server_version="0.1.0",
            node_id="n",
            boot_id="b",
            epoch=3,
            key_algorithm="xxh3-128",
            key_seed=1 << 60,
            token="t",
            data_host="h",
            data_port=7401,
            shards=[shard],
            fabric="tcp",
        ),
        pb.StatsRequest(),
        pb.StatsReply(json="{}"),
        pb.KeysRequest(keys=KEYS.tobytes()),
        pb.QueryReply(blocks=[pb.BlockInfo(shard=-1), pb.BlockInfo(shard=1, state=2, layers_ready=2, size_bytes=1024)]),
        pb.PinRequest(keys=KEYS.tobytes(), on=True),
        pb.FlushRequest(namespace_digest=b"\x01" * 16, all=False),
        pb.CountReply(blocks=7),
    ]
    return {type(message).__name__: message.SerializeToString(deterministic=True) for message in messages}
