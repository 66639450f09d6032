"""Which engine copies the pages of a layout: by the device its tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpkv_sglang._core import CopyEngine, Pool
from hpkv_sglang.copy.interface import Engine
from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.base import PoolLayout


class Copier(NamedTuple):
    """An engine, and what is particular about its device.

    engine     copies between the pages of a layout and a pool
    landing    what it copies blocks into: the pages, or its staging area. Sources of blocks in
               other formats are built over it
    is_broken  whether the device failed: then every spill is dropped and every load fails
    """

    engine: Engine
    landing: PoolLayout
    is_broken: Callable[[], bool]


def copier_for(
    pool: Pool, namespace_index: int, layout: PoolLayout, forward_stream: Any = None
) -> Copier:
    """The engine between `layout`'s pages and `pool`. RefusedError for a device nobody reaches.

    `forward_stream`: the stream of SGLang's forward passes, where the device has streams.
    """
    device = layout.tensors[0].pages.device.type
    if device == "cpu":
        engine = CopyEngine(pool, namespace_index, layout.block)
        return Copier(engine, layout, lambda: False)
    if device == "npu":
        from hpkv_sglang.npu.engine import NpuEngine
        from hpkv_sglang.npu.streams import TorchNpuStreams

        staged = NpuEngine(pool, namespace_index, layout, TorchNpuStreams(forward_stream))
        return Copier(staged, staged.staged_layout, lambda: staged.poisoned)
    raise RefusedError.build(
        "--enable-hpkv",
        "the memory of this device is out of the copy engine's reach",
        device,
        "This version copies to and from CPU and Ascend NPU memory. Run without --enable-hpkv.",
    )
