"""The copy engine in Python: every tensor of a pool comes back, and tickets keep their promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from layout_rig import gqa_pool, gqa_pools, mla_pools, page_rows, scribble, tensors_of

from hpkv_sglang._core import CopyEngine, KeyBatch, Pool
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.mla import layout as mla

POOL_BYTES = 16 << 20


def keys_of(first: int, count: int) -> KeyBatch:
    raw = np.random.default_rng(first).bytes(32 * count)
    return KeyBatch.from_bytes(raw)


class Rig:
    """A pool file of its own and engines on it."""

    def __init__(self, directory: str, *, verify_always: bool = False) -> None:
        self.pool = Pool.open(directory, pool_bytes=POOL_BYTES, verify_always=verify_always)
        self._next = 0

    def engine(self, layout: PoolLayout, threads: int = 2) -> CopyEngine:
        """An engine under a namespace nobody else uses."""
        self._next += 1
        identity = self._next.to_bytes(32, "little")
        index = self.pool.add_namespace(identity, b"", layout.block.block_bytes)
        return CopyEngine(self.pool, index, layout.block, threads=threads)

    def close(self) -> None:
        assert self.pool.check() == []
        assert self.pool.stats()["pinned"] == 0
        self.pool.close()


@pytest.fixture
def rig(directory: str) -> Iterator[Rig]:
    rig = Rig(directory)
    yield rig
    rig.close()


@pytest.fixture
def checking_rig(directory: str) -> Iterator[Rig]:
    rig = Rig(directory, verify_always=True)
    yield rig
    rig.close()


def small_layout() -> tuple[Any, PoolLayout]:
    pool = gqa_pool(layers=3, slots=64, kv_heads=2, head_dims=(16, 8), dtype=torch.float16)
    return pool, gqa.describe(pool, 4)


def round_trip(rig: Rig, pool: Any, page_size: int, layout: PoolLayout) -> None:
    """Both ends and scattered pages go out, come back to other pages, and nothing else changes."""
    engine = rig.engine(layout)
    count = layout.block.page_count
    sources = np.array([count - 1, 0, count // 2], dtype=np.int64)
    targets = np.array([0, count // 2, count - 1], dtype=np.int64)
    keys = KeyBatch.from_bytes(torch.randint(0, 256, (96,)).to(torch.uint8).numpy().tobytes())
    stored = [page_rows(pool, page_size, int(page)) for page in sources]
    ticket = engine.spill(keys, sources)
    ticket.wait()
    assert (ticket.stored, ticket.present, ticket.dropped) == (3, 0, 0)
    scribble(pool)
    before = [page_rows(pool, page_size, page) for page in range(count)]
    assert engine.load(rig.pool.pin(keys), targets).wait()
    landed = dict(zip(targets.tolist(), stored, strict=True))
    for page in range(count):
        assert page_rows(pool, page_size, page) == landed.get(page, before[page])
    engine.close()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=gqa_pools())
def test_every_gqa_tensor_comes_back_at_random_geometry(rig: Rig, drawn: tuple[Any, int]) -> None:
    pool, page_size = drawn
    round_trip(rig, pool, page_size, gqa.describe(pool, page_size))
    rig.pool.clear()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=mla_pools())
def test_every_mla_tensor_comes_back_at_random_geometry(rig: Rig, drawn: tuple[Any, int]) -> None:
    pool, page_size = drawn
    round_trip(rig, pool, page_size, mla.describe(pool, page_size))
    rig.pool.clear()


def test_every_byte_of_every_tensor_is_part_of_the_block(rig: Rig) -> None:
    pool = gqa_pool(layers=2, slots=12, kv_heads=1, head_dims=(6, 3), dtype=torch.uint8)
    layout = gqa.describe(pool, 4)
    engine = rig.engine(layout)
    page = np.array([1], dtype=np.int64)
    blocks = []
    for seed, flipped in enumerate([None, *_bytes_of_page_one(pool)]):
        if flipped is not None:
            flipped[0][flipped[1]] ^= 0x40
        keys = keys_of(seed, 1)
        engine.spill(keys, page).wait()
        if flipped is not None:
            flipped[0][flipped[1]] ^= 0x40
        out = bytearray(layout.block.block_bytes)
        assert rig.pool.get(bytes(keys), out)
        blocks.append(np.frombuffer(bytes(out), dtype=np.uint8))
    assert len(blocks) == 1 + layout.block.block_bytes
    # In block order, so the k-th flipped byte is the k-th byte of the block.
    for k, block in enumerate(blocks[1:]):
        assert np.flatnonzero(block != blocks[0]).tolist() == [k]
    engine.close()


def _bytes_of_page_one(pool: Any) -> list[tuple[torch.Tensor, int]]:
    """(flat tensor, index) of every byte of slots 4 to 7, tensor by tensor."""
    places = []
    for tensor in tensors_of(pool):
        slot_bytes = tensor[0].numel()
        places += [(tensor.view(-1), i) for i in range(4 * slot_bytes, 8 * slot_bytes)]
    return places


def test_one_flipped_byte_in_the_pool_file_fails_the_load(checking_rig: Rig) -> None:
    rig = checking_rig
    pool, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(1, 3)
    pages = np.arange(3, dtype=np.int64)
    engine.spill(keys, pages).wait()
    assert engine.load(rig.pool.pin(keys), pages + 5).wait()
    _flip_in_file(Path(rig.pool.path), b"".join(page_rows(pool, 4, 1)))
    assert not engine.load(rig.pool.pin(keys), pages + 5).wait()
    assert rig.pool.lookup(keys) == 1, "the bad block and what follows it are no longer promised"
    assert engine.stats()["bad_blocks"] == 1
    engine.close()


def _flip_in_file(path: Path, block: bytes) -> None:
    """Flip the last bit of the only copy of `block` in the file."""
    content = path.read_bytes()
    at = content.index(block)
    assert content.count(block) == 1
    with path.open("r+b") as file:
        file.seek(at + len(block) - 1)
        file.write(bytes([block[-1] ^ 1]))


def test_verify_reports_the_run_that_holds(checking_rig: Rig) -> None:
    rig = checking_rig
    pool, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(2, 4)
    engine.spill(keys, np.arange(4, dtype=np.int64)).wait()
    good = engine.verify(rig.pool.pin(keys))
    good.wait()
    assert (good.done, good.good) == (True, 4)
    _flip_in_file(Path(rig.pool.path), b"".join(page_rows(pool, 4, 2)))
    bad = engine.verify(rig.pool.pin(keys))
    bad.wait()
    assert bad.good == 2
    engine.close()


def test_waiting_for_a_layer_lets_other_threads_run(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(3, 2)
    pages = np.arange(2, dtype=np.int64)
    engine.spill(keys, pages).wait()
    engine.set_delay("load", 1, 3_600_000_000)
    load = engine.load(rig.pool.pin(keys), pages)
    load.wait_layer(0)
    assert load.layer_done(0) and not load.layer_done(1) and not load.done
    waiting = threading.Event()
    returned = threading.Event()

    def wait() -> None:
        waiting.set()
        load.wait_layer(2)
        load.wait_layer(1)
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30), "this thread runs while the other one waits"
    assert not returned.is_set()
    engine.close()  # fails the load, which ends the wait
    thread.join(30)
    assert returned.is_set() and load.done and not load.ok


def test_a_cancelled_spill_publishes_nothing_more(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(4, 8)
    engine.set_delay("spill", -1, 3_600_000_000)
    ticket = engine.spill(keys, np.arange(8, dtype=np.int64))
    assert not ticket.wait_device(0.001) and not ticket.device_done
    ticket.cancel()
    assert ticket.wait_device(0) and ticket.device_done
    ticket.wait()
    assert (ticket.stored, ticket.dropped) == (0, 8)
    assert rig.pool.lookup(keys) == 0
    assert engine.stats()["spill_dropped_cancelled"] == 8
    engine.close()


def test_a_load_takes_the_lease_over(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(5, 2)
    pages = np.arange(2, dtype=np.int64)
    engine.spill(keys, pages).wait()
    lease = rig.pool.pin(keys)
    assert engine.load(lease, pages).wait()
    assert lease.count == 0
    lease.release()
    assert not engine.load(lease, pages).wait(), "a lease that was used up fails the load"
    engine.close()


def test_injected_failures_run_out(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(6, 2)
    pages = np.arange(2, dtype=np.int64)
    engine.fail_next("spill", 1)
    engine.spill(keys, pages).wait()
    assert rig.pool.lookup(keys) == 0
    engine.spill(keys, pages).wait()
    engine.fail_next("load", 1)
    assert not engine.load(rig.pool.pin(keys), pages).wait()
    assert engine.load(rig.pool.pin(keys), pages).wait()
    engine.close()


@pytest.mark.parametrize("bad", [[0, 16], [-1, 0], [0], [0, 1, 2]])
def test_pages_outside_the_pool_are_a_value_error(rig: Rig, bad: list[int]) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(7, 2)
    engine.spill(keys, np.arange(2, dtype=np.int64)).wait()
    with pytest.raises(ValueError, match="copy engine"):
        engine.spill(keys, np.array(bad, dtype=np.int64))
    with pytest.raises(ValueError, match="copy engine"):
        engine.load(rig.pool.pin(keys), np.array(bad, dtype=np.int64))
    engine.close()


def test_unknown_kinds_and_layers_are_value_errors(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    with pytest.raises(ValueError, match="valid: spill, load, verify"):
        engine.set_delay("store", -1, 1)
    with pytest.raises(ValueError, match="layer"):
        engine.set_delay("load", 3, 1)
    engine.close()


def test_an_engine_needs_the_block_size_of_its_namespace(rig: Rig) -> None:
    _, layout = small_layout()
    index = rig.pool.add_namespace(bytes(32), b"", layout.block.block_bytes + 8)
    with pytest.raises(ValueError, match="blocks of the namespace have"):
        CopyEngine(rig.pool, index, layout.block)


def test_submissions_after_close_are_dropped_or_fail(rig: Rig) -> None:
    _, layout = small_layout()
    engine = rig.engine(layout)
    keys = keys_of(8, 2)
    pages = np.arange(2, dtype=np.int64)
    engine.spill(keys, pages).wait()
    engine.close()
    assert engine.spill(keys, pages).dropped == 2
    assert not engine.load(rig.pool.pin(keys), pages).wait()
    assert engine.verify(rig.pool.pin(keys)).good == 0
    engine.quiesce()
