"""The stream engine in Python, on a device of host threads whose memory is numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hpkv_sglang import _core
from hpkv_sglang._core import (
    BlockLayout,
    BlockSource,
    CorePoolError,
    KeyBatch,
    Pool,
    Region,
    StreamEngine,
    StreamLoad,
    StreamSpill,
)

needs_rig = pytest.mark.skipif(
    not hasattr(_core, "AsyncHostDevice"),
    reason="the extension was built without HPKV_RIG=ON: the stream engine is NOT tested in Python",
)

LAYERS, PAGES, TOKENS, ROW = 3, 16, 4, 40
PAGE_BYTES = TOKENS * ROW
BLOCK_BYTES = LAYERS * PAGE_BYTES
LONG_S = 60.0


def keys_of(count: int, seed: int = 1) -> KeyBatch:
    return KeyBatch.from_bytes(np.random.default_rng(seed).bytes(32 * count))


class Rig:
    """A pool, an engine on memory [layer, page, token, byte], and a server's two streams."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.device = _core.AsyncHostDevice()
        self.schedule = self.device.make_stream()
        self.forward = self.device.make_stream()
        self.pool = Pool.open(directory, pool_bytes=16 << 20)
        index = self.pool.add_namespace(bytes([1]) * 32, b"", BLOCK_BYTES)
        self.memory = np.zeros((LAYERS, PAGES, TOKENS, ROW), dtype=np.uint8)
        self.layout = BlockLayout(
            block_bytes=BLOCK_BYTES, layer_count=LAYERS, page_count=PAGES, regions=self.regions()
        )
        self.engine = StreamEngine(
            self.device, self.pool, index, self.layout, page_size=TOKENS, **options
        )
        self._arrays: list[npt.NDArray[np.int64]] = []

    def regions(self) -> list[Region]:
        return [
            Region(
                layer=layer,
                base=self.memory[layer].ctypes.data,
                page_stride=PAGE_BYTES,
                piece_count=TOKENS,
                piece_stride=ROW,
                piece_bytes=ROW,
                block_offset=layer * PAGE_BYTES,
            )
            for layer in range(LAYERS)
        ]

    def scribble(self, seed: int) -> npt.NDArray[np.uint8]:
        """New random bytes everywhere; returns a copy of them."""
        random = np.random.default_rng(seed)
        self.memory[:] = random.integers(0, 256, self.memory.shape, dtype=np.uint8)
        return self.memory.copy()

    def slots(self, pages: list[int]) -> int:
        array = np.array(pages, dtype=np.int64) * TOKENS
        self._arrays.append(array)
        return array.ctypes.data

    def spill(self, keys: KeyBatch, pages: list[int], **turns: int) -> StreamSpill:
        return self.engine.spill(keys, self.slots(pages), self.schedule, self.forward, **turns)

    def load(
        self, keys: KeyBatch, pages: list[int], source: BlockSource | None = None
    ) -> StreamLoad:
        return self.engine.load(
            self.pool.pin(keys),
            self.slots(pages),
            len(pages),
            self.schedule,
            self.forward,
            source,
        )

    def stream_of_spills(self) -> int:
        """The engine's: after the two of ours, those of loads and of their gate."""
        return self.device.made_stream(4)

    def close(self) -> None:
        self.engine.close()
        assert self.engine.check() == []
        assert self.pool.check() == []
        assert self.pool.stats()["pinned"] == 0
        self.pool.close()


@pytest.fixture
def rig(directory: str) -> Iterator[Rig]:
    rig = Rig(directory)
    yield rig
    rig.close()


def check_round_trip(rig: Rig, source: BlockSource | None) -> None:
    stored = rig.scribble(1)
    keys = keys_of(4)
    spill = rig.spill(keys, [0, 15, 7, 3])
    spill.wait()
    assert spill.done and spill.device_done
    assert (spill.stored, spill.present, spill.dropped) == (4, 0, 0)
    expected = rig.scribble(2)
    expected[:, [2, 4, 6, 15]] = stored[:, [0, 15, 7, 3]]
    load = rig.load(keys, [2, 4, 6, 15], source)
    assert all(load.wait_layer_on(rig.forward, layer) for layer in range(LAYERS))
    assert load.wait() and load.ok and load.done and load.elapsed_s > 0
    assert all(load.layer_done(layer) for layer in range(LAYERS))
    np.testing.assert_array_equal(rig.memory, expected)
    stats = rig.engine.stats()
    assert (stats["spill_stored"], stats["loaded_blocks"]) == (4, 4)


@needs_rig
@pytest.mark.parametrize("spill_path", ["batch", "kernel"])
def test_pages_come_back_to_other_pages_by_every_path(directory: str, spill_path: str) -> None:
    rig = Rig(directory, spill_path=spill_path, threads=1)
    check_round_trip(rig, None)
    rig.close()


@needs_rig
def test_pages_come_back_through_a_source(rig: Rig) -> None:
    check_round_trip(rig, BlockSource(rig.layout, block_bytes=BLOCK_BYTES, parts=[rig.regions()]))


