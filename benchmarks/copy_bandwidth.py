"""How fast are blocks copied through the pool, and what does submitting a copy cost the scheduler?

Bandwidth: blocks of 1 to 8 MiB, 1 and 2 threads, all memory touched before. The ways to copy take
turns every few blocks, each at another place of a working set larger than the caches:

    plain      memcpy (ctypes), numpy.copyto, non-temporal stores: private memory <-> shared memory
    put        reserve, copy and checksum in one pass, publish
    get        pin, copy, unpin: the block was verified before
    first get  pin, verify, then copy, unpin: what the first reader of an epoch does
    spill      put, by the copy engine's threads, 32 layers of K and V apart
    load       get, by the copy engine's threads, likewise

A sample is the wall time of one block; of the engine, the CPU time its threads spend on a ticket of
a few blocks (wall time would measure how soon a busy machine wakes them). A ratio compares the
medians of one round with those of the plain way that is best in that direction. The first get runs
on an attachment that verifies always, which does that work each time.

Submission: wall time of `spill`, `pin` and `load` on the calling thread for 2,048 pages, per page,
while engine threads are at work.

    python benchmarks/copy_bandwidth.py [--json] [--rounds N] [--mib-total N]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from report import Report, Spread

from hpkv_sglang._core import (
    BlockLayout,
    CopyEngine,
    KeyBatch,
    Pool,
    Region,
    copy_nt,
    crc32c_implementation,
)

MIB = 1 << 20
LAYERS = 32
PAGES = 2048
BATCH = 4  # blocks that one thread copies before the next way has its turn

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], None]
RESIDENT, SCRATCH = b"\1" * 32, b"\2" * 32  # namespaces: stored once; dropped after each round


def memcpy(target: Bytes, source: Bytes) -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


PLAIN: dict[str, Copy] = {"memcpy": memcpy, "numpy.copyto": np.copyto, "non-temporal": copy_nt}
AIMS = {
    "put": ("out", ">= 0.85"),
    "get": ("in", ">= 0.9"),
    "first get": ("in", ">= 0.45"),
    "spill": ("out", ">= 0.85"),
    "load": ("in", ">= 0.9"),
}


@contextmanager
def shared_bytes(directory: str, count: int) -> Iterator[Bytes]:
    """Touched memory of the same kind as the pool's."""
    path = Path(directory) / "plain"
    path.write_bytes(bytes(count))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), count)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = 1
    yield array
    path.unlink()


def layer_layout(memory: Bytes, block_bytes: int) -> BlockLayout:
    """`memory` as a device pool of pages of `block_bytes`, 32 layers of K and V, each dense."""
    pages = memory.nbytes // block_bytes
    piece = block_bytes // (2 * LAYERS)
    regions = [
        Region(
            layer=i // 2,
            base=memory.ctypes.data + i * pages * piece,
            page_stride=piece,
            piece_count=1,
            piece_stride=piece,
            piece_bytes=piece,
            block_offset=i * piece,
        )
        for i in range(2 * LAYERS)
    ]
    return BlockLayout(
        block_bytes=block_bytes, layer_count=LAYERS, page_count=pages, regions=regions
    )


