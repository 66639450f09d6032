"""Every layout, random geometry: all a pool owns goes through host pool and disk and comes back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_rig import page_rows, scribble, spans, tensors_of
from sglang_pools import mha, mla, npu_mha, npu_mla

from hpkv_sglang._core import CopyEngine, KeyBatch, Pool, Store
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.layout.detect import detect_layout

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e5m2)
PAGES = 6

GQA = {"head_num": st.integers(1, 3), "head_dim": st.sampled_from([8, 24, 64])}
LATENT = {"kv_lora_rank": st.sampled_from([16, 48]), "qk_rope_head_dim": st.sampled_from([16, 32])}
INDEX = {**LATENT, "index_head_dim": st.sampled_from([16, 128])}
POOLS: dict[str, tuple[Callable[..., Any], dict[str, st.SearchStrategy[Any]]]] = {
    "gqa": (mha, {**GQA, "v_head_dim": st.sampled_from([8, 40])}),
    "mla-fused": (mla, LATENT),
    "npu gqa": (npu_mha, {**GQA, "fia": st.booleans()}),
    "mla-split": (npu_mla, LATENT),
    "mla-split-nz": (npu_mla, {**LATENT, "nz": st.just(True)}),
    "mla-split-index": (npu_mla, INDEX),
    "mla-split-nz-index": (npu_mla, {**INDEX, "nz": st.just(True)}),
}


@st.composite
def built(draw: st.DrawFn, kind: str) -> tuple[Any, PoolLayout]:
    make, widths = POOLS[kind]
    page_size = draw(st.sampled_from([1, 4, 16]))
    pool = make(
        page_size=page_size,
        size=PAGES * page_size,
        layer_num=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        **{name: draw(strategy) for name, strategy in widths.items()},
    )
    return pool, detect_layout(pool, page_size)


def check_spans(pool: Any, layout: PoolLayout) -> None:
    block = layout.block
    device = [
        address + i
        for page in range(block.page_count)
        for address, _, count in spans(block, page)
        for i in range(count)
    ]
    owned = {
        tensor.data_ptr() + i
        for tensor in tensors_of(pool)
        for i in range(tensor.numel() * tensor.element_size())
    }
    assert len(device) == len(set(device)) and set(device) == owned
    in_block = sorted(i for _, at, count in spans(block, 0) for i in range(at, at + count))
    assert in_block == list(range(block.block_bytes))


@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_tensor_survives_host_pool_and_disk(kind: str, data: st.DataObject) -> None:
    pool, layout = data.draw(built(kind))
    check_spans(pool, layout)
    # Both ends of the pool, and pages that are not side by side.
    order = [0, PAGES, *data.draw(st.permutations(range(1, PAGES)))]
    pages, into = np.array(order[:4], np.int64), np.array(order[::-1][:4], np.int64)
    keys = KeyBatch.from_bytes(np.random.default_rng(1).bytes(32 * len(pages)))
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as directory:
        host = Pool.open(directory + "/pool", pool_bytes=16 << 20, verify_always=True)
        index = host.add_namespace(bytes(32), b"", layout.block.block_bytes)
        store = Store.open(host, directory + "/store", storage_bytes=64 << 20, background=False)
        engine = CopyEngine(host, index, layout.block)
        scribble(pool)
        stored = [page_rows(pool, layout.page_size, int(page)) for page in pages]
        engine.spill(keys, pages).wait()
        for tier in ("host", "disk"):
            if tier == "disk":
                assert store.demote(index, keys) == host.drop(keys) == len(keys)
                ticket = store.promote(index, keys)
                assert ticket.wait(60.0) and ticket.from_disk == len(keys)
                ticket.release()
            scribble(pool)
            assert engine.load(host.pin(keys), into).wait()
            assert [page_rows(pool, layout.page_size, int(page)) for page in into] == stored, tier
        flip_one_byte(Path(host.path), stored[2], data)
        assert not engine.load(host.pin(keys), into).wait()
        engine.close()
        assert store.close(60.0)
        host.close()


def flip_one_byte(path: Path, page: list[bytes], data: st.DataObject) -> None:
    """Flip a byte of what stores the longest part of `page`, also where an older copy was freed."""
    part = max(page, key=len)
    at = data.draw(st.integers(0, len(part) - 1))
    with path.open("r+b") as file:
        content = file.read()
        found = content.find(part)
        assert found > 0, "the block is not where it was stored"
        while found >= 0:
            file.seek(found + at)
            file.write(bytes([part[at] ^ 1]))
            found = content.find(part, found + 1)
