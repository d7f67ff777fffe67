"""The plugin's contract, through LMCache's own plugin loader, remote backend, wrapper and memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

import kvstore
from engine_adapters.lmcache import connector as connector_module
from engine_adapters.lmcache.chunks import chunks_of, digest_of, namespaces_of
from engine_adapters.lmcache.options import Options
from kvstore import UsageError
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.engines.lmcache.worker import CHUNK, MODEL, Model, Worker, config_of, content, other

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")  # LMCache's own

TIMEOUT_S = 1.0
LEAKED = "is being garbage collected"  # LMCache's complaint about memory that nobody gave back
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
BASE = Model()

Open = Callable[..., Worker]


@pytest.fixture
def revision(request: pytest.FixtureRequest) -> str:
    """Of this test's own."""
    return request.node.name


@pytest.fixture
def worker(server: ServerProcess, revision: str) -> Iterator[Open]:
    """Makes workers of engines."""
    opened: list[Worker] = []

    def make(model: Model = BASE, /, *, has_memory: bool = True, plugin: str = "kvstore", **told: Any) -> Worker:
        address, version = told.pop("address", server.address), told.pop("revision", revision)
        config = config_of(address, version, plugin, chunk_size=model.chunk, **told)
        opened.append(Worker(config, model, plugin, has_memory))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


# --------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_saved_by_one_engine_arrive_whole_in_another(
    worker: Open, dtype: torch.dtype, latent: bool, transport: str
) -> None:
    model = Model(dtype=dtype, latent=latent)
    saver, loader = worker(model, transport=transport), worker(model, transport=transport)
    keys = model.keys(3)
    chunks = [saver.chunk(seed=1), saver.chunk(seed=2), saver.chunk(20, seed=3)]
    assert loader.remote.batched_contains(keys) == 0
    saver.save(keys, chunks)
    assert loader.remote.batched_contains(keys) == 3
    loaded = loader.load(keys)
    assert [content(chunk) for chunk in loaded] == [content(chunk) for chunk in chunks]
    for mine, its in zip(loaded, chunks, strict=True):
        assert mine is not None
        assert (mine.get_shapes(), mine.get_dtypes()) == (its.get_shapes(), its.get_dtypes())
        assert mine.get_memory_format() == its.get_memory_format()


def test_one_chunk_at_a_time_works_as_well(worker: Open) -> None:
    saver, loader = worker(), worker()
    key, chunk = BASE.key(), saver.chunk(seed=1)
    assert not loader.remote.contains(key)
    assert loader.remote.get_blocking(key) is None
    saver.remote.submit_put_task(key, chunk).result(10)
    assert loader.remote.contains(key)
    assert loader.connector.exists_sync(key)
    assert content(loader.remote.get_blocking(key)) == content(chunk)


def test_lookups_tell_the_chunks_before_the_first_gap(worker: Open) -> None:
    saver = worker()
    keys = BASE.keys(5)
    saver.save([*keys[:2], keys[3]], [saver.chunk(seed=n) for n in range(3)])
    assert [saver.remote.batched_contains(keys[first:]) for first in (0, 2, 3)] == [2, 0, 1]
    assert saver.run(saver.remote.batched_async_contains("lookup", keys)) == 2
    assert saver.remote.batched_contains([]) == 0


def test_a_gap_is_a_gap_and_what_is_behind_it_arrives(worker: Open) -> None:
    saver, loader = worker(), worker()
    keys = BASE.keys(4)
    chunks = [saver.chunk(seed=n) for n in range(3)]
    saver.save([keys[0], keys[1], keys[3]], chunks)
    loaded = loader.load(keys)
    assert [chunk is None for chunk in loaded] == [False, False, True, False]
    assert content(loaded[3]) == content(chunks[2])


