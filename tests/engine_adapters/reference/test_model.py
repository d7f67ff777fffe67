"""The engine computes what transformers computes from the same weights, whole or in parts."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

import itertools

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from engine_adapters.reference import Limits
from engine_adapters.reference.attention import KvMemory, PagedAttention, SplitAttention
from engine_adapters.reference.model import Stage
from engine_adapters.transformers.model import load_smollm2
from kvstore import UsageError
from tests.engine_adapters.reference.tiny import assert_same, tiny_engine, transformers_answer
from tests.engine_adapters.transformers.tiny import prompt, tiny_config, tiny_model

TOLERANCE = 1e-4


def model_with(**changes: Any) -> LlamaForCausalLM:
    config = tiny_config().to_dict()
    torch.default_generator.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes}))
    return model.eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ],
    ids=["grouped heads", "as many KV heads", "one KV head", "tied", "biases", "stretched RoPE"],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(changes: dict[str, Any]) -> None:
    model = model_with(**changes)
    prompts = [prompt(tokens, seed=40 + tokens) for tokens in (1, 15, 16, 33, 100)]
    with tiny_engine(model) as engine:
        for answer, each in zip(engine.generate(prompts, 6), prompts, strict=True):
            assert_same(answer, transformers_answer(model, each, 6), TOLERANCE)


@pytest.mark.slow
def test_smollm2_says_what_it_says_in_transformers() -> None:
    loaded = load_smollm2()
    tokenizer: Any = loaded.tokenizer
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a land far away, " * 8]
    prompts = [list[int](tokenizer(text)["input_ids"]) for text in texts]
    limits = Limits(blocks=64, step_tokens=32, running=4)
    with tiny_engine(loaded.model, revision=loaded.revision, limits=limits) as engine:
        for answer, each in zip(engine.generate(prompts, 12), prompts, strict=True):
            assert_same(answer, transformers_answer(loaded.model, each, 12), TOLERANCE)


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_stages_one_after_the_other_give_bit_for_bit_what_the_whole_gives(cuts: tuple[int, ...]) -> None:
    model = tiny_model()
    runs = [range(*pair) for pair in itertools.pairwise(cuts)]
    prompts = [prompt(tokens, seed=50 + tokens) for tokens in (20, 45)]
    with tiny_engine(model) as whole, tiny_engine(model, stages=runs) as divided:
        assert divided.generate(prompts, 8) == whole.generate(prompts, 8)


def test_heads_attended_to_apart_give_what_all_of_them_give() -> None:
    model = tiny_model()
    prompts = [prompt(tokens, seed=60 + tokens) for tokens in (20, 45)]
    with tiny_engine(model) as whole, tiny_engine(model) as divided:
        halves = [half_memory() for _ in range(2)]
        divided.attention = SplitAttention([(1, PagedAttention(half)) for half in halves])
        for answer, expected in zip(divided.generate(prompts, 8), whole.generate(prompts, 8), strict=True):
            assert_same(answer, expected, 1e-5)
        assert not divided.memory.tensor.any()
        together = torch.cat([half.tensor for half in halves], dim=2)
        torch.testing.assert_close(together, whole.memory.tensor, rtol=0, atol=1e-5)


def half_memory() -> KvMemory:
    return KvMemory(
        range(3),
        kv_heads=1,
        block_tokens=16,
        head_dim=16,
        blocks=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class Counted(Mapping[str, Tensor]):
    """Weights that remember which were read."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def test_a_stage_reads_its_own_weights_only_and_all_stages_together_read_all() -> None:
    model = tiny_model()
    weights = [Counted(model.state_dict()) for _ in range(3)]
    for layer, mine in enumerate(weights):
        Stage(model.config, range(layer, layer + 1), mine)
        assert all(f"layers.{layer}." in name for name in mine.read if "layers." in name)
    assert not weights[0].read & weights[1].read
    assert weights[0].read | weights[1].read | weights[2].read == set(model.state_dict())


def test_what_is_no_llama_or_turns_with_the_length_is_refused() -> None:
    qwen = Qwen2ForCausalLM(Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
    dynamic = model_with(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    cases: list[tuple[PreTrainedModel, str]] = [(qwen, "Qwen2Config"), (dynamic, "rope_type='dynamic'")]
    for model, culprit in cases:
        with pytest.raises(UsageError, match=culprit):
            tiny_engine(model)


def test_a_missing_weight_and_stages_with_a_gap_are_refused() -> None:
    model = tiny_model()
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if name != "model.layers.1.mlp.up_proj.weight"
    }
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Stage(model.config, range(1, 3), weights)
    with pytest.raises(UsageError, match="allowed are runs that make up"):
        tiny_engine(model, stages=[range(1), range(2, 3)])
