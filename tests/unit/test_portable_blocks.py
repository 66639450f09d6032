"""Blocks cross between formats and tensor-parallel sizes bit by bit, through host pool and disk."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from layout_rig import scribble
from portable_rig import (
    LAYERS,
    PAGE,
    PAGES,
    Rank,
    head_pools,
    in_order,
    latent_pool,
    latent_rows,
    promote,
    to_disk_only,
)

from hpkv_sglang._core import Pool, Store
from hpkv_sglang.layout.heads import heads_of
from hpkv_sglang.mla.formats import FORMATS

WRITTEN = [0, 7, 3, 8]  # both ends of the pool, and not side by side
READ = [8, 1, 0, 6]


@pytest.fixture
def host() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as directory:
        pool = Pool.open(directory, pool_bytes=32 << 20)
        yield pool
        pool.close()


@pytest.fixture
def store(host: Pool, tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(host, str(tmp_path / "store"), storage_bytes=64 << 20, background=False)
    yield opened
    assert opened.close(60.0)


def page_hashes(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]


ORDERS = [("pairs", "pairs"), ("pairs", "halves"), ("halves", "pairs")]


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("reads", FORMATS)
@pytest.mark.parametrize("writes", FORMATS)
def test_latent_rows_cross_between_formats_to_the_bit(
    writes: str, reads: str, tier: str, orders: tuple[str, str], host: Pool, store: Store
) -> None:
    # Native blocks too: the same format written under another device is another namespace.
    writer = Rank.of(host, latent_pool(writes), device="cuda", rope_order=orders[0])
    scribble(writer.device_pool)
    expected = [in_order(latent_rows(writer.device_pool, page), *orders) for page in WRITTEN]
    hashes = page_hashes(len(WRITTEN))
    writer.spill(hashes, WRITTEN)
    reader = Rank.of(host, latent_pool(reads), device="npu", rope_order=orders[1])
    scribble(reader.device_pool)
    if tier == "disk":
        to_disk_only(host, store, writer, hashes)
        assert reader.find(hashes).pages == 0
        promote(store, reader, hashes)
    run = reader.find(hashes)
    assert run.pages == run.verified_pages == len(hashes) and not run.is_own
    assert reader.load(run, READ)
    for page, rows in zip(READ, expected, strict=True):
        assert torch.equal(
            latent_rows(reader.device_pool, page).view(torch.uint8), rows.view(torch.uint8)
        )
    for rank in (writer, reader):
        rank.engine.close()


SIZES = [(w, r) for w in (1, 2, 4, 8) for r in (1, 2, 4, 8)]


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize(("writers", "readers"), SIZES)
def test_heads_written_under_one_size_are_read_under_another_to_the_bit(
    writers: int, readers: int, total: int, host: Pool
) -> None:
    values = torch.randn(2, LAYERS, (PAGES + 1) * PAGE, total, 8).bfloat16()
    hashes = page_hashes(len(WRITTEN))
    for rank, pool in enumerate(head_pools(writers, total, values)):
        written = Rank.of(host, pool, (rank, writers, total))
        if written.find(hashes).pages == 0:  # a head that several ranks hold is stored once
            written.spill(hashes, WRITTEN)
        written.engine.close()
    stored = host.stats()["blocks"]
    assert stored == len(hashes) * min(writers, total)
    for rank, pool in enumerate(head_pools(readers, total)):
        scribble(pool)
        reader = Rank.of(host, pool, (rank, readers, total))
        run = reader.find(hashes)
        assert run.pages == len(hashes)
        assert run.is_own == (writers == readers)
        assert reader.load(run, READ)
        reader.engine.close()
        heads = heads_of(rank, readers, total)
        assert heads is not None
        for to, source in zip(READ, WRITTEN, strict=True):
            for kind, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
                for layer in range(LAYERS):
                    got = buffers[layer][to * PAGE : (to + 1) * PAGE]
                    want = values[kind, layer, source * PAGE : (source + 1) * PAGE]
                    assert torch.equal(got, want[:, heads.begin : heads.end])


def test_heads_cross_between_sizes_by_way_of_the_disk(host: Pool, store: Store) -> None:
    values = torch.randn(2, LAYERS, (PAGES + 1) * PAGE, 4, 8).bfloat16()
    hashes = page_hashes(len(WRITTEN))
    for rank, pool in enumerate(head_pools(2, 4, values)):
        writer = Rank.of(host, pool, (rank, 2, 4))
        writer.spill(hashes, WRITTEN)
        to_disk_only(host, store, writer, hashes)
        writer.engine.close()
    (pool,) = head_pools(1, 4)
    reader = Rank.of(host, pool, (0, 1, 4))
    assert reader.find(hashes).pages == 0
    promote(store, reader, hashes)
    assert reader.load(reader.find(hashes), READ)
    reader.engine.close()
    for to, source in zip(READ, WRITTEN, strict=True):
        got = pool.k_buffer[1][to * PAGE : (to + 1) * PAGE]
        assert torch.equal(got, values[0, 1, source * PAGE : (source + 1) * PAGE])


def test_a_page_of_which_one_rank_stored_nothing_is_a_miss_and_what_precedes_it_a_hit(
    host: Pool,
) -> None:
    hashes = page_hashes(4)
    writers = [Rank.of(host, pool, (rank, 2, 4)) for rank, pool in enumerate(head_pools(2, 4))]
    writers[0].spill(hashes, WRITTEN)
    writers[1].spill(hashes[:2], WRITTEN[:2])
    (pool,) = head_pools(1, 4)
    reader = Rank.of(host, pool, (0, 1, 4))
    run = reader.find(hashes)
    assert run.pages == 2
    run.release()
    assert host.stats()["pinned"] == 0
    for rank in (*writers, reader):
        rank.engine.close()


def test_a_prefix_of_several_servers_is_one_run(host: Pool) -> None:
    values = torch.randn(2, LAYERS, (PAGES + 1) * PAGE, 2, 8).bfloat16()
    hashes = page_hashes(6)
    whole = Rank.of(host, head_pools(1, 2, values)[0], (0, 1, 2))
    halves = [Rank.of(host, pool, (r, 2, 2)) for r, pool in enumerate(head_pools(2, 2, values))]
    whole.spill(hashes[:2], [1, 2])
    for half in halves:
        half.spill(hashes[2:4], [3, 4])
    whole.spill(hashes[4:], [5, 6])
    (pool,) = head_pools(1, 2)
    reader = Rank.of(host, pool, (0, 1, 2))
    run = reader.find(hashes)
    assert [part.pages for part in run.parts] == [2, 2, 2] and run.pages == 6
    run.keep(3)
    assert [part.pages for part in run.parts] == [2, 1]
    assert reader.load(run, [1, 2, 3])
    for layer in range(LAYERS):
        assert torch.equal(pool.v_buffer[layer][PAGE : 4 * PAGE], values[1, layer, PAGE : 4 * PAGE])
    for rank in (whole, *halves, reader):
        rank.engine.close()


@pytest.mark.parametrize("flipped", [0, 1])
def test_one_flipped_byte_in_any_block_of_a_page_fails_the_load(
    flipped: int, tmp_path: Path
) -> None:
    host = Pool.open(str(tmp_path), pool_bytes=32 << 20, verify_always=True)
    hashes = page_hashes(2)
    writers = [Rank.of(host, pool, (rank, 2, 4)) for rank, pool in enumerate(head_pools(2, 4))]
    for writer in writers:
        scribble(writer.device_pool)
        writer.spill(hashes, [1, 2])
    tensor = writers[flipped].device_pool.v_buffer[1]
    stored = tensor[2 * PAGE : 3 * PAGE].contiguous().view(torch.uint8).numpy().tobytes()
    (pool,) = head_pools(1, 4)
    reader = Rank.of(host, pool, (0, 1, 4))
    assert reader.load(reader.find(hashes), [1, 2])
    with Path(host.path).open("r+b") as file:
        content = file.read()
        at = content.index(stored) + 5
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    assert not reader.load(reader.find(hashes), [1, 2])
    assert reader.find(hashes).pages == 1, "the bad block is gone"
    for rank in (*writers, reader):
        rank.engine.close()
    host.close()


def test_reuse_of_other_servers_blocks_can_be_switched_off(host: Pool) -> None:
    writer = Rank.of(host, latent_pool("mla-fused"), device="cuda")
    hashes = page_hashes(2)
    writer.spill(hashes, [1, 2])
    off = Rank.of(host, latent_pool("mla-fused"), foreign=False)
    on = Rank.of(host, latent_pool("mla-fused"))
    assert (off.find(hashes).pages, on.find(hashes).pages) == (0, 2)
    for rank in (writer, off, on):
        rank.engine.close()
