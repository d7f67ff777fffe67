"""The storage backend's contract, on the engine's real base class, factory and host pools."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetrics

from engine_adapters.sglang.backend import KvStoreHiCache
from engine_adapters.sglang.pages import DirectPages, FlatPages, GatheredPages, pages_of
from kvstore import UsageError
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.engines.sglang.pools import PAGE, PAGES, POOLS, host_pool, page, slots_of, storage_config

TIMEOUT_S = 10.0  # where nothing fails: a busy machine is no fault
FAULT_TIMEOUT_S = 1.0
ENGINE = {
    "backend_name": "kvstore",
    "module_path": "engine_adapters.sglang.backend",
    "class_name": "KvStoreHiCache",
    "interface_v1": 1,
}
every_pool = pytest.mark.parametrize("kind", POOLS)


def hashes(count: int, prompt: str = "prompt") -> list[str]:
    """Page hashes as the engine makes them: chained SHA-256, in hexadecimal digits."""
    chain: list[str] = []
    for number in range(count):
        before = bytes.fromhex(chain[-1]) if chain else b""
        chain.append(hashlib.sha256(before + f"{prompt} {number}".encode()).hexdigest())
    return chain


Open = Callable[..., KvStoreHiCache]


@pytest.fixture
def backend(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes backends as the engine's factory does, with a namespace of this test's own."""
    opened: list[KvStoreHiCache] = []

    def make(pool: Any, *, config: dict[str, Any] | None = None, **options: Any) -> KvStoreHiCache:
        extra = ENGINE | {"address": server.address, "revision": request.node.name, "timeout_s": TIMEOUT_S} | options
        made: Any = StorageBackendFactory.create_backend(
            "dynamic", storage_config(extra_config=extra, **(config or {})), pool
        )
        made.register_mem_pool_host(pool)
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.close()


# ------------------------------------------------------------------------------------------------------------------ v1


@every_pool
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_saved_by_one_engine_arrive_whole_in_another(backend: Open, kind: str, transport: str) -> None:
    source, target = host_pool(kind, seed=1), host_pool(kind)
    keys = hashes(5)
    saver, loader = backend(source, transport=transport), backend(target, transport=transport)
    assert loader.batch_exists(keys) == 0
    assert saver.batch_set_v1(keys, slots_of(7, 3, 4, 39, 0)) == [True] * 5
    assert loader.batch_exists(keys) == 5
    assert loader.batch_get_v1(keys, slots_of(2, 9, 1, 30, 39)) == [True] * 5
    for saved, loaded in zip((7, 3, 4, 39, 0), (2, 9, 1, 30, 39), strict=True):
        assert torch.equal(page(source, saved), page(target, loaded))
    assert not page(target, 3).any(), "a page that nobody asked for was written"


def test_only_pages_with_parts_of_several_sizes_or_without_pointers_are_staged() -> None:
    found = {kind: type(pages_of(host_pool(kind))) for kind in [*POOLS, "mamba-page_first"]}
    gathered = {"asymmetric-page_first", "asymmetric-page_first_direct", "mamba-page_first"}
    assert {kind for kind, pages in found.items() if pages is GatheredPages} == gathered
    assert {kind for kind, pages in found.items() if pages is FlatPages} == {"flat-layer_first"}
    assert {kind for kind, pages in found.items() if pages is DirectPages} == set(POOLS) - gathered - {
        "flat-layer_first"
    }


def test_a_pool_that_gives_no_pages_at_all_ends_the_start_with_one_line(backend: Open) -> None:
    pool = host_pool("flat-layer_first")
    pool.layout = "another"
    with pytest.raises(UsageError, match=r"^host pool MHATokenToKVPoolHost, layout another: it gives no pages"):
        backend(pool)


@every_pool
def test_exists_counts_the_pages_before_the_first_gap(backend: Open, kind: str) -> None:
    keys = hashes(6)
    saver = backend(host_pool(kind, seed=1))
    saver.batch_set_v1(keys[:2], slots_of(0, 1))
    saver.batch_set_v1(keys[3:], slots_of(3, 4, 5))
    assert [saver.batch_exists(keys[first:]) for first in (0, 2, 3)] == [2, 0, 3]
    assert [saver.exists(key) for key in keys] == [True, True, False, True, True, True]