def test_without_waiting_only_the_chunks_before_the_gap_are_given_and_the_others_freed(
    worker: Open, caplog: pytest.LogCaptureFixture
) -> None:
    saver, loader = worker(), worker()
    free = loader.free_bytes()
    keys = BASE.keys(4)
    chunks = [saver.chunk(seed=n) for n in range(3)]
    saver.save([keys[0], keys[1], keys[3]], chunks)
    loaded = loader.run(loader.remote.batched_get_non_blocking("lookup", keys))
    assert [content(chunk) for chunk in loaded] == [content(chunk) for chunk in chunks[:2]]
    for chunk in loaded:
        chunk.ref_count_down()
    assert loader.free_bytes() == free
    assert LEAKED not in caplog.text


def test_what_is_there_is_not_written_again(worker: Open) -> None:
    saver = worker()
    first, second = saver.chunk(seed=1), saver.chunk(seed=2)
    saver.save([BASE.key()], [first])
    saver.save([BASE.key()], [second])
    assert content(saver.load([BASE.key()])[0]) == content(first)


def test_a_removed_chunk_is_a_miss(worker: Open) -> None:
    saver = worker()
    keys = BASE.keys(2)
    saver.save(keys, [saver.chunk(seed=1), saver.chunk(7, seed=2)])
    assert [saver.remote.remove(key) for key in (*keys, BASE.key(99))] == [True, True, False]
    assert saver.remote.batched_contains(keys) == 0


def test_keys_can_not_be_listed(worker: Open) -> None:
    with pytest.raises(NotImplementedError):
        worker().run(worker().connector.list())


# ------------------------------------------------------------------------------------------------------ shorter chunks


@pytest.mark.parametrize("tokens", [1, 17, CHUNK - 1])
def test_a_prompts_last_chunk_keeps_its_length(worker: Open, tokens: int) -> None:
    saver, loader = worker(), worker()
    chunk = saver.chunk(tokens, seed=1)
    saver.save([BASE.key()], [chunk])
    (loaded,) = loader.load([BASE.key()])
    assert content(loaded) == content(chunk)
    assert loaded is not None
    assert loaded.get_num_tokens() == tokens


def test_an_engine_that_does_not_want_shorter_chunks_neither_stores_nor_finds_them(worker: Open) -> None:
    without, with_them = worker(save_unfull_chunk=False), worker()
    without.save([BASE.key(1)], [without.chunk(9, seed=1)])
    with_them.save([BASE.key(2)], [with_them.chunk(9, seed=2)])
    assert with_them.remote.batched_contains(BASE.keys(1)) == 0
    assert without.remote.batched_contains([BASE.key(2)]) == 0
    assert without.load([BASE.key(2)]) == [None]


def test_a_damaged_header_is_a_miss_and_costs_no_memory(worker: Open, server: ServerProcess, revision: str) -> None:
    loader = worker()
    free = loader.free_bytes()
    metadata = BASE.metadata
    chunks = chunks_of(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD, CHUNK)
    _, shorter = namespaces_of(chunks, Options(revision=revision), metadata)
    with kvstore.connect(server.address, namespace=shorter) as store:
        for number, block in enumerate((b"", b"kvslmc-1" + b"\xff" * 4, b"kvslmc-1" + b"\0" * 4, b"other-01\x05")):
            damaged = np.zeros((1, shorter.block_bytes), dtype=np.uint8)
            damaged[0, : len(block)] = np.frombuffer(block, dtype=np.uint8)
            keys = kvstore.keys_from_digests(shorter, [digest_of(BASE.key(number), MODEL)], scheme=store.scheme)
            assert store.put(keys, damaged).stored == 1
    assert [loader.load([BASE.key(number)]) for number in range(4)] == [[None]] * 4
    assert loader.free_bytes() == free


