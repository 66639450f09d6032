"""`hpkv bench`: what this machine's memory and disk do for blocks, in figures of one run.

Owns a pool and a store of its own, in folders inside the places a server would use (or the nearest
one above that is there) and removed afterwards, so no server and nothing stored is disturbed. For
the project's own questions there are `benchmarks/`; this answers one of an operator: is a tier fast
enough to be worth it here?

Threading: one thread copies; the store's threads read and write. Takes seconds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from hpkv_sglang._core import KeyBatch, Pool
from hpkv_sglang.errors import PoolError
from hpkv_sglang.pool import translated
from hpkv_sglang.pool.storage import open_store

__all__ = ["bench_table", "measure_disk", "measure_pool"]

BLOCK_BYTES = 2 << 20
ROUNDS = 5
PATIENCE_S = 60.0

Rows = list[dict[str, Any]]


def measure_pool(pool_directory: str, count_bytes: int) -> Rows:
    """Copies into a pool and out of it, beside a plain copy of the same bytes.

    Rows: `name`, `gib_per_s` (median), `of_plain_copy`. Raises PoolError without a place for it.
    """
    count = count_bytes // BLOCK_BYTES
    source = os.urandom(BLOCK_BYTES)
    target = memoryview(bytearray(count * BLOCK_BYTES))
    seconds: dict[str, list[float]] = {"plain copy": [], "put": [], "get": []}
    with _own_pool(pool_directory, count_bytes) as (pool, namespace):
        for _ in range(ROUNDS + 1):
            keys = [os.urandom(32) for _ in range(count)]
            began = [time.perf_counter()]
            for i in range(count):
                target[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] = source
            began.append(time.perf_counter())
            stored = [pool.put(namespace, key, source) == "stored" for key in keys]
            began.append(time.perf_counter())
            found = [
                pool.get(key, target[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
                for i, key in enumerate(keys)
            ]
            began.append(time.perf_counter())
            for name, (begin, end) in zip(seconds, pairwise(began), strict=True):
                seconds[name].append(end - begin)
            pool.clear()
            if not (all(stored) and all(found)):
                raise PoolError("space", f"measuring in {pool_directory}: blocks found no place.")
    # The first round touches the memory for the first time.
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return [
        {
            "name": f"memory: {name}",
            "gib_per_s": _rate(count, median),
            "of_plain_copy": round(medians["plain copy"] / median, 2),
        }
        for name, median in medians.items()
    ]


def measure_disk(pool_directory: str, storage: str, count_bytes: int) -> Rows:
    """Blocks to a disk, synced, and back, once. Rows as above, without the last column."""
    count = count_bytes // BLOCK_BYTES
    with (
        _own_pool(pool_directory, count_bytes) as (pool, namespace),
        TemporaryDirectory(dir=_existing(storage), prefix="hpkv-bench-") as directory,
    ):
        keys = [os.urandom(32) for _ in range(count)]
        for key in keys:
            pool.put(namespace, key, os.urandom(BLOCK_BYTES))
        batch = KeyBatch.from_bytes(b"".join(keys))
        store = open_store(pool, directory, 4 * count_bytes, BLOCK_BYTES, background=False)
        begin = time.perf_counter()
        written = store.demote(namespace, batch)
        store.sync()
        written_s = time.perf_counter() - begin
        pool.clear()
        begin = time.perf_counter()
        ticket = store.promote(namespace, batch)
        ticket.wait(PATIENCE_S)
        read_s = time.perf_counter() - begin
        read = ticket.from_disk
        ticket.release()
        store.close(PATIENCE_S)
    if written != count or read != count:
        raise PoolError(
            "space", f"measuring in {storage}: {written} of {count} blocks written, {read} read."
        )
    return [
        {"name": "disk: write, synced", "gib_per_s": _rate(written, written_s)},
        {"name": "disk: read", "gib_per_s": _rate(read, read_s)},
    ]


@contextmanager
def _own_pool(pool_directory: str, count_bytes: int) -> Iterator[tuple[Pool, int]]:
    """A pool with room for twice the bytes, and its only namespace."""
    with TemporaryDirectory(dir=_existing(pool_directory), prefix="hpkv-bench-") as directory:
        with translated():
            pool = Pool.open(directory, pool_bytes=2 * count_bytes + (64 << 20))
        try:
            yield pool, pool.add_namespace(bytes(32), b"", BLOCK_BYTES)
        finally:
            pool.close()


def bench_table(rows: Rows) -> Table:
    """For a terminal."""
    table = Table("", "GiB/s", "of a plain copy")
    for row in rows:
        share = row.get("of_plain_copy")
        table.add_row(row["name"], f"{row['gib_per_s']:.2f}", "" if share is None else f"{share}")
    return table


def _rate(blocks: int, seconds: float) -> float:
    return round(blocks * BLOCK_BYTES / seconds / 2**30, 3)


def _existing(directory: str) -> str:
    """The folder itself, or the nearest one above it that is there: on the same file system."""
    path = Path(directory)
    while not path.is_dir():
        path = path.parent
    return str(path)
