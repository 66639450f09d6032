"""On the GPU: the pool's memory is registered while copies run, and loads read it in place."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from gpu_rig import FORMS, PAGES, PATIENCE_S, Rig, keys_of, noise_for, read, same, scribble, write

from hpkv_sglang.copy.streams import StreamCopies

COUNT = 8
SOURCES, TARGETS = list(range(COUNT)), list(range(PAGES - COUNT, PAGES))


@pytest.fixture
def rig(directory: str) -> Iterator[Rig]:
    rig = Rig(directory, FORMS["mla-bf16"](128))
    yield rig
    rig.close()


def stored(rig: Rig, copies: StreamCopies, first_key: int) -> list[torch.Tensor]:
    """Random bytes, spilled under `COUNT` keys from `first_key` on."""
    with rig.on_forward():
        values = noise_for(rig.layout, COUNT)
        write(rig.layout, SOURCES, values)
    ticket = copies.spill(keys_of(first_key, COUNT), rig.pages(SOURCES))
    ticket.wait()
    assert ticket.stored == COUNT
    return values


def loaded(rig: Rig, copies: StreamCopies, first_key: int) -> list[torch.Tensor]:
    """What a load of these keys brings, into pages that held something else."""
    with rig.on_forward():
        scribble(rig.layout)
    torch.cuda.synchronize()
    ticket = copies.load(rig.pool.pin(keys_of(first_key, COUNT)), rig.pages(TARGETS))
    assert ticket.wait()
    with rig.on_forward():
        return read(rig.layout, TARGETS)


def in_place(copies: StreamCopies) -> int:
    return copies.stats()["loaded_in_place"]


def test_loads_read_the_registered_pool_and_staged_loads_do_not(rig: Rig) -> None:
    copies, staged = rig.engine(), rig.engine(register_pool=False)
    values = stored(rig, copies, 0)
    deadline = time.monotonic() + PATIENCE_S
    while in_place(copies) < COUNT and time.monotonic() < deadline:
        with rig.on_forward():
            assert same(loaded(rig, copies, 0), values)
    assert in_place(copies) >= COUNT, "the driver registers nothing: see the log"
    with rig.on_forward():
        assert same(loaded(rig, staged, 0), values)
    assert in_place(staged) == 0


def test_the_pool_is_registered_while_it_grows_under_traffic(rig: Rig) -> None:
    copies = rig.engine()
    segments = set()
    kept = {}
    for first in range(0, 16 * COUNT, COUNT):
        kept[first] = stored(rig, copies, first)
        segments.add(rig.pool.stats()["reserved_bytes"])
        again = max(0, first - 2 * COUNT)  # some already registered, some perhaps not
        with rig.on_forward():
            assert same(loaded(rig, copies, again), kept[again])
    assert len(segments) > 4, "the pool grew while loads went on"
    assert in_place(copies) > 0, "the driver registers nothing: see the log"
