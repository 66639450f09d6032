"""How much is written to disk for what is worth keeping there?

A trace with twice the disk's size in distinct blocks, a tenth of which are asked for again and
again, goes through a small host pool and a store with its threads running: once with a few
favourites (Zipf), which the host pool keeps, once evenly, so that more come from disk. Reported are
bytes written for each byte demoted (what is carried over when a region goes is written again), how
much of it was carried, and how many of the requests for blocks that were stored once found them.

    python benchmarks/disk_writes.py [--json] [--mib N] [--times N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Report

from hpkv_sglang._core import KeyBatch, Pool, Store

MIB = 1 << 20
BLOCK_BYTES = 128 << 10
POOL_BYTES = 32 * MIB
ASKED_AGAIN = 0.1  # of the blocks
REQUESTS_PER_STORE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=256, help="size of the disk tier")
    parser.add_argument("--times", type=int, default=2, help="the disk's size in distinct blocks")
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    report = Report("How much is written to disk for what is worth keeping there?")
    with (
        TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as memory,
        TemporaryDirectory(dir=arguments.directory, prefix="hpkv-bench-") as disk,
    ):
        for name, favourites in (("favourites", True), ("evenly", False)):
            places = Path(memory) / name, Path(disk) / name
            measure(report, name, favourites, arguments, places)
    report.print(as_json=arguments.json)


def measure(
    report: Report,
    name: str,
    favourites: bool,
    arguments: argparse.Namespace,
    places: tuple[Path, Path],
) -> None:
    size, count = arguments.mib * MIB, arguments.times * arguments.mib * MIB // BLOCK_BYTES
    pool = Pool.open(str(places[0]), pool_bytes=POOL_BYTES)
    index = pool.add_namespace(b"\1" * 32, b"", BLOCK_BYTES)
    store = Store.open(pool, str(places[1]), storage_bytes=size, block_bytes=BLOCK_BYTES)
    asked, found = replay(pool, store, index, count, favourites)
    stats = store.stats()
    store.close(30.0)
    pool.close()
    demoted = stats["written_blocks"] - stats["carried_blocks"]
    carried = 100 * stats["carried_blocks"] / stats["written_blocks"]
    report.add(f"{name}: written / demoted", stats["written_blocks"] / demoted, "ratio")
    report.add(f"{name}: carried over", carried, "% of writes")
    report.add(f"{name}: regions evicted", stats["regions_evicted"], "regions")
    report.add(f"{name}: requests found", 100 * found / asked, "% of requests")
    report.add(
        f"{name}: read from disk", 100 * stats["promoted_blocks"] / max(found, 1), "% of these"
    )


def replay(pool: Pool, store: Store, index: int, count: int, favourites: bool) -> tuple[int, int]:
    """(requests for stored blocks, how many of them were answered)."""
    rng = random.Random(1)
    keys = [os.urandom(32) for _ in range(count)]
    payload = os.urandom(BLOCK_BYTES)
    out = bytearray(BLOCK_BYTES)
    asked = found = 0
    wanted: list[bytes] = []
    for number, key in enumerate(keys):
        if number % 32 == 0:
            let_the_disk_follow(pool)
        pool.put(index, key, payload)
        if rng.random() < ASKED_AGAIN:
            wanted.append(key)
        for _ in range(REQUESTS_PER_STORE if wanted else 0):
            # Over the blocks seen so far; Zipf with exponent 1 by inversion.
            rank = len(wanted) ** rng.random() - 1 if favourites else rng.random() * len(wanted)
            key = wanted[min(int(rank), len(wanted) - 1)]
            asked += 1
            batch = KeyBatch.from_bytes(key)
            if pool.lookup(batch) == 0:
                ticket = store.promote(index, batch)
                ticket.wait(10.0)
                ticket.release()
            if pool.get(key, out):
                pool.touch(batch)
                found += 1
    return asked, found


def let_the_disk_follow(pool: Pool) -> None:
    """A server computes its blocks; it does not make them at the speed of memory."""
    until = time.monotonic() + 0.2  # what is not admitted to the disk never gets there
    while pool.stats()["disk_pending_blocks"] > POOL_BYTES // BLOCK_BYTES // 2:
        if time.monotonic() > until:
            return
        time.sleep(0.005)


if __name__ == "__main__":
    main()
