"""On the GPU: an address that is nobody's, two engines on one pool, an end while copies run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wild_address
from gpu_rig import FORMS, PAGES, Rig, block_of, keys_of, read, same, scribble

from hpkv_sglang._core import CorePoolError, Pool, cuda_device

LONG_S = 60.0


def test_a_wild_address_poisons_the_engine_and_leaves_the_pool_sound(directory: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", wild_address.__file__, directory],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["poisoned"] and facts["errors"] >= 1
    assert "cuda" in facts["error"] and "device.cu:" in facts["error"], "which call it was"
    assert facts["stored"] == [0, 0] and facts["waited"] == [True, True]
    assert facts["loaded"] is False
    assert facts["found"] == wild_address.GOOD, "what was stored before is still there"
    assert (facts["engine"], facts["pool"], facts["pinned"]) == ([], [], 0)
    pool = Pool.open(directory, create=False)
    assert pool.check() == []
    assert pool.lookup(keys_of(0, wild_address.GOOD)) == wild_address.GOOD
    pool.close()


def _environment() -> dict[str, str]:
    import os

    paths = [str(Path(wild_address.__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_a_device_that_is_not_there_is_refused_by_its_number() -> None:
    with pytest.raises((CorePoolError, ValueError), match="99"):
        cuda_device(99)


def test_two_engines_on_one_pool_read_what_the_other_stored(directory: str) -> None:
    layout = FORMS["mla-bf16"](32)
    rig = Rig(directory, layout)
    engines = [rig.engine(), rig.engine(spill_path="batch")]
    halves = [list(range(8)), list(range(8, 16))]
    stored = [read(layout, half) for half in halves]
    torch.cuda.synchronize()
    for copies, half in zip(engines, halves, strict=True):
        copies.spill(keys_of(100 * half[0], len(half)), rig.pages(half))
    for copies in engines:
        copies.quiesce()
    scribble(layout)
    torch.cuda.synchronize()
    loads = [
        copies.load(rig.pool.pin(keys_of(100 * half[0], len(half))), rig.pages(half))
        for copies, half in zip(engines, reversed(halves), strict=True)
    ]
    assert all(load.wait() for load in loads)
    with rig.on_forward():
        for half, values in zip(halves, stored, strict=True):
            assert same(read(layout, half), values)
    rig.close()


@pytest.mark.parametrize("path", ["batch", "kernel"])
def test_closing_while_copies_run_ends_every_ticket(directory: str, path: str) -> None:
    rig = Rig(directory, FORMS["gqa-bf16"](16))
    with torch.cuda.stream(rig.schedule):
        copies = rig.engine(spill_path=path)
        rig.warm_up(copies)
        everything = list(range(PAGES))
        values, keys = read(rig.layout, everything), keys_of(0, PAGES)
        pages = [rig.pages(everything), rig.pages(everything)]
        copies.spill(keys, pages[0]).wait()
        count = rig.pool.lookup(keys)
        assert count > 0
        torch.cuda.synchronize()
        rig.spin()
        load = copies.load(rig.pool.pin(keys), pages[0][:count])
        spill = copies.spill(keys_of(100, PAGES), pages[1])
        copies.close()
        assert load.done and spill.done and spill.device_done
        assert spill.wait_device(LONG_S)
        torch.cuda.synchronize()
    assert same(read(rig.layout, everything), values), "what was loaded is what was there"
    for row in range(rig.pool.lookup(keys_of(100, PAGES))):
        assert rig.block(keys_of(100, PAGES), row) == block_of(values, row)
    rig.close()


def test_a_rig_that_is_closed_drops_and_fails_what_comes(directory: str) -> None:
    rig = Rig(directory, FORMS["gqa-bf16"](16))
    copies = rig.engine()
    keys, pages = keys_of(0, 2), rig.pages([1, 2])
    copies.spill(keys, pages).wait()
    copies.close()
    assert copies.spill(keys_of(9, 2), pages).stored == 0
    assert not copies.load(rig.pool.pin(keys), pages).wait()
    rig.close()