def key_of(*seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(32)


class Bench:
    """One block size and thread count: memory, pool, engines, and the samples of a round."""

    def __init__(self, block_bytes: int, threads: int, directory: str, shared: Bytes) -> None:
        self.block_bytes = block_bytes
        self.threads = threads
        self.shared = shared
        self.private: Bytes = np.ones(shared.nbytes, dtype=np.uint8)
        self.count = shared.nbytes // block_bytes
        self.pool = Pool.open(directory, pool_bytes=5 * shared.nbytes)
        self.checking = Pool.open(directory, verify_always=True)
        self.index = self.pool.add_namespace(SCRATCH, b"", block_bytes)
        resident = self.pool.add_namespace(RESIDENT, b"", block_bytes)
        self.resident = [key_of(0, i) for i in range(self.count)]
        for i, key in enumerate(self.resident):
            self.store(resident, key, i)
        # With more than one thread, one never spills.
        workers = threads + 1 if threads > 1 else 1
        layout = layer_layout(self.private, block_bytes)
        self.spilling = CopyEngine(self.pool, self.index, layout, threads=workers)
        self.loading = CopyEngine(self.pool, resident, layout, threads=threads)
        self.workers = ThreadPoolExecutor(threads)
        self.rounds = 0
        self.fresh: list[bytes] = []  # keys of this round's puts
        self.ways: dict[str, Callable[[int], None]] = {
            **{f"out {name}": self._plain_out(copy) for name, copy in PLAIN.items()},
            **{f"in {name}": self._plain_in(copy) for name, copy in PLAIN.items()},
            "put": lambda i: self.store(self.index, self.fresh[i], i),
            "get": lambda i: self.fetch(self.pool, i),
            "first get": lambda i: self.fetch(self.checking, i),
        }

    def block(self, memory: Bytes, index: int) -> Bytes:
        return memory[index * self.block_bytes : (index + 1) * self.block_bytes]

    def _plain_out(self, copy: Copy) -> Callable[[int], None]:
        return lambda i: copy(self.block(self.shared, i), self.block(self.private, i))

    def _plain_in(self, copy: Copy) -> Callable[[int], None]:
        return lambda i: copy(self.block(self.private, i), self.block(self.shared, i))

    def store(self, namespace: int, key: bytes, index: int) -> None:
        status = self.pool.put(namespace, key, self.block(self.private, index))
        if status != "stored":
            raise RuntimeError(f"put answered {status!r}")

    def fetch(self, pool: Pool, index: int) -> None:
        if not pool.get(self.resident[index], self.block(self.private, index)):
            raise RuntimeError("a block did not come back")

    def by_threads(self, work: Callable[[int], None], indices: list[int]) -> list[float]:
        """Seconds of each block; `indices` are split among the threads, which run at once."""

        def part(thread: int) -> list[float]:
            seconds = []
            for index in indices[thread :: self.threads]:
                begin = time.perf_counter()
                work(index)
                seconds.append(time.perf_counter() - begin)
            return seconds

        parts = self.workers.map(part, range(self.threads))
        return [seconds for part_seconds in parts for seconds in part_seconds]

    def spill(self, indices: list[int]) -> list[float]:
        raw = b"".join(key_of(self.rounds, 1 << 30, i) for i in indices)
        keys, pages = KeyBatch.from_bytes(raw), np.array(indices, dtype=np.int64)
        begin = time.process_time()
        ticket = self.spilling.spill(keys, pages)
        ticket.wait()
        seconds = time.process_time() - begin
        if ticket.stored != len(indices):
            raise RuntimeError("a spilled block was not stored")
        return [seconds / len(indices)]

    def load(self, indices: list[int]) -> list[float]:
        keys = KeyBatch.from_bytes(b"".join(self.resident[i] for i in indices))
        pages = np.array(indices, dtype=np.int64)
        begin = time.process_time()
        landed = self.loading.load(self.pool.pin(keys), pages).wait()
        seconds = time.process_time() - begin
        if not landed:
            raise RuntimeError("a block did not load")
        return [seconds / len(indices)]

    def round(self) -> dict[str, float]:
        """Median seconds per block and thread of every way, over the whole working set."""
        self.rounds += 1
        self.fresh = [key_of(self.rounds, i) for i in range(self.count)]
        phases: dict[str, Callable[[list[int]], list[float]]] = {
            name: lambda indices, w=work: self.by_threads(w, indices)  # type: ignore[misc]
            for name, work in self.ways.items()
        } | {"spill": self.spill, "load": self.load}
        samples: dict[str, list[float]] = {name: [] for name in phases}
        step = BATCH * self.threads
        for first in range(0, self.count, step):
            for k, (name, phase) in enumerate(phases.items()):
                start = first + k * self.count // len(phases)
                indices = [(start + i) % self.count for i in range(min(step, self.count - first))]
                samples[name] += phase(indices)
        self.pool.drop_namespace(SCRATCH)
        return {name: statistics.median(values) for name, values in samples.items()}

    def close(self) -> None:
        self.spilling.close()
        self.loading.close()
        self.workers.shutdown()
        self.checking.close()
        self.pool.close()


def report_bandwidth(report: Report, bench: Bench, rounds: list[dict[str, float]]) -> None:
    label = f"{bench.block_bytes // MIB} MiB x{bench.threads}"
    best = {
        direction: min(
            (f"{direction} {name}" for name in PLAIN),
            key=lambda way: statistics.median(medians[way] for medians in rounds),
        )
        for direction in ("out", "in")
    }
    for way in best.values():
        speed = [bench.threads * bench.block_bytes / 1e9 / medians[way] for medians in rounds]
        report.add(f"{label} best: {way}", Spread.of(speed), "GB/s")
    for name, (direction, aim) in AIMS.items():
        spread = Spread.of(medians[best[direction]] / medians[name] for medians in rounds)
        report.add(f"{label} {name}", spread, "ratio", aim=aim)


def measure_bandwidth(report: Report, arguments: argparse.Namespace) -> None:
    rounds, total = arguments.rounds, arguments.mib_total * MIB
    for threads in arguments.threads:
        for block_mib in arguments.block_mib:
            with (
                tempfile.TemporaryDirectory(prefix="hpkv-bench-", dir="/dev/shm") as directory,
                shared_bytes(directory, total) as shared,
            ):
                bench = Bench(block_mib * MIB, threads, f"{directory}/pool", shared)
                for _ in range(2):
                    bench.round()  # every place of the pool is touched
                report_bandwidth(report, bench, [bench.round() for _ in range(rounds)])
                bench.close()
                del bench, shared


def measure_submission(report: Report, rounds: int) -> None:
    block_bytes = 64 * 2 * LAYERS
    device: Bytes = np.ones(PAGES * block_bytes, dtype=np.uint8)
    layout = layer_layout(device, block_bytes)
    pages = np.arange(PAGES, dtype=np.int64)
    samples: dict[str, list[float]] = {"spill": [], "pin": [], "load": []}
    with tempfile.TemporaryDirectory(prefix="hpkv-bench-", dir="/dev/shm") as directory:
        pool = Pool.open(directory, pool_bytes=256 * MIB)
        engine = CopyEngine(pool, pool.add_namespace(bytes(32), b"", block_bytes), layout)
        for seed in range(4 * rounds):
            keys = KeyBatch.from_bytes(np.random.default_rng(seed).bytes(32 * PAGES))
            marks = [time.perf_counter()]
            spill = engine.spill(keys, pages)
            marks.append(time.perf_counter())
            spill.wait()
            marks.append(time.perf_counter())
            lease = pool.pin(keys)
            marks.append(time.perf_counter())
            load = engine.load(lease, pages)
            marks.append(time.perf_counter())
            load.wait()
            for name, at in (("spill", 0), ("pin", 2), ("load", 3)):
                samples[name].append(1e6 * (marks[at + 1] - marks[at]) / PAGES)
        engine.close()
        pool.close()
    for name, values in samples.items():
        report.add(
            f"scheduler thread, {name} of {PAGES} pages",
            Spread.of(values),
            "us per page",
            aim="< 2",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib-total", type=int, default=128, help="bytes moved per measurement")
    parser.add_argument("--block-mib", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    report = Report(f"How fast are blocks copied? ({crc32c_implementation()})")
    measure_bandwidth(report, arguments)
    measure_submission(report, arguments.rounds)
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