@pytest.mark.parametrize(
    ("shape", "dtype", "form"),
    [
        ((2, 4, CHUNK, 65), torch.float32, MemoryFormat.KV_2LTD),
        ((2, 5, CHUNK, 64), torch.float32, MemoryFormat.KV_2LTD),
        ((2, 4, CHUNK + 1, 64), torch.float32, MemoryFormat.KV_2LTD),
        ((2, 4, CHUNK, 64), torch.int32, MemoryFormat.KV_2LTD),
        ((2, 4, CHUNK, 64), torch.float32, MemoryFormat.KV_MLA_FMT),
        ((CHUNK, 2, 64), torch.float32, MemoryFormat.KV_T2D),
    ],
    ids=str,
)
def test_a_chunk_that_is_not_the_engines_is_not_stored(
    worker: Open, shape: tuple[int, ...], dtype: torch.dtype, form: MemoryFormat
) -> None:
    saver = worker()
    chunk = saver.memory.allocate(torch.Size(shape), dtype, form)
    assert chunk is not None
    saver.save([BASE.key()], [chunk])
    assert not saver.remote.contains(BASE.key())
    assert chunk.get_ref_count() == 1


# ---------------------------------------------------------------------------------------------- what is never mixed up


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "org/other"},
        {"world_size": 2},
        {"worker_id": 1},
        {"chunk_hash": 2},
        {"chunk_hash": -1},
        {"chunk_hash": b"\x01"},
        {"dtype": torch.bfloat16},
        {"request_configs": {"lmcache.tag.user": "a"}},
    ],
    ids=str,
)
def test_every_part_of_a_key_counts(worker: Open, changed: dict[str, Any]) -> None:
    saver = worker()
    saver.save([BASE.key(1)], [saver.chunk(seed=1)])
    assert saver.remote.batched_contains([BASE.key(**{"chunk_hash": 1, **changed})]) == 0
    assert saver.remote.batched_contains([BASE.key(1, request_configs={"temperature": "1"})]) == 1


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (BASE, {"revision": "another"}),
        (BASE, {"tenant": "another"}),
        (BASE, {"model": "org/renamed"}),
        (other(BASE, dtype=torch.bfloat16), {}),
        (other(BASE, dtype=torch.int32), {}),
        (other(BASE, layers=2, heads=4), {}),
        (other(BASE, layers=5), {}),
        (other(BASE, chunk=32), {}),
        (other(BASE, chunk=32, heads=4), {}),
        (other(BASE, latent=True, heads=4), {}),
        (other(BASE, workers=2), {}),
    ],
    ids=str,
)
def test_an_engine_of_another_kind_gets_misses_for_the_same_key(
    worker: Open, model: Model, told: dict[str, Any]
) -> None:
    saver, loader = worker(), worker(model, **told)
    saver.save(BASE.keys(2), [saver.chunk(seed=1), saver.chunk(5, seed=2)])
    assert loader.remote.batched_contains(BASE.keys(2)) == 0
    assert loader.load(BASE.keys(2)) == [None, None]


def test_with_latent_attention_all_workers_read_the_first_ones_chunks(worker: Open) -> None:
    first, second = (Model(latent=True, workers=2, worker=number) for number in range(2))
    saver, loader = worker(first), worker(second)
    chunk = saver.chunk(seed=1)
    saver.save([first.key()], [chunk])
    assert loader.remote.batched_contains([second.key()]) == 1
    assert content(loader.load([second.key()])[0]) == content(chunk)


def test_workers_with_heads_of_their_own_do_not_read_each_others_chunks(worker: Open) -> None:
    first, second = (Model(workers=2, worker=number) for number in range(2))
    saver, loader = worker(first), worker(second)
    saver.save([first.key()], [saver.chunk(seed=1)])
    assert loader.remote.batched_contains([second.key()]) == 0


def test_hosts_that_keep_the_model_in_other_folders_share_chunks_under_its_name(worker: Open) -> None:
    here, there = Model(name="/models/m"), Model(name="/data/m")
    saver, loader = worker(here, model="org/m"), worker(there, model="org/m")
    saver.save([here.key()], [saver.chunk(seed=1)])
    assert loader.remote.batched_contains([there.key()]) == 1