@every_pool
def test_a_gap_is_told_page_by_page(backend: Open, kind: str) -> None:
    keys = hashes(4)
    source, target = host_pool(kind, seed=1), host_pool(kind)
    saver, loader = backend(source), backend(target)
    saver.batch_set_v1(keys[:2], slots_of(0, 1))
    assert loader.batch_get_v1(keys, slots_of(0, 1, 2, 3)) == [True, True, False, False]
    assert torch.equal(page(source, 1), page(target, 1))


def test_what_is_there_counts_as_kept_and_is_not_written_again(backend: Open) -> None:
    keys = hashes(3)
    first, second = host_pool("mha-page_first", seed=1), host_pool("mha-page_first", seed=2)
    backend(first).batch_set_v1(keys[:2], slots_of(0, 1))
    again = backend(second)
    assert again.batch_set_v1(keys, slots_of(0, 1, 2)) == [True] * 3
    assert again.batch_get_v1(keys, slots_of(10, 11, 12)) == [True] * 3
    assert [torch.equal(page(second, 10 + at), page(first, at)) for at in (0, 1)] == [True, True]
    assert torch.equal(page(second, 12), page(second, 2))


@pytest.mark.parametrize(
    "slots",
    [
        slots_of(0),
        slots_of(0, 1)[:-1],
        slots_of(0, 1) + 1,
        slots_of(0, 1).flip(0),
        slots_of(0, PAGES),
        slots_of(0, 1) - PAGE,
    ],
    ids=["too few", "a slot short", "shifted", "reversed", "behind the pool", "before the pool"],
)
def test_slots_that_are_no_whole_pages_move_nothing(backend: Open, slots: torch.Tensor) -> None:
    pool = host_pool("mha-layer_first", seed=1)
    store = backend(pool)
    before = pool.kv_buffer.view(torch.uint8).clone()
    assert store.batch_set_v1(hashes(2), slots) == [False, False]
    assert store.batch_exists(hashes(2)) == 0
    store.batch_set_v1(hashes(2), slots_of(5, 6))
    assert store.batch_get_v1(hashes(2), slots) == [False, False]
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before)


# -------------------------------------------------------------------------------------------------------- generic path


@pytest.mark.parametrize("kind", [kind for kind in POOLS if not kind.startswith("asymmetric")])
def test_flat_pages_and_pool_pages_are_the_same_blocks(backend: Open, kind: str) -> None:
    source, target = host_pool(kind, seed=1), host_pool(kind)
    keys = hashes(4)
    saver, loader = backend(source), backend(target)
    assert saver.batch_set(keys[:2], [source.get_data_page(slot) for slot in (0, PAGE)])
    assert saver.batch_set_v1(keys[2:], slots_of(2, 3)) == [True, True]
    assert loader.batch_get_v1(keys[:2], slots_of(0, 1)) == [True, True]
    pages = loader.batch_get(keys[2:], [target.get_dummy_flat_data_page() for _ in range(2)])
    for number, flat in enumerate(pages, start=2):
        assert flat is not None
        target.set_from_flat_data_page(number * PAGE, flat)
    assert all(torch.equal(page(source, number), page(target, number)) for number in range(4))


def test_single_pages_go_by_get_and_set(backend: Open) -> None:
    pool = host_pool("mha-layer_first", seed=1)
    store = backend(pool)
    (key,) = hashes(1)
    assert store.get(key, pool.get_dummy_flat_data_page()) is None
    assert store.set(key, pool.get_data_page(0))
    found = store.get(key, pool.get_dummy_flat_data_page())
    assert found is not None
    assert torch.equal(found.view(torch.uint8), page(pool, 0))


def test_a_flat_page_of_another_size_is_a_miss(backend: Open) -> None:
    pool = host_pool("mha-layer_first", seed=1)
    store = backend(pool)
    keys = hashes(2)
    assert not store.batch_set(keys, [pool.get_data_page(0), pool.get_data_page(PAGE)[:-1]])
    assert store.batch_get(keys, [pool.get_dummy_flat_data_page()[:-1]] * 2) == [None, None]


# ----------------------------------------------------------------------------------------------- what is kept apart


