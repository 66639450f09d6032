"""Blocks of latent attention in the arrangements servers write, all one table: field `latent`.

    mla-fused      | layer 0: rows of NoPE and RoPE side by side | layer 1 | ...
    mla-split      | layer 0: NoPE rows | layer 0: RoPE rows | layer 1: NoPE | ...
    mla-split-nz   as mla-split, each part in tiles of 16 elements (NZ order)

NoPE is columns `[0, kv_lora_rank)` of the field, RoPE what follows, in elements. So a server reads
what one of another kind wrote by the join of its pool's columns with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpkv_sglang.layout.columns import Columns, rows_of, shifted, tiles_of

FUSED = "mla-fused"
SPLIT = "mla-split"
SPLIT_NZ = "mla-split-nz"
FORMATS = (FUSED, SPLIT, SPLIT_NZ)

FIELD = "latent"
TILE_ELEMENTS = 16


def geometry_of(pool: Any) -> dict[str, int | str]:
    """The sizes that belong to a block's identity, equal in every arrangement."""
    return {
        "layers": pool.layer_num,
        "kv_lora_rank": pool.kv_lora_rank,
        "qk_rope_head_dim": pool.qk_rope_head_dim,
        "element_bytes": pool.store_dtype.itemsize,
    }


def block_columns(name: str, geometry: Mapping[str, Any], page_size: int) -> list[Columns]:
    """Where a block of format `name` has its columns. KeyError for a format not listed above."""
    element = geometry["element_bytes"]
    nope, rope = (geometry[n] * element for n in ("kv_lora_rank", "qk_rope_head_dim"))
    parts = {FUSED: [nope + rope], SPLIT: [nope, rope], SPLIT_NZ: [nope, rope]}[name]
    columns: list[Columns] = []
    offset = 0
    for layer in range(geometry["layers"]):
        first = 0
        for row_bytes in parts:
            if name == SPLIT_NZ:
                tile = TILE_ELEMENTS * element
                part = list(tiles_of(layer, FIELD, row_bytes, tile, offset, page_size))
            else:
                part = [rows_of(layer, FIELD, row_bytes, offset, row_bytes)]
            columns += shifted(part, first)
            first += row_bytes
            offset += page_size * row_bytes
    return columns
