"""The node's side of the control plane: gRPC calls mapped onto the shards."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from concurrent import futures
from typing import Any, Protocol, TypeVar

import grpc

from kvstore.core.errors import ConfigError, KvStoreError, UsageError
from kvstore.core.keys import BlockKeys
from kvstore.wire._pb import control_pb2 as pb
from kvstore.wire._pb.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from kvstore.wire.control import AUTHORIZATION, BlockInfo, NodeInfo, TenantQuota
from kvstore.wire.frames import PROTOCOL_VERSION

R = TypeVar("R")

KEYS_MAX = 4096  # of one administrative call
THREADS = 8
CALLS_MAX = 64  # under way at the same time; more are refused at once


class NodeOperations(Protocol):
    """What the control plane needs of the node."""

    def describe(self) -> NodeInfo: ...
    def status(self) -> dict[str, Any]: ...
    def query(self, keys: BlockKeys) -> list[BlockInfo]: ...
    def pin(self, keys: BlockKeys, *, on: bool) -> int: ...
    def delete(self, keys: BlockKeys) -> int: ...
    def flush(self, digest: bytes) -> int: ...
    def set_quota(self, tenant: str, quota: TenantQuota) -> None: ...


class ControlService(ControlServicer):
    """gRPC methods: check, call the node, translate errors to status codes."""

    def __init__(self, node: NodeOperations, auth_token: str, version: str) -> None:
        self._node = node
        self._auth_token = auth_token
        self._version = version

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""
        info = self._run(context, self._node.describe)
        # The version is the client's to judge: it gets ours, whatever its own is.
        del request
        return pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_version=self._version,
            node_id=info.node_id,
            boot_id=info.boot_id,
            epoch=info.epoch,
            key_algorithm=info.scheme.algorithm,
            key_seed=info.scheme.seed,
            token=info.token,
            data_host=info.data_host,
            data_port=info.data_port,
            shards=[
                pb.Shard(
                    number=shard.number,
                    boot_id=shard.boot_id,
                    socket_path=shard.socket_path,
                    pool_bytes=shard.pool_bytes,
                    block_bytes_max=shard.block_bytes_max,
                )
                for shard in info.shards
            ],
            fabric=info.fabric,
        )

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""
        del request
        return pb.StatsReply(json=json.dumps(self._run(context, self._node.status)))

    def Query(self, request: pb.KeysRequest, context: grpc.ServicerContext) -> pb.QueryReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""
        blocks = self._run(context, lambda: self._node.query(_keys(request.keys)))
        return pb.QueryReply(
            blocks=[
                pb.BlockInfo(shard=b.shard, state=b.state, layers_ready=b.layers_ready, size_bytes=b.size_bytes)
                for b in blocks
            ]
        )

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.CountReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""
        return pb.CountReply(blocks=self._run(context, lambda: self._node.pin(_keys(request.keys), on=request.on)))

    def Delete(self, request: pb.KeysRequest, context: grpc.ServicerContext) -> pb.CountReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""
        return pb.CountReply(blocks=self._run(context, lambda: self._node.delete(_keys(request.keys))))

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> pb.CountReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""

        def flush() -> int:
            if request.all == bool(request.namespace_digest):
                raise UsageError("name a namespace digest, or all, not both and not neither")
            if not request.all and len(request.namespace_digest) != 16:
                raise UsageError(f"a namespace digest has 16 bytes, not {len(request.namespace_digest)}")
            return self._node.flush(request.namespace_digest)

        return pb.CountReply(blocks=self._run(context, flush))

    def SetQuota(self, request: pb.QuotaRequest, context: grpc.ServicerContext) -> pb.QuotaReply:  # noqa: N802 -- the name is the .proto's
        """See the .proto."""

        def set_quota() -> None:
            quota = TenantQuota(request.dram_limit, request.dram_share, request.disk_limit, request.disk_share)
            self._node.set_quota(request.tenant, quota)

        self._run(context, set_quota)
        return pb.QuotaReply()

    def _run(self, context: grpc.ServicerContext, action: Callable[[], R]) -> R:
        if self._auth_token:
            shown = dict(context.invocation_metadata()).get(AUTHORIZATION, "")
            if not hmac.compare_digest(str(shown).encode(), f"Bearer {self._auth_token}".encode()):
                context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "the auth token is missing or wrong (KVSTORE_AUTH_TOKEN)"
                )
        try:
            return action()
        except UsageError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except KvStoreError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _keys(data: bytes) -> BlockKeys:
    keys = BlockKeys.frombuffer(data)
    if not 0 < len(keys) <= KEYS_MAX:
        raise UsageError(f"{len(keys)} keys in one call; allowed is 1 to {KEYS_MAX}")
    return keys


def serve_control(service: ControlService, address: str) -> tuple[grpc.Server, int]:
    """Start serving; the server and the port it got.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(THREADS, thread_name_prefix="control"),
        maximum_concurrent_rpcs=CALLS_MAX,
        options=[("grpc.so_reuseport", 0)],
    )
    add_ControlServicer_to_server(service, server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"control port {address}: in use, or not an address of this machine") from error
    server.start()
    return server, bound