@pytest.mark.parametrize(
    ("pool", "config", "options"),
    [
        ({"dtype": torch.bfloat16}, {}, {}),
        ({"dtype": torch.float8_e4m3fn}, {}, {}),
        ({"kind": "mha-page_first_direct"}, {}, {}),
        ({"kind": "mha-layer_first"}, {}, {}),
        ({"heads": 2}, {}, {}),
        ({}, {"tp_rank": 1, "tp_size": 2}, {}),
        ({}, {"tp_rank": 0, "tp_size": 2}, {}),
        ({}, {"pp_rank": 0, "pp_size": 2}, {}),
        ({}, {"attn_cp_size": 2}, {}),
        ({}, {"model_name": "org/other"}, {}),
        ({}, {}, {"revision": "another"}),
        ({}, {}, {"tenant": "another"}),
        ({}, {}, {"adapter": "another"}),
    ],
    ids=str,
)
def test_what_makes_other_kv_has_no_hit(
    backend: Open, pool: dict[str, Any], config: dict[str, Any], options: dict[str, Any]
) -> None:
    keys = hashes(3)
    saver = backend(host_pool("mha-page_first", seed=1))
    assert saver.batch_set_v1(keys, slots_of(0, 1, 2)) == [True] * 3
    told: dict[str, Any] = {"kind": "mha-page_first"}
    other = host_pool(**(told | pool))
    loader = backend(other, config=config, **options)
    assert loader.batch_exists(keys) == 0
    assert loader.batch_get_v1(keys, slots_of(0, 1, 2)) == [False] * 3
    assert not any(page(other, number).any() for number in range(3))


