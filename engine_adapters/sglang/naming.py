"""What the KV of a host pool is called: the namespace of its blocks, and the keys of its pages.

SGLang's page hash covers all tokens of a prefix and the salt, and nothing else. Model, revision, dtype, layout, rank
and whatever else changes the bytes go into the namespace.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapters.sglang.options import Options
from engine_adapters.sglang.pages import Pages
from kvstore import BlockKeys, KeyScheme, Namespace, OpaqueLayout, UsageError, keys_from_digests
from kvstore.core.namespace import ITEM_BYTES

__all__ = [
    "HeadGroups",
    "digests_of",
    "engine_settings",
    "head_groups_of",
    "namespace_of",
    "page_keys",
    "weight_version",
]

FORMAT = "sglang-hicache-v1"  # of the tag and of the bytes: a change of either gets a new one
_PAGE_HASH = re.compile(r"[0-9a-f]{64}")
_MAMBA = "mamba"
_KV = "kv"

# What of the engine's arguments changes KV of the same model, revision, dtype and layout.
_SETTINGS = (
    "kv_cache_dtype",  # a pool of float8 may call itself uint8
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "speculative_draft_model_path",  # its layers may lie in the same page
    "speculative_draft_model_revision",
)


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Which head groups of all ranks this rank's pages hold: `count` of `total`, from `first` on. 1 of 1 where pages
    aren't cut.
    """

    first: int = 0
    count: int = 1
    total: int = 1


def head_groups_of(config: Any) -> HeadGroups:
    """The cut that `tp_lcm_size` asks for, so that engines of different tensor-parallel sizes share pages."""
    if not config.tp_lcm_size or config.is_mla_model:
        return HeadGroups()
    if config.tp_lcm_size % config.tp_size:
        raise UsageError(f"tp_lcm_size={config.tp_lcm_size}: allowed is a multiple of the tensor-parallel size")
    count = config.tp_lcm_size // config.tp_size
    return HeadGroups(config.tp_rank * count, count, config.tp_lcm_size)


def engine_settings() -> dict[str, Any]:
    """The running engine's arguments that change KV, and its LoRA adapters; empty outside of an engine."""
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - the rest of this module needs no engine

    try:
        arguments = get_server_args()
    except ValueError:  # none are set: not in an engine's process
        return {}
    settings = {name: getattr(arguments, name, None) for name in _SETTINGS}
    return settings | {"lora": bool(getattr(arguments, "lora_paths", None))}


def weight_version() -> str:
    """What the engine calls its weights by now; an update while it runs may change that. Empty outside of an engine."""
    from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - as above

    try:
        return str(get_serving().weight_version)
    except ValueError:
        return ""


def namespace_of(
    options: Options, config: Any, pool: Any, pages: Pages, *, name: str, groups: HeadGroups, settings: dict[str, Any]
) -> Namespace:
    """The namespace of one host pool's pages.

    Args:
        options: the adapter's.
        config: the engine's `HiCacheStorageConfig`.
        pool: the pool.
        pages: its pages.
        name: of the pool, as the engine calls it.
        groups: how its heads are cut.
        settings: of the engine, that change KV.

    Raises:
        UsageError: something that has to be told apart isn't named.
    """
    if settings.get("lora") and not options.adapter:
        raise UsageError(
            "option 'adapter' is missing: the engine's page hashes tell adapters of --lora-paths apart by name and path "
            "only; name the version of their weights"
        )
    dtype = str(pool.dtype).removeprefix("torch.")
    parts = [
        FORMAT,
        name,
        type(pool).__name__,
        str(pool.layout),
        f"page {pool.page_size}",
        f"parts {pages.layers}",
        dtype,
        getattr(pool, "storage_format_tag", None) or "",
        _part_of_the_model(config, pool, name, groups),
        hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16],
    ]
    return Namespace(
        model=_model_of(options, config),
        revision=options.revision,
        dtype=dtype if dtype in ITEM_BYTES else "uint8",
        block_tokens=max(1, pool.page_size),
        layout=OpaqueLayout("/".join(parts), pages.layers, pages.layer_bytes),
        pipeline=(config.pp_rank, config.pp_size),
        adapter=hashlib.sha256(options.adapter.encode()).digest() if options.adapter else b"",
        tenant=options.tenant.encode(),
    )


def page_keys(namespace: Namespace, hashes: Sequence[str], groups: HeadGroups, scheme: KeyScheme) -> BlockKeys:
    """Keys of all head groups of each page, page after page."""
    digests = digests_of(hashes)
    if groups.total > 1:
        numbers = [group.to_bytes(4, "little") for group in range(groups.first, groups.first + groups.count)]
        digests = [digest + number for digest in digests for number in numbers]
    return keys_from_digests(namespace, digests, scheme=scheme)


def digests_of(hashes: Sequence[str]) -> list[bytes]:
    """The engine's page hashes as bytes. Another key than SHA-256 in hexadecimal digits is hashed itself."""
    return [
        bytes.fromhex(text) if _PAGE_HASH.fullmatch(text) else hashlib.sha256(b"key:" + text.encode()).digest()
        for text in hashes
    ]


def _model_of(options: Options, config: Any) -> str:
    if options.model:
        return options.model
    name = config.model_name or ""
    if not name or name.startswith((".", "/", "~")) or Path(name).exists():
        raise UsageError(f"option 'model' is missing: the engine's {name!r} is no name that all workers share")
    return name


def _part_of_the_model(config: Any, pool: Any, name: str, groups: HeadGroups) -> str:
    """Which share of heads and positions these bytes are. Latent attention is the same on all ranks."""
    ranks = f"cp{config.attn_cp_rank}of{config.attn_cp_size}"
    if groups.total > 1:
        return f"{ranks}/head groups of {groups.total}"
    is_split = not config.is_mla_model or name == _MAMBA or (name != _KV and hasattr(pool, "v_buffer"))
    return f"{ranks}/tp{config.tp_rank}of{config.tp_size}" if is_split else ranks
