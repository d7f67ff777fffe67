"""A namespace is derived from the model, and says so when it can't be."""

import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig

from engine_adapters.transformers import namespace_for
from kvstore import CanonicalLayout, UsageError
from tests.engine_adapters.transformers.tiny import tiny_config, tiny_model


def test_a_namespace_takes_layout_and_dtype_from_the_model() -> None:
    namespace = namespace_for(tiny_model(torch.bfloat16), revision="r1", model_id="tiny", block_tokens=8)
    assert namespace.layout == CanonicalLayout(layers=3, kv_heads=2, head_dim=16)
    assert (namespace.model, namespace.dtype, namespace.block_tokens) == ("tiny", "bfloat16", 8)
    assert namespace.block_bytes == 3 * 2 * 2 * 8 * 16 * 2


def test_revision_and_settings_that_change_the_kv_are_other_namespaces() -> None:
    stretched = tiny_config()
    stretched.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    digests = {
        namespace_for(config, revision=revision, model_id="tiny", dtype=torch.float32).digest
        for config, revision in ((tiny_config(), "r1"), (tiny_config(), "r2"), (stretched, "r1"), (tiny_config(), "r1"))
    }
    assert len(digests) == 3


def test_a_model_without_heads_in_its_config_for_keys_has_as_many_as_for_queries() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    assert namespace_for(config, revision="r", model_id="m").layout == CanonicalLayout(
        layers=2, kv_heads=4, head_dim=16
    )


@pytest.mark.parametrize(
    "config",
    [MistralConfig(sliding_window=64, num_hidden_layers=2), Gemma2Config(num_hidden_layers=2)],
    ids=["mistral", "gemma2"],
)
def test_sliding_layers_are_refused_because_they_keep_only_their_window(config: object) -> None:
    with pytest.raises(UsageError, match=r"DynamicSlidingWindowLayer.*only full attention"):
        namespace_for(config, revision="r", model_id="m")  # pyright: ignore[reportArgumentType] # either config


def test_a_model_without_a_hub_name_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"model_id=None.*give the name"):
        namespace_for(tiny_config(), revision="r")


def test_an_empty_revision_is_refused() -> None:
    with pytest.raises(UsageError, match="revision=''"):
        namespace_for(tiny_config(), revision="", model_id="m")
