"""Real host pools of the engine, small, over small device pools on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 16
PAGES = 40
LAYERS = 3
HEADS = 4

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = [
    *(f"mha-{layout}" for layout in MHA_LAYOUTS),
    *(f"mla-{layout}" for layout in MLA_LAYOUTS),
    "asymmetric-page_first",
    "asymmetric-page_first_direct",
    "shm-page_first",
    "flat-layer_first",
]


def host_pool(kind: str, *, dtype: torch.dtype = torch.float32, heads: int = HEADS, seed: int | None = None) -> Any:
    """A pool of that kind and layout, `PAGES` pages; random bytes from `seed`, zeros without one."""
    family, layout = kind.split("-")
    if family == "mla":
        pool = _latent(layout, dtype)
    elif family == "mamba":
        pool = _recurrent(layout)
    else:
        pool = _plain(layout, dtype, heads, value_dim=8 if family == "asymmetric" else 16, shared=family == "shm")
    if family == "flat":  # as pools are that move their pages about: no pointers
        pool.get_page_buffer_meta = _no_pointers
    for buffer in buffers(pool):
        raw = buffer.view(torch.uint8)
        if seed is None:
            raw.zero_()
        else:
            raw.copy_(
                torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            )
    return pool


def buffers(pool: Any) -> tuple[torch.Tensor, ...]:
    """Its memory."""
    return (pool.kv_buffer,) if isinstance(pool.kv_buffer, torch.Tensor) else tuple(pool.kv_buffer)


def page(pool: Any, number: int) -> torch.Tensor:
    """All bytes of one page (as floats they'd be unequal to themselves), read without the adapter's code."""
    slots, whole = slice(number * PAGE, (number + 1) * PAGE), slice(number, number + 1)
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        pieces = [b[slots] if pool.layout == "page_first" else b[whole] for b in pool.kv_buffer]
        return torch.cat([piece.flatten() for piece in pieces]).view(torch.uint8)
    return pool.get_data_page(number * PAGE, flat=True).clone().view(torch.uint8)


def slots_of(*pages: int) -> torch.Tensor:
    """Token slots of these pages, as the controller hands them over."""
    return torch.cat([torch.arange(number * PAGE, (number + 1) * PAGE) for number in pages])


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    """What the controller gives a backend, in an engine of one rank."""
    told: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "org/tiny",
    }
    return HiCacheStorageConfig(**(told | changes))


def _plain(layout: str, dtype: torch.dtype, heads: int, *, value_dim: int, shared: bool) -> Any:
    tokens, device = PAGE, torch.device("cpu")
    keys = tuple(torch.zeros(tokens, heads, 16, dtype=dtype) for _ in range(LAYERS))
    values = tuple(torch.zeros(tokens, heads, value_dim, dtype=dtype) for _ in range(LAYERS))
    pointers = [torch.tensor([b.data_ptr() for b in tensors], dtype=torch.uint64) for tensors in (keys, values)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys, v=values, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=16,
        v_head_dim=value_dim,
        dtype=dtype,
        device=device,
    )
    kind = MHATokenToKVPoolHost if value_dim == 16 else AsymmetricMHATokenToKVPoolHost
    return kind(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        allocator_type="shm" if shared else "default",
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=PAGES * PAGE,
    )


def _no_pointers(_: torch.Tensor) -> None:
    raise NotImplementedError


def _recurrent(layout: str) -> Any:
    """States of a slot each, of three sizes."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 4, 2, 8, 6),
        conv=(torch.zeros(LAYERS, 4, 10, 3), torch.zeros(LAYERS, 4, 5)),
    )
    return MambaPoolHost(
        info, host_to_device_ratio=4.0, host_size=0, device_capacity=4, pin_memory=False, layout=layout
    )


def _latent(layout: str, dtype: torch.dtype) -> Any:
    latent, rope = 24, 8
    rows = tuple(torch.zeros(PAGE, 1, latent + rope, dtype=dtype) for _ in range(LAYERS))
    return MLATokenToKVPoolHost(
        MLABufferInfo(
            buffers=rows,
            data_ptrs=torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64),
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=PAGE,
            kv_lora_rank=latent,
            qk_rope_head_dim=rope,
            kv_cache_dim=latent + rope,
            dtype=dtype,
            device=torch.device("cpu"),
        ),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=PAGES * PAGE,
    )
