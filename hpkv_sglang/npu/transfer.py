"""How the pages of a layer get from device memory into staging blocks, and back.

A block's layer is one run of bytes, the layer's tensors one after the other. Two ways, chosen at
start and never mixed:

    IndexTransfer       pages --gather--> bounce buffer on the device --one copy a page--> blocks
    ExchangeTransfer    pages --copies of the device library--> blocks

The bounce buffer is reused layer after layer: both its writer and its reader are on one stream,
which is why every stream needs a transfer of its own. Nothing here waits.

Threads: a transfer belongs to the thread that drives its stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpkv_sglang.errors import LayoutError
from hpkv_sglang.npu.streams import DeviceStreams, PageExchange, PageIndices

if TYPE_CHECKING:
    import torch

    from hpkv_sglang.layout.base import PageTensor, PoolLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer: bytes `[begin, end)` of a block, and the tensors they come from.

    `parts` are (pages as `[page_count, page_bytes]` bytes, offset from `begin`).
    """

    begin: int
    end: int
    parts: tuple[tuple[torch.Tensor, int], ...]


def layers_of(layout: PoolLayout) -> tuple[LayerPages, ...]:
    """The layers of a pool, in order. LayoutError when a page is not one run of bytes."""
    layers: list[LayerPages] = []
    offset = 0
    for number in range(layout.block.layer_count):
        begin = offset
        parts = []
        for tensor in layout.tensors:
            if tensor.layer == number:
                rows = _page_rows(tensor)
                parts.append((rows, offset - begin))
                offset += int(rows.shape[1])
        layers.append(LayerPages(begin, offset, tuple(parts)))
    if offset != layout.block.block_bytes:
        raise LayoutError.build(
            "describe a KV pool",
            f"bytes of a page's tensors, a block has {layout.block.block_bytes}",
            offset,
            "Blocks would not hold everything the pool stores; run without --enable-hpkv.",
        )
    return tuple(layers)


def _page_rows(tensor: PageTensor) -> torch.Tensor:
    import torch

    pages = tensor.pages
    if not pages[0].is_contiguous():
        raise LayoutError.build(
            "describe a KV pool",
            f"strides of layer {tensor.layer}, shape {tuple(pages.shape)}",
            pages.stride(),
            "The bytes of one page must be contiguous on an NPU; run without --enable-hpkv.",
        )
    return pages.view(pages.shape[0], -1).view(torch.uint8)


class PageTransfer(Protocol):
    """Enqueues copies on the current stream. Block `slots[i]` is that of page `pages[i]`."""

    def prepare(self, pages: PageIndices) -> Any:
        """The form of page indices that the other two take, valid on the current stream."""

    def to_host(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None: ...
    def to_device(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None: ...


class IndexTransfer:
    """Batched index copies; works for every pool. One asynchronous copy per page and layer."""

    def __init__(self, device: DeviceStreams, staging: torch.Tensor, bounce: torch.Tensor) -> None:
        """`staging` holds a block a row; `bounce`, on the device, the widest layer a row."""
        self._device = device
        self._staging = staging
        self._bounce = bounce

    def prepare(self, pages: PageIndices) -> Any:
        return self._device.indices(pages)

    def to_host(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None:
        bounce = self._bounce[: len(slots)]
        for rows, offset in layer.parts:
            self._device.gather(rows, pages, bounce[:, offset : offset + rows.shape[1]])
        for i, slot in enumerate(slots):
            self._device.copy_async(*self._ends(layer, slot, i))

    def to_device(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None:
        bounce = self._bounce[: len(slots)]
        for i, slot in enumerate(slots):
            block, row = self._ends(layer, slot, i)
            self._device.copy_async(row, block)
        for rows, offset in layer.parts:
            self._device.scatter(bounce[:, offset : offset + rows.shape[1]], pages, rows)

    def _ends(self, layer: LayerPages, slot: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's bytes in a block, and in a row of the bounce buffer."""
        return (
            self._staging[slot, layer.begin : layer.end],
            self._bounce[row, : layer.end - layer.begin],
        )


class ExchangeTransfer:
    """Copies of the device library, one call per tensor of a layer."""

    def __init__(self, exchange: PageExchange, staging: torch.Tensor) -> None:
        self._exchange = exchange
        self._staging = staging

    def prepare(self, pages: PageIndices) -> Any:
        return pages

    def to_host(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None:
        self._copy(layer, pages, slots, to_host=True)

    def to_device(self, layer: LayerPages, pages: Any, slots: Sequence[int]) -> None:
        self._copy(layer, pages, slots, to_host=False)

    def _copy(
        self, layer: LayerPages, pages: PageIndices, slots: Sequence[int], *, to_host: bool
    ) -> None:
        blocks = np.asarray(slots, dtype=np.int64)
        for rows, offset in layer.parts:
            begin = layer.begin + offset
            host = self._staging[:, begin : begin + rows.shape[1]]
            self._exchange(rows, host, pages, blocks, to_host)


def exchange_fits(
    device: DeviceStreams, staging: torch.Tensor, layers: Sequence[LayerPages]
) -> bool:
    """Whether the device's own page copies can be used; tries one. Blocks until it is over.

    They need pages without gaps between them. A build that refuses the call is passed over.
    """
    exchange = device.exchange
    if exchange is None:
        return False
    if any(rows.stride(0) != rows.shape[1] for layer in layers for rows, _ in layer.parts):
        return False
    first = np.zeros(1, dtype=np.int64)
    try:
        ExchangeTransfer(exchange, staging).to_host(layers[0], first, [0])
        device.current_stream().record_event().synchronize()
    except Exception as error:  # noqa: BLE001  # whatever a device library raises
        logger.info("hpkv: page copies of sgl_kernel_npu are not used: %r", error)
        return False
    return True


def transfer_for(
    device: DeviceStreams,
    staging: torch.Tensor,
    layers: Sequence[LayerPages],
    pages_max: int,
    *,
    direct: bool,
) -> PageTransfer:
    """The device's own copies when `direct`, index copies of up to `pages_max` pages otherwise."""
    if direct and device.exchange is not None:
        return ExchangeTransfer(device.exchange, staging)
    widest = max(layer.end - layer.begin for layer in layers)
    return IndexTransfer(device, staging, device.empty(pages_max, widest))
