"""LMCache's own remote backend and memory, configured as its engine would, without an engine around them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from engine_adapters.lmcache.connector import KvStoreConnector

CHUNK = 64
MODEL = "org/model"
WAIT_S = 20.0
LOADING = {"module_path": "engine_adapters.lmcache.connector", "class_name": "KvStoreAdapter"}

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """What LMCache knows of a model, and of the worker that runs it."""

    name: str = MODEL
    dtype: torch.dtype = torch.float32
    layers: int = 4
    heads: int = 2
    head_dim: int = 32
    latent: bool = False
    workers: int = 1
    worker: int = 0
    chunk: int = CHUNK

    @property
    def metadata(self) -> LMCacheMetadata:
        """As LMCache has it."""
        return LMCacheMetadata(
            model_name=self.name,
            world_size=self.workers,
            local_world_size=self.workers,
            worker_id=self.worker,
            local_worker_id=self.worker,
            kv_dtype=self.dtype,
            kv_shape=(self.layers, 1 if self.latent else 2, self.chunk, self.heads, self.head_dim),
            use_mla=self.latent,
            chunk_size=self.chunk,
        )

    def key(self, chunk_hash: int | bytes = 1, **changed: Any) -> CacheEngineKey:
        """As LMCache's engine makes it."""
        told = {"model_name": self.name, "world_size": self.workers, "worker_id": self.worker, "dtype": self.dtype}
        return CacheEngineKey(**{**told, "chunk_hash": chunk_hash, **changed})

    def keys(self, count: int, first: int = 1) -> list[CacheEngineKey]:
        """Of so many chunks."""
        return [self.key(first + number) for number in range(count)]


def config_of(address: str, revision: str, plugin: str = "kvstore", **told: Any) -> LMCacheEngineConfig:
    """LMCache's configuration with the plugin in it. Options of the plugin are those that LMCache doesn't have."""
    engine = {name: told.pop(name) for name in tuple(told) if name in ENGINE_SETTINGS}
    options = {**LOADING, "address": address, "revision": revision, "timeout_s": 1.0, **told}
    return LMCacheEngineConfig.from_defaults(
        **{
            "local_cpu": False,
            "max_local_cpu_size": 0.02,
            "save_unfull_chunk": True,
            **engine,
            "remote_storage_plugins": [plugin],
            "extra_config": {
                f"remote_storage_plugin.{plugin}.{name}": value for name, value in options.items() if value is not None
            },
        }
    )


ENGINE_SETTINGS = {
    "chunk_size",
    "save_unfull_chunk",
    "use_layerwise",
    "remote_serde",
    "blocking_timeout_secs",
    "max_local_cpu_size",
}


@dataclass
class Worker:
    """A worker of an engine: LMCache's event loop, memory and remote backend."""

    config: LMCacheEngineConfig
    model: Model = field(default_factory=Model)
    plugin: str = "kvstore"
    has_memory: bool = True

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        metadata = self.model.metadata
        self.memory: LocalCPUBackend = LocalCPUBackend(self.config, metadata) if self.has_memory else None
        try:
            self.remote = RemoteBackend(self.config, metadata, self.loop, self.memory, plugin_name=self.plugin)
        except BaseException:
            self._end_loop()
            raise

    @property
    def connector(self) -> KvStoreConnector:
        """Ours, below LMCache's wrapper."""
        return self.remote.connection.getWrappedConnector()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
        """The answer of a coroutine in LMCache's loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(timeout_s)

    def chunk(self, tokens: int | None = None, seed: int | None = None) -> MemoryObj:
        """A chunk in LMCache's memory, with random bytes if there is a seed."""
        shapes = self.model.metadata.get_shapes(self.model.chunk if tokens is None else tokens)
        form = MemoryFormat.KV_MLA_FMT if self.model.latent else MemoryFormat.KV_2LTD
        chunk = self.memory.allocate(shapes, self.model.metadata.get_dtypes(), form, busy_loop=False)
        assert chunk is not None, "LMCache's memory is full"
        if seed is not None:
            fill(chunk, seed)
        return chunk

    def save(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        """Store chunks and wait for the end, as LMCache's engine doesn't."""
        done = threading.Semaphore(0)

        def ended(_: CacheEngineKey) -> None:
            done.release()

        self.remote.batched_submit_put_task(keys, list(chunks), on_complete_callback=ended)
        for _ in keys:
            assert done.acquire(timeout=WAIT_S), "a put didn't end"

    def load(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """The chunks, None where there is none."""
        return self.remote.batched_get_blocking(list(keys))

    def free_bytes(self) -> int:
        """What of LMCache's memory nobody holds."""
        held: list[MemoryObj] = []
        while (chunk := self.memory.allocate(torch.Size([1, 1, 1, 4096]), torch.uint8, busy_loop=False)) is not None:
            held.append(chunk)
        for chunk in held:
            chunk.ref_count_down()
        return 4096 * len(held)

    def close(self) -> None:
        """As LMCache does."""
        self.remote.close()
        self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


def fill(chunk: MemoryObj, seed: int) -> None:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (chunk.get_size(),), dtype=torch.uint8, generator=generator)
    chunk.raw_data[: chunk.get_size()] = raw


def content(chunk: MemoryObj | None) -> bytes:
    """All bytes of a chunk."""
    assert chunk is not None, "a miss"
    return bytes(chunk.byte_array)


def other(model: Model, **changed: Any) -> Model:
    """The same model but for something."""
    return replace(model, **changed)
