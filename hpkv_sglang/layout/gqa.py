"""The pool of multi-head, grouped-query and multi-query attention: K and V apart, layer by layer.

SGLang's `MHATokenToKVPool` holds `k_buffer[layer]` `[slots, kv_heads, head_dim]` and
`v_buffer[layer]` `[slots, kv_heads, v_head_dim]`, in `store_dtype` (bytes for 8-bit floats). Slots
are `size` plus one page of padding in front; a page is `page_size` consecutive slots. Under tensor
parallelism each rank has its own heads. A block of one page is

    | layer 0: K of the page | layer 0: V | layer 1: K | layer 1: V | ...

Not carried, and so refused: quantised pools (their scales are apart) and orders other than slot by
slot (`hnd`, `vectorized_5d`), whose bytes mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpkv_sglang.layout.base import (
    PageTensor,
    PoolLayout,
    layout_of,
    paged,
    refuse_if,
    require_shapes,
)
from hpkv_sglang.layout.columns import Columns, rows_of, shifted

NAME = "gqa"
FIELDS = ("k", "v")


def describe(pool: Any, page_size: int) -> PoolLayout:
    """The layout of a `MHATokenToKVPool`. RefusedError or LayoutError; touches no KV bytes."""
    refuse_if(pool.kv_cache_layout != "nhd", pool, f"the order {pool.kv_cache_layout!r}")
    refuse_if(pool.is_quantized_kv_cache, pool, "a quantised KV cache")
    refuse_if(pool.layer_shard_enabled, pool, "layers sharded across ranks")
    refuse_if(pool.layer_num == 0, pool, "no layers")
    require_shapes(pool.k_buffer, (pool.head_num, pool.head_dim), "K")
    require_shapes(pool.v_buffer, (pool.head_num, pool.v_head_dim), "V")
    tensors = [
        PageTensor(layer=layer, field=field, pages=paged(tensor, page_size))
        for layer, pair in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))
        for field, tensor in zip(FIELDS, pair, strict=True)
    ]
    return layout_of(NAME, geometry_of(pool), tensors, replicated=False)


def geometry_of(pool: Any) -> dict[str, int | str]:
    """The sizes that belong to a block's identity; `kv_heads` are this rank's."""
    return {
        "layers": pool.layer_num,
        "kv_heads": pool.head_num,
        "head_dim": pool.head_dim,
        "v_head_dim": pool.v_head_dim,
        "element_bytes": pool.store_dtype.itemsize,
    }


def block_columns(geometry: Mapping[str, Any], first_head: int, page_size: int) -> list[Columns]:
    """Where a block of this geometry has its columns.

    Its heads are numbered from `first_head`, which may be negative: relative to the reader's first.
    """
    widths = (geometry["head_dim"], geometry["v_head_dim"])
    columns: list[Columns] = []
    offset = 0
    for layer in range(geometry["layers"]):
        for field, width in zip(FIELDS, widths, strict=True):
            head_bytes = width * geometry["element_bytes"]
            row_bytes = geometry["kv_heads"] * head_bytes
            rows = rows_of(layer, field, row_bytes, offset, row_bytes)
            columns += shifted([rows], first_head * head_bytes)
            offset += page_size * row_bytes
    return columns
