"""What does it cost to ask whether blocks are on disk?

One question for 2,048 keys, as the scheduler asks it for a request: all on disk and not in the host
pool. The index is the pool's, so nothing here touches a file but the preparation. Beside the time,
what the index takes for each block on disk, as the format says (docs/formats/pool.md).

    python benchmarks/disk_lookup.py [--json] [--blocks N ...] [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Report, Spread

from hpkv_sglang._core import KeyBatch, Pool, Store

BLOCK_BYTES = 4096
KEYS = 2048
ROUNDS = 200
MIB = 1 << 20
ENTRY_BYTES = 64  # a disk entry
TABLE_BYTES = 8  # its place in the shard's table, which is between 3/8 and 3/4 full


def measure(report: Report, blocks: int, directory: Path) -> None:
    with (
        TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as memory,
        TemporaryDirectory(dir=directory, prefix="hpkv-bench-") as disk,
    ):
        # Blocks and their descriptors in the pool, and twice the space for the index.
        pool = Pool.open(memory, pool_bytes=max(64 * MIB, 2 * blocks * (BLOCK_BYTES + 256)))
        index = pool.add_namespace(b"\1" * 32, b"", BLOCK_BYTES)
        keys = [os.urandom(32) for _ in range(blocks)]
        for key in keys:
            assert pool.put(index, key, bytes(BLOCK_BYTES)) == "stored"
        store = Store.open(
            pool,
            f"{disk}/store",
            storage_bytes=max(64 * MIB, 3 * blocks * BLOCK_BYTES),
            block_bytes=BLOCK_BYTES,
            background=False,
        )
        assert store.demote(index, KeyBatch.from_bytes(b"".join(keys))) == blocks
        pool.clear()
        rng = random.Random(1)
        samples = []
        for _ in range(ROUNDS):
            batch = KeyBatch.from_bytes(b"".join(rng.choices(keys, k=KEYS)))
            begin = time.perf_counter()
            found = store.lookup(batch)
            samples.append((time.perf_counter() - begin) * 1e6 / KEYS)
            assert found == KEYS
        report.add(
            f"lookup, {blocks:,} blocks on disk", Spread.of(samples), "us per key", aim="< 0.2"
        )
        store.close(5.0)
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    report = Report("What does it cost to ask whether blocks are on disk?")
    for blocks in arguments.blocks:
        measure(report, blocks, arguments.directory)
    for name, load in (("full", 3 / 4), ("just grown", 3 / 8)):
        report.add(f"index, table {name}", ENTRY_BYTES + TABLE_BYTES / load, "B per block on disk")
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