FIELDS = st.fixed_dictionaries(
    {
        "model_name": st.sampled_from(["m", "m@1", ""]),
        "world_size": st.integers(1, 12),
        "worker_id": st.integers(0, 12),
        "chunk_hash": st.one_of(st.integers(-(2**63), 2**256), st.binary(min_size=1, max_size=32)),
        "dtype": st.sampled_from(DTYPES),
        "request_configs": st.dictionaries(st.sampled_from(["lmcache.tag.a", "lmcache.tag.b"]), st.text(max_size=3)),
    }
)


@given(FIELDS, FIELDS)
def test_keys_are_equal_in_the_store_only_if_they_are_in_lmcache(left: dict[str, Any], right: dict[str, Any]) -> None:
    mine, its = BASE.key(**left), BASE.key(**right)
    assert (digest_of(mine, MODEL) == digest_of(its, MODEL)) == (mine == its)


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_dead_store_is_a_miss_and_a_new_one_is_used(revision: str) -> None:
    with ServerProcess(dram="64MiB") as store:
        worker = Worker(config_of(store.address, revision, chunk_size=CHUNK))
        chunk = worker.chunk(seed=1)
        worker.save([BASE.key()], [chunk])
        store.kill()
        began = time.monotonic()
        assert worker.remote.batched_contains([BASE.key()]) == 0
        assert worker.load([BASE.key()]) == [None]
        worker.save([BASE.key()], [chunk])
        assert time.monotonic() - began < 6 * TIMEOUT_S
        store.start()
        until(lambda: saved(worker, chunk), timeout_s=30, what="a hit in the new store")
        assert content(worker.load([BASE.key()])[0]) == content(chunk)
        worker.close()


def saved(worker: Worker, chunk: Any) -> bool:
    """Whether a chunk is in the store after it was given to it again."""
    worker.save([BASE.key()], [chunk])
    return worker.remote.batched_contains([BASE.key()]) == 1


def test_a_frozen_store_costs_a_bounded_wait_and_no_memory(revision: str) -> None:
    with ServerProcess(dram="64MiB") as store:
        worker = Worker(config_of(store.address, revision, chunk_size=CHUNK, transport="tcp"))
        chunk = worker.chunk(seed=1)
        worker.save([BASE.key()], [chunk])
        chunk.ref_count_down()
        free = worker.free_bytes()
        store.freeze()
        for _ in range(3):
            began = time.monotonic()
            assert worker.remote.batched_contains([BASE.key()]) == 0
            assert worker.load([BASE.key()]) == [None]
            assert time.monotonic() - began < 5 * TIMEOUT_S
        assert worker.free_bytes() == free
        store.thaw()
        until(lambda: worker.remote.batched_contains([BASE.key()]) == 1, timeout_s=30, what="a hit again")
        worker.close()


def test_an_engine_may_start_before_its_store(revision: str) -> None:
    store = ServerProcess(dram="64MiB").start()
    store.kill()
    worker = Worker(config_of(store.address, revision, chunk_size=CHUNK))
    chunk = worker.chunk(seed=1)
    assert worker.remote.batched_contains([BASE.key()]) == 0
    assert worker.load([BASE.key()]) == [None]
    worker.save([BASE.key()], [chunk])
    store.start()
    until(lambda: saved(worker, chunk), timeout_s=30, what="a hit in the store")
    worker.close()
    store.close()