@needs_rig
def test_what_is_stored_already_is_present_and_turns_are_taken(rig: Rig) -> None:
    rig.scribble(1)
    keys = keys_of(4)
    rig.spill(keys[0:2], [0, 1]).wait()
    again = rig.spill(keys, [0, 1, 2, 3], turn=1, turns=2)
    again.wait()
    assert (again.stored, again.present) == (2, 2)
    with pytest.raises(ValueError, match=r"turn 2 is not in \[0, 2\)"):
        rig.spill(keys, [0, 1, 2, 3], turn=2, turns=2)


@needs_rig
def test_indices_are_read_behind_the_chooser_and_pages_behind_the_user(rig: Rig) -> None:
    keys = keys_of(1)
    rig.device.hold(rig.schedule)
    rig.device.hold(rig.forward)
    slots = np.zeros(1, dtype=np.int64)
    spill = rig.engine.spill(keys, slots.ctypes.data, rig.schedule, rig.forward)
    slots[0] = 9 * TOKENS
    rig.device.release(rig.schedule)
    stored = rig.scribble(1)
    assert not spill.wait_device(0.005)
    rig.device.release(rig.forward)
    spill.wait()
    rig.scribble(2)
    assert rig.load(keys, [5]).wait()
    np.testing.assert_array_equal(rig.memory[:, 5], stored[:, 9])


@needs_rig
def test_a_stream_overwrites_pages_behind_the_reads(rig: Rig) -> None:
    stored = rig.scribble(1)
    keys = keys_of(3)
    reader = rig.stream_of_spills()
    rig.device.hold(reader)
    spill = rig.spill(keys, [0, 1, 2])
    assert spill.wait_reads_on(rig.forward, LONG_S)
    assert not spill.device_done
    rig.device.release(reader)
    rig.device.synchronize_stream(rig.forward)
    rig.scribble(2)  # as work on the forward stream would
    spill.wait()
    assert spill.stored == 3 and rig.load(keys, [3, 4, 5]).wait()
    np.testing.assert_array_equal(rig.memory[:, 3:6], stored[:, 0:3])


@needs_rig
def test_reads_that_are_late_are_cancelled_and_not_published(directory: str) -> None:
    """By batches: until the page indices are known, no read is enqueued."""
    rig = Rig(directory, spill_path="batch")
    keys = keys_of(2)
    rig.device.hold(rig.schedule)
    spill = rig.spill(keys, [0, 1])
    assert not spill.wait_reads_on(rig.forward, 0)
    assert not spill.wait_reads_on(rig.forward, 0.005)
    spill.cancel()
    assert spill.wait_reads_on(rig.forward, 0)
    rig.device.release(rig.schedule)
    spill.wait()
    assert spill.dropped == 2 and rig.pool.lookup(keys) == 0
    assert rig.engine.stats()["spill_dropped_cancelled"] == 2
    rig.close()


@needs_rig
def test_a_spill_by_the_kernel_needs_no_indices_on_the_host(rig: Rig) -> None:
    stored = rig.scribble(1)
    keys = keys_of(2)
    rig.device.hold(rig.schedule)
    spill = rig.spill(keys, [0, 1])
    assert spill.wait_reads_on(rig.forward, LONG_S)
    assert not spill.done
    rig.device.release(rig.schedule)
    spill.wait()
    assert spill.stored == 2
    assert rig.load(keys, [3, 2]).wait()
    np.testing.assert_array_equal(rig.memory[:, [3, 2]], stored[:, [0, 1]])


@needs_rig
def test_a_stream_waits_for_a_layer_that_has_not_landed(rig: Rig) -> None:
    rig.scribble(1)
    keys = keys_of(2)
    rig.spill(keys, [0, 1]).wait()
    copies = rig.device.made_stream(2)
    rig.device.hold(copies)
    load = rig.load(keys, [2, 3])
    assert load.wait_layer_on(rig.forward, 0)
    assert not load.layer_done(0)
    rig.device.release(copies)
    rig.device.synchronize_stream(rig.forward)
    np.testing.assert_array_equal(rig.memory[0, 2:4], rig.memory[0, 0:2])
    assert load.wait()
    for layer in (LAYERS, LAYERS + 7):
        with pytest.raises(IndexError, match=rf"layer {layer} is not in \[0, {LAYERS}\)"):
            load.layer_done(layer)
        with pytest.raises(IndexError, match=rf"layer {layer} is not in \[0, {LAYERS}\)"):
            load.wait_layer_on(rig.forward, layer)


@needs_rig
def test_a_page_outside_is_dropped_and_left_out(rig: Rig) -> None:
    stored = rig.scribble(1)
    keys = keys_of(3)
    spill = rig.spill(keys, [1, PAGES, -1])
    spill.wait()
    assert (spill.stored, spill.dropped) == (1, 2)
    assert rig.engine.stats()["spill_dropped_outside"] == 2
    source = BlockSource(rig.layout, block_bytes=BLOCK_BYTES, parts=[rig.regions()])
    assert rig.load(keys[0:1], [PAGES]).wait()
    assert rig.load(keys[0:1], [PAGES], source).wait()
    np.testing.assert_array_equal(rig.memory, stored)


