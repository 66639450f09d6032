"""Which engine copies the pages of a layout: by the device its tensors are on."""

from __future__ import annotations

from typing import Any

from hpkv_sglang._core import CopyEngine, Pool
from hpkv_sglang.copy.interface import Engine
from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.base import PoolLayout


def engine_for(
    pool: Pool, namespace_index: int, layout: PoolLayout, forward_stream: Any = None
) -> Engine:
    """The engine between `layout`'s pages and `pool`. RefusedError for a device nobody reaches.

    `forward_stream`: the stream of SGLang's forward passes, where the device has streams.
    """
    device = layout.tensors[0].pages.device.type
    if device == "cpu":
        return CopyEngine(pool, namespace_index, layout.block)
    if device == "npu":
        from hpkv_sglang.npu.engine import NpuEngine
        from hpkv_sglang.npu.streams import TorchNpuStreams

        return NpuEngine(pool, namespace_index, layout, TorchNpuStreams(forward_stream))
    raise RefusedError.build(
        "--enable-hpkv",
        "the memory of this device is out of the copy engine's reach",
        device,
        "This version copies to and from CPU and Ascend NPU memory. Run without --enable-hpkv.",
    )


def landing_layout(engine: Engine, layout: PoolLayout) -> PoolLayout:
    """What `engine` copies blocks into, for pages of `layout`: the pages, or its staging area.

    Sources of blocks in other formats are built over it.
    """
    staged: PoolLayout | None = getattr(engine, "staged_layout", None)
    return layout if staged is None else staged


def is_broken(engine: Engine) -> bool:
    """Whether the engine's device failed: then it drops every spill and fails every load."""
    return bool(getattr(engine, "poisoned", False))
