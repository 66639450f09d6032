"""How much is written to disk for what is worth keeping there?

A trace with twice the disk's size in distinct blocks, a tenth of which are asked for again and
again (Zipf), goes through a small host pool and a store with its threads running. Reported are
bytes written for each byte demoted (what is carried over when a region goes is written again), how
much of it was carried, and how many of the requests for blocks that were stored once found them.

    python benchmarks/disk_writes.py [--json] [--mib N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import random
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
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    report = Report("How much is written to disk for what is worth keeping there?")
    with (
        TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as memory,
        TemporaryDirectory(dir=arguments.directory, prefix="hpkv-bench-") as disk,
    ):
        pool = Pool.open(memory, pool_bytes=POOL_BYTES)
        index = pool.add_namespace(b"\1" * 32, b"", BLOCK_BYTES)
        size = arguments.mib * MIB
        store = Store.open(pool, f"{disk}/store", storage_bytes=size, block_bytes=BLOCK_BYTES)
        asked, found = replay(pool, store, index, 2 * size // BLOCK_BYTES)
        stats = store.stats()
        store.close(30.0)
        pool.close()
    demoted = stats["written_blocks"] - stats["carried_blocks"]
    report.add("written / demoted", stats["written_blocks"] / demoted, "ratio")
    report.add(
        "carried over", 100 * stats["carried_blocks"] / stats["written_blocks"], "% of writes"
    )
    report.add("regions evicted", stats["regions_evicted"], "regions")
    report.add("requests found", 100 * found / asked, "% of requests")
    report.add("of which read from disk", 100 * stats["promoted_blocks"] / max(found, 1), "%")
    report.print(as_json=arguments.json)


def replay(pool: Pool, store: Store, index: int, count: int) -> tuple[int, int]:
    """(requests for stored blocks, how many of them were answered)."""
    rng = random.Random(1)
    keys = [os.urandom(32) for _ in range(count)]
    payload = os.urandom(BLOCK_BYTES)
    out = bytearray(BLOCK_BYTES)
    asked = found = 0
    wanted: list[bytes] = []
    for key in keys:
        pool.put(index, key, payload)
        if rng.random() < ASKED_AGAIN:
            wanted.append(key)
        for _ in range(REQUESTS_PER_STORE if wanted else 0):
            # Zipf with exponent 1 over the blocks seen so far, by inversion.
            key = wanted[min(int(len(wanted) ** rng.random()) - 1, len(wanted) - 1)]
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


if __name__ == "__main__":
    main()
