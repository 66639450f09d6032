"""SGLang's own KV pool classes on CPU tensors: those of CPU and CUDA, and those of an NPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
npu = pytest.importorskip("sglang.srt.hardware_backend.npu.memory_pool_npu")
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PAGE = 16
_ANY = {
    "size": 8 * PAGE,
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "layer_num": 3,
    "device": "cpu",
    "enable_memory_saver": False,
}
_HEADS = {**_ANY, "head_num": 3, "head_dim": 32}
_LATENT = {**_ANY, "kv_lora_rank": 64, "qk_rope_head_dim": 16}


def mha(cls: Any = memory_pool.MHATokenToKVPool, **changes: Any) -> Any:
    return cls(**(_HEADS | changes))


def mla(cls: Any = memory_pool.MLATokenToKVPool, **changes: Any) -> Any:
    return cls(**(_LATENT | changes))


def npu_mha(fia: bool = False, **changes: Any) -> Any:
    """`NPUMHATokenToKVPool`; `fia` shows its buffers as views for the fused attention kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_USE_FIA", str(fia))
        return npu.NPUMHATokenToKVPool(**(_HEADS | changes))


def npu_mla(nz: bool = False, cls: Any = npu.NPUMLATokenToKVPool, **changes: Any) -> Any:
    """`NPUMLATokenToKVPool`; `nz` is what `SGLANG_USE_FIA_NZ` chooses."""
    with (
        get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SGLANG_USE_FIA_NZ", str(nz))
        return cls(**(_LATENT | changes))
