"""What a process does whose layout names an address that is nobody's; run by test_cuda_failures.py.

    python wild_address.py DIRECTORY

Prints one JSON object about what its engine said and did. Such a fault ends the process's CUDA
context for good, so it needs a process of its own, which leaves without tidying up after torch.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from gpu_rig import FORMS, Rig, keys_of

from hpkv_sglang._core import BlockLayout, Region
from hpkv_sglang.layout.base import PoolLayout

NOBODYS = 1 << 45  # inside the range of addresses, far from any allocation
GOOD = 4


def astray(layout: PoolLayout) -> PoolLayout:
    """The same, but the last layer lies where nothing is."""
    block = layout.block
    regions = [
        Region(
            layer=region.layer,
            base=NOBODYS + index * (1 << 30)
            if region.layer == block.layer_count - 1
            else region.base,
            page_stride=region.page_stride,
            piece_count=region.piece_count,
            piece_stride=region.piece_stride,
            piece_bytes=region.piece_bytes,
            block_offset=region.block_offset,
            block_stride=region.block_stride,
        )
        for index, region in enumerate(block.regions)
    ]
    wrong = BlockLayout(
        block_bytes=block.block_bytes,
        layer_count=block.layer_count,
        page_count=block.page_count,
        regions=regions,
    )
    return replace(layout, block=wrong)


def main() -> None:
    rig = Rig(sys.argv[1], FORMS["gqa-bf16"](16))
    good = rig.engine(spill_path="kernel")
    keys = keys_of(0, GOOD)
    good.spill(keys, rig.pages(range(GOOD))).wait()
    pages = rig.pages(range(GOOD))
    # Not the batch path: it may take an address that is nobody's for the host's, and read it there.
    bad = rig.engine(astray(rig.layout), spill_path="kernel")
    first = bad.spill(keys_of(100, GOOD), pages)
    first.wait()
    second = bad.spill(keys_of(200, GOOD), pages)
    second.wait()
    load = bad.load(rig.pool.pin(keys), pages)
    loaded = load.wait()
    bad.quiesce()
    stats = bad.stats()
    facts = {
        "poisoned": bad.poisoned,
        "error": bad._engine.first_error,
        "errors": stats["device_errors"],
        "stored": [first.stored, second.stored],
        "waited": [first.wait_device(60.0), second.wait_device(60.0)],
        "loaded": loaded,
        "found": rig.pool.lookup(keys),
        "engine": bad.check(),
    }
    bad.close()
    good.close()
    facts |= {"pool": rig.pool.check(), "pinned": rig.pool.stats()["pinned"]}
    rig.pool.close()
    print(json.dumps(facts), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
