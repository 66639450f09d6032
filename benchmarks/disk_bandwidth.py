"""How fast do blocks go to disk and come back, against the disk itself?

Blocks of 1 to 8 MiB are demoted from the pool and promoted back; fio does the same amount of I/O in
between, in turns: same block size, as many threads (one request each), O_DIRECT where the store
uses it, its buffer in shared memory as the pool is, into files fallocated and not yet written,
synced at the end. Reads are of files that were just written, by both.

    python benchmarks/disk_bandwidth.py [--json] [--directory DIR] [--rounds N] [--mib N]

Needs fio. `--directory` chooses the disk (default: the system's temporary folder).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Report, Spread

from hpkv_sglang._core import KeyBatch, Pool, Store

MIB = 1 << 20
READ_THREADS = 2
WRITE_THREADS = 1


def fio(mode: str, jobs: int, folder: Path, block_bytes: int, total: int, *, direct: bool) -> float:
    """MiB/s of one run of fio; the files of a write stay for a read with as many jobs."""
    command = [
        *("fio", "--name=hpkv", f"--rw={mode}", f"--bs={block_bytes}", f"--size={total // jobs}"),
        *(f"--numjobs={jobs}", "--ioengine=psync", "--iodepth=1", f"--direct={int(direct)}"),
        *("--fallocate=native", "--group_reporting", "--output-format=json"),
        *("--iomem=shm", "--thread", "--invalidate=1"),
        *(["--end_fsync=1"] if mode == "write" else []),
        f"--filename_format=hpkv-{jobs}.$jobnum",
        f"--directory={folder}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0][mode]
    seconds = job["runtime"] / 1e3
    return float(job["io_bytes"] / MIB / seconds)


def hpkv(folder: Path, block_bytes: int, total: int) -> tuple[float, float, bool]:
    """(demoted, promoted) MiB/s, and whether I/O was direct."""
    count = total // block_bytes
    with TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as memory:
        pool = Pool.open(memory, pool_bytes=2 * total + 256 * MIB)
        index = pool.add_namespace(b"\1" * 32, b"", block_bytes)
        keys = [os.urandom(32) for _ in range(count)]
        payload = os.urandom(block_bytes)
        for key in keys:
            assert pool.put(index, key, payload) == "stored"
        batch = KeyBatch.from_bytes(b"".join(keys))
        store = Store.open(
            pool, str(folder), storage_bytes=4 * total, block_bytes=block_bytes, background=False
        )
        begin = time.perf_counter()
        assert store.demote(index, batch) == count
        store.sync()
        demoted = total / MIB / (time.perf_counter() - begin)
        pool.clear()
        begin = time.perf_counter()
        # A request is read by one thread: as many requests as fio has jobs.
        half = count // READ_THREADS
        tickets = [store.promote(index, batch[i : i + half]) for i in range(0, count, half)]
        assert all(ticket.wait(60) for ticket in tickets)
        promoted = total / MIB / (time.perf_counter() - begin)
        assert sum(ticket.from_disk for ticket in tickets) == count
        for ticket in tickets:
            ticket.release()
        direct = store.direct_io
        store.close(5.0)
        pool.close()
    return demoted, promoted, direct


def measure(report: Report, folder: Path, block_bytes: int, total: int, rounds: int) -> None:
    ratios: dict[str, list[float]] = {"demote": [], "promote": []}
    rates: dict[str, list[float]] = {
        name: [] for name in ("fio write", "demote", "fio read", "promote")
    }
    for number in range(rounds):
        mine = folder / f"store-{number}"
        demoted, promoted, direct = hpkv(mine, block_bytes, total)
        shutil.rmtree(mine)
        theirs = folder / f"fio-{number}"
        theirs.mkdir()
        written = fio("write", WRITE_THREADS, theirs, block_bytes, total, direct=direct)
        fio("write", READ_THREADS, theirs, block_bytes, total, direct=direct)  # to be read
        read = fio("read", READ_THREADS, theirs, block_bytes, total, direct=direct)
        shutil.rmtree(theirs)
        for name, value in zip(rates, (written, demoted, read, promoted), strict=True):
            rates[name].append(value)
        ratios["demote"].append(demoted / written)
        ratios["promote"].append(promoted / read)
    size = f"{block_bytes // MIB} MiB"
    for name, values in rates.items():
        report.add(f"{size}: {name}", Spread.of(values), "MiB/s")
    for name, values in ratios.items():
        report.add(f"{size}: {name} / fio", Spread.of(values), "ratio", aim=">= 0.9")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="moved in each direction each round")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed: there is nothing to compare with (package fio)")
    report = Report("How fast do blocks go to disk and come back?")
    with TemporaryDirectory(dir=arguments.directory, prefix="hpkv-bench-") as folder:
        for mib in (1, 2, 4, 8):
            measure(report, Path(folder), mib * MIB, arguments.mib * MIB, arguments.rounds)
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
