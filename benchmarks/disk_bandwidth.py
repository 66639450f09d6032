"""How fast do blocks go to disk and come back, against the disk itself?

Blocks of 1 to 8 MiB are demoted from the pool and promoted back; fio does the same amount of I/O in
turns with it: same block size, as many threads (one request each), O_DIRECT where the store
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Report, Spread

from hpkv_sglang._core import KeyBatch, Pool, Store

MIB = 1 << 20
READ_THREADS = 2
WRITE_THREADS = 1
READS = 2
"""Pairs of reads a round: a shared disk's rate wanders more than what is looked for here."""


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


class Ours:
    """A pool full of blocks and a fresh store, for one round."""

    def __init__(self, memory: str, folder: Path, block_bytes: int, total: int) -> None:
        count = total // block_bytes
        self._mib = total / MIB
        self._pool = Pool.open(memory, pool_bytes=2 * total + 256 * MIB)
        self._index = self._pool.add_namespace(b"\1" * 32, b"", block_bytes)
        keys = [os.urandom(32) for _ in range(count)]
        payload = os.urandom(block_bytes)
        for key in keys:
            assert self._pool.put(self._index, key, payload) == "stored"
        self._batch = KeyBatch.from_bytes(b"".join(keys))
        self._store = Store.open(
            self._pool,
            str(folder),
            storage_bytes=4 * total,
            block_bytes=block_bytes,
            background=False,
        )
        self.direct = self._store.direct_io

    def demote(self) -> float:
        """MiB/s of every block to the disk, synced; once."""
        begin = time.perf_counter()
        assert self._store.demote(self._index, self._batch) == len(self._batch)
        self._store.sync()
        return self._mib / (time.perf_counter() - begin)

    def promote(self) -> float:
        """MiB/s of every block back into an emptied pool."""
        self._pool.clear()
        # A request is read by one thread: as many requests as fio has jobs.
        share = len(self._batch) // READ_THREADS
        begin = time.perf_counter()
        tickets = [
            self._store.promote(self._index, self._batch[at : at + share])
            for at in range(0, len(self._batch), share)
        ]
        assert all(ticket.wait(60) for ticket in tickets)
        rate = self._mib / (time.perf_counter() - begin)
        assert sum(ticket.from_disk for ticket in tickets) == len(self._batch)
        for ticket in tickets:
            ticket.release()
        return rate

    def close(self) -> None:
        self._store.close(5.0)
        self._pool.close()


class Pairs:
    """Rates of ours and of fio, measured one after the other, first one first, then the other."""

    def __init__(self) -> None:
        self.ours: list[float] = []
        self.fio: list[float] = []

    def add(self, ours: Callable[[], float], fio: Callable[[], float]) -> None:
        if len(self.ours) % 2:
            self.fio.append(fio())
            self.ours.append(ours())
        else:
            self.ours.append(ours())
            self.fio.append(fio())

    def report(self, report: Report, size: str, name: str, yardstick: str) -> None:
        report.add(f"{size}: {yardstick}", Spread.of(self.fio), "MiB/s")
        report.add(f"{size}: {name}", Spread.of(self.ours), "MiB/s")
        ratios = [ours / fio for ours, fio in zip(self.ours, self.fio, strict=True)]
        report.add(f"{size}: {name} / fio", Spread.of(ratios), "ratio", aim=">= 0.9")


def measure(report: Report, folder: Path, block_bytes: int, total: int, rounds: int) -> None:
    writes, reads = Pairs(), Pairs()
    for number in range(rounds):
        theirs = folder / f"fio-{number}"
        theirs.mkdir()
        mine = folder / f"store-{number}"
        with TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as memory:
            ours = Ours(memory, mine, block_bytes, total)
            run = partial(
                fio, folder=theirs, block_bytes=block_bytes, total=total, direct=ours.direct
            )
            writes.add(ours.demote, partial(run, "write", WRITE_THREADS))
            run("write", READ_THREADS)  # to be read
            for _ in range(READS):
                reads.add(ours.promote, partial(run, "read", READ_THREADS))
            ours.close()
        shutil.rmtree(mine)
        shutil.rmtree(theirs)
    size = f"{block_bytes // MIB} MiB"
    writes.report(report, size, "demote", "fio write")
    reads.report(report, size, "promote", "fio read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=15)
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
