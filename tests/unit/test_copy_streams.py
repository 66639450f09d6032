"""Copies on streams, over a device of host threads: the promises of the tickets, one by one.

A stream that is held stands for work that takes long. What must not happen before that work is over
is given a moment in which it would happen (`returns`), and then the bytes are looked at.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layout_rig import gqa_pool, mla_pool, page_rows, scribble
from streams_rig import LAYERS, PAGE, PAGES, POOL_BYTES, Calling, Rig, keys_of

from hpkv_sglang import _core
from hpkv_sglang._core import KeyBatch, Pool
from hpkv_sglang.copy import engines as engines_module
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.copy.streams import resident_pages
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.mla import layout as mla
from hpkv_sglang.radix.loads import NO_BATCH, LayerLoads, QueuedLoad
from hpkv_testing import host_streams

pytestmark = pytest.mark.skipif(
    host_streams.missing() is not None, reason=host_streams.missing() or ""
)

LONG_S = 60.0
MOMENT_S = 0.2


def poison(rig: Rig) -> None:
    """A call of the engine fails. Not the first one for sure: the thread that registers the pool
    may come before, and lives with a refusal. Spills that are in time run behind what is held."""
    until = time.monotonic() + LONG_S
    while not rig.copies.poisoned:
        assert time.monotonic() < until
        rig.device.fail_call(1)
        rig.copies.spill(keys_of(9, 1), rig.pages(1))
        time.sleep(0.001)
    rig.device.fail_call(0)


@pytest.fixture(params=[True, False], ids=["overlap", "no-overlap"])
def rig(request: pytest.FixtureRequest, directory: str) -> Iterator[Rig]:
    rig = Rig(directory, overlap=request.param)
    yield rig
    for stream in (rig.streams.schedule, rig.streams.forward, rig.writes, rig.reads):
        rig.device.release(stream)  # a test that failed may have left it held
    rig.copies.quiesce()
    assert rig.copies.poisoned or rig.copies.check() == []
    rig.copies.close()
    assert rig.pool.check() == []
    assert rig.pool.stats()["pinned"] == 0
    rig.pool.close()


# ---- spills ----


def test_a_spill_stores_what_the_forward_stream_writes_before_it_is_done(rig: Rig) -> None:
    keys = keys_of(0, 2)
    rig.device.hold(rig.streams.forward)
    spill = rig.copies.spill(keys, rig.pages(3, 5))
    assert not Calling(spill.wait).returns(MOMENT_S)
    scribble(rig.kv)  # the forward pass
    written = rig.rows(3, 5)
    rig.device.release(rig.streams.forward)
    spill.wait()
    assert rig.blocks(keys) == [b"".join(page) for page in written]


def test_page_numbers_are_read_behind_the_stream_that_chooses_them(rig: Rig) -> None:
    keys, pages = keys_of(0, 2), rig.pages(3, 5)
    chosen, written = pages.clone(), rig.rows(3, 5)
    pages.fill_(7 * PAGE)
    rig.device.hold(rig.streams.schedule)
    spill = rig.copies.spill(keys, pages)
    assert not Calling(spill.wait).returns(MOMENT_S)
    pages.copy_(chosen)
    rig.device.release(rig.streams.schedule)
    spill.wait()
    assert rig.blocks(keys) == [b"".join(page) for page in written]


def test_behind_wait_device_the_forward_stream_may_overwrite_the_pages(rig: Rig) -> None:
    keys, old = keys_of(0, 2), rig.rows(3, 5)
    rig.device.hold(rig.reads)
    spill = rig.copies.spill(keys, rig.pages(3, 5))
    assert spill.wait_device(LONG_S), "the reads are enqueued, and that is all it waits for"
    assert not spill.device_done and not spill.done

    def forward() -> None:
        rig.settle()
        scribble(rig.kv)

    running = Calling(forward)
    assert not running.returns(MOMENT_S)
    rig.device.release(rig.reads)
    assert running.returns(LONG_S)
    spill.wait()
    assert spill.device_done and spill.stored == 2
    assert rig.blocks(keys) == [b"".join(page) for page in old]


def test_wait_device_gives_up_in_time_and_a_cancelled_spill_publishes_nothing(rig: Rig) -> None:
    keys = keys_of(0, 2)
    rig.copies.set_delay("spill", 0, 300_000)  # before its reads are enqueued
    spill = rig.copies.spill(keys, rig.pages(3, 5))
    assert not spill.wait_device(0.01)
    spill.cancel()
    spill.wait()
    assert spill.stored == 0 and rig.pool.lookup(keys) == 0
    assert spill.wait_device(LONG_S)


def test_a_page_that_is_stored_already_is_no_reason_to_wait(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    spill = rig.copies.spill(keys, rig.pages(3, 5))
    spill.wait()
    assert spill.done and spill.device_done and spill.stored == 0
    assert spill.wait_device(0.0)


# ---- loads ----


def test_a_load_comes_behind_what_the_forward_stream_still_does(rig: Rig) -> None:
    keys, rows = rig.stored(3, 5)
    rig.device.hold(rig.streams.forward)
    load = rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9))
    assert load.wait(), "its copies are enqueued, and that is all it waits for"
    assert not Calling(rig.copies.quiesce).returns(MOMENT_S)
    scribble(rig.kv)  # the forward pass before
    rig.device.release(rig.streams.forward)
    rig.settle()
    assert rig.rows(8, 9) == rows


def test_behind_wait_layer_the_current_stream_finds_the_layer_and_behind_wait_all(
    rig: Rig,
) -> None:
    keys, rows = rig.stored(3, 5)
    rig.device.hold(rig.writes)
    load = rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9))
    rig.streams.enter_forward()
    load.wait_layer(0)
    rig.streams.leave_forward()
    first = Calling(rig.settle)
    assert not first.returns(MOMENT_S) and not load.done
    rig.device.release(rig.writes)
    assert first.returns(LONG_S)
    assert [page[:2] for page in rig.rows(8, 9)] == [page[:2] for page in rows]
    assert load.wait()
    rig.settle()
    assert rig.rows(8, 9) == rows
    rig.copies.quiesce()
    assert load.done and load.elapsed_s > 0
    with pytest.raises(IndexError):
        load.wait_layer(LAYERS)


def test_wait_layer_waits_on_the_host_until_the_layer_is_enqueued(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    rig.copies.set_delay("load", 1, 3_600_000_000)
    load = rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9))
    load.wait_layer(0)
    waiting = Calling(lambda: load.wait_layer(1))
    assert not waiting.returns(MOMENT_S)
    rig.copies.close()  # fails the load, which ends the wait
    assert waiting.returns(LONG_S)
    assert not load.wait() and load.done


def test_wait_after_a_failure_returns_when_nothing_writes_pages_any_more(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    rig.device.hold(rig.writes)
    load = rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9))
    load.wait_layer(LAYERS - 1)  # all of it is on its way
    poison(rig)
    waiting = Calling(load.wait)
    assert not waiting.returns(MOMENT_S)
    rig.device.release(rig.writes)
    assert waiting.returns(LONG_S) and waiting.result is False
    before = rig.rows(*range(PAGES))
    rig.copies.quiesce()
    assert rig.rows(*range(PAGES)) == before


def test_a_load_that_fails_by_injection_says_so(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    before = rig.rows(*range(PAGES))
    rig.copies.fail_next("load", 1)
    assert not rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9)).wait()
    assert rig.rows(*range(PAGES)) == before
    assert rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9)).wait()


# ---- page numbers, errors, the end ----


def test_page_numbers_are_kept_until_their_ticket_is_done(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    spilled, loaded = rig.pages(8, 9), rig.pages(10, 11)
    kept = [weakref.ref(spilled), weakref.ref(loaded)]
    rig.device.hold(rig.streams.forward)
    spill = rig.copies.spill(keys_of(50, 2), spilled)
    load = rig.copies.load(rig.pool.pin(keys), loaded)
    del spilled, loaded
    gc.collect()
    assert all(reference() is not None for reference in kept)
    rig.device.release(rig.streams.forward)
    spill.wait()
    assert load.wait()
    rig.copies.quiesce()
    rig.copies.spill(keys_of(60, 1), rig.pages(1)).wait()
    gc.collect()
    assert all(reference() is None for reference in kept), "the next submission lets them go"


def test_resident_pages_are_the_first_slots_of_the_pages() -> None:
    slots = torch.tensor([8, 9, 10, 11, 40, 41, 42, 43], dtype=torch.int32)
    pages = resident_pages(slots, 4)
    assert pages.dtype == torch.int64 and pages.is_contiguous()
    assert pages.tolist() == [8, 40]


def test_a_lost_device_drops_spills_fails_loads_and_leaves_the_pool_sound(rig: Rig) -> None:
    keys, _ = rig.stored(3, 5)
    before = rig.rows(*range(PAGES))
    rig.device.fail_call(1, lost=True)
    spill = rig.copies.spill(keys_of(50, 2), rig.pages(8, 9))
    assert spill.wait_device(LONG_S), "nobody reads pages on a device that is lost"
    spill.wait()
    assert spill.stored == 0 and rig.copies.poisoned
    assert not rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9)).wait()
    rig.copies.quiesce()
    assert rig.copies.stats()["device_errors"] >= 1
    assert rig.rows(*range(PAGES)) == before
    assert rig.pool.lookup(keys) == 2 and rig.pool.lookup(keys_of(50, 2)) == 0


# ---- as a server uses it ----


def queued(rig: Rig, rid: str, keys: KeyBatch, *pages: int) -> QueuedLoad:
    lease = rig.pool.pin(keys)
    own = SimpleNamespace(lease=lease, pages=lease.count, source=SimpleNamespace(block=None))
    run: Any = SimpleNamespace(parts=[own], release=lease.release)
    return QueuedLoad(rid, run, rig.pages(*pages))


def test_layer_loads_finish_before_their_copies_and_tell_of_them_afterwards(rig: Rig) -> None:
    keys, rows = rig.stored(3, 5)
    landed: list[int] = []
    loads = LayerLoads(LAYERS, lambda pages, _seconds: landed.append(pages))
    rig.device.hold(rig.writes)
    loads.queue(queued(rig, "a", keys[:1], 8))
    loads.queue(queued(rig, "b", keys[1:], 9))
    index = loads.start(rig.copies)
    loads.set_consumer(index)
    rig.streams.enter_forward()
    for layer in range(LAYERS):
        loads.wait_until(layer)
    rig.streams.leave_forward()
    assert loads.finish(index) == {"a": True, "b": True}
    assert landed == [] and not loads.pending
    assert not Calling(rig.settle).returns(MOMENT_S)
    rig.device.release(rig.writes)
    rig.settle()
    assert rig.rows(8, 9) == rows
    rig.copies.quiesce()
    assert loads.finish(NO_BATCH) == {}
    assert landed == [1, 1]


def test_layer_loads_begin_side_by_side(rig: Rig) -> None:
    keys, rows = rig.stored(3, 5)
    loads = LayerLoads(LAYERS, lambda pages, seconds: None)
    loads.queue(queued(rig, "a", keys[:1], 8))
    loads.queue(queued(rig, "b", keys[1:], 9))
    rig.copies.set_delay("load", 1, 3_600_000_000)
    index = loads.start(rig.copies, rig.copies.together)
    loads.set_consumer(index)
    rig.streams.enter_forward()
    in_time = Calling(lambda: loads.wait_until(0)).returns(LONG_S)
    rig.streams.leave_forward()
    rig.settle()
    found = rig.rows(8, 9)
    rig.copies.close()  # fails them, which ends the delay
    assert in_time, "layer 0 of the second waits for layer 1 of the first"
    assert [page[:2] for page in found] == [page[:2] for page in rows]
    assert loads.finish(index) == {"a": False, "b": False}


def test_loads_begin_when_the_block_is_left_by_an_error_too(rig: Rig) -> None:
    keys, rows = rig.stored(3, 5)
    with pytest.raises(RuntimeError), rig.copies.together():
        load = rig.copies.load(rig.pool.pin(keys), rig.pages(8, 9))
        assert not Calling(load.wait).returns(MOMENT_S)
        raise RuntimeError
    landing = Calling(load.wait)
    if not landing.returns(LONG_S):
        rig.copies.close()  # ends the hold, which the fixture would wait for
    assert landing.result is True
    rig.settle()
    assert rig.rows(8, 9) == rows


LAYOUTS: dict[str, Callable[[], PoolLayout]] = {
    "gqa": lambda: gqa.describe(
        gqa_pool(layers=2, slots=64, kv_heads=3, head_dims=(13, 7), dtype=torch.uint8), 16
    ),
    "mla": lambda: mla.describe(
        mla_pool(layers=2, slots=64, rank=512, rope=64, dtype=torch.bfloat16), 16
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_page_self_test_passes_and_finds_a_load_that_fails(directory: str, name: str) -> None:
    layout = LAYOUTS[name]()

    def failing(pool: Pool, index: int) -> Any:
        copier = host_streams.copier(pool, index, layout)
        copier.engine.fail_next("load", 1)  # type: ignore[attr-defined]
        return copier

    def good(pool: Pool, index: int) -> Any:
        return host_streams.copier(pool, index, layout, delay_us=500)

    assert page_round_trip(directory, layout, good) is None
    assert "did not land" in str(page_round_trip(directory, layout, failing))


def test_on_the_host_tickets_answer_for_what_the_host_does_next(directory: str) -> None:
    kv = gqa_pool(layers=3, slots=64, kv_heads=2, head_dims=(16, 8), dtype=torch.float16)
    layout = gqa.describe(kv, PAGE)
    pool = Pool.open(directory, pool_bytes=POOL_BYTES)
    index = pool.add_namespace(bytes(32), b"", layout.block.block_bytes)
    copier = host_streams.copier(pool, index, layout, delay_us=2000)
    keys, old = keys_of(0, 2), [page_rows(kv, PAGE, page) for page in (3, 5)]
    slots = torch.tensor([3, 5]).mul(PAGE)[:, None].add(torch.arange(PAGE)).reshape(-1)
    spill = copier.engine.spill(keys, copier.pages_of(slots, PAGE))
    assert spill.wait_device(LONG_S)
    scribble(kv)
    spill.wait()
    with copier.together():
        load = copier.engine.load(pool.pin(keys), copier.pages_of(slots, PAGE))
    for layer in range(3):
        load.wait_layer(layer)
        both = slice(2 * layer, 2 * layer + 2)
        assert [page_rows(kv, PAGE, page)[both] for page in (3, 5)] == [r[both] for r in old]
    assert load.wait() and not copier.is_broken()
    copier.engine.close()
    assert pool.check() == []
    pool.close()


@pytest.mark.parametrize(("name", "ordinal"), [("cuda", 0), ("cuda:3", 3)])
def test_each_rank_copies_on_the_gpu_that_its_tensors_are_on(
    monkeypatch: pytest.MonkeyPatch, name: str, ordinal: int
) -> None:
    """One process per GPU of a node; the layout is one of a device that is not here."""
    devices: list[int] = []
    engines: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_core, "cuda_device", lambda number: devices.append(number) or "device")
    monkeypatch.setattr(
        _core, "StreamEngine", lambda *args, **options: engines.append((*args, options))
    )
    pages = SimpleNamespace(device=torch.device(name))
    layout: Any = SimpleNamespace(
        tensors=[SimpleNamespace(pages=pages)],
        page_size=64,
        block=SimpleNamespace(block_bytes=1 << 20, layer_count=4),
    )
    made = engines_module._cuda_copier("pool", 7, layout, None)  # type: ignore[arg-type]
    assert devices == [ordinal]
    ((device, pool, namespace, block, options),) = engines
    assert (device, pool, namespace, block) == ("device", "pool", 7, layout.block)
    assert options == {"page_size": 64, "staging_bytes": engines_module.GPU_STAGING_BYTES}
    assert made.landing is layout
