"""The real NPU pool classes on CPU tensors: laid out in full, or refused by name."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from layout_rig import page_rows, scribble, spans, tensors_of
from sglang_pools import PAGE, npu_mha, npu_mla

from hpkv_sglang._core import CopyEngine, KeyBatch, Pool
from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.detect import detect_layout

INDEX = {"index_head_dim": 128}
PACKED = {"kv_lora_rank": 128, "kv_cache_dim": 128 + 4 + 32, "dtype": torch.float8_e4m3fn}


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotation matrix of the index is made by a kernel; it is not KV."""
    module = pytest.importorskip("sglang.srt.layers.attention.dsa.dsa_npu_indexer")
    monkeypatch.setattr(module, "create_npu_hadamard_128", lambda *_: None)


CASES = [
    (npu_mha, {}, "gqa"),
    (npu_mha, {"fia": True}, "gqa"),
    (npu_mha, {"head_num": 1, "v_head_dim": 16}, "gqa"),
    (npu_mha, {"dtype": torch.float8_e4m3fn}, "gqa"),
    (npu_mla, {}, "mla-split"),
    (npu_mla, {"nz": True}, "mla-split-nz"),
    (npu_mla, {"dtype": torch.float8_e5m2, "nz": True}, "mla-split-nz"),
    (npu_mla, INDEX, "mla-split-index"),
    (npu_mla, {**INDEX, "nz": True}, "mla-split-nz-index"),
    (npu_mla, {**INDEX, "indexer_layer_ids": [0, 2]}, "mla-split-index"),
    (npu_mla, {**INDEX, **PACKED}, "mla-packed-index"),
]


@pytest.mark.parametrize(("make", "changes", "name"), CASES)
def test_every_tensor_of_the_real_pool_comes_back(
    make: Any, changes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_kernels(monkeypatch)
    pool = make(**changes)
    layout = detect_layout(pool, PAGE)
    assert layout.name == name
    assert layout.block.page_count == pool.size // PAGE + 1
    assert layout.block.block_bytes == sum(map(len, page_rows(pool, PAGE, 0)))
    scribble(pool)
    pages = np.random.default_rng(1).permutation(layout.block.page_count).astype(np.int64)
    stored = [page_rows(pool, PAGE, int(page)) for page in pages]
    keys = KeyBatch.from_bytes(np.random.default_rng(1).bytes(32 * len(pages)))
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as directory:
        host = Pool.open(directory, pool_bytes=16 << 20)
        engine = CopyEngine(
            host, host.add_namespace(bytes(32), b"", layout.block.block_bytes), layout.block
        )
        engine.spill(keys, pages).wait()
        scribble(pool)
        assert engine.load(host.pin(keys), pages[::-1].copy()).wait()
        engine.close()
        host.close()
    assert [page_rows(pool, PAGE, int(page)) for page in pages[::-1]] == stored


@pytest.mark.parametrize(("make", "changes", "name"), CASES)
def test_spans_are_disjoint_and_cover_every_tensor_the_pool_owns(
    make: Any, changes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_kernels(monkeypatch)
    pool = make(**changes)
    layout = detect_layout(pool, PAGE)
    covered = {
        address + i
        for page in range(layout.block.page_count)
        for address, _, count in spans(layout.block, page)
        for i in range(0, count, 16)
    }
    owned = {
        tensor.data_ptr() + i
        for value in vars(pool).values()
        for tensor in (value if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, torch.Tensor)
        for i in range(0, tensor.numel() * tensor.element_size(), 16)
    }
    assert covered == owned, name


def test_geometry_tells_pools_with_another_index_apart() -> None:
    plain, indexed, fewer = (
        detect_layout(npu_mla(**changes), PAGE)
        for changes in ({}, INDEX, {**INDEX, "indexer_layer_ids": [0, 2]})
    )
    assert plain.geometry != indexed.geometry != fewer.geometry
    assert plain.replicated and indexed.replicated


def test_keys_and_values_in_host_memory_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD", "1")
    with pytest.raises(RefusedError, match=r"sparsity-driven offload.*NPUMLATokenToKVPool"):
        detect_layout(npu_mla(**INDEX), PAGE)


def test_pools_beside_the_two_that_are_known_are_refused_by_their_class() -> None:
    base = type(npu_mla())

    class Mine(base):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(RefusedError, match="Mine"):
        detect_layout(npu_mla(cls=Mine), PAGE)


def test_the_tensors_read_back_are_in_the_order_of_the_block() -> None:
    pool = npu_mla()
    assert [tuple(t.shape) for t in tensors_of(pool)[:2]] == [(9 * PAGE, 1, 64), (9 * PAGE, 1, 16)]
