"""Blocks of latent attention in the arrangements servers write, all one table: field `latent`.

    mla-fused      | layer 0: rows of NoPE and RoPE side by side | layer 1 | ...
    mla-split      | layer 0: NoPE rows | layer 0: RoPE rows | layer 1: NoPE | ...
    mla-split-nz   as mla-split, each part in tiles of 16 elements (NZ order)

NoPE is columns `[0, kv_lora_rank)` of the field, RoPE what follows, in elements. So a server reads
what one of another kind wrote by the join of its pool's columns with these.

The elements of the RoPE part may lie in another order: rotated pairs side by side as in the
checkpoint (`pairs`), or all first halves before all second ones (`halves`), which is what Ascend's
rotary operators leave behind. A product of query and key is the same in both, as long as both sides
agree, so a block of the other order is reordered on the way in. Which order a server has is not to
be seen from its pool; where it is not known, blocks do not cross between arrangements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpkv_sglang.layout.columns import Columns, rows_of, shifted, tiles_of

FUSED = "mla-fused"
SPLIT = "mla-split"
SPLIT_NZ = "mla-split-nz"
FORMATS = (FUSED, SPLIT, SPLIT_NZ)

PAIRS, HALVES, UNKNOWN_ORDER = "pairs", "halves", "unknown"

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


def with_rope_order(
    columns: list[Columns], geometry: Mapping[str, Any], wanted: str
) -> list[Columns]:
    """`columns` of a block in the other order, numbered as a reader with order `wanted` counts."""
    element = geometry["element_bytes"]
    first, count = geometry["kv_lora_rank"], geometry["qk_rope_head_dim"]
    numbers = range(count)
    if wanted == PAIRS:  # of a block in halves
        index = [2 * (j % (count // 2)) + j // (count // 2) for j in numbers]
    else:  # HALVES, of a block in pairs
        index = [j // 2 + (j % 2) * (count // 2) for j in numbers]
    renumbered: list[Columns] = []
    for part in columns:
        begin, end = part.begin // element, part.end // element
        if begin < first:  # NoPE, and with it what lies before the RoPE part in a fused row
            kept = min(part.end, first * element)
            renumbered.append(replace(part, end=kept))
        for at in range(max(begin, first), end):
            to = (first + index[at - first]) * element
            offset = part.at + (at - begin) * element
            renumbered.append(replace(part, begin=to, end=to + element, at=offset))
    return renumbered
