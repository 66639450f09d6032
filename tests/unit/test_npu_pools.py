"""SGLang's real NPU pools through the NPU engine, whole: every tensor comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from layout_rig import mla_pool, page_rows, scribble
from sglang_pools import PAGE, npu_mla
from test_npu_layouts import CASES, no_kernels

from hpkv_sglang._core import BlockSource, CopyEngine, KeyBatch, Pool
from hpkv_sglang.copy.engines import Copier, host_pages
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.layout.columns import join
from hpkv_sglang.layout.detect import detect_layout
from hpkv_sglang.mla import formats
from hpkv_sglang.mla import layout as mla
from hpkv_sglang.npu.engine import NpuEngine
from hpkv_testing.fake_npu import FakeNpu

real_pools = pytest.mark.parametrize(("make", "changes", "name"), CASES)


@pytest.fixture
def device() -> Iterator[FakeNpu]:
    device = FakeNpu()
    yield device
    device.close()


def adopted(device: FakeNpu, layout: PoolLayout) -> PoolLayout:
    for tensor in layout.tensors:
        device.adopt(tensor.pages)
    return layout


@real_pools
def test_every_tensor_comes_back_through_the_staging_area(
    make: Any,
    changes: dict[str, Any],
    name: str,
    device: FakeNpu,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_kernels(monkeypatch)
    kv = make(**changes)
    layout = adopted(device, detect_layout(kv, PAGE))
    scribble(kv)
    pages = np.random.default_rng(2).permutation(layout.block.page_count).astype(np.int64)
    stored = [page_rows(kv, PAGE, int(page)) for page in pages]
    keys = KeyBatch.from_bytes(np.random.default_rng(2).bytes(32 * len(pages)))
    host = Pool.open(directory, pool_bytes=16 << 20)
    namespace = host.add_namespace(bytes(32), b"", layout.block.block_bytes)
    engine = NpuEngine(host, namespace, layout, device, staging_pages=5)
    spill = engine.spill(keys, pages)
    spill.wait()
    assert spill.stored == len(pages), name
    scribble(kv)
    assert engine.load(host.pin(keys), pages[::-1].copy()).wait()
    assert [page_rows(kv, PAGE, int(page)) for page in pages[::-1]] == stored
    assert engine.check() == []
    engine.close()
    host.close()


@real_pools
def test_the_page_self_test_passes_and_leaves_the_page_as_it_was(
    make: Any,
    changes: dict[str, Any],
    name: str,
    device: FakeNpu,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_kernels(monkeypatch)
    kv = make(**changes)
    layout = adopted(device, detect_layout(kv, PAGE))
    scribble(kv)
    last = layout.block.page_count - 1
    before = page_rows(kv, PAGE, last)

    def copier(pool: Pool, namespace: int) -> Copier:
        engine = NpuEngine(pool, namespace, layout, device, staging_pages=2)
        return Copier(engine, engine.staged_layout, host_pages, lambda: engine.poisoned)

    assert page_round_trip(directory, layout, copier) is None, name
    assert page_rows(kv, PAGE, last) == before


@pytest.mark.parametrize("nz", [False, True])
def test_fused_blocks_become_the_pages_that_the_cores_engine_makes_of_them(
    nz: bool, device: FakeNpu, directory: str
) -> None:
    """A CUDA-style server stored them; here NoPE and RoPE are apart, in NZ order or not."""
    pages = np.array([7, 0, 3, 5, 8], dtype=np.int64)
    keys = KeyBatch.from_bytes(np.random.default_rng(3).bytes(32 * len(pages)))
    host = Pool.open(directory, pool_bytes=16 << 20)
    fused = mla_pool(layers=3, slots=9 * PAGE, rank=64, rope=16, dtype=torch.bfloat16)
    writing = mla.describe(fused, PAGE)
    size = writing.block.block_bytes
    writer = CopyEngine(host, host.add_namespace(bytes(32), b"", size), writing.block)
    writer.spill(keys, pages).wait()
    writer.close()
    found = []
    for through_staging in (False, True):
        kv = npu_mla(nz=nz)
        layout = adopted(device, detect_layout(kv, PAGE))
        namespace = host.add_namespace(b"n" * 32, b"", layout.block.block_bytes)
        engine: CopyEngine | NpuEngine = (
            NpuEngine(host, namespace, layout, device, staging_pages=4)
            if through_staging
            else CopyEngine(host, namespace, layout.block)
        )
        landing = engine.staged_layout if isinstance(engine, NpuEngine) else layout
        columns = formats.block_columns(formats.FUSED, layout.geometry, PAGE)
        parts = [join(landing.devices, columns, PAGE)]
        source = BlockSource(landing.block, block_bytes=size, parts=parts)
        assert engine.load(host.pin(keys), pages, source).wait()
        engine.close()
        found.append([page_rows(kv, PAGE, page) for page in range(9)])
    assert found[0] == found[1]
    assert any(any(row) for row in found[0][7]), "something landed"
    host.close()
