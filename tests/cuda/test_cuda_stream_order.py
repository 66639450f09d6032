"""On the GPU: who waits for whom, shown by a kernel that keeps the forward stream busy.

While it spins, copies are submitted and waited for, and what follows is enqueued. That the spin's
event has not passed by then shows that the host waited for nothing. That the bytes are right in the
end shows that the device did.
"""

from __future__ import annotations

from collections.abc import Iterator

import gpu_rig
import pytest
import torch
from gpu_rig import FORMS, Rig, Snapshot, block_of, keys_of, noise_for, read, same, write

from hpkv_sglang._core import KeyBatch
from hpkv_sglang.copy.streams import StreamCopies, resident_pages

PAGES = [3, 17, 8, 1]
COUNT = len(PAGES)
LONG_S = 60.0

Traffic = tuple[Rig, StreamCopies]


@pytest.fixture(params=["batch", "kernel"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["overlap", "no-overlap"])
def traffic(request: pytest.FixtureRequest, directory: str, path: str) -> Iterator[Traffic]:
    """Everything is warm, and the schedule stream is the current one, as in SGLang."""
    rig = Rig(directory, FORMS["gqa-bf16"](16), overlap=request.param)
    with torch.cuda.stream(rig.schedule):
        copies = rig.engine(spill_path=path)
        rig.warm_up(copies)
        yield rig, copies
        torch.cuda.synchronize()
        rig.close()


def stored(traffic: Traffic) -> tuple[KeyBatch, Snapshot]:
    """Keys of blocks in the pool and what is in them; the pages hold other bytes by now."""
    rig, copies = traffic
    values = noise_for(rig.layout, COUNT)
    write(rig.layout, PAGES, values)
    keys = keys_of(0, COUNT)
    spill = copies.spill(keys, rig.pages(PAGES))
    spill.wait()
    assert spill.stored == COUNT
    write(rig.layout, PAGES, noise_for(rig.layout, COUNT))
    torch.cuda.synchronize()
    return keys, values


def blocks(rig: Rig) -> list[bytes | None]:
    return [rig.block(keys_of(0, COUNT), row) for row in range(COUNT)]


def expected_blocks(values: Snapshot) -> list[bytes]:
    return [block_of(values, row) for row in range(COUNT)]


def test_a_spill_stores_what_an_earlier_forward_is_still_to_write(traffic: Traffic) -> None:
    rig, copies = traffic
    values, pages = noise_for(rig.layout, COUNT), rig.pages(PAGES)
    torch.cuda.synchronize()
    spinning = rig.spin()
    with rig.on_forward():
        write(rig.layout, PAGES, values)
    spill = copies.spill(keys_of(0, COUNT), pages)
    assert not spinning.query(), "the host did not wait"
    spill.wait()
    assert spill.stored == COUNT
    assert blocks(rig) == expected_blocks(values)


def test_a_load_leaves_what_an_earlier_forward_still_reads(traffic: Traffic) -> None:
    rig, copies = traffic
    keys, values = stored(traffic)
    pages, old = rig.pages(PAGES), read(rig.layout, PAGES)
    seen = noise_for(rig.layout, COUNT)
    torch.cuda.synchronize()
    spinning = rig.spin()
    with rig.on_forward():
        read(rig.layout, PAGES, seen)
    load = copies.load(rig.pool.pin(keys), pages)
    assert load.wait()
    assert not spinning.query(), "the host did not wait"
    torch.cuda.synchronize()
    assert same(seen, old)
    copies.quiesce()
    assert same(read(rig.layout, PAGES), values)


def test_a_read_behind_wait_layer_finds_that_layer(traffic: Traffic) -> None:
    rig, copies = traffic
    keys, values = stored(traffic)
    pages, seen = rig.pages(PAGES), noise_for(rig.layout, COUNT)
    torch.cuda.synchronize()
    spinning = rig.spin()
    load = copies.load(rig.pool.pin(keys), pages)
    with rig.on_forward():
        for layer in range(rig.layout.block.layer_count):
            load.wait_layer(layer)
            read_layer(rig, layer, seen)
    assert not spinning.query(), "the host did not wait"
    torch.cuda.synchronize()
    assert same(seen, values)
    assert load.wait()


def read_layer(rig: Rig, layer: int, out: Snapshot) -> None:
    for tensor, into in zip(rig.layout.tensors, out, strict=True):
        if tensor.layer != layer:
            continue
        for row, page in enumerate(PAGES):
            into[row].copy_(gpu_rig.bytes_of(tensor.pages[page]))


def test_a_forward_behind_wait_device_may_overwrite_the_pages(traffic: Traffic) -> None:
    rig, copies = traffic
    old, new = read(rig.layout, PAGES), noise_for(rig.layout, COUNT)
    pages = rig.pages(PAGES)
    torch.cuda.synchronize()
    spinning = rig.spin()
    spill = copies.spill(keys_of(0, COUNT), pages)
    assert spill.wait_device(LONG_S)
    # Without overlap the page numbers themselves come behind the spin, and somebody must read them.
    assert not (rig.overlap and spinning.query()), "the host did not wait"
    with rig.on_forward():
        write(rig.layout, PAGES, new)
    spill.wait()
    assert spill.stored == COUNT
    assert blocks(rig) == expected_blocks(old)
    torch.cuda.synchronize()
    assert same(read(rig.layout, PAGES), new)


def test_a_load_into_pages_that_a_spill_still_reads_comes_behind_it(traffic: Traffic) -> None:
    rig, copies = traffic
    keys, values = stored(traffic)
    old, pages = read(rig.layout, PAGES), rig.pages(PAGES)
    torch.cuda.synchronize()
    rig.spin()
    other = keys_of(100, COUNT)
    spill = copies.spill(other, pages)
    assert spill.wait_device(LONG_S)  # as the fence does before a load
    load = copies.load(rig.pool.pin(keys), pages)
    assert load.wait()
    spill.wait()
    assert [rig.block(other, row) for row in range(COUNT)] == expected_blocks(old)
    with rig.on_forward():
        assert same(read(rig.layout, PAGES), values)


def test_page_numbers_that_are_freed_right_after_submission_stay_valid(traffic: Traffic) -> None:
    rig, copies = traffic
    keys, values = stored(traffic)
    old, pages = read(rig.layout, [20, 21, 22, 23]), rig.pages(PAGES)
    torch.cuda.synchronize()
    rig.spin()
    load = copies.load(rig.pool.pin(keys), pages)
    del pages
    # Whoever gets the memory of the page numbers now writes others into it: valid ones, of pages
    # that belong to somebody else.
    hoard = [
        torch.full((COUNT,), 20 * rig.layout.page_size, dtype=torch.int64, device=gpu_rig.DEVICE)
        for _ in range(256)
    ]
    assert load.wait()
    copies.quiesce()
    torch.cuda.synchronize()
    del hoard
    assert same(read(rig.layout, PAGES), values)
    assert same(read(rig.layout, [20, 21, 22, 23]), old)


def test_the_page_numbers_of_a_spill_stay_valid_too(traffic: Traffic) -> None:
    rig, copies = traffic
    values, slots = read(rig.layout, PAGES), rig.slots(PAGES)
    torch.cuda.synchronize()
    torch.cuda._sleep(gpu_rig.SPIN_CYCLES // 4)  # type: ignore[no-untyped-call]
    spill = copies.spill(keys_of(0, COUNT), resident_pages(slots, rig.layout.page_size))
    hoard = [
        torch.full((COUNT,), 20 * rig.layout.page_size, dtype=torch.int64, device=gpu_rig.DEVICE)
        for _ in range(256)
    ]
    spill.wait()
    del hoard
    assert spill.stored == COUNT
    assert blocks(rig) == expected_blocks(values)


def test_the_loads_of_a_batch_are_waited_for_layer_by_layer(traffic: Traffic) -> None:
    rig, copies = traffic
    keys, values = stored(traffic)
    pages, seen = rig.pages(PAGES), noise_for(rig.layout, COUNT)
    torch.cuda.synchronize()
    spinning = rig.spin()
    loads = [
        copies.load(rig.pool.pin(keys[row : row + 1]), pages[row : row + 1]) for row in range(COUNT)
    ]
    with rig.on_forward():
        for layer in range(rig.layout.block.layer_count):
            for load in loads:
                load.wait_layer(layer)
            read_layer(rig, layer, seen)
    assert all(load.wait() for load in loads)
    assert not any(load.done for load in loads) and not spinning.query(), "the host did not wait"
    torch.cuda.synchronize()
    assert same(seen, values)
