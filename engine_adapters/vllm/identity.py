"""What makes the KV of one vLLM engine differ from that of another, as far as its tokens and geometry do not say it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from engine_adapters.vllm.options import Options
from kvstore import ConfigError

__all__ = ["Identity", "adapter_digest", "identify", "weights_digest"]

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SLOW_S = 5.0
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_log = logging.getLogger("vllm.kvstore")

Identity = tuple[str, str]  # model, revision


def identify(vllm_config: Any, options: Options) -> Identity:
    """Model and revision of a namespace: which weights, and the settings that change the KV that they give.

    Raises ConfigError where the weights' identity can't be found out.
    """
    model = vllm_config.model_config
    name = options.model or _name(str(model.model))
    revision = options.revision or _revision(model, vllm_config.load_config)
    return name, f"{revision}+{_settings_digest(vllm_config)}"


def adapter_digest(name: str, path: str) -> bytes:
    """What tells a LoRA adapter from others: its files' content; where there are none, its name and path."""
    content = weights_digest(Path(path)) or f"{name}\0{path}"
    return hashlib.sha256(f"lora\0{content}".encode()).digest()


def weights_digest(path: Path) -> str:
    """Of a file of weights, or of all weights in a folder, by content: 32 hexadecimal digits, or nothing where there
    are no weights. Reads every byte.
    """
    files = _weights(path)
    digest = xxhash.xxh3_128()
    buffer = bytearray(8 * 2**20)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as opened:
            while size := opened.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
    return digest.hexdigest() if files else ""


def _weights(path: Path) -> list[Path]:
    """The file, or of a folder the first kind of weights that is there, in a fixed order."""
    if path.is_file():
        return [path]
    for pattern in WEIGHTS:
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _name(model: str) -> str:
    path = Path(model)
    return path.name if path.exists() else model


def _revision(model: Any, load: Any) -> str:
    path = Path(str(model.model))
    if snapshot := _SNAPSHOT.search(f"{path}/"):
        return snapshot[1]
    if not path.exists():
        commit = str(model.revision or "")
        if re.fullmatch(r"[0-9a-f]{40}", commit):
            return commit
        raise ConfigError(
            f"kv_connector_extra_config: the commit of {model.model!r} is not known; "
            f"set revision to something that changes with the weights"
        )
    if str(load.load_format) == "dummy":
        return f"dummy-{model.seed}"
    began_s = time.monotonic()
    digest = weights_digest(path)
    if not digest:
        raise ConfigError(
            f"kv_connector_extra_config: no weights ({', '.join(WEIGHTS)}) in {model.model!r}; "
            f"set revision to something that changes with them"
        )
    took_s = time.monotonic() - began_s
    if took_s > SLOW_S:
        _log.warning(
            "reading the weights for their digest took %.0f s; set kv_connector_extra_config revision=%r to skip it",
            took_s,
            digest,
        )
    return digest


def _settings_digest(vllm_config: Any) -> str:
    """Of what changes the KV of the same weights: the model's own config with its overrides, and quantisation."""
    model = vllm_config.model_config
    text = model.hf_text_config.to_dict()
    volatile = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
    settings = {
        "config": {name: text[name] for name in sorted(text) if name not in volatile},
        "quantization": model.quantization,
        # vLLM chooses the short or the long factors of such a model by the longest sequence that it may have.
        "max_model_len": model.max_model_len if "longrope" in json.dumps(text, default=str) else None,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "speculative": _speculative(vllm_config.speculative_config),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _speculative(config: Any) -> Iterable[str] | None:
    """A draft model's layers lie in the same blocks."""
    return None if config is None else [str(config.method), str(config.model)]
