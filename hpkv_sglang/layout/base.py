"""The description that every layout yields, and how a tensor of token slots becomes part of it.

A layout names the buffers of a device pool in the order in which a block stores them. Each buffer
is described once, by address, strides and sizes; the C++ core expands that to the bytes of any
page, so nothing in Python loops over pages. Invariant (checked by `BlockLayout`): the regions of a
block are disjoint on the device and cover the block exactly. Immutable, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpkv_sglang._core import BlockLayout, Region
from hpkv_sglang.errors import LayoutError, RefusedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBuffer:
    """One buffer of one layer, page by page; all numbers but the counts are bytes.

    Piece `i` of page `p` is at `address + p * page_stride + i * piece_stride`. `owner` is the
    tensor that keeps the memory mapped.
    """

    layer: int
    address: int
    page_count: int
    page_stride: int
    piece_count: int
    piece_stride: int
    piece_bytes: int
    owner: Any

    @property
    def page_bytes(self) -> int:
        return self.piece_count * self.piece_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """How the pages of one device pool become blocks.

    `name` is the format of the bytes and part of every block's identity, `geometry` the sizes that
    go with it. `replicated` says that every rank of a tensor-parallel group holds the same bytes.
    `buffers` keep the device memory that `block` points at.
    """

    name: str
    geometry: Mapping[str, int | str]
    replicated: bool
    page_size: int
    block: BlockLayout
    buffers: tuple[PageBuffer, ...]


def slot_buffer(tensor: torch.Tensor, layer: int, page_size: int) -> PageBuffer:
    """A tensor `[slots, ...]`, one slot per token, cut into pages of `page_size` slots.

    Slots past the last whole page are left out: SGLang never allocates them. LayoutError if the
    bytes of one slot are not contiguous.
    """
    slot_bytes = tensor[0].numel() * tensor.element_size()
    slot_stride = tensor.stride(0) * tensor.element_size()
    if not tensor[0].is_contiguous() or slot_stride < slot_bytes:
        raise LayoutError.build(
            "describe a KV pool",
            f"layer {layer}, shape {tuple(tensor.shape)}",
            tensor.stride(),
            "The bytes of one token slot must be contiguous; run without --enable-hpkv.",
        )
    dense = slot_stride == slot_bytes
    return PageBuffer(
        layer=layer,
        address=tensor.data_ptr(),
        page_count=tensor.shape[0] // page_size,
        page_stride=page_size * slot_stride,
        piece_count=1 if dense else page_size,
        piece_stride=slot_stride,
        piece_bytes=page_size * slot_bytes if dense else slot_bytes,
        owner=tensor,
    )


def block_of(buffers: Iterable[PageBuffer]) -> BlockLayout:
    """The block that stores `buffers` one after the other, in this order, layers ascending."""
    parts = tuple(buffers)
    page_counts = {part.page_count for part in parts}
    if len(page_counts) != 1:
        raise LayoutError.build(
            "describe a KV pool",
            "pages of its buffers",
            sorted(page_counts),
            "All buffers of a pool must have the same number of pages.",
        )
    ends = list(accumulate((part.page_bytes for part in parts), initial=0))
    regions = [
        Region(
            layer=part.layer,
            base=part.address,
            page_stride=part.page_stride,
            piece_count=part.piece_count,
            piece_stride=part.piece_stride,
            piece_bytes=part.piece_bytes,
            block_offset=begin,
        )
        for part, begin in zip(parts, ends[:-1], strict=True)
    ]
    return BlockLayout(
        block_bytes=ends[-1],
        layer_count=parts[-1].layer + 1,
        page_count=page_counts.pop(),
        regions=regions,
    )


def require_shapes(
    tensors: Iterable[torch.Tensor], inner_shape: tuple[int, ...], what: str
) -> None:
    """LayoutError unless every tensor is `[slots, *inner_shape]`."""
    for layer, tensor in enumerate(tensors):
        if tuple(tensor.shape[1:]) != inner_shape:
            raise LayoutError.build(
                "describe a KV pool",
                f"{what} of layer {layer}, expected [slots, {', '.join(map(str, inner_shape))}]",
                tuple(tensor.shape),
                "This SGLang lays the pool out in another way; run without --enable-hpkv.",
            )


def refuse_if(condition: bool, pool: object, what: str) -> None:
    """RefusedError: this pool is of a known class, but in a mode that no layout carries."""
    if condition:
        raise RefusedError.build(
            "--enable-hpkv",
            f"a KV pool with {what}",
            type(pool).__qualname__,
            "Blocks would not hold everything the pool stores; run without --enable-hpkv or "
            "switch that mode off.",
        )
