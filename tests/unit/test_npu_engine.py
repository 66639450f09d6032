"""What only the NPU engine has: a bounded staging area, reads it can spare, device errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from npu_rig import LAYERS, PAGES, NpuRig, keys_of, kv_tensors, pages_of

from hpkv_sglang.errors import LayoutError
from hpkv_sglang.layout.base import PageTensor
from hpkv_sglang.npu import spills
from hpkv_testing.fake_npu import FakeNpu


@pytest.fixture
def rig(directory: str) -> Iterator[NpuRig]:
    rig = NpuRig(directory)
    yield rig
    rig.close()


def test_a_rank_begins_with_its_own_pages(rig: NpuRig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig.npu(staging_pages=2)  # one page at a time
    read: list[int] = []
    indices = rig.device.indices
    monkeypatch.setattr(
        rig.device, "indices", lambda pages: read.extend(pages.tolist()) or indices(pages)
    )
    keys = keys_of(14, 5)
    ticket = engine.spill(keys, pages_of(10, 11, 12, 13, 14), 1, 2)
    ticket.wait()
    assert read == [11, 13, 10, 12, 14]
    assert engine.load(rig.pool.pin(keys), pages_of(0, 1, 2, 3, 4)).wait()
    assert [rig.page(p) for p in range(5)] == [rig.page(10 + p) for p in range(5)]


def test_what_is_in_the_pool_is_not_read_from_the_device(rig: NpuRig) -> None:
    engine = rig.npu()
    keys = keys_of(15, 3)
    engine.spill(keys, pages_of(0, 1, 2)).wait()
    copies = rig.device.issued["copy"]
    ticket = engine.spill(keys, pages_of(3, 4, 5))
    ticket.wait()
    assert ticket.present == 3
    assert rig.device.issued["copy"] == copies


def test_a_spill_larger_than_the_staging_area_evicts_its_tail_first(directory: str) -> None:
    # Blocks of about 1 MiB in a pool of 16 MiB.
    rig = NpuRig(directory, tensors=kv_tensors(((22000,), (22000,))))
    engine = rig.npu(staging_pages=4)
    keys = keys_of(16, 6)
    ticket = engine.spill(keys, np.arange(6, dtype=np.int64))
    ticket.wait()
    assert ticket.stored == 6
    others = keys_of(17, PAGES)
    evicted = 0
    while rig.pool.lookup(keys) == 6:
        assert evicted < PAGES, "the pool never got full"
        engine.spill(others[evicted : evicted + 1], pages_of(evicted)).wait()
        evicted += 1
    assert rig.pool.lookup(keys) >= 3, "the head of a prefix stays when its tail goes"
    rig.close()


def test_the_caller_never_waits_and_what_does_not_fit_is_dropped(
    rig: NpuRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "QUEUED_PAGES_MAX", 10)
    engine = rig.npu(staging_pages=2)
    rig.device.streams["d2h"].hold()
    keys = keys_of(18, 16)
    first = engine.spill(keys[:8], np.arange(8, dtype=np.int64))
    second = engine.spill(keys[8:], np.arange(8, dtype=np.int64))
    assert second.done and second.dropped == 8 and not first.done
    assert engine.stats()["spill_dropped_queue"] == 8
    rig.device.streams["d2h"].release()
    first.wait()
    assert first.stored == 8
    assert engine.stats()["queued_pages"] == 0


def test_a_cancelled_page_that_is_being_read_is_dropped(rig: NpuRig) -> None:
    engine = rig.npu()
    keys = keys_of(19, 2)
    rig.device.streams["d2h"].hold()
    ticket = engine.spill(keys, pages_of(0, 1))
    rig.device.wait_issued("copy", 2 * LAYERS)
    ticket.cancel()
    assert not ticket.device_done, "the device may still read"
    rig.device.streams["d2h"].release()
    assert ticket.wait_device(30)
    ticket.wait()
    assert ticket.dropped == 2 and rig.pool.lookup(keys) == 0


@pytest.mark.parametrize("operation", ["gather", "copy"])
def test_a_device_error_drops_spills_from_then_on(
    rig: NpuRig, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig.npu()
    stored = keys_of(20, 2)
    engine.spill(stored, pages_of(0, 1)).wait()
    keys = keys_of(21, 2)
    rig.device.fail_next(operation)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            ticket = engine.spill(keys, pages_of(2, 3))
            ticket.wait()
            assert ticket.device_done and ticket.dropped == 2
            assert not engine.load(rig.pool.pin(stored), pages_of(4, 5)).wait()
    assert rig.pool.lookup(keys) == 0 and engine.poisoned
    assert engine.stats()["device_errors"] == 1
    assert len([r for r in caplog.records if "staging area failed" in r.message]) == 1


@pytest.mark.parametrize("how", ["scatter", "copy", "stream"])
def test_a_device_error_fails_loads_from_then_on(rig: NpuRig, how: str) -> None:
    engine = rig.npu(staging_pages=4)
    keys = keys_of(22, 7)
    engine.spill(keys, np.arange(7, dtype=np.int64)).wait()
    if how == "stream":
        rig.device.break_stream("h2d")
    else:
        rig.device.fail_next(how)
    load = engine.load(rig.pool.pin(keys), np.arange(7, 14, dtype=np.int64))
    load.wait_layer(LAYERS - 1)
    assert not load.wait() and load.layer_done(0)
    assert rig.pool.stats()["pinned"] == 0
    assert not engine.load(rig.pool.pin(keys), np.arange(7, dtype=np.int64)).wait()
    assert engine.spill(keys_of(23, 1), pages_of(0)).dropped == 1
    engine.quiesce()


def test_too_little_staging_is_a_value_error(rig: NpuRig) -> None:
    with pytest.raises(ValueError, match="staging"):
        rig.npu(staging_pages=1)


def test_pages_with_gaps_are_refused(directory: str) -> None:
    wide = kv_tensors(((2, 8),))
    narrow = [
        PageTensor(layer=t.layer, field=t.field, pages=t.pages.flatten(2)[:, :, :12]) for t in wide
    ]
    rig = NpuRig(directory, FakeNpu(), narrow)
    with pytest.raises(LayoutError, match="contiguous"):
        rig.npu()
    rig.close()
