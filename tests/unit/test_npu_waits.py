"""Every wait of the NPU engine is needed: with it the bytes are right, without it they are wrong.

Each test runs twice on the fake device: complete, and with one kind of wait left out (`skip`). A
stream is held while everything else goes as far as it can, so a missing wait shows every time.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from npu_rig import LAYERS, PAGES, NpuRig, keys_of, pages_of

from hpkv_testing.fake_npu import FakeNpu

LAST = LAYERS - 1
Pair = tuple[str, str]
MakeRig = Callable[[Pair | None], NpuRig]


def with_and_without(waiter: str, awaited: str) -> Any:
    """Two runs: with every wait, and without that of `waiter` for `awaited`."""
    pair = (waiter, awaited)
    return pytest.mark.parametrize("skip", [None, pair], ids=["complete", f"{waiter}-{awaited}"])


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[NpuRig] = []
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as directory:

        def make(skip: Pair | None) -> NpuRig:
            rigs.append(NpuRig(directory, FakeNpu(skip=[] if skip is None else [skip])))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()


def verdict(rig: NpuRig, found: list[bytes], wanted: list[bytes], skip: Pair | None) -> None:
    """Right with every wait, wrong without."""
    assert (found == wanted) == (skip is None)


def stored_page(rig: NpuRig, engine: Any, seed: int, page: int) -> Any:
    """The key of `page`, which is in the pool now."""
    keys = keys_of(seed, 1)
    ticket = engine.spill(keys, pages_of(page))
    ticket.wait()
    rig.device.settle()
    assert rig.pool.lookup(keys) == 1
    return keys


@with_and_without("d2h", "forward")
def test_a_spill_reads_what_the_forward_pass_wrote(make_rig: MakeRig, skip: Pair | None) -> None:
    _spill_behind_a_write(make_rig(skip), "forward", skip)


@with_and_without("d2h", "schedule")
def test_a_spill_reads_what_the_current_stream_wrote(make_rig: MakeRig, skip: Pair | None) -> None:
    _spill_behind_a_write(make_rig(skip), "schedule", skip)


def _spill_behind_a_write(rig: NpuRig, writing: str, skip: Pair | None) -> None:
    engine = rig.npu()
    stream = rig.device.streams[writing]
    stream.hold()
    with rig.device.on(stream):
        rig.device.compute(rig.writer(0, 77))
    keys = keys_of(1, 1)
    ticket = engine.spill(keys, pages_of(0))
    rig.device.wait_issued("copy", LAYERS)
    rig.device.settle()
    stream.release()
    ticket.wait()
    rig.device.settle()
    assert engine.load(rig.pool.pin(keys), pages_of(1)).wait()
    verdict(rig, rig.page(1), rig.written(77), skip)


@with_and_without("host", "d2h")
def test_a_page_is_given_up_only_when_it_has_been_read(
    make_rig: MakeRig, skip: Pair | None
) -> None:
    rig = make_rig(skip)
    engine = rig.npu()
    rig.writer(0, 11)()
    keys = keys_of(2, 1)
    rig.device.streams["d2h"].hold()
    ticket = engine.spill(keys, pages_of(0))
    rig.device.wait_issued("copy", LAYERS)
    rig.device.settle()
    if skip is None:
        assert not ticket.wait_device(0.1) and not ticket.device_done
        rig.device.streams["d2h"].release()
    # What the fence does before a freed slot is written again.
    assert ticket.wait_device(30)
    rig.writer(0, 12)()
    rig.device.streams["d2h"].release()
    ticket.wait()
    rig.device.settle()
    assert engine.load(rig.pool.pin(keys), pages_of(1)).wait()
    rig.device.settle()
    verdict(rig, rig.page(1), rig.written(11), skip)


@pytest.mark.parametrize("stream", ["forward", "schedule"])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "without"])
def test_a_load_waits_for_the_last_user_of_its_pages(
    make_rig: MakeRig, stream: str, complete: bool
) -> None:
    skip = None if complete else ("h2d", stream)
    rig = make_rig(skip)
    engine = rig.npu()
    rig.writer(0, 21)()
    keys = stored_page(rig, engine, 3, 0)
    writing = rig.device.streams[stream]
    writing.hold()
    with rig.device.on(writing):
        rig.device.compute(rig.writer(5, 22))
    load = engine.load(rig.pool.pin(keys), pages_of(5))
    load.wait_layer(LAST)
    rig.device.settle()
    writing.release()
    assert load.wait()
    rig.device.settle()
    verdict(rig, rig.page(5), rig.written(21), skip)


@with_and_without("forward", "h2d")
def test_a_layer_is_on_the_device_before_the_forward_pass_reads_it(
    make_rig: MakeRig, skip: Pair | None
) -> None:
    rig = make_rig(skip)
    engine = rig.npu()
    rig.writer(0, 31)()
    keys = stored_page(rig, engine, 4, 0)
    rig.writer(5, 32)()
    seen: list[list[bytes]] = []
    rig.device.streams["h2d"].hold()
    load = engine.load(rig.pool.pin(keys), pages_of(5))
    with rig.device.on(rig.device.forward_stream):
        for layer in range(LAYERS):
            load.wait_layer(layer)
        assert not load.layer_done(0), "the host went on before the copy ran"
        rig.device.compute(lambda: seen.append(rig.page(5)))
    rig.device.settle()
    assert bool(seen) == (skip is not None)
    rig.device.streams["h2d"].release()
    assert load.wait() and load.layer_done(0)
    rig.device.settle()
    verdict(rig, seen[0], rig.written(31), skip)


@with_and_without("host", "h2d")
def test_a_staging_block_is_reused_only_when_the_device_has_it(
    make_rig: MakeRig, skip: Pair | None
) -> None:
    rig = make_rig(skip)
    engine = rig.npu(staging_pages=2)  # one for loads
    rig.writer(0, 41)()
    rig.writer(1, 42)()
    keys = [stored_page(rig, engine, 5, 0), stored_page(rig, engine, 6, 1)]
    rig.device.streams["h2d"].hold()
    first = engine.load(rig.pool.pin(keys[0]), pages_of(5))
    second = engine.load(rig.pool.pin(keys[1]), pages_of(6))
    first.wait_layer(LAST)
    rig.device.settle()
    if skip is None:
        assert not second.layer_done(0)
    else:
        second.wait_layer(LAST)
    rig.device.streams["h2d"].release()
    assert first.wait() and second.wait()
    rig.device.settle()
    assert rig.page(6) == rig.written(42)
    verdict(rig, rig.page(5), rig.written(41), skip)


@with_and_without("host", "h2d")
def test_batches_of_one_load_do_not_overwrite_each_other(
    make_rig: MakeRig, skip: Pair | None
) -> None:
    rig = make_rig(skip)
    engine = rig.npu(staging_pages=4)
    for page in range(6):
        rig.writer(page, 100 + page)()
    keys = keys_of(7, 6)
    engine.spill(keys, np.arange(6, dtype=np.int64)).wait()
    rig.device.settle()
    rig.device.streams["h2d"].hold()
    load = engine.load(rig.pool.pin(keys), np.arange(8, 14, dtype=np.int64))
    if skip is not None:
        load.wait_layer(LAST)
    rig.device.settle()
    rig.device.streams["h2d"].release()
    assert load.wait()
    rig.device.settle()
    found = [row for page in range(6) for row in rig.page(8 + page)]
    verdict(rig, found, [row for page in range(6) for row in rig.written(100 + page)], skip)


def test_a_layer_of_a_large_load_is_there_when_its_last_batch_is(make_rig: MakeRig) -> None:
    rig = make_rig(None)
    engine = rig.npu(staging_pages=4)  # two for loads: batches of one
    for page in range(6):
        rig.writer(page, 100 + page)()
    keys = keys_of(9, 6)
    engine.spill(keys, np.arange(6, dtype=np.int64)).wait()
    rig.device.streams["h2d"].hold()
    load = engine.load(rig.pool.pin(keys), np.arange(8, 14, dtype=np.int64))
    seen: list[list[bytes]] = []

    def forward() -> None:
        with rig.device.on(rig.device.forward_stream):
            load.wait_layer(0)
            load.wait_layer(LAST)
            rig.device.compute(lambda: seen.extend(rig.page(8 + page) for page in range(6)))

    thread = threading.Thread(target=forward)
    thread.start()
    rig.device.wait_issued("scatter", 2 * LAYERS)  # the first batch
    thread.join(0.1)
    assert thread.is_alive(), "most of its pages are still in the pool"
    rig.device.streams["h2d"].release()
    thread.join(30)
    assert load.wait()
    rig.device.settle()
    assert seen == [rig.written(100 + page) for page in range(6)]


class Impatient:
    """The core's engine with tickets that claim every layer, and every page, at once."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def load(self, *arguments: Any) -> Any:
        self._ticket = self.inner.load(*arguments)
        return self

    def spill(self, *arguments: Any) -> Any:
        self.inner.spill(*arguments)
        return self

    def wait_layer(self, layer: int) -> None:
        """Too early."""

    def wait(self) -> bool:
        return self._ticket is None or bool(self._ticket.wait())

    done = False
    ok = False
    stored = 1
    present = 0
    _ticket: Any = None


