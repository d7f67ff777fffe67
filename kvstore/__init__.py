"""A distributed KV cache store for LLM serving, and its SDK.

    with kvstore.connect("local", namespace=namespace) as store:
        keys = store.keys(token_ids)
        hit = store.lookup(keys)
        store.get_into(keys[: hit.hit_blocks], buffers)

The names below are the public interface; everything else may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore.core.errors import (
    BlockTooLarge,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    IndexFull,
    KvStoreError,
    LayoutMismatch,
    LeaseExpired,
    NamespaceMismatch,
    ProtocolError,
    StreamClosed,
    Unavailable,
    UnregisteredBuffer,
    UsageError,
)
from kvstore.core.keys import BlockKeys, KeyScheme, chain_keys, keys_from_digests
from kvstore.core.layout import CanonicalLayout, OpaqueLayout
from kvstore.core.namespace import Namespace
from kvstore.core.sizes import format_size, parse_size
from kvstore.core.states import BlockState, PutStatus
from kvstore.transport.buffers import RegisteredBuffer

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient, AsyncView, connect_async
    from kvstore.client.client import Client, View, connect
    from kvstore.client.device_pool import DevicePool
    from kvstore.client.planning import Action, FetchPlan
    from kvstore.client.results import Fetched, GetResult, Lookup, PutResult
    from kvstore.client.streams import LayerStream, PublishStream

__all__ = [
    "Action",
    "AsyncClient",
    "AsyncView",
    "BlockKeys",
    "BlockState",
    "BlockTooLarge",
    "CanonicalLayout",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "DevicePool",
    "FetchPlan",
    "Fetched",
    "GetResult",
    "IndexFull",
    "KeyScheme",
    "KvStoreError",
    "LayerStream",
    "LayoutMismatch",
    "LeaseExpired",
    "Lookup",
    "Namespace",
    "NamespaceMismatch",
    "OpaqueLayout",
    "ProtocolError",
    "PublishStream",
    "PutResult",
    "PutStatus",
    "RegisteredBuffer",
    "StreamClosed",
    "Unavailable",
    "UnregisteredBuffer",
    "UsageError",
    "View",
    "chain_keys",
    "connect",
    "connect_async",
    "format_size",
    "keys_from_digests",
    "parse_size",
]

# The server's processes are many and start often: the client, with gRPC and asyncio behind it, is loaded at first use.
_HOMES = {
    "kvstore.client.aio": ("AsyncClient", "AsyncView", "connect_async"),
    "kvstore.client.client": ("Client", "View", "connect"),
    "kvstore.client.device_pool": ("DevicePool",),
    "kvstore.client.planning": ("Action", "FetchPlan"),
    "kvstore.client.results": ("Fetched", "GetResult", "Lookup", "PutResult"),
    "kvstore.client.streams": ("LayerStream", "PublishStream"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
