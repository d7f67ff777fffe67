"""Chunks, preemption, prefixes and aborted requests change what is computed when, never what is answered."""

import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine_adapters.reference import Engine, Limits
from engine_adapters.reference.attention import Batch, Group, Partial
from kvstore import UsageError
from tests.engine_adapters.reference.tiny import assert_all_free, assert_same, tiny_engine, transformers_answer
from tests.engine_adapters.transformers.tiny import VOCABULARY, prompt, tiny_model

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.mark.parametrize("step_tokens", [4, 7, 16, 33])
def test_a_prompt_in_chunks_is_answered_as_in_one_piece(step_tokens: int, model: LlamaForCausalLM) -> None:
    prompts = [prompt(tokens, seed=100 + tokens) for tokens in (3, 50, 97, 16)]
    limits = Limits(blocks=64, step_tokens=step_tokens, running=4)
    with tiny_engine(model) as whole, tiny_engine(model, limits=limits) as chunked:
        for answer, expected in zip(
            chunked.generate(prompts, NEW_TOKENS), whole.generate(prompts, NEW_TOKENS), strict=True
        ):
            assert_same(answer, expected)
        assert_all_free(chunked)


def test_preempted_requests_are_answered_as_uninterrupted_ones(model: LlamaForCausalLM) -> None:
    prompts = [prompt(tokens, seed=110 + tokens) for tokens in (30, 45, 28)]
    tight = Limits(blocks=8, step_tokens=64, running=4)
    with tiny_engine(model) as roomy, tiny_engine(model, limits=tight) as engine:
        answers = engine.generate(prompts, 40)
        assert sum(answer.preemptions for answer in answers) >= 2
        for answer, expected in zip(answers, roomy.generate(prompts, 40), strict=True):
            assert expected.preemptions == 0
            assert_same(answer, expected)
        assert_all_free(engine)


def test_a_request_alone_may_use_all_of_the_memory_and_no_more(model: LlamaForCausalLM) -> None:
    with tiny_engine(model, limits=Limits(blocks=3, step_tokens=64, running=4)) as engine:
        tokens = prompt(40, seed=121)
        (answer,) = engine.generate([tokens], 9)  # the last token has no KV
        assert_same(answer, transformers_answer(model, tokens, 9))
        with pytest.raises(UsageError, match="KV of 49 tokens: allowed is up to 48"):
            engine.generate([tokens], 10)


def test_a_known_prefix_is_not_computed_again(model: LlamaForCausalLM) -> None:
    with tiny_engine(model) as engine:
        first = prompt(70, seed=131)
        second = [*first[:50], *prompt(20, seed=132)]
        computed = computing(engine)
        engine.generate([first], 1)
        (answer,) = engine.generate([second], NEW_TOKENS)
        engine.forget()
        (again,) = engine.generate([second], NEW_TOKENS)
        assert computed[0] == 70
        assert computed[1] == 70 - 48
        assert computed[1 + NEW_TOKENS] == 70
        for each in (answer, again):
            assert_same(each, transformers_answer(model, second, NEW_TOKENS))
            assert each.hit_tokens == 0


def computing(engine: Engine) -> list[int]:
    """Grows by the tokens of each step."""
    computed: list[int] = []
    engine.stages[0].register_forward_pre_hook(lambda _, arguments: computed.append(len(arguments[0])))
    return computed


@pytest.mark.parametrize("steps", range(8))
def test_a_request_that_is_aborted_at_any_stage_leaves_no_block_behind(steps: int, model: LlamaForCausalLM) -> None:
    """Stages: waiting, prefill in three chunks, decode; the other request goes on, and its answer is not touched."""
    with tiny_engine(model, limits=Limits(blocks=16, step_tokens=40, running=2)) as engine:
        tokens = prompt(10, seed=141)
        kept, dropped = engine.add(tokens, 12), engine.add(prompt(100, seed=142), 12)
        late = engine.add(prompt(20, seed=143), 12)  # waits for its turn
        for _ in range(steps):
            assert not engine.step()
        assert engine.abort(dropped)
        assert engine.abort(late)
        assert not engine.abort(dropped)
        answers = [answer for _ in range(20) for answer in engine.step()]
        assert [answer.number for answer in answers] == [kept]
        assert_same(answers[0], transformers_answer(model, tokens, 12))
        assert_all_free(engine)
        assert not engine.abort(kept)


