"""Device pools of random geometry, and what a layout says about them spelled out byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hpkv_sglang._core import BlockLayout

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, slot_gap: int) -> torch.Tensor:
    """`[slots, ...]` of random bytes; `slot_gap` unused elements lie between two slots."""
    inner = int(np.prod(shape[1:]))
    whole = torch.randint(0, 256, (shape[0] * (inner + slot_gap) * dtype.itemsize,))
    rows = whole.to(torch.uint8).view(dtype).view(shape[0], inner + slot_gap)
    return rows[:, :inner].view(shape) if slot_gap == 0 else rows[:, :inner].unflatten(1, shape[1:])


class DevicePool(SimpleNamespace):
    """Attributes of a pool; shows its geometry and not its bytes when an example fails."""

    def __repr__(self) -> str:
        shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors_of(self)[:2]]
        return f"DevicePool(layers={self.layer_num}, first={shapes})"


def gqa_pool(
    *,
    layers: int,
    slots: int,
    kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    slot_gap: int = 0,
) -> Any:
    """What the GQA layout reads of SGLang's pool; `head_dims` of K and of V."""
    head_dim, v_head_dim = head_dims
    return DevicePool(
        kv_cache_layout="nhd",
        is_quantized_kv_cache=False,
        layer_shard_enabled=False,
        layer_num=layers,
        head_num=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        store_dtype=dtype,
        k_buffer=[
            random_tensor((slots, kv_heads, head_dim), dtype, slot_gap) for _ in range(layers)
        ],
        v_buffer=[
            random_tensor((slots, kv_heads, v_head_dim), dtype, slot_gap) for _ in range(layers)
        ],
    )


def mla_pool(*, layers: int, slots: int, rank: int, rope: int, dtype: torch.dtype) -> Any:
    """What the MLA layout reads of SGLang's pool."""
    return DevicePool(
        use_dsa=False,
        dsa_kv_cache_store_fp8=False,
        kv_scale_buffer=None,
        layer_shard_enabled=False,
        layer_num=layers,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        store_dtype=dtype,
        kv_buffer=[random_tensor((slots, 1, rank + rope), dtype, 0) for _ in range(layers)],
    )


@st.composite
def gqa_pools(draw: st.DrawFn) -> tuple[Any, int]:
    """(pool, page size); the slots need not be a multiple of the page size."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    pool = gqa_pool(
        layers=draw(st.integers(1, 4)),
        slots=page_size * draw(st.integers(3, 9)) + draw(st.integers(0, page_size - 1)),
        kv_heads=draw(st.integers(1, 4)),
        head_dims=(draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        dtype=draw(st.sampled_from(DTYPES)),
        slot_gap=draw(st.sampled_from([0, 0, 3])),
    )
    return pool, page_size


@st.composite
def mla_pools(draw: st.DrawFn) -> tuple[Any, int]:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    pool = mla_pool(
        layers=draw(st.integers(1, 4)),
        slots=page_size * draw(st.integers(3, 9)) + draw(st.integers(0, page_size - 1)),
        rank=draw(st.integers(1, 70)),
        rope=draw(st.integers(0, 20)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return pool, page_size


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """Every tensor that holds KV, slot by slot, in block order."""
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    by_layer = [pool.k_buffer, pool.v_buffer]
    index = getattr(pool, "index_k_buffer", None)
    rows = []
    for layer in range(pool.layer_num):
        parts = [buffer[layer] for buffer in by_layer if buffer[layer].numel()]
        if index is not None and layer in pool.indexer_layer_ids:
            slot = pool.indexer_layer_ids.index(layer)
            parts.append(index[slot])
            if pool.index_k_scale_buffer is not None:
                parts.append(pool.index_k_scale_buffer[slot].reshape(-1, 1, 1))
        # The NPU's pages, [page, slot, ...], are slots in a row all the same.
        rows += [p if p.ndim == 3 else p.reshape(-1, *p.shape[-2:]) for p in parts]
    return rows


def spans(block: BlockLayout, page: int) -> Iterator[tuple[int, int, int]]:
    """(device address, block offset, bytes) of a page, expanded as the format says."""
    for region in block.regions:
        block_stride = region.block_stride or region.piece_bytes
        for piece in range(region.piece_count):
            yield (
                region.base + page * region.page_stride + piece * region.piece_stride,
                region.block_offset + piece * block_stride,
                region.piece_bytes,
            )


def page_rows(pool: Any, page_size: int, page: int) -> list[bytes]:
    """The bytes of one page of every tensor, read through torch and not through the layout."""
    rows = slice(page * page_size, (page + 1) * page_size)
    return [t[rows].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors_of(pool)]


def scribble(pool: Any) -> None:
    """Overwrite everything with random bytes."""
    for tensor in tensors_of(pool):
        noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),)).to(torch.uint8)
        tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
