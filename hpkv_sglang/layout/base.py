"""The description that every layout yields: the tensors of a device pool, page by page.

A layout names the tensors of a pool in the order in which a block stores them and says how a page
lies in each: `PageTensor`. From that follow the columns of the device, the columns of a block, and
by joining the two (`layout.columns`) the regions that the C++ core expands, so nothing in Python
loops over pages. Invariant (checked by `BlockLayout`): the regions of a block are disjoint on the
device and cover the block exactly. Immutable, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpkv_sglang._core import BlockLayout
from hpkv_sglang.errors import LayoutError, RefusedError
from hpkv_sglang.layout.columns import Columns, Device, join, rows_of, shifted, tiles_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTensor:
    """One tensor of one layer: `pages[p]` is page `p`, `[page_size, ...]`, a row per token slot.

    `tile_bytes` is zero for pages stored row by row; otherwise the tensor's memory holds tiles of
    that width (NZ order), whatever its shape says. `first` is the column of the field, in bytes,
    at which the rows begin. `pages` keeps the memory mapped.
    """

    layer: int
    field: str
    pages: torch.Tensor
    tile_bytes: int = 0
    first: int = 0

    @property
    def page_size(self) -> int:
        return int(self.pages.shape[1])

    @property
    def row_bytes(self) -> int:
        return int(self.pages[0, 0].numel() * self.pages.element_size())

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.row_bytes

    def device(self) -> list[Device]:
        """Where its columns lie in device memory."""
        page_stride, slot_stride = (
            self.pages.stride(i) * self.pages.element_size() for i in (0, 1)
        )
        address = self.pages.data_ptr()
        return [Device(c, page_stride) for c in self._columns(address, slot_stride)]

    def block(self, offset: int) -> list[Columns]:
        """Where its columns lie in a block that stores a page from `offset` on."""
        return self._columns(offset, self.row_bytes)

    def _columns(self, at: int, slot_stride: int) -> list[Columns]:
        if self.tile_bytes == 0:
            columns = [rows_of(self.layer, self.field, self.row_bytes, at, slot_stride)]
        else:
            columns = list(
                tiles_of(
                    self.layer, self.field, self.row_bytes, self.tile_bytes, at, self.page_size
                )
            )
        return shifted(columns, self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """How the pages of one device pool become blocks.

    `name` is the format of the bytes and part of every block's identity, `geometry` the sizes that
    go with it. `replicated` says that every rank of a tensor-parallel group holds the same bytes.
    `devices` and `columns` are the two arrangements that `block` joins; `tensors` keep the memory.
    """

    name: str
    geometry: Mapping[str, int | str]
    replicated: bool
    page_size: int
    tensors: tuple[PageTensor, ...]
    devices: tuple[Device, ...]
    columns: tuple[Columns, ...]
    block: BlockLayout

    def staged(self, address: int, page_count: int) -> PoolLayout:
        """The same format over `page_count` blocks that lie one after the other at `address`."""
        size = self.block.block_bytes
        devices = tuple(Device(replace(c, at=c.at + address), size) for c in self.columns)
        return replace(
            self,
            tensors=(),
            devices=devices,
            block=_joined(devices, self.columns, self.page_size, size, page_count),
        )


def layout_of(
    name: str,
    geometry: Mapping[str, int | str],
    tensors: Sequence[PageTensor],
    *,
    replicated: bool,
) -> PoolLayout:
    """The layout whose blocks store `tensors` one after the other, in this order.

    LayoutError unless all have the same pages, and the bytes of one token slot are contiguous.
    """
    for tensor in tensors:
        _require_dense_slots(tensor)
    shapes = {(int(t.pages.shape[0]), t.page_size) for t in tensors}
    if len(shapes) != 1:
        raise LayoutError.build(
            "describe a KV pool",
            "pages of its buffers",
            sorted(shapes),
            "All buffers of a pool must have the same number of pages.",
        )
    page_count, page_size = shapes.pop()
    columns: list[Columns] = []
    size = 0
    for tensor in tensors:
        columns += tensor.block(size)
        size += tensor.page_bytes
    devices = tuple(device for tensor in tensors for device in tensor.device())
    return PoolLayout(
        name=name,
        geometry=geometry,
        replicated=replicated,
        page_size=page_size,
        tensors=tuple(tensors),
        devices=devices,
        columns=tuple(columns),
        block=_joined(devices, columns, page_size, size, page_count),
    )


def _joined(
    devices: Sequence[Device],
    columns: Sequence[Columns],
    page_size: int,
    size: int,
    page_count: int,
) -> BlockLayout:
    return BlockLayout(
        block_bytes=size,
        layer_count=max(c.layer for c in columns) + 1,
        page_count=page_count,
        regions=join(devices, columns, page_size),
    )


def paged(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """`[slots, ...]`, one slot per token, as `[pages, page_size, ...]`.

    Slots past the last whole page are left out: SGLang never allocates them.
    """
    page_count = slots.shape[0] // page_size
    return slots[: page_count * page_size].unflatten(0, (page_count, page_size))


def _require_dense_slots(tensor: PageTensor) -> None:
    pages, slot = tensor.pages, tensor.pages[0, 0]
    tiled = tensor.tile_bytes != 0
    if (
        not slot.is_contiguous()
        or pages.stride(1) < slot.numel()
        or (tiled and (not pages[0].is_contiguous() or tensor.row_bytes % tensor.tile_bytes))
    ):
        raise LayoutError.build(
            "describe a KV pool",
            f"layer {tensor.layer}, {tensor.field}, pages {tuple(pages.shape)}",
            pages.stride(),
            "The bytes of one token slot must be contiguous, and those of a tiled page too; run "
            "without --enable-hpkv.",
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