def test_a_preempted_request_can_be_aborted(model: LlamaForCausalLM) -> None:
    with tiny_engine(model, limits=Limits(blocks=8, step_tokens=64, running=4)) as engine:
        numbers = [engine.add(prompt(40, seed=150 + turn), 60) for turn in range(2)]
        while not any(request.preemptions for request in engine.scheduler.waiting):
            assert not engine.step()
        assert engine.abort(numbers[1])
        assert engine.abort(numbers[0])
        assert_all_free(engine)


class FailingOnce:
    """Attention that fails in the middle of a pass, once, as a device without memory does."""

    def __init__(self, engine: Engine, layer: int) -> None:
        self._inner, self._layer, self._failed = engine.attention, layer, False

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Partial:
        if layer == self._layer and not self._failed:
            self._failed = True
            raise torch.OutOfMemoryError("no memory for layer 1")
        return self._inner.attend(layer, queries, keys, values, batch)


def test_a_step_that_failed_can_be_taken_again(model: LlamaForCausalLM) -> None:
    tokens = prompt(50, seed=160)
    with tiny_engine(model) as engine:
        engine.attention = FailingOnce(engine, layer=1)
        engine.add(tokens, NEW_TOKENS)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        answers = [answer for _ in range(NEW_TOKENS) for answer in engine.step()]
        assert_same(answers[0], transformers_answer(model, tokens, NEW_TOKENS))
        assert_all_free(engine)


def test_an_answer_ends_at_a_stop_token(model: LlamaForCausalLM) -> None:
    tokens = prompt(20, seed=170)
    expected = transformers_answer(model, tokens, NEW_TOKENS).tokens
    with tiny_engine(model) as engine:
        (answer,) = engine.generate([tokens], NEW_TOKENS, stop=expected[2:3])
        assert answer.tokens == expected[: expected.index(expected[2]) + 1]


def test_bad_requests_are_refused_and_leave_nothing_queued(model: LlamaForCausalLM) -> None:
    with tiny_engine(model) as engine:
        for bad, new_tokens, culprit in (
            ([1, VOCABULARY], 1, f"token {VOCABULARY} in the prompt"),
            ([-1], 1, "token -1"),
            ([], 1, "0 tokens"),
            ([1], 0, "new_tokens=0"),
            ([1] * 2000, 100, "allowed is up to 2048, the model's"),
        ):
            with pytest.raises(UsageError, match=culprit):
                engine.generate([[1, 2, 3], bad], new_tokens)
            assert_all_free(engine)
        engine.add([1], 1)
        with pytest.raises(UsageError, match="other requests"):
            engine.generate([[1]], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_answered_as_transformers_does_up_to_their_rounding(dtype: torch.dtype) -> None:
    model = tiny_model(dtype)
    tokens = prompt(60, seed=180)
    with tiny_engine(model) as engine:
        (answer,) = engine.generate([tokens], 1)
    expected = transformers_answer(model, tokens, 1)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=0.02)


def test_log_sum_exp_is_that_of_the_scores(model: LlamaForCausalLM) -> None:
    """What a merge of token ranges needs: each half weighted by its exponential gives the whole."""
    with tiny_engine(model) as engine:
        engine.generate([prompt(32, seed=190)], 1)
        memory = engine.memory.layer(0)[:2]  # the two blocks of the prompt, which was the first one
        queries = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
        parts = [attended(engine, queries, table, at) for table, at in (([0, 1], 31), ([0], 15), ([1], 15))]
        keys = memory[:, :, 0].transpose(0, 1).flatten(1, 2)  # [kv heads, 32, dim]
        scores = queries[0].view(2, 2, 16) @ keys.transpose(1, 2) / 4
        torch.testing.assert_close(parts[0].lse[0], scores.logsumexp(-1).flatten(), rtol=0, atol=1e-5)
        weights = torch.stack([part.lse for part in parts[1:]]).softmax(0)[..., None]
        merged = (torch.stack([part.out for part in parts[1:]]) * weights).sum(0)
        torch.testing.assert_close(merged, parts[0].out, rtol=0, atol=1e-5)


def attended(engine: Engine, queries: Tensor, table: list[int], position: int) -> Partial:
    """Attention of layer 0 over these blocks, without new tokens' KV."""
    nothing = torch.empty(0, dtype=torch.int64)
    group = Group(slice(0, 1), torch.tensor([table]), torch.tensor([[position]]))
    batch = Batch(nothing, nothing, nothing, nothing, (group,))
    none = torch.empty(0, 2, 16)
    return engine.attention.attend(0, queries, none, none, batch)