def test_updated_weights_have_no_hit_and_keep_nothing_of_the_old_ones(
    backend: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says which weights it has, and empties its host pool after an update, not at once."""
    version = "v1"
    monkeypatch.setattr("engine_adapters.sglang.backend.weight_version", lambda: version)
    old, new = hashes(2, "old"), hashes(2, "new")
    pool = host_pool("mha-page_first", seed=1)
    store = backend(pool)
    assert store.batch_set_v1(old, slots_of(0, 1)) == [True, True]
    version = "v2"
    assert store.batch_set_v1(new, slots_of(0, 1)) == [False, False], "pages that the old weights computed"
    assert store.batch_exists(old) == 0
    pool.clear()
    assert (store.batch_exists(old), store.batch_exists(new)) == (0, 0)
    assert store.batch_set_v1(new, slots_of(0, 1)) == [True, True]
    assert store.batch_exists(new) == 2
    updated_before = backend(host_pool("mha-page_first"))
    assert (updated_before.batch_exists(old), updated_before.batch_exists(new)) == (0, 2)
    version = "v1"
    pool.clear()
    assert (store.batch_exists(old), store.batch_exists(new)) == (2, 0)


def test_ranks_with_the_same_latent_kv_share_what_one_of_them_writes(backend: Open) -> None:
    keys = hashes(2)
    config = {"is_mla_model": True, "tp_size": 2}
    source, target = host_pool("mla-page_first", seed=1), host_pool("mla-page_first")
    writer, other = backend(source, config=config | {"tp_rank": 0}), backend(target, config=config | {"tp_rank": 1})
    assert other.batch_set_v1(keys, slots_of(5, 6)) == [True, True]
    assert writer.batch_exists(keys) == 0
    writer.batch_set_v1(keys, slots_of(0, 1))
    assert other.batch_get_v1(keys, slots_of(0, 1)) == [True, True]
    assert torch.equal(page(source, 1), page(target, 1))


@pytest.mark.parametrize("writers", [1, 2])
def test_with_split_heads_one_tensor_parallel_size_reads_what_another_wrote(backend: Open, writers: int) -> None:
    """Layout page_head and tp_lcm_size=2: an engine of one rank with four heads, and one of two ranks with two each."""
    keys = hashes(3)
    whole = host_pool("mha-page_head", seed=1 if writers == 1 else None)
    halves = [host_pool("mha-page_head", heads=2, seed=None if writers == 1 else 2 + rank) for rank in range(2)]
    split: dict[str, Any] = {"tp_lcm_size": 2}
    one = backend(whole, config=split | {"should_split_heads": True})
    two = [backend(half, config=split | {"tp_rank": rank, "tp_size": 2}) for rank, half in enumerate(halves)]
    savers, loaders = ([one], two) if writers == 1 else (two, [one])
    for saver in savers:
        assert loaders[-1].batch_exists(keys) == 0
        assert saver.batch_set_v1(keys, slots_of(4, 5, 6)) == [True] * 3
    for loader in loaders:
        assert loader.batch_get_v1(keys, slots_of(4, 5, 6)) == [True] * 3
    for rank, half in enumerate(halves):
        # [k|v][page][head, slot, layer, dim]: the heads of a rank are a slice of the whole pool's.
        mine, same = whole.kv_buffer[:, 4:7, 2 * rank : 2 * rank + 2], half.kv_buffer[:, 4:7]
        assert torch.equal(mine.contiguous().view(torch.uint8), same.contiguous().view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------- v2


def sidecar(name: PoolName, keys: list[str], policy: PoolHitPolicy, *pages: int) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=slots_of(*pages) if pages else None, hit_policy=policy)


def test_pages_of_several_pools_travel_together(backend: Open) -> None:
    keys = hashes(4)
    pools = [(host_pool("mha-page_first", seed=s), host_pool("mla-layer_first", seed=s)) for s in (1, None)]
    saver, loader = backend(pools[0][0]), backend(pools[1][0])
    for made, (_, extra) in zip((saver, loader), pools, strict=True):
        made.register_mem_host_pool_v2(extra, PoolName.INDEXER)
        made.on_host_pools_registered()
    policy = PoolHitPolicy.ALL_PAGES
    saver.batch_set_v1(keys, slots_of(0, 1, 2, 3))
    assert saver.batch_set_v2([sidecar(PoolName.INDEXER, keys[:3], policy, 0, 1, 2)]) == {"indexer": [True] * 3}
    found = loader.batch_exists_v2(keys, [sidecar(PoolName.INDEXER, keys, policy)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {"kv": 4, "indexer": 3})
    got = loader.batch_get_v2([sidecar(PoolName.INDEXER, keys, policy, 5, 6, 7, 8)])
    assert got == {"indexer": [True, True, True, False]}
    assert torch.equal(page(pools[0][1], 2), page(pools[1][1], 7))


def test_the_recurrent_states_of_a_hybrid_model_travel_beside_its_pages(backend: Open) -> None:
    """A state stands for the whole prefix before it, so one at its end is enough; each rank has its own."""
    keys = hashes(4)
    states = [host_pool("mamba-page_first", seed=s) for s in (5, None)]
    latent: dict[str, Any] = {"is_mla_model": True, "tp_size": 2}
    engines = [backend(host_pool("mla-page_first", seed=1), config=latent | {"tp_rank": rank}) for rank in (0, 0, 1)]
    for engine, pool in zip(engines, [*states, states[1]], strict=True):
        engine.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    saver, loader, other_rank = engines

    def state(keys: list[str], *slots: int) -> PoolTransfer:
        indices = torch.tensor(slots) if slots else None
        policy = PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=PoolName.MAMBA, keys=keys, host_indices=indices, hit_policy=policy)

    saver.batch_set_v1(keys, slots_of(0, 1, 2, 3))
    assert saver.batch_set_v2([state(keys[2:3], 7)]) == {"mamba": [True]}
    found = loader.batch_exists_v2(keys, [state(keys[-1:])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert other_rank.batch_exists_v2(keys, [state(keys[-1:])]).kv_hit_pages == 0
    assert loader.batch_get_v2([state(keys[2:3], 11)]) == {"mamba": [True]}
    assert torch.equal(*(pool.get_data_page(slot) for pool, slot in zip(states, (7, 11), strict=True)))
    assert states[1].get_data_page(10).count_nonzero() == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv=st.integers(0, 6),
    whole=st.sets(st.integers(0, 5)),
    tail=st.sets(st.integers(0, 5)),
    window=st.integers(1, 3),
    number=st.integers(0, 2**32),
)
def test_a_hybrid_prefix_is_restorable_where_the_engines_own_file_backend_says_so(
    backend: Open, tmp_path: Path, kv: int, whole: set[int], tail: set[int], window: int, number: int
) -> None:
    pool, keys = host_pool("mla-page_first", seed=1), hashes(6, str(number))
    ours = backend(pool)
    theirs = HiCacheFile(storage_config(), str(tmp_path))
    theirs.register_mem_pool_host(pool)
    for made in (ours, theirs):
        for name in (PoolName.INDEXER, PoolName.SWA):
            made.register_mem_host_pool_v2(pool, name)
    for at in range(kv):
        ours.batch_set_v1([keys[at]], slots_of(at))
        theirs.set(keys[at], pool.get_data_page(at * PAGE))
    for name, pages in ((PoolName.INDEXER, whole), (PoolName.SWA, tail)):
        for at in pages:
            for made in (ours, theirs):
                made.batch_set_v2([sidecar(name, [keys[at]], PoolHitPolicy.ALL_PAGES, at)])
    asked = [
        sidecar(PoolName.INDEXER, keys, PoolHitPolicy.ALL_PAGES),
        sidecar(PoolName.SWA, keys[:window], PoolHitPolicy.TRAILING_PAGES),
    ]
    mine, file = ours.batch_exists_v2(keys, asked), theirs.batch_exists_v2(keys, asked)
    assert (mine.kv_hit_pages, mine.restorable_prefix_pages) == (file.kv_hit_pages, file.restorable_prefix_pages)
    ours.close()


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"adress": "x"}, "option 'adress': not known; the options are revision, address, model"),
        ({"revision": ""}, "revision='': allowed is the commit or digest of the weights"),
        ({"timeout_s": "2"}, "timeout_s='2': allowed is a number of seconds"),
        ({"timeout_s": 0}, "timeout_s=0: allowed is 0.001 to 60 seconds"),
        ({"transport": "rdma"}, "transport='rdma': allowed is one of auto, shm, mooncake, tcp"),
        ({"checksums": 1}, "checksums=1: allowed is true or false"),
        ({"address": []}, "address=(): allowed is 'host:port', several of them, or 'local'"),
    ],
)
def test_a_wrong_option_ends_the_start_with_one_line(backend: Open, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match="^" + line.replace("(", r"\(").replace(")", r"\)")) as refusal:
        backend(host_pool("mha-page_first"), **options)
    assert "\n" not in str(refusal.value)


def test_a_model_that_has_only_a_folder_must_be_named(backend: Open) -> None:
    with pytest.raises(UsageError, match=r"^option 'model' is missing"):
        backend(host_pool("mha-page_first"), config={"model_name": "/models/tiny"})
    backend(host_pool("mha-page_first"), config={"model_name": "/models/tiny"}, model="org/tiny")


# ------------------------------------------------------------------------------------------------------------ faults


def faulty_store(address: str, pool: Any, transport: str = "auto") -> KvStoreHiCache:
    """A backend with a short timeout; on a busy machine it may find its server a little later."""
    extra = ENGINE | {"address": address, "revision": "r", "timeout_s": FAULT_TIMEOUT_S, "transport": transport}
    store = KvStoreHiCache(storage_config(extra_config=extra))
    store.register_mem_pool_host(pool)
    return store


def elapsed(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["mha-layer_first", "mha-page_first", "mla-page_first"])
def test_a_killed_server_reads_as_a_miss_and_a_new_one_serves_again(kind: str, transport: str) -> None:
    keys, more = hashes(3), hashes(3, "more")
    pool = host_pool(kind, seed=1)
    with ServerProcess(dram="32MiB") as server:
        store = faulty_store(server.address, pool, transport)
        until(lambda: store.batch_set_v1(keys, slots_of(0, 1, 2)) == [True] * 3, 20, "the server")
        server.kill()
        assert elapsed(lambda: store.batch_get_v1(keys, slots_of(3, 4, 5))) < FAULT_TIMEOUT_S + 1
        assert store.batch_get_v1(keys, slots_of(3, 4, 5)) == [False] * 3
        assert store.batch_exists(keys) == 0
        assert store.batch_set_v1(more, slots_of(0, 1, 2)) == [False] * 3
        assert store.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys]) == [None] * 3
        server.start()
        until(lambda: store.batch_set_v1(more, slots_of(0, 1, 2)) == [True] * 3, 20, "the new server")
        assert store.batch_exists(keys) == 0
        assert store.batch_get_v1(more, slots_of(3, 4, 5)) == [True] * 3
        assert torch.equal(page(pool, 5), page(pool, 2))
        store.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["mha-layer_first", "mha-page_first", "mla-page_first"])
def test_a_frozen_server_costs_its_timeout_once(kind: str, transport: str) -> None:
    keys, more = hashes(3), hashes(3, "more")
    pool = host_pool(kind, seed=1)
    with ServerProcess(dram="32MiB") as server:
        store = faulty_store(server.address, pool, transport)
        until(lambda: store.batch_set_v1(keys, slots_of(0, 1, 2)) == [True] * 3, 20, "the server")
        server.freeze()
        try:
            assert elapsed(lambda: store.batch_set_v1(more, slots_of(0, 1, 2))) < FAULT_TIMEOUT_S + 1
            for call in (
                lambda: store.batch_set_v1(more, slots_of(0, 1, 2)),
                lambda: store.batch_get_v1(more, slots_of(3, 4, 5)),
                lambda: store.batch_exists(more),
            ):
                assert elapsed(call) < 0.5, "the link is known to be down, nothing is to be waited for"
            assert store.batch_get_v1(more, slots_of(3, 4, 5)) == [False] * 3
        finally:
            server.thaw()
        until(lambda: store.batch_exists(keys) == 3, 20, "the server, awake again")
        store.close()


def test_an_engine_starts_without_a_store_and_finds_it_later() -> None:
    keys = hashes(2)
    server = ServerProcess(dram="32MiB").start()
    server.stop()
    store = faulty_store(server.address, host_pool("mha-page_first", seed=1))
    assert store.batch_set_v1(keys, slots_of(0, 1)) == [False, False]
    assert store.batch_exists(keys) == 0
    server.start()
    try:
        until(lambda: store.batch_set_v1(keys, slots_of(0, 1)) == [True, True], 20, "the store")
        assert store.batch_exists(keys) == 2
    finally:
        store.close()
        server.close()


def test_a_bug_reads_as_a_miss_and_is_logged(
    backend: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = backend(host_pool("mha-page_first"))
    monkeypatch.setattr("engine_adapters.sglang.pool_store.page_keys", None)
    assert store.batch_exists(hashes(2)) == 0
    assert store.batch_get_v1(hashes(2), slots_of(0, 1)) == [False, False]
    assert store.batch_set(hashes(1), [store.mem_pool_host.get_data_page(0)]) is False
    assert "batch_exists met a bug; it reads as a miss" in caplog.text


# -------------------------------------------------------------------------------------------------------------- rest


def test_clear_removes_this_models_pages_and_no_others(backend: Open) -> None:
    keys = hashes(2)
    mine, other = backend(host_pool("mha-page_first", seed=1)), backend(host_pool("mha-page_first"), revision="kept")
    for store in (mine, other):
        store.batch_set_v1(keys, slots_of(0, 1))
    assert mine.clear()
    assert (mine.batch_exists(keys), other.batch_exists(keys)) == (0, 2)


def test_after_close_everything_is_a_miss(backend: Open) -> None:
    store = backend(host_pool("mha-page_first"))
    store.batch_set_v1(hashes(2), slots_of(0, 1))
    store.close()
    store.close()
    assert store.batch_exists(hashes(2)) == 0
    assert store.batch_set_v1(hashes(2), slots_of(0, 1)) == [False, False]


def test_the_engines_metrics_get_each_transfer_once(backend: Open) -> None:
    store = backend(host_pool("mha-page_first"), config={"enable_storage_metrics": True})
    store.batch_set_v1(hashes(3), slots_of(0, 1, 2))
    store.batch_get_v1(hashes(3)[:2], slots_of(3, 4))
    told = store.get_stats()
    assert isinstance(told, StorageMetrics)
    assert (told.backup_pgs, told.prefetch_pgs) == ([3], [2])
    assert all(speed > 0 for speed in told.backup_bandwidth + told.prefetch_bandwidth)
    assert store.get_stats() == StorageMetrics()
    assert backend(host_pool("mha-page_first")).get_stats() is None
