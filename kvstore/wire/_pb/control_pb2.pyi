from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "client")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: str
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "server_version", "node_id", "boot_id", "epoch", "key_algorithm", "key_seed", "token", "data_host", "data_port", "shards", "fabric")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    KEY_SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_HOST_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FABRIC_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    node_id: str
    boot_id: str
    epoch: int
    key_algorithm: str
    key_seed: int
    token: str
    data_host: str
    data_port: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    fabric: str
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., key_algorithm: _Optional[str] = ..., key_seed: _Optional[int] = ..., token: _Optional[str] = ..., data_host: _Optional[str] = ..., data_port: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., fabric: _Optional[str] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("number", "boot_id", "socket_path", "pool_bytes", "block_bytes_max")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    number: int
    boot_id: str
    socket_path: str
    pool_bytes: int
    block_bytes_max: int
    def __init__(self, number: _Optional[int] = ..., boot_id: _Optional[str] = ..., socket_path: _Optional[str] = ..., pool_bytes: _Optional[int] = ..., block_bytes_max: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class KeysRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("shard", "state", "layers_ready", "size_bytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_READY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    state: int
    layers_ready: int
    size_bytes: int
    def __init__(self, shard: _Optional[int] = ..., state: _Optional[int] = ..., layers_ready: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "on")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    on: bool
    def __init__(self, keys: _Optional[bytes] = ..., on: bool = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("namespace_digest", "all")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    all: bool
    def __init__(self, namespace_digest: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class QuotaRequest(_message.Message):
    __slots__ = ("tenant", "dram_limit", "dram_share", "disk_limit", "disk_share")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAM_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRAM_SHARE_FIELD_NUMBER: _ClassVar[int]
    DISK_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DISK_SHARE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    dram_limit: int
    dram_share: int
    disk_limit: int
    disk_share: int
    def __init__(self, tenant: _Optional[str] = ..., dram_limit: _Optional[int] = ..., dram_share: _Optional[int] = ..., disk_limit: _Optional[int] = ..., disk_share: _Optional[int] = ...) -> None: ...

class QuotaReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CountReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...