@needs_rig
def test_a_device_that_fails_ends_copying_and_says_which_call(rig: Rig) -> None:
    keys = keys_of(2)
    rig.spill(keys[0:1], [0]).wait()
    rig.engine.quiesce()
    assert not rig.engine.poisoned and rig.engine.first_error == ""
    rig.device.fail_call(1, lost=True)
    spill = rig.spill(keys[1:2], [1])
    spill.wait()
    assert spill.dropped == 1 and spill.wait_reads_on(rig.forward, LONG_S)
    assert rig.engine.poisoned and rig.engine.error_count >= 1
    assert "record: injected" in rig.engine.first_error
    load = rig.load(keys[0:1], [2])
    assert not load.wait_layer_on(rig.forward, 0) and not load.wait() and not load.ok
    verify = rig.engine.verify(rig.pool.pin(keys[0:1]))
    verify.wait()
    assert verify.good == 1
    assert rig.engine.stats()["spill_dropped_off"] == 1
    with pytest.raises(CorePoolError) as caught:
        rig.device.synchronize_stream(rig.forward)
    assert caught.value.args[0] == "system"


@needs_rig
def test_faults_are_injected_as_into_the_cpu_engine(rig: Rig) -> None:
    keys = keys_of(1)
    rig.engine.fail_next("spill", 1)
    failed = rig.spill(keys, [0])
    failed.wait()
    assert failed.dropped == 1
    rig.spill(keys, [0]).wait()
    rig.engine.fail_next("load", 1)
    assert not rig.load(keys, [1]).wait()
    rig.engine.set_delay("load", 1, 1000)
    load = rig.load(keys, [1])
    assert load.wait() and load.elapsed_s >= 0.001
    with pytest.raises(ValueError, match="valid: spill, load, verify"):
        rig.engine.fail_next("copy", 1)
    with pytest.raises(ValueError, match="layer is -1 or one of the layout"):
        rig.engine.set_delay("load", LAYERS, 1)


@needs_rig
def test_wrong_numbers_are_refused_and_pins_are_given_back(rig: Rig) -> None:
    keys = keys_of(2)
    rig.spill(keys, [0, 1]).wait()
    slots = rig.slots([0, 1])
    with pytest.raises(ValueError, match="no address of an int64"):
        rig.engine.spill(keys, 0, rig.schedule, 0)
    with pytest.raises(ValueError, match="no address of an int64"):
        rig.engine.load(rig.pool.pin(keys), slots + 4, 2, rig.schedule, 0)
    with pytest.raises(ValueError, match="1 pages given, 2 expected"):
        rig.engine.load(rig.pool.pin(keys), slots, 1, rig.schedule, 0)
    for wrong, said in (
        ({"spill_path": "dma"}, "spill_path is 'dma'; valid: batch, kernel"),
        ({"threads": 0}, "0 threads asked for"),
        ({"page_size": 0}, "a page of 0 tokens"),
    ):
        options: Any = {"page_size": TOKENS, **wrong}
        with pytest.raises(ValueError, match=said):
            StreamEngine(rig.device, rig.pool, 0, rig.layout, **options)


@needs_rig
@pytest.mark.parametrize("registers", [True, False])
def test_blocks_are_read_in_place_where_the_pool_is_registered(
    directory: str, registers: bool
) -> None:
    rig = Rig(directory, register_pool=registers)
    stored = rig.scribble(1)
    keys = keys_of(2)
    rig.spill(keys, [0, 1]).wait()
    for _ in range(1000 if registers else 3):  # registered in the background
        rig.memory[:] = 0
        assert rig.load(keys, [2, 3]).wait()
        np.testing.assert_array_equal(rig.memory[:, 2:4], stored[:, 0:2])
        if rig.engine.stats()["loaded_in_place"] > 0:
            break
    assert (rig.engine.stats()["loaded_in_place"] > 0) == registers
    assert rig.engine.notice == ""
    rig.close()


@needs_rig
def test_an_engine_that_the_device_refuses_is_a_core_error(rig: Rig) -> None:
    device = _core.AsyncHostDevice()  # nobody else's calls come first
    device.fail_call(1)
    with pytest.raises(CorePoolError, match="allocate_pinned: injected") as caught:
        StreamEngine(device, rig.pool, 0, rig.layout, page_size=TOKENS)
    assert caught.value.args[0] == "system"


@needs_rig
def test_a_closed_engine_drops_and_fails(rig: Rig) -> None:
    keys = keys_of(1)
    rig.spill(keys, [0]).wait()
    rig.engine.close()
    rig.engine.close()
    spill = rig.spill(keys_of(1, seed=2), [0])
    assert spill.done and spill.dropped == 1
    assert not rig.load(keys, [0]).wait()
    with pytest.raises(IndexError):
        rig.device.made_stream(100)


def test_a_gpu_that_is_not_there_is_an_error_that_says_why() -> None:
    assert _core.CUDA_RUNTIME == 0 or _core.CUDA_RUNTIME >= 11000
    with pytest.raises(CorePoolError, match=r"CUDA device: .*(no CUDA|not in|cuda)") as caught:
        _core.cuda_device(4096)
    assert caught.value.args[0] == "system"
