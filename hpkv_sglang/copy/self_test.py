"""The page self-test: one page there and back through the layout in use, before anything is served.

A page of the device is filled with a random pattern, spilled, overwritten, loaded and compared,
tensor by tensor as torch sees them and not as the layout describes them. So a layout that
misunderstands a pool is found at start and not in somebody's answer. It runs on a small pool of its
own, so that the shared one shows nothing of it.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable

import torch

from hpkv_sglang._core import CorePoolError, KeyBatch, Pool
from hpkv_sglang.copy.engines import Copier
from hpkv_sglang.layout.base import PoolLayout

CopierMaker = Callable[[Pool, int], Copier]

_POOL_BYTES_MIN = 16 << 20
_BLOCKS = 16  # a block may be an eighth of a pool at most


def page_round_trip(directory: str, layout: PoolLayout, make_copier: CopierMaker) -> str | None:
    """None when the last page came back as it was; otherwise what was found, in words.

    `make_copier(pool, namespace_index)` makes the engine under test. The page is restored. Blocks
    for some milliseconds. CorePoolError when `directory` has no place for a pool of 16 blocks.
    """
    block_bytes = layout.block.block_bytes
    with tempfile.TemporaryDirectory(prefix=".self-test-", dir=directory) as place:
        pool = Pool.open(place, pool_bytes=max(_POOL_BYTES_MIN, _BLOCKS * block_bytes))
    # The file has no name from here on: whatever happens, nothing of it stays.
    try:
        copier = make_copier(pool, pool.add_namespace(bytes(32), b"", block_bytes))
        try:
            return _round_trip(pool, copier, layout)
        finally:
            copier.engine.close()
    except CorePoolError as error:
        return str(error)
    finally:
        pool.close()


def _round_trip(pool: Pool, copier: Copier, layout: PoolLayout) -> str | None:
    index = layout.block.page_count - 1
    parts = [_bytes_of(tensor.pages[index]) for tensor in layout.tensors]
    before = [part.clone() for part in parts]
    pattern = [torch.randint(0, 256, part.shape, dtype=torch.uint8) for part in parts]
    _write(parts, pattern)
    keys = KeyBatch.from_bytes(secrets.token_bytes(32))
    size = layout.page_size
    slots = torch.arange(index * size, (index + 1) * size, device=parts[0].device)
    pages = copier.pages_of(slots, size)
    try:
        spill = copier.engine.spill(keys, pages)
        spill.wait()
        _write(parts, [~wanted for wanted in pattern])
        landed = copier.engine.load(pool.pin(keys), pages).wait()
        copier.engine.quiesce()  # where `wait` is for streams: until the bytes are there
        wrong = [
            f"layer {tensor.layer}, {tensor.field}"
            for tensor, part, wanted in zip(layout.tensors, parts, pattern, strict=True)
            if not torch.equal(part.cpu(), wanted)
        ]
    finally:
        _write(parts, before)
    if spill.stored != 1 or not landed:
        return f"the page was {'' if spill.stored else 'not '}stored and did not land"
    return (
        f"other bytes came back in {', '.join(wrong[:3])} ({len(wrong)} parts)" if wrong else None
    )


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.view(torch.uint8)


def _write(parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for part, value in zip(parts, values, strict=True):
        part.copy_(value)