def swap_inner(side: Any, inner: Any) -> None:
    """Another engine between staging area and pool, for one direction."""
    side._lane = replace(side._lane, inner=inner)


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "without"])
def test_a_layer_leaves_the_staging_area_only_when_it_is_there(
    make_rig: MakeRig, complete: bool
) -> None:
    skip = None if complete else ("load", "staging")
    rig = make_rig(None)
    engine = rig.npu()
    rig.writer(0, 51)()
    keys = stored_page(rig, engine, 8, 0)
    if not complete:
        swap_inner(engine._loads, Impatient(engine._inner))
    engine.set_delay("load", 0, 200_000)
    assert engine.load(rig.pool.pin(keys), pages_of(5)).wait()
    verdict(rig, rig.page(5), rig.written(51), skip)


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "without"])
def test_a_staging_block_is_reused_only_when_it_is_stored(
    make_rig: MakeRig, complete: bool
) -> None:
    skip = None if complete else ("store", "staging")
    rig = make_rig(None)
    engine = rig.npu(staging_pages=2)  # one for spills
    if not complete:
        swap_inner(engine._spills, Impatient(engine._inner))
    rig.writer(0, 61)()
    rig.writer(1, 62)()
    engine._inner.set_delay("spill", -1, 200_000)
    keys = keys_of(10, 2)
    engine.spill(keys, pages_of(0, 1)).wait()
    engine.quiesce()
    assert engine.load(rig.pool.pin(keys), pages_of(5, 6)).wait()
    assert rig.page(6) == rig.written(62)
    verdict(rig, rig.page(5), rig.written(61), skip)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staging_pages", [2, 5, 32])
