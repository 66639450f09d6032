"""The split pool of latent attention on an Ascend NPU: NoPE and RoPE parts in tensors of their own.

SGLang's `NPUMLATokenToKVPool` holds `k_buffer` `[layer, page, slot, 1, kv_lora_rank]` (NoPE) and
`v_buffer` `[layer, page, slot, 1, qk_rope_head_dim]` (RoPE). With `SGLANG_USE_FIA_NZ` the memory of
a page is in NZ order, tiles of 16 elements of all slots, though the shape stays. Beside them there
may be what sparse attention searches: `index_k_buffer` `[index layer, page, slot, 1, width]` and
scales. Packed 8-bit rows (latent, RoPE and scales in one opaque record) leave `v_buffer` without
bytes and are carried as they are.

Formats: those of `mla.formats`, with `-index` behind the name when an index is present, because
nobody without one could use such a block, nor the other way round; `mla-packed-index` for the
packed rows. Every rank of a tensor-parallel group holds the same bytes.
"""

from __future__ import annotations

from typing import Any

from hpkv_sglang.layout.base import PageTensor, PoolLayout, layout_of, refuse_if
from hpkv_sglang.mla import formats

PACKED = "mla-packed"


def describe(pool: Any, page_size: int) -> PoolLayout:
    """The layout of a `NPUMLATokenToKVPool`. RefusedError or LayoutError; touches no KV bytes."""
    refuse_if(pool.k_buffer is None, pool, "K and V in host memory (sparsity-driven offload)")
    refuse_if(pool.layer_shard_enabled, pool, "layers sharded across ranks")
    refuse_if(pool.layer_num == 0, pool, "no layers")
    refuse_if(pool.dcp_size > 1, pool, "slots shared between ranks (decode context parallelism)")
    geometry = formats.geometry_of(pool)
    name = _rows_name(pool)
    if pool.index_k_buffer is not None:
        refuse_if(pool.index_page_size != page_size, pool, "an index with pages of its own size")
        name += "-index"
        geometry |= {
            "index_head_dim": pool.index_head_dim,
            "index_layers": ",".join(map(str, _index_layers(pool))),
        }
    if pool.dsa_kv_cache_store_fp8:
        geometry["packed_row_bytes"] = pool.kv_cache_dim * pool.store_dtype.itemsize
    tensors = [t for layer in range(pool.layer_num) for t in _layer_tensors(pool, layer)]
    return layout_of(name, geometry, tensors, replicated=True)


def _rows_name(pool: Any) -> str:
    if pool.dsa_kv_cache_store_fp8:
        return PACKED
    return formats.SPLIT_NZ if pool.use_fia_nz else formats.SPLIT


def _index_layers(pool: Any) -> list[int]:
    return [layer - pool.start_layer for layer in pool.indexer_layer_ids]


def _layer_tensors(pool: Any, layer: int) -> list[PageTensor]:
    """What one layer stores, in block order."""
    element = pool.store_dtype.itemsize
    if pool.dsa_kv_cache_store_fp8:
        tensors = [PageTensor(layer=layer, field="packed", pages=pool.k_buffer[layer])]
    else:
        tile = formats.TILE_ELEMENTS * element if pool.use_fia_nz else 0
        rope_begins = pool.kv_lora_rank * element
        tensors = [
            PageTensor(
                layer=layer, field=formats.FIELD, pages=buffer[layer], tile_bytes=tile, first=first
            )
            for buffer, first in ((pool.k_buffer, 0), (pool.v_buffer, rope_begins))
        ]
    if pool.index_k_buffer is not None and layer in _index_layers(pool):
        slot = _index_layers(pool).index(layer)
        tensors.append(PageTensor(layer=layer, field="index_k", pages=pool.index_k_buffer[slot]))
        if pool.index_k_scale_buffer is not None:
            tensors.append(
                PageTensor(layer=layer, field="index_scale", pages=pool.index_k_scale_buffer[slot])
            )
    return tensors
