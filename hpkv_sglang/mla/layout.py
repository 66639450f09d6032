"""The fused pool of latent attention: NoPE and RoPE parts side by side in one row per token.

SGLang's `MLATokenToKVPool` holds `kv_buffer[layer]`, `[slots, 1, kv_lora_rank +
qk_rope_head_dim]`, in `store_dtype`. Slots are `size` plus one page of padding; a page is
`page_size` consecutive slots. Every rank of a tensor-parallel group holds the same bytes. A block
of one page is

    | layer 0: rows of the page | layer 1 | ...

Not carried, and so refused: sparse-attention pools (their index is apart), packed 8-bit rows and
quantised pools (their scales are apart).
"""

from __future__ import annotations

from typing import Any

from hpkv_sglang.layout.base import (
    PageTensor,
    PoolLayout,
    layout_of,
    paged,
    refuse_if,
    require_shapes,
)
from hpkv_sglang.mla.formats import FIELD, FUSED, geometry_of


def describe(pool: Any, page_size: int) -> PoolLayout:
    """The layout of a `MLATokenToKVPool`. RefusedError or LayoutError; touches no KV bytes."""
    refuse_if(pool.use_dsa, pool, "a sparse-attention index")
    refuse_if(pool.dsa_kv_cache_store_fp8, pool, "packed 8-bit rows")
    refuse_if(pool.kv_scale_buffer is not None, pool, "scales beside the rows")
    refuse_if(pool.layer_shard_enabled, pool, "layers sharded across ranks")
    refuse_if(pool.layer_num == 0, pool, "no layers")
    require_shapes(pool.kv_buffer, (1, pool.kv_lora_rank + pool.qk_rope_head_dim), "KV")
    tensors = [
        PageTensor(layer=layer, field=FIELD, pages=paged(tensor, page_size))
        for layer, tensor in enumerate(pool.kv_buffer)
    ]
    return layout_of(FUSED, geometry_of(pool), tensors, replicated=True)
