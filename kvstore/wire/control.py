"""The client's side of the control plane: gRPC messages in and out as values, failures as this package's errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import grpc

from kvstore.core.errors import DeadlineExceeded, KvStoreError, ProtocolError, Unavailable, UsageError
from kvstore.core.keys import BlockKeys, KeyScheme
from kvstore.core.states import BlockState
from kvstore.wire._pb import control_pb2 as pb
from kvstore.wire._pb.control_pb2_grpc import ControlStub
from kvstore.wire.frames import PROTOCOL_VERSION

AUTHORIZATION = "authorization"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard as its node describes it."""

    number: int
    boot_id: str
    socket_path: str
    pool_bytes: int
    block_bytes_max: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node answers to HELLO."""

    address: str
    node_id: str
    boot_id: str
    epoch: int
    scheme: KeyScheme
    token: str
    data_host: str
    data_port: int
    shards: tuple[ShardInfo, ...]
    fabric: str = ""  # protocol of its one-sided transfers; empty: none


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may have of a node: bytes of slots, rounding and checksums included.

    Raises:
        UsageError: a negative number, or a share above its limit.
    """

    dram_limit: int = 0  # never more than this; 0 = no limit
    dram_share: int = 0  # never evicted below this by others
    disk_limit: int = 0
    disk_share: int = 0

    def __post_init__(self) -> None:
        for tier in ("dram", "disk"):
            limit, share = getattr(self, f"{tier}_limit"), getattr(self, f"{tier}_share")
            if not 0 <= limit < 1 << 62 or not 0 <= share < 1 << 62:
                raise UsageError(f"{tier} quota of {limit} bytes, share {share}: allowed is 0 to 2**62 - 1 bytes")
            if limit and share > limit:
                raise UsageError(f"{tier} share of {share} bytes is more than the limit of {limit} bytes")


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """Where a block stands."""

    shard: int
    state: BlockState
    layers_ready: int
    size_bytes: int


class ControlClient:
    """One node's control plane. A channel lives only for the `with` block: gRPC's threads don't survive a fork.

    Every method raises `Unavailable` (or `DeadlineExceeded`) when the node can't be reached in time, and `UsageError`
    when it refuses the call.
    """

    def __init__(self, address: str, *, auth_token: str = "", timeout_s: float = 2.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = ((AUTHORIZATION, f"Bearer {auth_token}"),) if auth_token else ()
        # A proxy from the environment has no business between a worker and its cache.
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def hello(self, client: str) -> NodeInfo:
        """Open a session.

        Raises:
            ProtocolError: the node speaks another version.
        """
        with self._translated():
            reply = self._stub.Hello(
                pb.HelloRequest(protocol_version=PROTOCOL_VERSION, client=client), **self._call_options()
            )
        if reply.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self._address} speaks protocol version {reply.protocol_version}, we speak {PROTOCOL_VERSION}; "
                f"its version is {reply.server_version}"
            )
        return NodeInfo(
            address=self._address,
            node_id=reply.node_id,
            boot_id=reply.boot_id,
            epoch=reply.epoch,
            scheme=KeyScheme(cast("Any", reply.key_algorithm), reply.key_seed),
            token=reply.token,
            data_host=reply.data_host or self._address.rpartition(":")[0].strip("[]"),
            data_port=reply.data_port,
            shards=tuple(
                ShardInfo(shard.number, shard.boot_id, shard.socket_path, shard.pool_bytes, shard.block_bytes_max)
                for shard in reply.shards
            ),
            fabric=reply.fabric,
        )

    def stats(self) -> dict[str, Any]:
        """Everything that `/status` shows."""
        with self._translated():
            return json.loads(self._stub.Stats(pb.StatsRequest(), **self._call_options()).json)

    def query(self, keys: BlockKeys) -> Sequence[BlockInfo]:
        """Where each block stands."""
        with self._translated():
            reply = self._stub.Query(pb.KeysRequest(keys=keys.tobytes()), **self._call_options())
        return [BlockInfo(b.shard, BlockState(b.state), b.layers_ready, b.size_bytes) for b in reply.blocks]

    def pin(self, keys: BlockKeys, *, on: bool) -> int:
        """Add or take off one pin; how many blocks are there."""
        with self._translated():
            return self._stub.Pin(pb.PinRequest(keys=keys.tobytes(), on=on), **self._call_options()).blocks

    def delete(self, keys: BlockKeys) -> int:
        """Remove blocks; how many were there."""
        with self._translated():
            return self._stub.Delete(pb.KeysRequest(keys=keys.tobytes()), **self._call_options()).blocks

    def flush(self, digest: bytes | None) -> int:
        """Remove a namespace's blocks, or all (None); how many."""
        request = pb.FlushRequest(namespace_digest=digest or b"", all=digest is None)
        with self._translated():
            return self._stub.Flush(request, **self._call_options()).blocks

    def set_quota(self, tenant: str, quota: TenantQuota) -> None:
        """Say what a tenant may have; `TenantQuota()` takes its quota away."""
        with self._translated():
            self._stub.SetQuota(pb.QuotaRequest(tenant=tenant, **asdict(quota)), **self._call_options())

    def _call_options(self) -> dict[str, Any]:
        return {"timeout": self._timeout_s, "metadata": self._metadata}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._translate(cast("grpc.Call", error)) from error

    def _translate(self, error: grpc.Call) -> KvStoreError:
        details = error.details() or ""
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded(f"{self._address}: no answer within {self._timeout_s:g} s")
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNAUTHENTICATED:
                return UsageError(f"{self._address}: {details}")
            case grpc.StatusCode.UNAVAILABLE:
                return Unavailable(f"{self._address}: nobody answers there; is kvstore-server running?")
            case code:
                return Unavailable(f"{self._address}: {code.name}: {details}")