def test_random_traffic_leaves_every_page_as_a_model_without_delays_has_it(
    make_rig: MakeRig, seed: int, staging_pages: int
) -> None:
    rig = make_rig(None)
    random = np.random.default_rng(seed)
    engine = rig.npu(staging_pages=staging_pages)
    for stream in rig.device.streams.values():
        stream.delay_s = float(random.choice([0, 0, 0.0003]))
    pages = [int(v) for v in random.integers(0, 1 << 14, PAGES)]
    for page, value in enumerate(pages):
        rig.forward(rig.writer(page, value))
    stored: dict[int, list[int]] = {}  # seed of the keys -> values
    spills: list[tuple[Any, set[int]]] = []
    loads = []
    for step in range(40):
        chosen = random.permutation(PAGES)[: random.integers(1, 9)]
        what = random.choice(["write", "spill", "load"])
        if what == "write":
            _fence(spills, chosen)
            for page in chosen:
                pages[page] = int(random.integers(0, 1 << 14))
                rig.forward(rig.writer(int(page), pages[page]))
        elif what == "spill":
            ticket = engine.spill(keys_of(1000 + step, len(chosen)), chosen.astype(np.int64))
            stored[1000 + step] = [pages[page] for page in chosen]
            spills.append((ticket, set(chosen.tolist())))
        elif stored:
            key = int(random.choice(list(stored)))
            count = min(len(chosen), len(stored[key]))
            chosen = chosen[:count]
            _fence(spills, chosen)
            _settled(spills)
            load = engine.load(
                rig.pool.pin(keys_of(key, len(stored[key]))[:count]), chosen.astype(np.int64)
            )
            with rig.device.on(rig.device.forward_stream):
                for layer in range(LAYERS):
                    load.wait_layer(layer)
            loads.append(load)
            for page, value in zip(chosen, stored[key], strict=False):
                pages[page] = value
    assert all(load.wait() for load in loads)
    engine.quiesce()
    rig.device.settle()
    assert (
        torch.stack([t.pages[:, 0].flatten(1)[:, 0] for t in rig.tensors]).unique(dim=0).shape[0]
        == 1
    ), f"seed {seed}"
    assert [rig.page(p) for p in range(PAGES)] == [rig.written(v) for v in pages], f"seed {seed}"
    assert engine.check() == []


def _fence(spills: list[tuple[Any, set[int]]], pages: Any) -> None:
    """Pages are about to be written: whoever reads them must be through."""
    for ticket, read in spills:
        if read & set(pages.tolist()):
            assert ticket.wait_device(30)


def _settled(spills: list[tuple[Any, set[int]]]) -> None:
    """What was spilled is in the pool."""
    for ticket, _ in spills:
        ticket.wait()
        assert ticket.dropped == 0
