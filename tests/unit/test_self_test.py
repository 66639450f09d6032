"""The page self-test passes for layouts that are right and names what is wrong in others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_rig import page_rows, scribble
from sglang_pools import PAGE, mha, mla, npu_mha, npu_mla

from hpkv_sglang._core import CopyEngine, CorePoolError, Pool
from hpkv_sglang.copy.engines import Copier, copier_for, host_pages
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.layout.base import PoolLayout, layout_of
from hpkv_sglang.layout.detect import detect_layout


def maker(layout: PoolLayout) -> Any:
    return lambda pool, index: copier_for(pool, index, layout)


def over(layout: PoolLayout, make_engine: Any) -> Any:
    """As `maker`, with an engine of the test's own."""
    return lambda pool, index: Copier(make_engine(pool, index), layout, host_pages, lambda: False)


@pytest.mark.parametrize(
    "make",
    [mha, mla, npu_mha, npu_mla, lambda: npu_mla(nz=True), lambda: npu_mla(index_head_dim=128)],
)
def test_every_layout_passes_and_its_page_is_restored(make: Any, tmp_path: Path) -> None:
    pool = make()
    layout = detect_layout(pool, PAGE)
    scribble(pool)
    before = page_rows(pool, PAGE, layout.block.page_count - 1)
    assert page_round_trip(str(tmp_path), layout, maker(layout)) is None
    assert page_rows(pool, PAGE, layout.block.page_count - 1) == before
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_forgets_a_tensor_is_found_out(tmp_path: Path) -> None:
    whole = detect_layout(mha(), PAGE)
    partial = layout_of("gqa", whole.geometry, whole.tensors[:-1], replicated=False)
    claimed = replace(partial, tensors=whole.tensors)
    found = page_round_trip(str(tmp_path), claimed, maker(claimed))
    assert found == "other bytes came back in layer 2, v (1 parts)"


def test_an_engine_that_loads_another_page_is_found_out(tmp_path: Path) -> None:
    layout = detect_layout(mha(), PAGE)

    class Astray:
        def __init__(self, pool: Pool, index: int) -> None:
            self._engine = CopyEngine(pool, index, layout.block)

        def load(self, lease: Any, pages: Any) -> Any:
            return self._engine.load(lease, pages - 1)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    found = page_round_trip(str(tmp_path), layout, over(layout, Astray))
    assert found is not None and "layer 0, k, layer 0, v, layer 1, k (6 parts)" in found


def test_a_block_that_does_not_land_is_found_out(tmp_path: Path) -> None:
    layout = detect_layout(mha(), PAGE)
    for kind in ("spill", "load"):

        def failing(pool: Pool, index: int, kind: str = kind) -> CopyEngine:
            engine = CopyEngine(pool, index, layout.block)
            engine.fail_next(kind, 1)
            return engine

        found = page_round_trip(str(tmp_path), layout, over(layout, failing))
        assert found is not None and "did not land" in found


def test_a_directory_without_room_is_an_error_of_the_pool(tmp_path: Path) -> None:
    layout = detect_layout(mha(), PAGE)
    with pytest.raises((CorePoolError, OSError)):
        page_round_trip(str(tmp_path / "missing"), layout, maker(layout))


def test_one_byte_is_enough(tmp_path: Path) -> None:
    layout = detect_layout(mha(), PAGE)
    tensor = layout.tensors[3].pages[layout.block.page_count - 1]

    class Flipping:
        def __init__(self, pool: Pool, index: int) -> None:
            self._engine = CopyEngine(pool, index, layout.block)

        def load(self, lease: Any, pages: Any) -> Any:
            ticket = self._engine.load(lease, pages)
            ticket.wait()
            tensor.view(torch.uint8).view(-1)[77] ^= 1
            return ticket

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    found = page_round_trip(str(tmp_path), layout, over(layout, Flipping))
    assert found == "other bytes came back in layer 1, v (1 parts)"
