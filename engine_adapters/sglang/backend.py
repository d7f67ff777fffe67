"""SGLang's HiCache storage backend over the store: what `--hicache-storage-backend dynamic` loads.

The engine's cache controller calls from threads of its own. Whatever goes wrong there is a miss within the timeout: a
page that can't be had is computed, one that can't be kept isn't.
"""

# ruff: noqa: ARG002 - the signatures are the engine's.

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from engine_adapters.sglang.naming import HeadGroups, engine_settings, head_groups_of, weights_now
from engine_adapters.sglang.options import Options
from engine_adapters.sglang.pool_store import PoolStore
from kvstore import KvStoreError, Unavailable

__all__ = ["KvStoreHiCache"]

Mask = NDArray[np.bool_]
P = ParamSpec("P")
T = TypeVar("T")

SAMPLES_MAX = 1024  # of transfers, between two looks of the engine's metrics

log = logging.getLogger(__name__)


def _or_miss(miss: Callable[..., T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Answer with `miss(...)`, of the same arguments, when a call fails: the engine's threads must live."""

    def guard(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except KvStoreError as fault:
                log.warning("%s: %s; it reads as a miss", call.__name__, fault)
            except Exception:  # of whatever kind: the engine's storage threads serve all requests, and must live
                log.exception("%s met a bug; it reads as a miss", call.__name__)
            return miss(*args, **kwargs)

        return guarded

    return guard


def _none_of_them(_: object, keys: Sequence[str], *__: object, **___: object) -> list[bool]:
    return [False] * len(keys)


def _no_tensors(_: object, keys: Sequence[str], *__: object, **___: object) -> list[torch.Tensor | None]:
    return [None] * len(keys)


def _no_transfers(_: object, transfers: Sequence[PoolTransfer], *__: object, **___: object) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _nothing_restorable(*_: object, **__: object) -> PoolTransferResult:
    return PoolTransferResult.empty()


class KvStoreHiCache(HiCacheStorage):
    """HiCache's third level in a kvstore. Options: `engine_adapters.sglang.options`, or docs/sglang.md.

    Raises UsageError when an option is wrong, which ends the engine's start with one line.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs  # the factory hands over an empty dict
        self._config = storage_config
        self._options = Options.parse(storage_config.extra_config)
        self._groups = head_groups_of(storage_config)
        self._settings = engine_settings()
        self._weights = weights_now()
        self._first_path = self._weights[1]
        self._generation: object = None  # of the host pool's slots, when a call last came with these weights
        self._registered: dict[str, tuple[Any, HeadGroups]] = {}
        self._pools: dict[str, PoolStore] = {}
        self._opening = threading.Lock()
        self._samples: dict[str, deque[tuple[int, float]]] = {
            way: deque(maxlen=SAMPLES_MAX) for way in ("prefetch", "backup")
        }
        self._lock = threading.Lock()

    # --- pools -------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV. One without memory stands for others, which come by `register_mem_host_pool_v2`."""
        super().register_mem_pool_host(mem_pool_host)
        if mem_pool_host.kv_buffer is not None:
            self._add(PoolName.KV, mem_pool_host, self._groups)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """A further pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name == PoolName.KV and PoolName.KV in self._pools:
            return  # the one above, once more
        if host_pool.kv_buffer is not None or host_pool_name != PoolName.KV:
            self._add(host_pool_name, host_pool, self._groups if host_pool_name == PoolName.KV else HeadGroups())

    def _add(self, name: str, pool: Any, groups: HeadGroups) -> None:
        with self._opening:
            self._registered[name] = (pool, groups)
            former = self._pools.pop(name, None)
            if former is not None:
                former.link.close()
            self._open(name)

    def _open(self, name: str) -> None:
        pool, groups = self._registered[name]
        version, path = self._weights
        # Workers may have the same weights in different places: the place counts only once it has changed.
        updated_from = "" if path == self._first_path else path
        settings = self._settings | {"weight_version": version, "updated_from": updated_from}
        store = PoolStore(self._options, self._config, pool, name=str(name), groups=groups, settings=settings)
        self._pools[name] = store
        space = store.namespace
        log.info("pool %s: %d bytes a page, namespace %s", name, store.page_bytes, space.digest.hex())

    def _current(self) -> dict[str, PoolStore]:
        """The pools, in the namespaces of the weights that the engine has now.

        Raises:
            Unavailable: the weights were updated, but pages of the old ones may still be on their way to us: the engine
            has not emptied its host pool yet.
        """
        weights, generation = weights_now(), getattr(self.mem_pool_host, "mem_state", None)
        with self._opening:
            if weights != self._weights:
                if generation is self._generation:
                    raise Unavailable(f"the weights are {weights!r} now, the pages still those of {self._weights!r}")
                self._weights = weights
                self.close()
                self._pools = {}  # first of all: whatever happens now, none of the old ones is used again
                for name in self._registered:
                    self._open(name)
            self._generation = generation
            return self._pools

    # --- v1: pages of the KV pool ------------------------------------------------------------------------------------

    @_or_miss(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Pages before the first one that is missing."""
        return _leading(self._current()[PoolName.KV].exists(keys))

    @_or_miss(_none_of_them)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; which have arrived."""
        return self._timed("prefetch", self._current()[PoolName.KV], PoolStore.get, keys, host_indices)

    @_or_miss(_none_of_them)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages from the host pool; which are kept. Where all ranks hold the same, one of them writes."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._timed("backup", self._current()[PoolName.KV], PoolStore.set, keys, host_indices)

    # --- generic: flat pages -----------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read a page into a flat tensor; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    @_or_miss(_no_tensors)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors; None for each miss."""
        found = self._current()[PoolName.KV].get_flat(keys, target_locations)
        return [target if ok else None for target, ok in zip(target_locations, found.tolist(), strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a flat page; whether it is kept."""
        return self.batch_set([key], [value])

    @_or_miss(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write flat pages; whether all are kept."""
        if not self._config.is_storage_writer:
            return True
        return bool(self._current()[PoolName.KV].set_flat(keys, values).all())

    # --- v2: several pools -------------------------------------------------------------------------------------------

    @_or_miss(_nothing_restorable)
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The prefix that can be restored from all pools, and every length at which it could be cut."""
        pools = self._current()
        own = pools.get(PoolName.KV)
        kv_pages = len(keys) if own is None else _leading(own.exists(keys))
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        usable = np.ones(kv_pages, np.bool_)  # [i]: a prefix of i + 1 pages
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of the same pages, which by its contract never limits the hit
            ends = _restorable(pools[transfer.name].exists(keys[:kv_pages]), transfer)
            if ends.any():
                hits[transfer.name] = int(np.flatnonzero(ends)[-1]) + 1
            usable &= ends
        lengths = (np.flatnonzero(usable) + 1).tolist()
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    @_or_miss(_no_transfers)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools into host memory; which have arrived."""
        return {transfer.name: self._move("prefetch", PoolStore.get, transfer) for transfer in transfers}

    @_or_miss(_no_transfers)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of several pools; which are kept."""
        return {transfer.name: self._move("backup", PoolStore.set, transfer) for transfer in transfers}

    def _move(
        self, way: str, call: Callable[[PoolStore, Sequence[str], torch.Tensor], Mask], transfer: PoolTransfer
    ) -> list[bool]:
        keys = transfer.keys or []
        if transfer.host_indices is None:
            return [False] * len(keys)
        return self._timed(way, self._current()[transfer.name], call, keys, transfer.host_indices)

    # --- the rest ----------------------------------------------------------------------------------------------------

    @_or_miss(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove the blocks of this engine's namespaces, and so of all engines that share them; whether that worked."""
        clients = [pool.link.first for pool in self._current().values()]
        removed = [client.flush() for client in clients if client is not None]
        return len(removed) == len(clients)

    def close(self) -> None:
        """End all sessions. Idempotent; later calls are misses."""
        for pool in list(self._pools.values()):
            pool.link.close()

    def get_stats(self) -> Any:
        """The engine's `StorageMetrics` of what was moved since the last call; None where it wants none."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415 - loads Prometheus

        with self._lock:
            taken = {way: list(samples) for way, samples in self._samples.items()}
            for samples in self._samples.values():
                samples.clear()
        metrics = StorageMetrics()
        metrics.prefetch_pgs, metrics.prefetch_bandwidth = _columns(taken["prefetch"])
        metrics.backup_pgs, metrics.backup_bandwidth = _columns(taken["backup"])
        return metrics

    def _timed(
        self,
        way: str,
        pool: PoolStore,
        call: Callable[[PoolStore, Sequence[str], torch.Tensor], Mask],
        keys: Sequence[str],
        host_indices: torch.Tensor,
    ) -> list[bool]:
        began_s = time.perf_counter()
        moved = call(pool, keys, host_indices)
        took_s = time.perf_counter() - began_s
        pages = int(np.count_nonzero(moved))
        if pages:
            with self._lock:
                self._samples[way].append((pages, pages * pool.page_bytes / took_s / 1e9))
        return moved.tolist()


def _leading(mask: Mask) -> int:
    gaps = np.flatnonzero(~mask)
    return int(gaps[0]) if len(gaps) else len(mask)


def _restorable(there: Mask, transfer: PoolTransfer) -> Mask:
    """At which ends of a prefix this pool can be restored: [i] is for i + 1 pages."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return np.logical_and.accumulate(there)
    window = max(1, len(transfer.keys or ()))
    seen = np.concatenate([np.zeros(1, np.int64), np.cumsum(there)])  # seen[i]: how many of the first i pages are there
    ends = np.arange(1, len(there) + 1)
    first = np.maximum(0, ends - window)
    return seen[ends] - seen[first] == ends - first


def _columns(samples: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [pages for pages, _ in samples], [speed for _, speed in samples]
