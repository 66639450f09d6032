"""Which layout belongs to which pool class.

By the exact class: a subclass adds buffers or gives them another meaning (sparse-attention index,
4-bit scales, sliding windows), and stored without them a block would be wrong. Classes are compared
by name, so this module needs no SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpkv_sglang.errors import LayoutError, RefusedError
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.mla import layout as mla
from hpkv_sglang.npu import mha as npu_mha
from hpkv_sglang.npu import mla as npu_mla

_NPU = "sglang.srt.hardware_backend.npu.memory_pool_npu."
_LAYOUTS: dict[str, Callable[[Any, int], PoolLayout]] = {
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": gqa.describe,
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": mla.describe,
    f"{_NPU}NPUMHATokenToKVPool": npu_mha.describe,
    f"{_NPU}NPUMLATokenToKVPool": npu_mla.describe,
}


def detect_layout(device_pool: Any, page_size: int) -> PoolLayout:
    """The layout of `device_pool`, cut into pages of `page_size` tokens.

    RefusedError for a class that no layout knows, or a mode of a known one that no layout carries;
    LayoutError if the tensors are not what the class promises. The result keeps the tensors alive.
    """
    cls = type(device_pool)
    name = f"{cls.__module__}.{cls.__qualname__}"
    describe = _LAYOUTS.get(name)
    if describe is None:
        raise RefusedError.build(
            "--enable-hpkv",
            "the KV pool of this model has no known layout",
            name,
            f"Known: {', '.join(_LAYOUTS)}. Run without --enable-hpkv.",
        )
    if device_pool.page_size != page_size:
        raise LayoutError.build(
            "describe a KV pool",
            f"page size of {cls.__qualname__}, the tree has {page_size}",
            device_pool.page_size,
            "Both must have the same page size.",
        )
    return describe(device_pool, page_size)
