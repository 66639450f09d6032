"""On the GPU: every layout, page size and path; all a pool owns goes out and comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gpu_rig
import pytest
import torch
from gpu_rig import (
    FORMS,
    PAGES,
    PATIENCE_S,
    Rig,
    keys_of,
    noise_for,
    read,
    same,
    scribble,
    snapshot,
    write,
)

from hpkv_sglang._core import BlockSource, Store
from hpkv_sglang.copy.engines import copier_for
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.copy.streams import StreamCopies
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PoolLayout, layout_of
from hpkv_sglang.layout.columns import join

PATHS = ("batch", "kernel")
PAGE_SIZES = (1, 16, 32, 64, 128)
COUNT = 9


@pytest.fixture
def rigs(directory: str) -> Iterator[list[Rig]]:
    """Those that a test puts in are closed after it."""
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.close()


def scattered(seed: int) -> tuple[list[int], list[int]]:
    """Pages to read and other pages to write; both ends of the pool are among them."""
    order = list(range(1, PAGES))
    random.Random(seed).shuffle(order)
    return [PAGES, *order[: COUNT - 1]], [0, *order[COUNT : 2 * COUNT - 1]]


def round_trip(rig: Rig, seed: int, *, disk: str | None = None, spill: str) -> None:
    copies = rig.engine(spill_path=spill)
    sources, targets = scattered(seed)
    stored = read(rig.layout, sources)
    keys = keys_of(seed, COUNT)
    spill = copies.spill(keys, rig.pages(sources))
    spill.wait()
    assert spill.stored == COUNT
    if disk is not None:
        through_disk(rig, disk, seed)
    scribble(rig.layout)
    expected = snapshot(rig.layout)
    for tensor, value in zip(expected, stored, strict=True):
        tensor[torch.tensor(targets, device=gpu_rig.DEVICE)] = value
    torch.cuda.synchronize()
    load = copies.load(rig.pool.pin(keys), rig.pages(targets))
    assert load.wait()
    with rig.on_forward():
        assert same(snapshot(rig.layout), expected), "what was stored, and nothing else changed"


def through_disk(rig: Rig, disk: str, seed: int) -> None:
    """Out of the host pool, so that only the disk has the blocks, and back into it."""
    keys = keys_of(seed, COUNT)
    store = Store.open(rig.pool, disk, storage_bytes=256 << 20, background=False)
    assert store.demote(rig.index, keys) == COUNT
    assert rig.pool.drop(keys) == COUNT and rig.pool.lookup(keys) == 0
    ticket = store.promote(rig.index, keys)
    assert ticket.wait(60.0) and ticket.from_disk == COUNT
    ticket.release()
    assert store.close(60.0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_comes_back_through_the_pool(
    directory: str, rigs: list[Rig], form: str, page_size: int
) -> None:
    rigs.append(Rig(directory, FORMS[form](page_size)))
    for seed, path in enumerate(PATHS):
        round_trip(rigs[0], seed * 100, spill=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_comes_back_through_the_disk(
    directory: str, rigs: list[Rig], tmp_path: Path, form: str, path: str
) -> None:
    rigs.append(Rig(directory, FORMS[form](16)))
    round_trip(rigs[0], 7, disk=str(tmp_path / "store"), spill=path)


@pytest.mark.parametrize("path", PATHS)
def test_the_default_stream_orders_copies_too(directory: str, rigs: list[Rig], path: str) -> None:
    rig = Rig(directory, FORMS["gqa-bf16"](16), overlap=False)
    rigs.append(rig)
    rig.schedule = rig.forward = torch.cuda.default_stream()
    round_trip(rig, 3, spill=path)


@pytest.mark.parametrize("path", PATHS)
def test_a_load_larger_than_the_staging_lands_whole(
    directory: str, rigs: list[Rig], path: str
) -> None:
    layout = FORMS["mla-bf16"](64)
    rig = Rig(directory, layout)
    rigs.append(rig)
    copies = rig.engine(staging_bytes=8 * layout.block.block_bytes, spill_path=path)
    everything = list(range(PAGES))
    stored = read(layout, everything)
    keys = keys_of(0, PAGES)
    for first in range(0, PAGES, 2):  # spills that outrun the threads would be dropped
        copies.spill(keys[first : first + 2], rig.pages(everything[first : first + 2])).wait()
    assert rig.pool.lookup(keys) == PAGES
    scribble(layout)
    torch.cuda.synchronize()
    backwards = list(reversed(everything))
    load = copies.load(rig.pool.pin(keys), rig.pages(backwards))
    for layer in range(layout.block.layer_count):
        with rig.on_forward():
            load.wait_layer(layer)
    assert load.wait()
    with rig.on_forward():
        assert same(read(layout, backwards), stored)


def grouped(heads: int, page_size: int) -> PoolLayout:
    pool = gpu_rig.gqa_pool((PAGES + 1) * page_size, heads, (64, 32), torch.bfloat16)
    return gqa.describe(pool, page_size)


def test_blocks_of_two_halves_become_pages_of_all_heads(directory: str, rigs: list[Rig]) -> None:
    page_size = 16
    halves = [grouped(2, page_size) for _ in range(2)]
    whole = grouped(4, page_size)
    sources, targets = scattered(11)
    # Two rigs on one pool: a reader's namespace has blocks of another size than the writers'.
    writer = Rig(directory, halves[0])
    reader = Rig(directory, whole, namespace=b"\1" * 32)
    rigs += [reader, writer]
    for half, layout in enumerate(halves):
        copies = writer.engine(layout)
        for row, page in enumerate(sources):
            copies.spill(keys_of(2 * row + half, 1), writer.pages([page])).wait()
    source = BlockSource(
        whole.block,
        block_bytes=halves[0].block.block_bytes,
        parts=[
            join(
                whole.devices,
                gqa.block_columns(halves[0].geometry, first_head, page_size),
                page_size,
            )
            for first_head in (0, 2)
        ],
    )
    with reader.on_forward():
        parts = [read(layout, sources) for layout in halves]
        joined = [torch.cat(pair, dim=2) for pair in zip(*parts, strict=True)]

    def check_load(copies: StreamCopies) -> None:
        with reader.on_forward():
            scribble(whole)
        torch.cuda.synchronize()
        lease = reader.pool.pin(keys_of(0, 2 * COUNT))
        assert lease.count == 2 * COUNT
        assert copies.load(lease, reader.pages(targets), source).wait()
        with reader.on_forward():
            assert same(read(whole, targets), joined)

    check_load(reader.engine(register_pool=False))
    copies, deadline = reader.engine(), time.monotonic() + PATIENCE_S
    while copies.stats()["loaded_in_place"] == 0 and time.monotonic() < deadline:
        check_load(copies)
    assert copies.stats()["loaded_in_place"] > 0, "the driver registers nothing: see the log"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("form", FORMS)
def test_the_page_self_test_passes_and_restores_the_page(
    directory: str, form: str, overlap: bool
) -> None:
    layout = FORMS[form](16)
    forward = torch.cuda.Stream() if overlap else None
    before = snapshot(layout)
    found = page_round_trip(
        directory, layout, lambda pool, index: copier_for(pool, index, layout, forward)
    )
    torch.cuda.synchronize()
    assert found is None
    assert same(snapshot(layout), before)


def test_the_page_self_test_finds_a_tensor_that_the_layout_forgot(directory: str) -> None:
    whole = FORMS["gqa-bf16"](16)
    partial = layout_of("gqa", whole.geometry, whole.tensors[:-1], replicated=False)
    claimed = replace(partial, tensors=whole.tensors)
    found = page_round_trip(
        directory, claimed, lambda pool, index: copier_for(pool, index, claimed)
    )
    assert found == "other bytes came back in layer 2, v (1 parts)"


def test_indices_outside_the_pool_are_dropped_and_change_nothing(
    directory: str, rigs: list[Rig]
) -> None:
    layout = FORMS["gqa-bf16"](16)
    rig = Rig(directory, layout)
    rigs.append(rig)
    copies = rig.engine()
    beyond = layout.block.page_count + 5
    keys = keys_of(0, 3)
    spill = copies.spill(keys, rig.pages([1, beyond, 2]))
    spill.wait()
    assert spill.stored == 2
    write(layout, [3], noise_for(layout, 1))
    copies.spill(keys[1:2], rig.pages([3])).wait()
    expected = snapshot(layout)
    for tensor in expected:
        tensor[4], tensor[5] = tensor[1], tensor[2]
    assert copies.load(rig.pool.pin(keys), rig.pages([4, beyond, 5])).wait()
    with rig.on_forward():
        assert same(snapshot(layout), expected)
