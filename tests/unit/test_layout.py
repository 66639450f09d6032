"""Layouts of random geometry: spans are disjoint, cover block and tensors, refusals name names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from layout_rig import gqa_pool, gqa_pools, mla_pool, mla_pools, spans, tensors_of

from hpkv_sglang._core import BlockLayout, Region
from hpkv_sglang.errors import LayoutError, RefusedError
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PageTensor, PoolLayout, layout_of, paged
from hpkv_sglang.layout.detect import detect_layout
from hpkv_sglang.mla import layout as mla


def device_bytes(layout: PoolLayout) -> list[int]:
    """The address of every byte of every page."""
    block = layout.block
    return [
        address + i
        for page in range(block.page_count)
        for address, _, count in spans(block, page)
        for i in range(count)
    ]


def owned_bytes(pool: Any, page_size: int, page_count: int) -> set[int]:
    """The address of every byte of whole pages in every tensor, computed from torch's strides."""
    owned = set()
    for tensor in tensors_of(pool):
        slot_bytes = tensor[0].numel() * tensor.element_size()
        for slot in range(page_size * page_count):
            first = tensor[slot].data_ptr()
            owned.update(range(first, first + slot_bytes))
    return owned


def check_spans(layout: PoolLayout, pool: Any, page_size: int) -> None:
    seen = device_bytes(layout)
    assert len(seen) == len(set(seen)), "a byte of the device is in two spans"
    pages = min(t.shape[0] for t in tensors_of(pool)) // page_size
    assert layout.block.page_count == pages
    assert set(seen) == owned_bytes(pool, page_size, pages)
    covered = sorted((offset, count) for _, offset, count in spans(layout.block, 0))
    end = 0
    for offset, count in covered:
        assert offset == end, "a gap or an overlap in the block"
        end += count
    assert end == layout.block.block_bytes


@settings(max_examples=40, deadline=None)
@given(drawn=gqa_pools())
def test_gqa_spans_are_disjoint_and_cover_block_and_tensors(drawn: tuple[Any, int]) -> None:
    pool, page_size = drawn
    layout = gqa.describe(pool, page_size)
    check_spans(layout, pool, page_size)
    assert layout.block.layer_count == pool.layer_num


@settings(max_examples=40, deadline=None)
@given(drawn=mla_pools())
def test_mla_spans_are_disjoint_and_cover_block_and_tensors(drawn: tuple[Any, int]) -> None:
    pool, page_size = drawn
    layout = mla.describe(pool, page_size)
    check_spans(layout, pool, page_size)
    assert layout.replicated


def test_a_block_is_stored_layer_by_layer_k_before_v() -> None:
    pool = gqa_pool(layers=2, slots=12, kv_heads=2, head_dims=(8, 4), dtype=torch.float16)
    regions = gqa.describe(pool, 4).block.regions
    assert [r.layer for r in regions] == [0, 0, 1, 1]
    assert [r.base for r in regions] == [t.data_ptr() for t in tensors_of(pool)]
    assert [r.piece_bytes for r in regions] == [4 * 2 * 8 * 2, 4 * 2 * 4 * 2] * 2


def test_slots_with_gaps_between_them_become_pieces() -> None:
    pool = gqa_pool(
        layers=1, slots=8, kv_heads=1, head_dims=(5, 5), dtype=torch.float32, slot_gap=3
    )
    region = gqa.describe(pool, 4).block.regions[0]
    assert (region.piece_count, region.piece_bytes, region.piece_stride) == (4, 20, 32)


def one_tensor_layout(*tensors: torch.Tensor) -> PoolLayout:
    parts = [
        PageTensor(layer=layer, field="k", pages=paged(tensor, 4))
        for layer, tensor in enumerate(tensors)
    ]
    return layout_of("test", {}, parts, replicated=False)


def test_slots_whose_bytes_are_scattered_are_an_error() -> None:
    scattered = torch.zeros(8, 4, 2).transpose(1, 2)
    with pytest.raises(LayoutError, match="one token slot must be contiguous"):
        one_tensor_layout(scattered)


def test_buffers_with_other_numbers_of_pages_are_an_error() -> None:
    with pytest.raises(LayoutError, match="same number of pages"):
        one_tensor_layout(*(torch.zeros(slots, 1, 4) for slots in (8, 12)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_cache_layout": "hnd"}, "hnd"),
        ({"kv_cache_layout": "vectorized_5d"}, "vectorized_5d"),
        ({"is_quantized_kv_cache": True}, "quantised"),
        ({"layer_shard_enabled": True}, "sharded"),
        ({"layer_num": 0}, "no layers"),
    ],
)
def test_modes_of_the_gqa_pool_that_are_not_carried_are_refused(
    change: dict[str, Any], named: str
) -> None:
    pool = gqa_pool(layers=1, slots=8, kv_heads=1, head_dims=(4, 4), dtype=torch.float16)
    vars(pool).update(change)
    with pytest.raises(RefusedError, match=named):
        gqa.describe(pool, 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dsa": True}, "sparse-attention"),
        ({"dsa_kv_cache_store_fp8": True}, "packed"),
        ({"kv_scale_buffer": [torch.zeros(1)]}, "scales"),
        ({"layer_shard_enabled": True}, "sharded"),
    ],
)
def test_modes_of_the_mla_pool_that_are_not_carried_are_refused(
    change: dict[str, Any], named: str
) -> None:
    pool = mla_pool(layers=1, slots=8, rank=8, rope=2, dtype=torch.float16)
    vars(pool).update(change)
    with pytest.raises(RefusedError, match=named):
        mla.describe(pool, 4)


def test_tensors_of_another_shape_than_promised_are_an_error() -> None:
    pool = gqa_pool(layers=2, slots=8, kv_heads=2, head_dims=(4, 4), dtype=torch.float16)
    pool.head_num = 1
    with pytest.raises(LayoutError, match=r"K of layer 0, expected \[slots, 1, 4\]"):
        gqa.describe(pool, 4)


def test_an_unknown_pool_class_is_refused_by_its_name() -> None:
    with pytest.raises(RefusedError, match=r"types\.SimpleNamespace.*MHATokenToKVPool"):
        detect_layout(SimpleNamespace(page_size=4), 4)


REGION = {
    "layer": 0,
    "base": 1 << 20,
    "page_stride": 64,
    "piece_count": 1,
    "piece_stride": 64,
    "piece_bytes": 64,
    "block_offset": 0,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([], "cover 0 of 64"),
        ([{"piece_bytes": 32}], "cover 32 of 64"),
        ([{"block_offset": 8}], "past the end"),
        ([{"block_offset": 8, "piece_bytes": 32}], "gap"),
        ([{}, {"base": 1 << 21}], "overlaps the bytes before"),
        ([{"layer": 2}], "does not exist"),
        ([{"base": 0}], "no device address"),
        ([{"page_stride": 32}], "overlap in device memory"),
        (
            [{"piece_bytes": 32}, {"piece_bytes": 32, "base": (1 << 20) + 16, "block_offset": 32}],
            "overlap",
        ),
    ],
)
def test_a_layout_that_breaks_a_rule_is_a_value_error_that_says_which(
    changes: list[dict[str, int]], named: str
) -> None:
    regions = [Region(**(REGION | change)) for change in changes]
    with pytest.raises(ValueError, match=named):
        BlockLayout(block_bytes=64, layer_count=2, page_count=4, regions=regions)
