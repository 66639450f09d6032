"""The paged pool of multi-head, grouped-query and multi-query attention on an Ascend NPU.

SGLang's `NPUMHATokenToKVPool` holds all layers in two tensors, `[layer, page, slot, kv_heads,
head_dim]` for K and for V. For the fused attention kernel (FIA) it shows them layer by layer as
`[slots, 1, kv_heads, head_dim]`, views of the same memory; the layout is taken from the tensors
behind them. A page of a layer is the same bytes in the same order as in a CUDA pool, so the blocks
are those of `layout.gqa`.
"""

from __future__ import annotations

from typing import Any

from hpkv_sglang.errors import LayoutError
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PageTensor, PoolLayout, layout_of, refuse_if


def describe(pool: Any, page_size: int) -> PoolLayout:
    """The layout of a `NPUMHATokenToKVPool`. RefusedError or LayoutError; touches no KV bytes."""
    refuse_if(pool.is_quantized_kv_cache, pool, "a quantised KV cache")
    refuse_if(pool.layer_shard_enabled, pool, "layers sharded across ranks")
    refuse_if(pool.layer_num == 0, pool, "no layers")
    buffers = pool.get_hicache_transfer_buffers()
    for field, tensor, width in zip(
        gqa.FIELDS, buffers, (pool.head_dim, pool.v_head_dim), strict=True
    ):
        expected = (pool.layer_num, page_size, pool.head_num, width)
        if (tensor.shape[0], *tensor.shape[2:]) != expected:
            raise LayoutError.build(
                "describe a KV pool",
                f"{field}, expected [layers, pages, {', '.join(map(str, expected[1:]))}] with "
                f"{pool.layer_num} layers",
                tuple(tensor.shape),
                "This SGLang lays the pool out in another way; run without --enable-hpkv.",
            )
    tensors = [
        PageTensor(layer=layer, field=field, pages=tensor[layer])
        for layer in range(pool.layer_num)
        for field, tensor in zip(gqa.FIELDS, buffers, strict=True)
    ]
    return layout_of(gqa.NAME, gqa.geometry_of(pool), tensors, replicated=False)
