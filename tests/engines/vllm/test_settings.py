"""Options that are wrong end the start; what makes KV differ is in the namespace."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from engine_adapters.vllm.connector import KvStoreConnector
from engine_adapters.vllm.identity import adapter_digest, identify
from engine_adapters.vllm.matching import extra_of
from engine_adapters.vllm.options import Options
from kvstore import ConfigError


def test_the_connector_answers_every_abstract_call_with_the_parameters_of_vllms_own_class() -> None:
    assert not inspect.isabstract(KvStoreConnector)
    for name, ours in vars(KvStoreConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, getattr(SupportsHMA, name, None))
        if theirs is not None and callable(theirs) and not name.startswith("__"):
            told = ours.__func__ if isinstance(ours, classmethod) else ours
            expected = theirs.__func__ if inspect.ismethod(theirs) else theirs
            assert list(inspect.signature(told).parameters) == list(inspect.signature(expected).parameters), name


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({"adress": "a:1"}, "'adress' is unknown; allowed is address, model, revision"),
        ({"transport": "pigeon"}, "transport='pigeon': allowed is one of auto, shm, mooncake, tcp"),
        ({"layout": "mine"}, "layout='mine': allowed is one of auto, canonical, opaque"),
        ({"timeout_s": 0}, "timeout_s=0: allowed is 0.001 to 3600 seconds"),
        ({"timeout_s": "1"}, "timeout_s='1': allowed is 0.001 to 3600 seconds"),
        ({"follow": 1}, "follow=1: allowed is true or false"),
        ({"revision": 7}, "revision=7: allowed is text"),
        ({"tenant": 123456}, "tenant=<int>: allowed is text"),
    ],
)
def test_a_wrong_option_is_named_in_one_line_with_what_is_allowed(told: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Options.parse(told)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_left_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", "10.1.2.3:7400")
    assert Options.parse({}).address == "10.1.2.3:7400"
    assert Options.parse({"address": "b:1"}).address == "b:1"


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def configured(model: str, **changes: Any) -> Any:
    """As much of a VllmConfig as names are made of."""
    text = {"hidden_size": 64, "rope_theta": 1e4, "_name_or_path": model} | changes.pop("text", {})
    values = {"revision": None, "quantization": None, "max_model_len": 2048, "seed": 0} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, hf_text_config=_Config(**text), **values),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        speculative_config=None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "story-7b"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights" * 100)
    (made / "config.json").write_text(json.dumps({}))
    return made


def test_one_byte_of_the_weights_makes_another_revision_and_the_place_of_the_folder_does_not(
    folder: Path, tmp_path: Path
) -> None:
    before = identify(configured(str(folder)), Options())
    elsewhere = tmp_path / "other" / "story-7b"
    elsewhere.parent.mkdir()
    folder.rename(elsewhere)
    assert identify(configured(str(elsewhere)), Options()) == before
    file = elsewhere / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[350] ^= 1
    file.write_bytes(changed)
    assert identify(configured(str(elsewhere)), Options())[1] != before[1]


@pytest.mark.parametrize(
    "change", [{"text": {"rope_theta": 1e6}}, {"quantization": "fp8"}, {"cache_dtype": "fp8"}], ids=str
)
def test_a_setting_that_changes_the_kv_makes_another_revision(folder: Path, change: dict[str, Any]) -> None:
    options = Options(revision="r1")
    assert identify(configured(str(folder)), options) != identify(configured(str(folder), **change), options)


def test_the_longest_sequence_counts_only_where_it_chooses_the_rope(folder: Path) -> None:
    def revision(length: int, text: dict[str, Any]) -> str:
        return identify(configured(str(folder), max_model_len=length, text=text), Options(revision="r"))[1]

    assert revision(2048, {}) == revision(4096, {})
    longrope = {"rope_scaling": {"rope_type": "longrope"}}
    assert revision(2048, longrope) != revision(4096, longrope)


def test_a_snapshot_of_the_hub_has_its_commit_and_a_model_of_unknown_commit_is_refused(tmp_path: Path) -> None:
    commit = "0e9e39f249a16976918f6564b8830bc894c89659"
    assert identify(configured(f"/hub/models--a--b/snapshots/{commit}"), Options())[1].startswith(commit)
    assert identify(configured("acme/story-7b", revision=commit), Options()) == identify(
        configured("acme/story-7b"), Options(revision=commit)
    )
    with pytest.raises(ConfigError, match="the commit of 'acme/story-7b' is not known; set revision"):
        identify(configured("acme/story-7b"), Options())


def test_a_folder_without_weights_is_refused_unless_a_revision_is_given(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        identify(configured(str(folder)), Options())
    assert identify(configured(str(folder)), Options(revision="r1"))[1].startswith("r1+")


def test_adapters_are_told_apart_by_content_and_not_by_name_or_order_of_loading(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert adapter_digest("a", str(folder)) == adapter_digest("b", str(copy))
    (copy / "model.safetensors").write_bytes(b"other weights")
    assert adapter_digest("a", str(folder)) != adapter_digest("a", str(copy))
    assert adapter_digest("a", "acme/lora") != adapter_digest("b", "acme/lora")


def requested(**fields: Any) -> Any:
    return SimpleNamespace(**{"cache_salt": None, "lora_request": None, "mm_features": []} | fields)


def test_salt_adapter_and_images_are_in_the_keys_each_where_it_begins() -> None:
    image = SimpleNamespace(identifier="sha", mm_position=SimpleNamespace(offset=40, length=100))
    later = SimpleNamespace(identifier="sha", mm_position=SimpleNamespace(offset=41, length=100))
    lora = SimpleNamespace(lora_name="a", lora_path="acme/lora")
    assert extra_of(requested(), 16) == {}
    assert set(extra_of(requested(cache_salt="s", lora_request=lora, mm_features=[image]), 16)) == {0, 2}
    seen = [
        extra_of(requested(**fields), 16)
        for fields in (
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora_request": lora},
            {"mm_features": [image]},
            {"mm_features": [later]},
            {"mm_features": [image, later]},
        )
    ]
    assert all(one != other for at, one in enumerate(seen) for other in seen[at + 1 :])