def test_a_request_that_is_given_up_gives_its_memory_back(worker: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = worker()
    keys = BASE.keys(2)
    chunks = [saver.chunk(seed=1), saver.chunk(5, seed=2)]
    saver.save(keys, chunks)
    for chunk in chunks:
        chunk.ref_count_down()
    free = saver.free_bytes()
    reached, go_on = threading.Event(), threading.Event()
    get_into = kvstore.Client.get_into

    def slow(*args: Any, **told: Any) -> kvstore.Fetched:
        fetched = get_into(*args, **told)
        reached.set()
        assert go_on.wait(20)
        return fetched

    monkeypatch.setattr(kvstore.Client, "get_into", slow)
    request = asyncio.run_coroutine_threadsafe(saver.connector.batched_get(keys), saver.loop)
    assert reached.wait(20)
    request.cancel()
    with pytest.raises(CancelledError):
        request.result(20)
    assert saver.free_bytes() < free
    go_on.set()
    until(lambda: saver.free_bytes() == free, what="the memory of a request that was given up")


def test_a_chunk_that_goes_between_lookup_and_read_is_a_miss_and_its_memory_is_given_back(
    worker: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver, loader = worker(), worker()
    free = loader.free_bytes()
    keys = BASE.keys(3)
    chunks = [saver.chunk(seed=n) for n in range(3)]
    saver.save(keys, chunks)
    get_into = kvstore.Client.get_into

    def late(client: kvstore.Client, wanted: kvstore.BlockKeys, *args: Any) -> kvstore.Fetched:
        assert client.delete(wanted[1:2]) == 1
        return get_into(client, wanted, *args)

    monkeypatch.setattr(kvstore.Client, "get_into", late)
    loaded = loader.load(keys)
    assert [chunk is None for chunk in loaded] == [False, True, False]
    for chunk in (loaded[0], loaded[2]):
        assert chunk is not None
        chunk.ref_count_down()
    assert loader.free_bytes() == free
    assert LEAKED not in caplog.text


def test_without_memory_a_hit_is_a_miss_and_nothing_waits(worker: Open) -> None:
    saver, loader = worker(), worker()
    keys = BASE.keys(3)
    saver.save(keys, [saver.chunk(seed=1), saver.chunk(seed=2), saver.chunk(5, seed=3)])
    held: list[MemoryObj] = []
    while (chunk := loader.memory.allocate(torch.Size([2, 4, CHUNK, 64]), torch.float32, busy_loop=False)) is not None:
        held.append(chunk)
    held.pop().ref_count_down()
    began = time.monotonic()
    loaded = loader.load(keys)
    assert time.monotonic() - began < 5
    assert [chunk is None for chunk in loaded] == [False, True, True]
    for chunk in (*held, *loaded[:1]):
        assert chunk is not None
        chunk.ref_count_down()


def test_references_are_as_they_were_after_saves_misses_and_hits(worker: Open) -> None:
    saver, loader = worker(), worker()
    free = loader.free_bytes()
    keys = BASE.keys(2)
    chunks = [saver.chunk(seed=1), saver.chunk(5, seed=2)]
    saver.save(keys, chunks)
    assert [chunk.get_ref_count() for chunk in chunks] == [1, 1]
    loaded = loader.load([*keys, BASE.key(77)])
    assert [chunk.get_ref_count() for chunk in loaded if chunk is not None] == [1, 1]
    for chunk in loaded[:2]:
        assert chunk is not None
        chunk.ref_count_down()
    assert loader.free_bytes() == free


def test_saves_beyond_the_limit_are_left_out_and_hold_no_memory(worker: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = worker()
    limit = connector_module.PUTS_MAX
    gate = threading.Event()
    put = kvstore.Client.put

    def slow(*args: Any, **told: Any) -> kvstore.PutResult:
        assert gate.wait(20)
        return put(*args, **told)

    monkeypatch.setattr(kvstore.Client, "put", slow)
    chunk = saver.chunk(seed=1)
    puts = [
        asyncio.run_coroutine_threadsafe(saver.connector.put(BASE.key(n), chunk), saver.loop) for n in range(limit + 5)
    ]
    until(lambda: sum(each.done() for each in puts) == 5, what="five that were left out")
    assert chunk.get_ref_count() == 1 + limit
    gate.set()
    for each in puts:
        each.result(20)
    until(lambda: chunk.get_ref_count() == 1, what="all references given back")
    assert saver.remote.batched_contains([BASE.key(n) for n in range(limit)]) == limit


def test_a_closed_connector_answers_with_misses(server: ServerProcess, revision: str) -> None:
    worker = Worker(config_of(server.address, revision, chunk_size=CHUNK))
    chunk = worker.chunk(seed=1)
    worker.run(worker.connector.close())
    worker.save([BASE.key()], [chunk])
    assert chunk.get_ref_count() == 1
    assert worker.remote.batched_contains([BASE.key()]) == 0
    assert worker.load([BASE.key()]) == [None]
    worker.close()


def test_a_schedulers_process_without_memory_looks_up(worker: Open) -> None:
    saver, scheduler = worker(), worker(has_memory=False)
    saver.save(BASE.keys(1), [saver.chunk(seed=1)])
    assert scheduler.remote.batched_contains(BASE.keys(2)) == 1
    assert scheduler.load(BASE.keys(1)) == [None]


# ------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"revision": None}, r"remote_storage_plugin\.kvstore\.revision' is missing"),
        ({"revision": ""}, "revision=''"),
        ({"adress": "x"}, r"remote_storage_plugin\.kvstore\.adress': not known; the options are revision, address"),
        ({"timeout_s": "soon"}, "timeout_s='soon': allowed is a number"),
        ({"timeout_s": 9.0}, "timeout_s=9.0: allowed is at most 5, half of LMCache's blocking_timeout_secs"),
        ({"timeout_s": 0}, "timeout_s=0: allowed is 0.001 seconds or more"),
        ({"transport": "rdma"}, "transport='rdma': allowed is one of auto"),
        ({"checksums": "yes"}, "checksums='yes'"),
        ({"address": ""}, "address=''"),
        ({"address": "nowhere:no-port"}, "nowhere:no-port"),
        ({"tenant": 5}, "tenant=5: allowed is text"),
        ({"use_layerwise": True}, "use_layerwise=True: allowed is False"),
        ({"remote_serde": "cachegen"}, "remote_serde='cachegen': allowed is 'naive'"),
    ],
    ids=str,
)
def test_a_wrong_configuration_stops_the_engine_in_one_line(worker: Open, told: dict[str, Any], line: str) -> None:
    with pytest.raises(IrrecoverableException, match=line) as refused:
        worker(**told)
    assert str(refused.value).startswith("plugin kvstore: ")
    assert "\n" not in str(refused.value)


def test_a_local_folder_is_no_name_of_a_model(worker: Open) -> None:
    with pytest.raises(IrrecoverableException, match=r"option 'model' is missing: the engine's '/models/m'"):
        worker(Model(name="/models/m"))


def test_shapes_without_the_tokens_in_their_place_are_refused() -> None:
    with pytest.raises(UsageError, match=r"allowed is \[K and V, layers, 64 tokens, hidden\]"):
        chunks_of([(2, 4, 32, 64)], [torch.float32], MemoryFormat.KV_2LTD, 64)


def test_several_plugins_have_options_of_their_own(worker: Open) -> None:
    saver, other_one = worker(), worker(plugin="kvstore.second", tenant="b")
    saver.save(BASE.keys(1), [saver.chunk(seed=1)])
    assert other_one.remote.batched_contains(BASE.keys(1)) == 0
    assert worker(plugin="kvstore.third").remote.batched_contains(BASE.keys(1)) == 1


# --------------------------------------------------------------------------------------------------------------- parts


@given(st.integers(1, CHUNK - 1), st.sampled_from([Model(), Model(latent=True, dtype=torch.bfloat16)]))
def test_a_shorter_chunk_is_what_it_was(tokens: int, model: Model) -> None:
    metadata = model.metadata
    chunks = chunks_of(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD, CHUNK)
    payload = np.random.default_rng(tokens).integers(0, 256, tokens * chunks.token_bytes, dtype=np.uint8)
    unpacked = chunks.unpack(chunks.pack(payload, tokens))
    assert unpacked is not None
    assert unpacked[0] == tokens
    assert np.array_equal(unpacked[1], payload)
