"""The engine over a real server: layers come and go beside the computing, and what fails is computed."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import kvstore
from engine_adapters.reference import Answer, Engine, Limits
from engine_adapters.reference.attention import Batch, Partial
from engine_adapters.transformers import CacheAdapter
from kvstore import BlockState
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.relay import Relay
from kvstore.testing.waiting import until
from tests.engine_adapters.reference.tiny import assert_all_free, assert_same, tiny_engine, transformers_answer
from tests.engine_adapters.transformers.tiny import compute, layer_tensors, prompt, tiny_model, tiny_namespace

LAYERS = 3
NEW_TOKENS = 4
TOKENS = 100  # 6 full blocks and 4 tokens

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def start(server: ServerProcess, model: LlamaForCausalLM) -> Iterator[Start]:
    engines: list[Engine] = []

    def new(address: str = server.address, **options: object) -> Engine:
        engines.append(tiny_engine(model, address, **options))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()


@pytest.fixture
def client(server: ServerProcess, model: LlamaForCausalLM) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=tiny_namespace(model), timeout_s=2.0) as connected:
        yield connected


class Watched:
    """Attention that has something done when a pass comes to a layer, the first time."""

    def __init__(self, engine: Engine, layer: int, do: Callable[[], object]) -> None:
        self._inner, self._layer, self._do = engine.attention, layer, do
        self.done = False

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Partial:
        if layer == self._layer and not self.done:
            self.done = True
            self._do()
        return self._inner.attend(layer, queries, keys, values, batch)


def test_blocks_are_those_of_the_transformers_adapter_both_ways(
    start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    adapter = CacheAdapter(client, model)
    theirs, ours = prompt(TOKENS, seed=200), prompt(TOKENS, seed=201)
    adapter.store(theirs, compute(model, theirs)[0])
    engine = start()
    for tokens, hit_tokens in ((theirs, 96), (ours, 0)):
        (answer,) = engine.generate([tokens], NEW_TOKENS)
        assert answer.hit_tokens == hit_tokens
        assert_same(answer, transformers_answer(model, tokens, NEW_TOKENS))
    cache, hit_tokens = adapter.load(ours, plan=False)
    assert hit_tokens == 96
    computed = [(keys[:, :, :96], values[:, :, :96]) for keys, values in layer_tensors(compute(model, ours)[0])]
    torch.testing.assert_close(layer_tensors(cache), computed, rtol=0, atol=1e-5)


def test_a_follower_sees_each_layer_as_soon_as_it_is_computed(
    start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=202)
    keys = client.keys(tokens)
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(client.lookup(keys).layers_ready.tolist())

    engine = start()
    engine.attention = Watched(engine, 2, look)
    engine.generate([tokens], 1)
    assert seen == [[2] * 6]
    assert (client.lookup(keys).states == BlockState.COMMITTED).all()


def test_an_engine_follows_another_worker_that_is_still_computing(
    start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=211)
    follower = start(follow=True)
    writer = start()
    with ThreadPoolExecutor(1) as beside:
        answers: list[Future[Answer]] = []

        def let_follow() -> None:
            answers.append(beside.submit(lambda: follower.generate([tokens], NEW_TOKENS)[0]))
            until(lambda: follower.scheduler.running, what="the follower to begin")

        writer.attention = Watched(writer, 1, let_follow)
        (answer,) = writer.generate([tokens], NEW_TOKENS)
        followed = answers[0].result(30)
    assert (answer.hit_tokens, followed.hit_tokens) == (0, 96)
    for each in (answer, followed):
        assert_same(each, transformers_answer(model, tokens, NEW_TOKENS))


def test_what_is_generated_is_saved_block_by_block(
    start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    tokens = prompt(30, seed=203)
    (answer,) = start().generate([tokens], 35)  # 65 tokens, of which 64 have KV
    turn = [*tokens, *answer.tokens, 5]
    (next_answer,) = start().generate([turn], NEW_TOKENS)
    assert next_answer.hit_tokens == 64
    assert_same(next_answer, transformers_answer(model, turn, NEW_TOKENS))


@pytest.mark.parametrize("step_tokens", [512, 40], ids=["one chunk", "chunks"])
def test_of_a_load_that_breaks_off_the_leading_whole_blocks_count_and_the_rest_is_computed(
    step_tokens: int, start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    """The others of the same step are not touched by it, and nothing that was computed on top is saved or kept."""
    tokens, other = prompt(TOKENS, seed=2040 + step_tokens), prompt(20, seed=2050 + step_tokens)
    keys = client.keys(tokens)
    CacheAdapter(client, model).store(tokens[:16], compute(model, tokens[:16])[0])
    with client.publish_stream(keys[1:3]) as stream:  # after a whole block, two that never get their second layer
        stream.write(0, np.full((2, client.namespace.layer_bytes), 255, dtype=np.uint8))  # 255 ... is no number
        engine = start(follow=True, limits=Limits(blocks=64, step_tokens=step_tokens, running=4))
        watched = engine.attention = Watched(engine, 1, stream.abort)
        answers = engine.generate([tokens, other], NEW_TOKENS)
    assert watched.done
    assert [answer.hit_tokens for answer in answers] == [16, 0]
    for answer, each in zip(answers, (tokens, other), strict=True):
        assert_same(answer, transformers_answer(model, each, NEW_TOKENS))
    assert_all_free(engine)
    (kept,) = engine.generate([tokens], NEW_TOKENS)
    (saved,) = start().generate([tokens], NEW_TOKENS)
    assert (kept.hit_tokens, saved.hit_tokens) == (0, 96)
    for again in (kept, saved):
        assert_same(again, transformers_answer(model, tokens, NEW_TOKENS))


def test_a_load_that_breaks_off_does_not_touch_requests_that_are_attended_to_in_the_same_go(
    start: Start, client: kvstore.Client, model: LlamaForCausalLM
) -> None:
    short, tokens = (
        prompt(6, seed=213),
        prompt(33, seed=214),
    )  # of the second one, one token is computed beside the load
    engine = start(follow=True)
    before, kept = engine.add(prompt(5, seed=215), 2 * NEW_TOKENS), engine.add(short, 2 * NEW_TOKENS)
    engine.step()
    engine.abort(before)  # so that block 0 is another request's
    with client.publish_stream(client.keys(tokens)) as stream:
        stream.write(0, np.full((2, client.namespace.layer_bytes), 255, dtype=np.uint8))
        watched = engine.attention = Watched(engine, 1, stream.abort)
        late = engine.add(tokens, NEW_TOKENS)
        answers = {answer.number: answer for _ in range(20) for answer in engine.step()}
    assert watched.done
    assert_same(answers[kept], transformers_answer(model, short, 2 * NEW_TOKENS))
    assert_same(answers[late], transformers_answer(model, tokens, NEW_TOKENS))


def test_a_step_that_fails_during_a_load_can_be_taken_again(
    server: ServerProcess, start: Start, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=212)
    start().generate([tokens], 1)
    engine = start()

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory for layer 1")

    engine.attention = Watched(engine, 1, fail)
    engine.add(tokens, NEW_TOKENS)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    engine.memory.clear(range(64))  # what came by then: all layers, or not
    answers = [answer for _ in range(NEW_TOKENS) for answer in engine.step()]
    assert_same(answers[0], transformers_answer(model, tokens, NEW_TOKENS))
    assert_all_free(engine)
    gauges = server.status()["shards"][0]["gauges"]
    assert (gauges["reserved_blocks_now"], gauges["leases_now"]) == (0, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("hurt", ["kill_all", "freeze"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_server_that_dies_or_freezes_at_any_layer_costs_at_most_the_deadline(
    hurt: str, transport: str, layer: int, start: Start, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=206)
    with ServerProcess(dram="64MiB") as server:
        start(server.address).generate([tokens[:64]], 1)
        engine = start(server.address, transport=transport, timeout_s=0.5)
        engine.attention = Watched(engine, layer, getattr(server, hurt))
        try:
            began_s = time.monotonic()
            (answer,) = engine.generate([tokens], NEW_TOKENS)
            assert time.monotonic() - began_s < 0.5 * 6 + 2.0  # saves, too, have their deadline
        finally:
            if hurt == "freeze":
                server.thaw()
    assert_same(answer, transformers_answer(model, tokens, NEW_TOKENS))
    assert_all_free(engine)


def test_a_link_that_stalls_within_a_layer_costs_at_most_the_deadline(
    server: ServerProcess, start: Start, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=207)
    start().generate([tokens], 1)
    layer_bytes = 6 * tiny_namespace(model).layer_bytes
    with Relay(server.address, bytes_per_s=1e9) as relay:
        engine = start(relay.address, transport="tcp", timeout_s=0.5)
        relay.stall_after(layer_bytes + layer_bytes // 2)
        began_s = time.monotonic()
        (answer,) = engine.generate([tokens], NEW_TOKENS)
        assert time.monotonic() - began_s < 3.0
    assert answer.hit_tokens == 0
    assert_same(answer, transformers_answer(model, tokens, NEW_TOKENS))


def test_a_hit_that_is_slower_than_computing_is_declined(
    server: ServerProcess, start: Start, model: LlamaForCausalLM
) -> None:
    tokens = prompt(TOKENS, seed=208)
    start().generate([tokens], 1)
    with Relay(server.address, bytes_per_s=1e9) as relay:
        engine = start(relay.address, transport="tcp", timeout_s=30.0, plan=True)
        assert engine.generate([tokens], 1)[0].hit_tokens == 96  # nothing is known yet
        engine.generate([prompt(TOKENS, seed=209)], 1)  # the speed of computing
        relay.bytes_per_s = 6 * tiny_namespace(model).block_bytes / 1.0
        engine.forget()
        slow = prompt(TOKENS, seed=210)
        start().generate([slow], 1)
        until(lambda: asked(engine, slow).hit_tokens == 0, 20.0, "a declined hit")
        assert_same(asked(engine, tokens), transformers_answer(model, tokens, 1))


def asked(engine: Engine, tokens: list[int]) -> Answer:
    engine.forget()
    return engine.generate([tokens], 1)[0]


def test_a_preempted_request_gets_its_blocks_back_from_the_store(start: Start, model: LlamaForCausalLM) -> None:
    prompts = [prompt(tokens, seed=220 + tokens) for tokens in (30, 45, 28)]
    engine = start(limits=Limits(blocks=8, step_tokens=64, running=4))
    answers = engine.generate(prompts, 40)
    assert sum(answer.preemptions for answer in answers) >= 2
    for answer, each in zip(answers, prompts, strict=True):
        assert answer.hit_tokens == 0  # what it had stored itself is no hit of the prompt
        assert_same(answer, transformers_answer(model, each, 40))
    assert_all_free(engine)


def test_aborted_between_steps_a_request_leaves_nothing_reserved_in_the_store(
    server: ServerProcess, start: Start, model: LlamaForCausalLM
) -> None:
    engine = start(limits=Limits(blocks=64, step_tokens=40, running=2))
    for steps in range(4):
        number = engine.add(prompt(TOKENS, seed=230 + steps), NEW_TOKENS)
        for _ in range(steps):
            engine.step()
        assert engine.abort(number)
        assert_all_free(engine)
    gauges = server.status()["shards"][0]["gauges"]
    assert (gauges["reserved_blocks_now"], gauges["leases_now"]) == (0, 0)
