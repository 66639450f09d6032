"""What do lookups cost on the scheduler thread, and a shard's rebuild after a death?

A pool of tiny blocks (4 KiB), so that a million fit into this machine. A sample is one call with
2,048 keys chosen at random among the blocks that are there: lookup, pin, unpin and touch, from
Python, on a batch made before; the conversion of page hashes into keys is a row of its own.

Rebuild: a shard is marked dirty in the file, as a death in the middle of a mutation leaves it, and
the next put into that shard repairs it. The sample is that put, less a put into a clean shard.

    python benchmarks/pool_lookup.py [--json] [--blocks N ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import Report, Spread

from hpkv_sglang._core import KeyBatch, KeyScope, Pool

BATCH = 2048
BLOCK_BYTES = 4096
KEY_BYTES = 32
# docs/formats/pool.md: where the superblock says the shard records lie, and a record's dirty flag.
SHARDS_OFFSET_AT, SHARD_RECORD_BYTES, DIRTY_AT, SHARDS = 72, 128, 4, 128


def fill(pool: Pool, blocks: int) -> bytes:
    """Stores that many blocks; returns their keys, one after the other."""
    index = pool.add_namespace(b"\1" * 32, b"", BLOCK_BYTES)
    keys = random.Random(blocks).randbytes(blocks * KEY_BYTES)
    payload = b"\0" * BLOCK_BYTES
    for i in range(0, len(keys), KEY_BYTES):
        outcome = pool.put(index, keys[i : i + KEY_BYTES], payload)
        if outcome != "stored":
            raise RuntimeError(f"block {i // KEY_BYTES} of {blocks}: {outcome}")
    return keys


def sample_batch(keys: bytes) -> KeyBatch:
    numbers = random.sample(range(len(keys) // KEY_BYTES), BATCH)
    return KeyBatch.from_bytes(b"".join(keys[n * KEY_BYTES : (n + 1) * KEY_BYTES] for n in numbers))


def us_per_key(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6 / BATCH


def measure_calls(pool: Pool, keys: bytes, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {"lookup": [], "pin": [], "unpin": [], "touch": []}
    for _ in range(rounds):
        batch = sample_batch(keys)
        samples["lookup"].append(us_per_key(lambda batch=batch: pool.lookup(batch)))
    for _ in range(rounds):
        batch = sample_batch(keys)
        begin = time.perf_counter()
        lease = pool.pin(batch)
        samples["pin"].append((time.perf_counter() - begin) * 1e6 / BATCH)
        if lease.count != BATCH:
            raise RuntimeError(f"only {lease.count} of {BATCH} keys were pinned")
        samples["unpin"].append(us_per_key(lease.release))
        samples["touch"].append(us_per_key(lambda batch=batch: pool.touch(batch)))
    return samples


def measure_conversion(rounds: int) -> list[float]:
    scope = KeyScope(os.urandom(KEY_BYTES))
    hashes = [os.urandom(KEY_BYTES).hex() for _ in range(BATCH)]
    return [us_per_key(lambda: scope.keys(hashes)) for _ in range(rounds)]


def measure_rebuild(pool: Pool, keys: bytes) -> list[float]:
    """Milliseconds of one rebuild, for every shard once."""
    index = pool.add_namespace(b"\1" * 32, b"", BLOCK_BYTES)
    by_shard = {keys[i] % SHARDS: keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)}
    payload = b"\0" * BLOCK_BYTES
    samples = []
    with Path(pool.path).open("r+b") as file, mmap.mmap(file.fileno(), 1 << 20) as head:
        (shards_offset,) = struct.unpack_from("<Q", head, SHARDS_OFFSET_AT)
        for shard, key in by_shard.items():
            times = []
            for dirty in (0, 1):
                at = shards_offset + shard * SHARD_RECORD_BYTES + DIRTY_AT
                struct.pack_into("<I", head, at, dirty)
                begin = time.perf_counter()
                outcome = pool.put(index, key, payload)
                times.append((time.perf_counter() - begin) * 1e3)
                if outcome != "present":
                    raise RuntimeError(f"a block of shard {shard} was {outcome}")
            samples.append(times[1] - times[0])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    report = Report("What do lookups cost, and a rebuild after a death?")
    report.add("conversion of page hashes", Spread.of(measure_conversion(60)), "us per key")
    for blocks in arguments.blocks:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as folder:
            pool = Pool.open(folder, pool_bytes=max(256 << 20, blocks * 4608))
            keys = fill(pool, blocks)
            aim = {"lookup": "< 0.15" if blocks <= 100_000 else "< 0.2"}
            for name, samples in measure_calls(pool, keys, arguments.rounds).items():
                row = f"{name}, {blocks:,} blocks"
                report.add(row, Spread.of(samples), "us per key", aim=aim.get(name, ""))
            rebuild = measure_rebuild(pool, keys)
            report.add(
                f"rebuild of a shard, {blocks:,} blocks", Spread.of(rebuild), "ms", aim="< 5"
            )
            problems = pool.check()
            pool.close()
            if problems:
                raise RuntimeError(f"the pool is not sound: {problems[0]}")
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
