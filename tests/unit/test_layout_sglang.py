"""The real pool classes of SGLang, built on CPU tensors: detected, or refused by name."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from layout_rig import page_rows, scribble, tensors_of
from sglang_pools import PAGE, memory_pool, mha, mla

from hpkv_sglang._core import CopyEngine, KeyBatch, Pool
from hpkv_sglang.errors import LayoutError, RefusedError
from hpkv_sglang.layout.detect import detect_layout


@pytest.mark.parametrize(
    ("make", "changes", "name"),
    [
        (mha, {}, "gqa"),
        (mha, {"head_num": 1}, "gqa"),
        (mha, {"v_head_dim": 16}, "gqa"),
        (mha, {"dtype": torch.float8_e4m3fn}, "gqa"),
        (mha, {"size": 8 * PAGE + 5}, "gqa"),
        (mla, {}, "mla-fused"),
        (mla, {"dtype": torch.float8_e5m2}, "mla-fused"),
        (mla, {"size": 8 * PAGE + 5}, "mla-fused"),
    ],
)
def test_every_tensor_of_the_real_pool_comes_back(
    make: Any, changes: dict[str, Any], name: str
) -> None:
    pool = make(**changes)
    layout = detect_layout(pool, PAGE)
    assert layout.name == name
    # The padding page in front and all that may be allocated, first and last.
    assert layout.block.page_count == pool.size // PAGE + 1
    assert layout.block.block_bytes == sum(map(len, page_rows(pool, PAGE, 0)))
    scribble(pool)
    pages = np.arange(layout.block.page_count, dtype=np.int64)
    stored = [page_rows(pool, PAGE, int(page)) for page in pages]
    keys = KeyBatch.from_bytes(np.random.default_rng(1).bytes(32 * len(pages)))
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as directory:
        host = Pool.open(directory, pool_bytes=16 << 20)
        index = host.add_namespace(bytes(32), b"", layout.block.block_bytes)
        engine = CopyEngine(host, index, layout.block)
        engine.spill(keys, pages).wait()
        scribble(pool)
        reversed_pages = np.ascontiguousarray(pages[::-1])
        assert engine.load(host.pin(keys), reversed_pages).wait()
        engine.close()
        host.close()
    assert [page_rows(pool, PAGE, int(page)) for page in reversed_pages] == stored


def test_geometry_is_that_of_the_rank() -> None:
    geometry = detect_layout(mha(v_head_dim=16), PAGE).geometry
    assert geometry == {
        "layers": 3,
        "kv_heads": 3,
        "head_dim": 32,
        "v_head_dim": 16,
        "element_bytes": 2,
    }
    assert detect_layout(mla(), PAGE).replicated
    assert not detect_layout(mha(), PAGE).replicated


def test_no_tensor_of_the_real_pools_is_left_out() -> None:
    for pool in (mha(), mla()):
        known = {t.data_ptr() for t in tensors_of(pool)}
        owned = {
            t.data_ptr()
            for value in vars(pool).values()
            for t in (value if isinstance(value, list | tuple) else [value])
            if isinstance(t, torch.Tensor) and t.shape[:1] == tensors_of(pool)[0].shape[:1]
        }
        assert owned == known


def test_a_subclass_is_not_its_parent() -> None:
    class Mine(memory_pool.MHATokenToKVPool):
        pass

    with pytest.raises(RefusedError, match=r"Mine"):
        detect_layout(mha(Mine), PAGE)
    with pytest.raises(RefusedError, match=r"NoOpMHATokenToKVPool"):
        detect_layout(mha(memory_pool.NoOpMHATokenToKVPool), PAGE)


def test_another_page_size_than_the_pools_is_an_error() -> None:
    with pytest.raises(LayoutError, match="page size"):
        detect_layout(mha(), 2 * PAGE)
