"""SGLang's real NPU pools through the NPU engine, whole: every tensor comes back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from layout_rig import page_rows, scribble
from npu_pools import PAGE
from test_npu_layouts import CASES, no_kernels

from hpkv_sglang._core import KeyBatch, Pool
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.layout.detect import detect_layout
from hpkv_sglang.npu.engine import NpuEngine
from hpkv_testing.fake_npu import FakeNpu

real_pools = pytest.mark.parametrize(("make", "changes", "name"), CASES)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as path:
        yield path


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

    def engine(pool: Pool, namespace: int) -> NpuEngine:
        return NpuEngine(pool, namespace, layout, device, staging_pages=2)

    assert page_round_trip(directory, layout, engine) is None, name
    assert page_rows(kv, PAGE, last) == before
