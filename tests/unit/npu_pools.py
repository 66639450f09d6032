"""SGLang's own NPU pool classes, built on CPU tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

npu = pytest.importorskip("sglang.srt.hardware_backend.npu.memory_pool_npu")
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PAGE = 16


def npu_mha(fia: bool = False, **changes: Any) -> Any:
    """`NPUMHATokenToKVPool`; `fia` shows its buffers as views for the fused attention kernel."""
    arguments = {
        "size": 8 * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": 3,
        "head_dim": 32,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_USE_FIA", str(fia))
        return npu.NPUMHATokenToKVPool(**(arguments | changes))


def npu_mla(nz: bool = False, cls: Any = npu.NPUMLATokenToKVPool, **changes: Any) -> Any:
    """`NPUMLATokenToKVPool`; `nz` is what `SGLANG_USE_FIA_NZ` chooses."""
    arguments = {
        "size": 8 * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_FIA_NZ", str(nz))
        stack.enter_context(get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0))
        return cls(**(arguments | changes))
