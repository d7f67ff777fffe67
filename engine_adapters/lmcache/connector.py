"""LMCache's side: the adapter that its plugin loader finds, and the connector that moves chunks.

LMCache calls from its event loop and, to look up, from the engine's thread. In the loop nothing waits for the store:
that is done in threads of the connector, for `timeout_s` a call at most. What the store can't do is a miss.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from engine_adapters.late_client import LateClients
from engine_adapters.lmcache.chunks import Chunks, chunks_of, keys_of, namespaces_of
from engine_adapters.lmcache.options import PLUGIN, Options, check_engine
from kvstore import BlockKeys, Client, ConfigError, KvStoreError, UsageError

__all__ = ["KvStoreAdapter", "KvStoreConnector"]

READERS: Final = 2  # threads; LMCache asks for a request's chunks in one call
PUTS_MAX: Final = 64  # calls that wait to be written; what comes on top isn't stored
_SCHEME: Final = "plugin://"

_log = logging.getLogger(__name__)

R = TypeVar("R")


class KvStoreAdapter(ConnectorAdapter):
    """Makes connectors for the plugin `kvstore`, or `kvstore.NAME` where there are several."""

    def __init__(self) -> None:
        super().__init__(f"{_SCHEME}{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        """Whether that is this plugin's address."""
        return url.startswith(_SCHEME) and extract_plugin_type(url.removeprefix(_SCHEME)) == PLUGIN

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """A connector.

        Raises:
            IrrecoverableException: wrong configuration, in one line. After anything else LMCache would run on without
            the plugin.
        """
        try:
            return KvStoreConnector(context)
        except (UsageError, ConfigError) as error:
            raise IrrecoverableException(f"plugin {context.plugin_name}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Store:
    """A client for whole chunks, and one for shorter ones."""

    whole: Client
    shorter: Client


class KvStoreConnector(RemoteConnector):
    """Chunks in the store. A chunk of another shape or dtype than the engine's is never stored and never returned.

    Args:
        context: LMCache's. Without a local CPU backend, as in a scheduler's process, only lookups work.

    Raises:
        UsageError: wrong configuration.
    """

    def __init__(self, context: ConnectorContext) -> None:
        config, metadata = context.config, context.metadata
        if config is None or metadata is None:
            raise UsageError("LMCache gave no configuration and metadata")
        options = Options.parse(config.extra_config, context.plugin_name or PLUGIN)
        check_engine(config, options)
        super().__init__(config, metadata)
        self._memory = context.local_cpu_backend
        self._model = str(metadata.model_name)
        self._save_shorter = bool(config.save_unfull_chunk)
        self._chunks = chunks_of(self.meta_shapes, self.meta_dtypes, self.meta_fmt, metadata.chunk_size)
        self._clients = LateClients(namespaces_of(self._chunks, options, metadata), options.connection)
        self._readers = ThreadPoolExecutor(READERS, "kvstore-read")
        self._writer = ThreadPoolExecutor(1, "kvstore-write")
        self._puts = threading.BoundedSemaphore(PUTS_MAX)
        self._closed = threading.Event()

    # --- lookups -----------------------------------------------------------------------------------------------------

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there."""
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """How many chunks are there before the first that isn't."""
        store = self._store()
        if store is None or not keys:
            return 0
        try:
            return self._leading(store, keys)
        except KvStoreError as fault:
            _log.warning("lookup failed, a miss: %s", fault)
            return 0

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:  # noqa: ARG002 - LMCache's signature
        """How many chunks are there before the first that isn't. Nothing is pinned: what has gone by then is a miss."""
        return await self._in_reader(self.batched_contains, keys, 0)

    def _leading(self, store: _Store, keys: Sequence[CacheEngineKey]) -> int:
        hit = store.whole.lookup(self._keys(store.whole, keys)).hit_blocks
        if self._save_shorter and hit < len(keys):  # a prompt's last chunk
            hit += store.shorter.lookup(self._keys(store.shorter, keys[hit : hit + 1])).hit_blocks
        return hit

    # --- reading -----------------------------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, in memory of LMCache's own; None if it isn't there."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """The chunks, None for each that isn't there or that LMCache has no memory for."""
        nothing: list[MemoryObj | None] = [None] * len(keys)
        return await self._in_reader(self._read, keys, nothing)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:  # noqa: ARG002 - LMCache's signature
        """The chunks before the first that isn't there."""
        chunks = await self.batched_get(keys)
        end = next((place for place, chunk in enumerate(chunks) if chunk is None), len(chunks))
        _give_back(chunks[end:])
        return [chunk for chunk in chunks[:end] if chunk is not None]

    def _read(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        store = self._store()
        found: list[MemoryObj | None] = [None] * len(keys)
        if store is None:
            return found
        try:
            self._read_whole(store, keys, found)
            missing = next((place for place, chunk in enumerate(found) if chunk is None), None)
            if self._save_shorter and missing is not None:  # a prompt's last chunk
                found[missing] = self._read_shorter(store, keys[missing])
        except KvStoreError as fault:
            _log.warning("reading failed, a miss: %s", fault)
        return found

    def _read_whole(self, store: _Store, keys: Sequence[CacheEngineKey], found: list[MemoryObj | None]) -> None:
        """Fill in the chunks that are there. Those that were only asked for cost LMCache no memory."""
        block_keys = self._keys(store.whole, keys)
        there = store.whole.lookup(block_keys).hit.nonzero()[0]
        targets: list[MemoryObj] = []
        ok = np.zeros(0, dtype=np.bool_)
        try:
            while len(targets) < len(there) and (target := self._allocate(self._chunks.tokens)) is not None:
                targets.append(target)
            if targets:
                buffers = [np.frombuffer(target.byte_array, dtype=np.uint8) for target in targets]
                ok = store.whole.get_into(BlockKeys(block_keys.array[there[: len(targets)]]), buffers).ok
        finally:
            filled = ok.tolist() or [False] * len(targets)
            for place, target, good in zip(there[: len(targets)].tolist(), targets, filled, strict=True):
                if good:
                    found[place] = target
                else:
                    target.ref_count_down()

    def _read_shorter(self, store: _Store, key: CacheEngineKey) -> MemoryObj | None:
        (block,) = store.shorter.get(self._keys(store.shorter, [key])).blocks
        chunk = None if block is None else self._chunks.unpack(block)
        if chunk is None:
            return None
        tokens, payload = chunk
        target = self._allocate(tokens)
        if target is not None:
            np.frombuffer(target.byte_array, dtype=np.uint8)[:] = payload
        return target

    def _allocate(self, tokens: int) -> MemoryObj | None:
        shapes = [torch.Size(shape) for shape in self._chunks.shapes_of(tokens)]
        # Not in a busy loop: that has no end while other requests hold all of LMCache's memory.
        return self._memory.allocate(shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)

    # --- writing -----------------------------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store a chunk, unless it is there."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[MemoryObj]) -> None:
        """Store chunks, those that aren't there. References are the caller's: it counts them up and down."""
        if self._store() is None:
            return
        if not self._puts.acquire(blocking=False):
            _log.debug("not stored: %d chunks, for %d calls are waiting", len(keys), PUTS_MAX)
            return
        for chunk in memory_objs:  # a caller that gives up must not free what is still being read
            chunk.ref_count_up()
        try:
            future = self._writer.submit(self._write_and_release, list(keys), list(memory_objs))
        except RuntimeError:  # closed
            self._puts.release()
            _give_back(memory_objs)
            return
        await asyncio.shield(asyncio.wrap_future(future))

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a chunk; whether it was there."""
        store = self._store()
        if store is None:
            return False
        try:
            return sum(client.delete(self._keys(client, [key])) for client in (store.whole, store.shorter)) > 0
        except KvStoreError as fault:
            _log.warning("removing failed: %s", fault)
            return False

    def _write_and_release(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        try:
            store = self._store()
            if store is not None and not self._closed.is_set():
                self._write(store, keys, chunks)
        except KvStoreError as fault:
            _log.warning("storing failed: %s", fault)
        finally:
            self._puts.release()
            _give_back(chunks)

    def _write(self, store: _Store, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        tokens = [self._tokens_in(chunk) for chunk in chunks]
        whole = [place for place, count in enumerate(tokens) if count == self._chunks.tokens]
        if whole:
            payloads = [np.frombuffer(chunks[place].byte_array, dtype=np.uint8) for place in whole]
            store.whole.put(self._keys(store.whole, [keys[place] for place in whole]), payloads)
        for place, count in enumerate(tokens):
            if count is None:
                _log.debug("not stored: a chunk of another shape, dtype or format than this engine's")
            elif self._save_shorter and count < self._chunks.tokens:
                payload = np.frombuffer(chunks[place].byte_array, dtype=np.uint8)
                store.shorter.put(self._keys(store.shorter, [keys[place]]), [self._chunks.pack(payload, count)])

    def _tokens_in(self, chunk: MemoryObj) -> int | None:
        try:
            shapes, dtypes = chunk.get_shapes(), chunk.get_dtypes()
            other = Chunks(
                tuple(tuple(shape) for shape in shapes),
                tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
                tuple(dtype.itemsize for dtype in dtypes),
                str(chunk.get_memory_format().name),
                self._chunks.tokens,
            )
        except (AssertionError, AttributeError, NotImplementedError):  # how LMCache's memory says that it has no shape
            return None
        tokens = self._chunks.tokens_in(other)
        return tokens if tokens is not None and chunk.get_size() == tokens * self._chunks.token_bytes else None

    # --- the rest ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[str]:
        """LMCache's class demands it, for a page about its file storage. Any list would be wrong: an empty one says
        that nothing is stored.

        Raises:
            NotImplementedError: always: LMCache's keys can't be told from the store's.
        """
        raise NotImplementedError("the store's keys are digests: they don't tell LMCache's")

    async def close(self) -> None:
        """End the threads and the connections. What waits to be written isn't."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._closed.set()
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=True)
        self._clients.close()

    def _store(self) -> _Store | None:
        clients = self._clients.clients
        return None if clients is None else _Store(*clients)

    def _keys(self, client: Client, keys: Sequence[CacheEngineKey]) -> BlockKeys:
        return keys_of(client.namespace, keys, self._model, client.scheme)

    async def _in_reader(self, call: Callable[[list[CacheEngineKey]], R], keys: list[CacheEngineKey], closed: R) -> R:
        """What the call answers in a thread; `closed` once the threads have ended."""
        try:
            future = self._readers.submit(call, list(keys))
        except RuntimeError:
            return closed
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:  # LMCache waits no longer: the thread still has memory of it, until it is done
            future.add_done_callback(_give_back_answer)
            raise


def _give_back(chunks: Sequence[MemoryObj | None]) -> None:
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()


def _give_back_answer(future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None and isinstance(future.result(), list):
        _give_back(future.result())
