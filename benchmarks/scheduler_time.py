"""What do the tiers cost the scheduler thread, per page?

The calls that the scheduler makes for a prompt of 2,048 pages, on a real pool: hashing its pages
for the first time (once per request), turning them into keys, looking up and pinning, handing over
a load, handing over a spill. Blocks are small, so that the engine's threads are soon done; the time
is that of the calling thread.

    python benchmarks/scheduler_time.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
from report import Report, Spread

from hpkv_sglang._core import BlockLayout, CopyEngine, KeyScope, Pool, Region
from hpkv_sglang.radix.lookup import PageLookup, fastest_hasher

PAGES = 2048
PAGE_SIZE = 64
BLOCK_BYTES = 4096


class Key:
    """As much of SGLang's RadixKey as the lookup reads."""

    extra_key = None
    cache_salt = None

    def __init__(self, tokens: list[int]) -> None:
        self.token_ids = array("q", tokens)

    def __len__(self) -> int:
        return len(self.token_ids)


def us_per_page(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) / PAGES * 1e6, result


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    pool = Pool.open(str(folder), pool_bytes=256 << 20)
    namespace = pool.add_namespace(b"n" * 32, b"", BLOCK_BYTES)
    memory = np.zeros(PAGES * BLOCK_BYTES, dtype=np.uint8)
    region = Region(
        layer=0,
        base=memory.ctypes.data,
        page_stride=BLOCK_BYTES,
        piece_count=1,
        piece_stride=BLOCK_BYTES,
        piece_bytes=BLOCK_BYTES,
        block_offset=0,
    )
    layout = BlockLayout(block_bytes=BLOCK_BYTES, layer_count=1, page_count=PAGES, regions=[region])
    engine = CopyEngine(pool, namespace, layout)
    scope, lookup = KeyScope(b"m" * 32), PageLookup(PAGE_SIZE, fastest_hasher())
    pages = np.arange(PAGES, dtype=np.int64)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        spent, result = us_per_page(call)
        times.setdefault(name, []).append(spent)
        return result

    for round_ in range(rounds):
        rng = random.Random(round_)
        prompt = Key([rng.randrange(150_000) for _ in range(PAGES * PAGE_SIZE)])
        req = SimpleNamespace()
        found = timed("hash and keys, first time", lambda: lookup.pages(req, prompt, scope))  # noqa: B023
        timed("hash and keys, again", lambda: lookup.pages(req, prompt, scope))  # noqa: B023
        hashes = list(found.hashes)
        keys = timed("keys of a node's hashes", lambda: scope.keys(hashes))  # noqa: B023
        engine.quiesce()
        timed("hand over a spill", lambda: engine.spill(keys, pages))  # noqa: B023
        engine.quiesce()
        lease = timed("look up and pin", lambda: pool.pin(keys))  # noqa: B023
        assert lease.count == PAGES, "blocks were dropped: the numbers would be of misses"
        ticket = timed("hand over a load", lambda: engine.load(lease, pages))  # noqa: B023
        ticket.wait()
    engine.close()
    pool.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    folder = Path(mkdtemp(prefix="hpkv-bench-", dir="/dev/shm"))
    try:
        times = measure(folder / "pool", arguments.rounds)
    finally:
        shutil.rmtree(folder)
    report = Report("What do the tiers cost the scheduler thread, per page of 2,048?")
    for name, samples in times.items():
        report.add(name, Spread.of(samples), "us per page", aim="< 2")
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
