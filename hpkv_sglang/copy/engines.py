"""Which engine copies the pages of a layout: by the device its tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from hpkv_sglang._core import CUDA_RUNTIME, CopyEngine, CorePoolError, LoadRoom, Pool
from hpkv_sglang.copy.interface import Engine, PageIndices, Pages
from hpkv_sglang.copy.streams import StreamCopies, TorchCudaStreams, resident_pages
from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.base import PoolLayout

if TYPE_CHECKING:
    import torch

# Pinned memory that a rank's copies go through on a GPU.
GPU_STAGING_BYTES = 512 << 20


class Copier(NamedTuple):
    """An engine, and what is particular about its device.

    engine     copies between the pages of a layout and a pool
    landing    what it copies blocks into: the pages, or its staging area. Sources of blocks in
               other formats are built over it
    pages_of   `(slots, page_size)`: what this engine takes for pages. SGLang's slots of a page are
               contiguous
    is_broken  whether the device failed: then every spill is dropped and every load fails
    together   loads that are started inside begin side by side. Wait for none of them inside
    room       what loads could take now so that nobody waits for one to be enqueued; None: whoever
               waits for a layer waits for its copy anyway
    """

    engine: Engine
    landing: PoolLayout
    pages_of: Callable[[torch.Tensor, int], Pages]
    is_broken: Callable[[], bool]
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    room: Callable[[], LoadRoom | None] = lambda: None


def copier_for(
    pool: Pool, namespace_index: int, layout: PoolLayout, forward_stream: Any = None
) -> Copier:
    """The engine between `layout`'s pages and `pool`. RefusedError for a device nobody reaches.

    `forward_stream`: the stream of SGLang's forward passes, where they have one of their own.
    """
    device = layout.tensors[0].pages.device.type
    if device == "cpu":
        engine = CopyEngine(pool, namespace_index, layout.block)
        return Copier(engine, layout, host_pages, lambda: False)
    if device == "npu":
        from hpkv_sglang.npu.engine import NpuEngine
        from hpkv_sglang.npu.streams import TorchNpuStreams

        staged = NpuEngine(pool, namespace_index, layout, TorchNpuStreams(forward_stream))
        return Copier(staged, staged.staged_layout, host_pages, lambda: staged.poisoned)
    if device == "cuda" and CUDA_RUNTIME:
        return _cuda_copier(pool, namespace_index, layout, forward_stream)
    raise RefusedError.build(
        "--enable-hpkv",
        "the memory of this device is out of the copy engine's reach",
        device,
        "This build copies to and from the memory of a CPU, an Ascend NPU"
        + (" and a CUDA GPU" if CUDA_RUNTIME else "; for a CUDA GPU, install it where nvcc is")
        + ". Run without --enable-hpkv.",
    )


def host_pages(slots: torch.Tensor, page_size: int) -> PageIndices:
    """Page indices on the host, int64. Waits for the current stream of a device."""
    import torch

    firsts: PageIndices = slots[::page_size].to(torch.int64).cpu().numpy()
    return firsts // page_size


def stream_copier(copies: StreamCopies, layout: PoolLayout) -> Copier:
    """Copies on the streams of a device, with page indices that stay there."""
    return Copier(
        copies,
        layout,
        resident_pages,
        is_broken=lambda: copies.poisoned,
        together=copies.together,
        room=copies.room,
    )


def _cuda_copier(
    pool: Pool, namespace_index: int, layout: PoolLayout, forward_stream: Any
) -> Copier:
    from hpkv_sglang._core import StreamEngine, cuda_device

    device = layout.tensors[0].pages.device
    try:
        engine = StreamEngine(
            cuda_device(device.index or 0),
            pool,
            namespace_index,
            layout.block,
            page_size=layout.page_size,
            staging_bytes=max(GPU_STAGING_BYTES, 8 * layout.block.block_bytes),
        )
    except CorePoolError as error:
        raise RefusedError.build(
            "--enable-hpkv", "the CUDA copy engine cannot start", str(error), "See docs/gpu.md."
        ) from error
    copies = StreamCopies(
        engine,
        TorchCudaStreams(device, forward_stream),
        layer_count=layout.block.layer_count,
    )
    return stream_copier(copies, layout)
