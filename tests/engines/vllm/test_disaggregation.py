"""A prefill instance and a decode instance with the store between, connectors side by side, and what routers see."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.engines.vllm.models import VOCABULARY
from tests.engines.vllm.process import BLOCK_TOKENS, VllmEngine, connector
from tests.engines.vllm.truth import Truth, same

pytestmark = pytest.mark.timeout(900)

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def truth(tiny: Path) -> Truth:
    return Truth(tiny)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the prefill instance publishes."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/kv"


@pytest.fixture(scope="module")
def prefill(server: ServerProcess, tiny: Path, events: str) -> Iterator[VllmEngine]:
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "topic": "kv"}
    with closing(VllmEngine(tiny, connector(server.address, role="kv_producer"), events=published)) as running:
        yield running


@pytest.fixture(scope="module")
def decode(server: ServerProcess, tiny: Path) -> Iterator[VllmEngine]:
    kv = connector(server.address, role="kv_consumer", follow=True, follow_timeout_s=20.0)
    with closing(VllmEngine(tiny, kv)) as running:
        yield running


def fresh(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(tokens)]


def test_the_decode_instance_takes_what_the_prefill_instance_computed_and_writes_nothing(
    server: ServerProcess, prefill: VllmEngine, decode: VllmEngine, truth: Truth
) -> None:
    prompt = fresh(1, 9 * BLOCK_TOKENS + 4)
    right = truth.answer(prompt, 2 * BLOCK_TOKENS)
    prefill.generate(prompt, 1)
    before = server.status()["shards"][0]["counters"]["committed_blocks"]
    answer = decode.generate(prompt, 2 * BLOCK_TOKENS)
    assert answer.hit_tokens == 9 * BLOCK_TOKENS
    assert same(answer, right)
    assert server.status()["shards"][0]["counters"]["committed_blocks"] == before


def test_the_prefill_instance_reads_nothing(prefill: VllmEngine, truth: Truth) -> None:
    prompt = fresh(2, 3 * BLOCK_TOKENS + 4)
    for _ in range(2):
        prefill.forget()
        answer = prefill.generate(prompt, 1)
        assert answer.hit_tokens == 0
        assert same(answer, truth.answer(prompt, 1))


def test_the_decode_instance_starts_on_blocks_that_are_still_being_computed(
    prefill: VllmEngine, decode: VllmEngine, truth: Truth
) -> None:
    """The two get the same requests at the same moment. How much of them was followed depends on who is quicker; the
    answers don't.
    """
    followed = 0
    for turn in range(8):
        prompts = [fresh(100 + 8 * turn + number, 12 * BLOCK_TOKENS + 5) for number in range(2)]
        computing = threading.Thread(target=prefill.generate_together, args=(prompts, 1))
        computing.start()
        answers = decode.generate_together(prompts, NEW_TOKENS)
        computing.join()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert same(answer, truth.answer(prompt, NEW_TOKENS))
            followed += answer.hit_tokens
    assert followed >= 0


def test_each_block_that_was_stored_is_told_to_routers_with_the_hash_that_they_compute(
    prefill: VllmEngine, events: str
) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(events)
        stored: list[BlockStored] = []
        local: list[BlockStored] = []
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        seeds = iter(range(1000, 2000))

        def told() -> bool:
            prefill.forget()
            prefill.generate(fresh(next(seeds), 2 * BLOCK_TOKENS + 1), 1)
            while socket.poll(200):
                for event in decoder.decode(socket.recv_multipart()[2]).events:
                    if isinstance(event, BlockStored):
                        (stored if event.medium == "STORAGE" else local).append(event)
            return len(stored) >= 4

        until(told, 60, "events")  # who subscribes late has missed some
    known = {block for event in local for block in event.block_hashes}
    assert {block for event in stored for block in event.block_hashes} <= known
    assert all(event.block_size == BLOCK_TOKENS == len(event.token_ids) for event in stored)


def test_a_reset_of_the_connectors_cache_empties_the_store_for_all(
    server: ServerProcess, prefill: VllmEngine, decode: VllmEngine, truth: Truth
) -> None:
    prompt = fresh(3, 4 * BLOCK_TOKENS + 1)
    prefill.generate(prompt, 1)
    assert decode.generate(prompt, 1).hit_tokens == 4 * BLOCK_TOKENS
    assert prefill.call("forget", everywhere=True)
    decode.forget()
    answer = decode.generate(prompt, 1)
    assert answer.hit_tokens == 0
    assert same(answer, truth.answer(prompt, 1))
    assert server.status()["shards"][0]["gauges"]["resident_blocks"] == 0


def test_connectors_side_by_side_load_from_the_first_that_has_the_prompt_and_save_to_both(
    server: ServerProcess, tiny: Path, prefill: VllmEngine, truth: Truth
) -> None:
    with ServerProcess(dram="64MiB") as second:
        both = [connector(server.address), connector(second.address)]
        kv = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": both},
        }
        with closing(VllmEngine(tiny, kv)) as engine:
            prompt = fresh(4, 5 * BLOCK_TOKENS + 1)
            right = truth.answer(prompt, NEW_TOKENS)
            assert same(engine.generate(prompt, NEW_TOKENS), right)
            for each in (server, second):
                each.kill_all()
                engine.forget()
                answer = engine.generate(prompt, NEW_TOKENS)
                assert same(answer, right)
                assert answer.hit_tokens == (5 * BLOCK_TOKENS if each is server else 0)
        server.start()
        second.start()
