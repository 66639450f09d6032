"""The core's engine and the NPU engine keep the same promises; a fake device stands for the NPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from npu_rig import LAYERS, PAGES, NpuRig, keys_of, kv_tensors, pages_of

from hpkv_sglang._core import BlockSource, CopyEngine, Region
from hpkv_sglang.npu.engine import NpuEngine

ONE_HOUR_US = 3_600_000_000
Engine = CopyEngine | NpuEngine


@pytest.fixture
def rig(directory: str) -> Iterator[NpuRig]:
    rig = NpuRig(directory)
    yield rig
    rig.close()


@pytest.fixture
def checking_rig(directory: str) -> Iterator[NpuRig]:
    rig = NpuRig(directory, verify_always=True)
    yield rig
    rig.close()


def engine_of(rig: NpuRig, kind: str) -> Engine:
    """`npu` has two staging blocks per direction, fewer than most tests have pages."""
    return rig.core() if kind == "core" else rig.npu(staging_pages=4)


both = pytest.mark.parametrize("kind", ["core", "npu"])


@both
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_spilled_pages_come_back_and_nothing_else_changes(
    rig: NpuRig, kind: str, count: int
) -> None:
    engine = engine_of(rig, kind)
    sources = pages_of(*[PAGES - 1, 0, 5, 2, 3, 8, 9][:count])
    targets = pages_of(*[0, PAGES - 1, 4, 6, 7, 1, 10][:count])
    keys = keys_of(1, count)
    wanted = dict(zip(targets.tolist(), [rig.page(int(p)) for p in sources], strict=True))
    ticket = engine.spill(keys, sources)
    ticket.wait()
    assert (ticket.stored, ticket.present, ticket.dropped) == (count, 0, 0)
    assert ticket.done and ticket.device_done
    for page in range(PAGES):
        rig.writer(page, page)()
    load = engine.load(rig.pool.pin(keys), targets)
    assert load.wait()
    assert load.ok and load.elapsed_s > 0
    for page in range(PAGES):
        assert rig.page(page) == wanted.get(page, rig.written(page))


@both
def test_pages_that_are_there_are_not_stored_again(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(2, 5)
    engine.spill(keys[1:3], pages_of(1, 2)).wait()
    ticket = engine.spill(keys, pages_of(0, 1, 2, 3, 4))
    ticket.wait()
    assert (ticket.stored, ticket.present, ticket.dropped) == (3, 2, 0)
    assert (engine.stats()["spill_stored"], engine.stats()["spill_present"]) == (5, 2)
    assert rig.pool.lookup(keys) == 5


@both
def test_a_cancelled_spill_publishes_nothing_more(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(3, 8)
    engine.set_delay("spill", -1, ONE_HOUR_US)
    ticket = engine.spill(keys, np.arange(8, dtype=np.int64))
    assert not ticket.wait_device(0.001) and not ticket.device_done
    ticket.cancel()
    assert ticket.wait_device(0) and ticket.device_done
    ticket.wait()
    assert (ticket.stored, ticket.dropped) == (0, 8)
    assert rig.pool.lookup(keys) == 0
    assert engine.stats()["spill_dropped_cancelled"] == 8


@both
def test_injected_failures_run_out(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(4, 2)
    engine.fail_next("spill", 1)
    engine.spill(keys, pages_of(0, 1)).wait()
    assert rig.pool.lookup(keys) == 0
    engine.spill(keys, pages_of(0, 1)).wait()
    engine.fail_next("load", 1)
    assert not engine.load(rig.pool.pin(keys), pages_of(2, 3)).wait()
    assert engine.load(rig.pool.pin(keys), pages_of(2, 3)).wait()
    assert (engine.stats()["load_tickets"], engine.stats()["load_failed"]) == (2, 1)
    engine.fail_next("verify", 1)
    assert _verified(engine, rig, keys) == 0
    assert _verified(engine, rig, keys) == 2


def _verified(engine: Engine, rig: NpuRig, keys: object) -> int:
    ticket = engine.verify(rig.pool.pin(keys))  # type: ignore[arg-type]
    ticket.wait()
    return ticket.good


@both
def test_a_load_takes_the_lease_over(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(5, 2)
    engine.spill(keys, pages_of(0, 1)).wait()
    lease = rig.pool.pin(keys)
    load = engine.load(lease, pages_of(4, 5))
    assert lease.count == 0
    assert load.wait()
    assert rig.pool.stats()["pinned"] == 0
    assert not engine.load(lease, pages_of(4, 5)).wait(), "a used lease fails the load"


@both
@pytest.mark.parametrize("bad", [[0, PAGES], [-1, 0], [0], [0, 1, 2]])
def test_pages_outside_the_pool_are_a_value_error(rig: NpuRig, kind: str, bad: list[int]) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(6, 2)
    engine.spill(keys, pages_of(0, 1)).wait()
    with pytest.raises(ValueError, match="copy engine"):
        engine.spill(keys, pages_of(*bad))
    lease = rig.pool.pin(keys)
    with pytest.raises(ValueError, match="copy engine"):
        engine.load(lease, pages_of(*bad))
    assert rig.pool.stats()["pinned"] == 0


@both
def test_unknown_kinds_layers_and_turns_are_errors(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    with pytest.raises(ValueError, match="valid: spill, load, verify"):
        engine.set_delay("store", -1, 1)
    with pytest.raises(ValueError, match="valid: spill, load, verify"):
        engine.fail_next("store", 1)
    for wrong in ((LAYERS, 1), (-2, 1), (0, -1)):
        with pytest.raises(ValueError, match="layer"):
            engine.set_delay("spill", *wrong)
    keys = keys_of(7, 1)
    with pytest.raises(ValueError, match="turn"):
        engine.spill(keys, pages_of(0), 2, 2)
    engine.spill(keys, pages_of(0)).wait()
    load = engine.load(rig.pool.pin(keys), pages_of(1))
    with pytest.raises(IndexError):
        load.wait_layer(LAYERS)
    assert load.wait()


@both
def test_submissions_after_close_are_dropped_or_fail(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(8, 2)
    engine.spill(keys, pages_of(0, 1)).wait()
    engine.close()
    engine.close()
    spill = engine.spill(keys_of(9, 2), pages_of(0, 1))
    assert spill.done and spill.dropped == 2
    assert not engine.load(rig.pool.pin(keys), pages_of(0, 1)).wait()
    assert _verified(engine, rig, keys) == 0
    engine.quiesce()


@both
def test_nothing_to_copy_is_done_at_once(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    none = keys_of(10, 1)[:0]
    assert engine.spill(none, pages_of()).done
    assert engine.load(rig.pool.pin(none), pages_of()).wait()


@both
def test_closing_ends_a_wait_for_a_layer(rig: NpuRig, kind: str) -> None:
    engine = engine_of(rig, kind)
    keys = keys_of(11, 2)
    engine.spill(keys, pages_of(0, 1)).wait()
    engine.set_delay("load", 1, ONE_HOUR_US)
    load = engine.load(rig.pool.pin(keys), pages_of(4, 5))
    load.wait_layer(0)
    assert not load.layer_done(1) and not load.done
    waiting, returned = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        load.wait_layer(2)
        load.wait_layer(1)
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30) and not returned.is_set()
    engine.close()
    thread.join(30)
    assert returned.is_set() and load.done and not load.ok and not load.wait()


@both
def test_one_flipped_byte_fails_the_load_and_gives_the_pins_back(
    checking_rig: NpuRig, kind: str
) -> None:
    rig = checking_rig
    engine = engine_of(rig, kind)
    keys = keys_of(12, 7)
    engine.spill(keys, np.arange(7, dtype=np.int64)).wait()
    assert _verified(engine, rig, keys) == 7
    _flip_in_file(Path(rig.pool.path), b"".join(rig.page(4)))
    assert not engine.load(rig.pool.pin(keys), np.arange(7, 14, dtype=np.int64)).wait()
    assert rig.pool.lookup(keys) == 4, "the bad block is no longer promised"
    assert engine.stats()["bad_blocks"] == 1
    assert rig.pool.stats()["pinned"] == 0
    wanted = rig.page(3)
    assert engine.load(rig.pool.pin(keys[:4]), pages_of(8, 9, 10, 11)).wait()
    assert rig.page(11) == wanted


def _flip_in_file(path: Path, block: bytes) -> None:
    content = path.read_bytes()
    at = content.index(block)
    with path.open("r+b") as file:
        file.seek(at + len(block) - 1)
        file.write(bytes([block[-1] ^ 1]))


@both
def test_in_turns_each_page_is_stored_once(rig: NpuRig, kind: str) -> None:
    first, second = engine_of(rig, kind), engine_of(rig, kind)
    keys = keys_of(13, 9)
    pages = np.arange(9, dtype=np.int64)
    tickets = [first.spill(keys, pages, 0, 2), second.spill(keys, pages, 1, 2)]
    for ticket in tickets:
        ticket.wait()
    assert sum(ticket.stored for ticket in tickets) == 9
    assert rig.pool.lookup(keys) == 9
    assert first.load(rig.pool.pin(keys), pages).wait()


@both
def test_blocks_of_another_arrangement_become_pages(directory: str, kind: str) -> None:
    """Elsewhere K and V of a page are two blocks, layers last to first."""
    rig = NpuRig(directory, tensors=kv_tensors(((2, 8), (2, 8))))
    engine = engine_of(rig, kind)
    layout = engine.staged_layout if isinstance(engine, NpuEngine) else rig.layout
    field_bytes = rig.tensors[0].page_bytes
    parts = [
        [
            Region(
                layer=device.columns.layer,
                base=device.columns.at,
                page_stride=device.page_stride,
                piece_count=1,
                piece_stride=0,
                piece_bytes=field_bytes,
                block_offset=(LAYERS - 1 - device.columns.layer) * field_bytes,
            )
            for device in layout.devices
            if device.columns.field == field
        ]
        for field in ("field 0", "field 1")
    ]
    source = BlockSource(layout.block, block_bytes=LAYERS * field_bytes, parts=parts)
    elsewhere = rig.pool.add_namespace(b"e" * 32, b"", source.block_bytes)
    keys = keys_of(24, 14)
    for page in range(7):
        for part in range(2):
            rows = rig.page(page)[part::2]
            key = bytes(keys[2 * page + part : 2 * page + part + 1])
            assert rig.pool.put(elsewhere, key, b"".join(reversed(rows))) == "stored"
    assert engine.load(rig.pool.pin(keys), np.arange(8, 15, dtype=np.int64), source).wait()
    assert [rig.page(8 + p) for p in range(7)] == [rig.page(p) for p in range(7)]
    assert not engine.load(rig.pool.pin(keys[:1]), pages_of(1)).wait(), "of another size"
    rig.close()
