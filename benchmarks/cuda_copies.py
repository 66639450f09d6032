"""What do copies cost on a GPU, against pinned `cudaMemcpyAsync` of the same bytes?

Pages of 64 tokens of two models: 32 layers of 8 grouped heads of 128 (Llama 3 8B), 61 layers of
latent rows of 576 (DeepSeek V3), both bfloat16. All is measured in turns, on one machine, in one
run; the table gives ratios and a few times that they come from:

    D2H, H2D       time on the stream from submission until what follows may run: pages overwritten
                   after a spill, all layers read after a load. Plain is one torch copy from or to
                   pinned memory of the same number of bytes
    sgl_kernel     SGLang's own transfer kernels on the same pages, where they are installed
    in place       loads that read the registered pool against loads by way of pinned memory, of few
                   and of many pages: which way a block takes follows from what is registered. Where
                   the driver registered too little, a row says NOT in place
    1 page         a load of one page against one plain copy of its bytes
    both           a spill and a load at once, against two plain copies on two streams at once
    layer 0        when the first layer of a load may be read, as a share of the whole load
    product        bf16 matrix products for a quarter of a second, while other streams always have
                   copies on their way, against the products alone; beside each slowdown, what the
                   copies moved in that time
    submission     wall time of `spill` of 2,048 pages on the calling thread
    enqueueing     wall time until the engine has enqueued a spill, per page or per span
    stored         wall time until the blocks of a spill are in the pool, checksummed

A spill goes by the batch path and by the kernel; a load, whose page numbers only the device has, by
the kernel. Without a GPU, or in a build without CUDA, it says SKIPPED, and why.

    python benchmarks/cuda_copies.py [--json] [--rounds N] [--mib N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from cuda_bench import MODELS, PATHS, SUBMITTED, Bench, events, streams_ms
from cuda_sgl import sgl_kernels
from report import Report, Spread

from hpkv_sglang._core import CUDA_RUNTIME

QUESTION = "What do copies cost on a GPU?"
KERNEL_BLOCKS = 16  # at most: csrc/copy/stream/kernels.h
PRODUCT_SIZE, LEAD = 8192, 16  # products before those that are measured
WINDOW_MS = 250.0
IN_FLIGHT = 3
PRODUCT_ROUNDS_MAX = 5

Figure = tuple[str, str, str]  # label, unit, aim


def loads(bench: Bench) -> list[int]:
    """Pages of the loads that are measured in place and staged."""
    return [*(pages for pages in (1, 4, 16) if pages < bench.count), bench.count]


def one_round(bench: Bench) -> dict[str, float]:
    plain, stream = bench.plain, bench.stream
    row = {
        "plain out": streams_ms(plain.out, stream)[0],
        "plain back": streams_ms(plain.back, stream)[0],
        "plain both": streams_ms(plain.both, stream)[0],
        "plain back 1": streams_ms(lambda: plain.back(bench.block_bytes), stream)[0],
    }
    if bench.sgl is not None:
        row["sgl out"] = streams_ms(bench.sgl.out, stream)[0]
        row["sgl back"] = streams_ms(bench.sgl.back, stream)[0]
    row["submission"] = bench.submission()
    row |= {f"load {name}": value for name, value in bench.load("kernel", bench.count).items()}
    for engine, pages in itertools.product(("kernel", "staged"), loads(bench)):
        load = bench.load(engine, pages)
        row[f"{engine} load {pages}"] = load["device"]
        row[f"{engine} in place {pages}"] = load["in place"]
    for path in PATHS:
        row |= {f"{path} {name}": value for name, value in bench.spill(path).items()}
        row[f"{path} both"] = bench.both(path)
    return row


def figures(bench: Bench, ms: dict[str, float], marks: dict[int, str]) -> dict[Figure, float]:
    """`marks`: what is to be said about loads of so many pages."""
    gigabytes, micros = bench.bytes / 1e6, 1e3 / bench.count
    out: dict[Figure, float] = {
        ("plain D2H", "GB/s", ""): gigabytes / ms["plain out"],
        ("plain H2D", "GB/s", ""): gigabytes / ms["plain back"],
    }
    out["H2D kernel / plain" + marks[bench.count], "ratio", ">= 0.95"] = (
        ms["plain back"] / ms["load device"]
    )
    out["H2D kernel / plain, 1 page" + marks[1], "ratio", ""] = (
        ms["plain back 1"] / ms["kernel load 1"]
    )
    for path in PATHS:
        out["D2H " + path + " / plain", "ratio", ">= 0.95"] = ms["plain out"] / ms[f"{path} device"]
        out["both, " + path + " / plain", "ratio", ""] = ms["plain both"] / ms[f"{path} both"]
    if bench.sgl is not None:
        out |= {
            ("D2H sgl_kernel / plain", "ratio", ""): ms["plain out"] / ms["sgl out"],
            ("H2D sgl_kernel / plain", "ratio", ""): ms["plain back"] / ms["sgl back"],
            ("D2H kernel / sgl_kernel", "ratio", "> 1"): ms["sgl out"] / ms["kernel device"],
            ("H2D kernel / sgl_kernel", "ratio", "> 1"): ms["sgl back"] / ms["load device"],
        }
    for pages in loads(bench):
        ratio = ms[f"staged load {pages}"] / ms[f"kernel load {pages}"]
        out[f"H2D in place / staged, {pages} pages{marks[pages]}", "ratio", "> 1"] = ratio
    out |= {
        ("D2H kernel / batch", "ratio", ""): ms["batch device"] / ms["kernel device"],
        ("layer 0 / whole load", "ratio", ""): ms["load layer 0"] / ms["load device"],
        ("stored / D2H, batch", "ratio", ""): ms["batch stored"] / ms["batch device"],
    }
    out["submission", "us per page", "< 0.5"] = 1e3 * ms["submission"] / SUBMITTED
    per_span = micros * ms["batch enqueueing"] / bench.spans
    out["enqueueing, kernel", "us per page", ""] = micros * ms["kernel enqueueing"]
    out["enqueueing, batch", "us per span", "< 0.3"] = per_span
    return out


def measure_copies(report: Report, bench: Bench, name: str, rounds: int) -> None:
    bench.warm_up()
    with torch.cuda.stream(bench.stream):
        one_round(bench)  # every kernel has run
        times = [one_round(bench) for _ in range(rounds)]
    marks = {
        pages: ""
        if all(ms[f"kernel in place {pages}"] == pages for ms in times)
        else ", NOT in place"
        for pages in loads(bench)
    }
    rows = [figures(bench, ms, marks) for ms in times]
    for label, unit, aim in rows[0]:
        values = Spread.of(row[label, unit, aim] for row in rows)
        report.add(f"{name} {label}", values, unit, aim=aim)


# ---- what the forward pass notices ----


@dataclass(frozen=True)
class Traffic:
    """`submit` starts a copy on the current stream and returns what waits for its end. The bytes
    are those moved so far, give or take the copies on their way."""

    submit: Callable[[], Callable[[], object]]
    moved_bytes: Callable[[], int]


@contextmanager
def kept_busy(bench: Bench, traffic: Traffic) -> Iterator[None]:
    """Copies on a thread and a stream of their own, always `IN_FLIGHT` of them on their way."""
    stop, flowing = threading.Event(), threading.Event()

    def run() -> None:
        ends: deque[Callable[[], object]] = deque()
        try:
            with torch.cuda.stream(bench.busy):
                while not stop.is_set():
                    ends.append(traffic.submit())
                    if len(ends) > IN_FLIGHT:
                        ends.popleft()()
                        flowing.set()
                for end in ends:
                    end()
        finally:
            flowing.set()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            flowing.wait()
            yield
        finally:
            stop.set()
        running.result()


def spills(bench: Bench, path: str) -> Traffic:
    copies = bench.engines[path]
    return Traffic(
        lambda: copies.spill(bench.fresh_keys(), bench.spilled).wait,
        lambda: copies.stats()["spilled_bytes"],
    )


def kernel_loads(bench: Bench) -> Traffic:
    copies = bench.engines["kernel"]

    def submit() -> Callable[[], object]:
        ticket = copies.load(bench.pool.pin(bench.keys), bench.loaded)

        def end() -> None:
            if not ticket.wait():
                raise RuntimeError("a load failed")
            bench.busy.synchronize()  # behind this load, and not behind the next ones

        return end

    return Traffic(submit, lambda: copies.stats()["loaded_bytes"])


def plain_copies(bench: Bench) -> Traffic:
    moved: list[int] = []

    def submit() -> Callable[[], object]:
        bench.plain.out()
        bench.plain.back()
        event = torch.cuda.Event(blocking=True)
        event.record()

        def end() -> None:
            event.synchronize()
            moved.append(2 * bench.bytes)

        return end

    return Traffic(submit, lambda: sum(moved))


class Products:
    """Matrix products on a stream of their own, timed alone and beside copies. One thread."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        shape = (3, PRODUCT_SIZE, PRODUCT_SIZE)
        factors = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self._left, self._right, self._out = factors.unbind()
        torch.cuda.synchronize()
        self._count = LEAD
        self.ms()
        self._count = math.ceil(LEAD * WINDOW_MS / self.ms()[0])

    def ms(self, traffic: Traffic | None = None) -> tuple[float, float]:
        """Milliseconds of all products, and the GB/s that the copies moved meanwhile."""
        moved = (lambda: 0) if traffic is None else traffic.moved_bytes
        with nullcontext() if traffic is None else kept_busy(self._bench, traffic):
            begin, end = events()
            self._enqueue(LEAD)
            begin.record(self._bench.product)
            self._enqueue(self._count)
            end.record(self._bench.product)
            begin.synchronize()
            before = moved()
            end.synchronize()
            moved_bytes = moved() - before
        elapsed = float(begin.elapsed_time(end))
        return elapsed, moved_bytes / elapsed / 1e6

    def _enqueue(self, count: int) -> None:
        with torch.cuda.stream(self._bench.product):
            for _ in range(count):
                torch.matmul(self._left, self._right, out=self._out)


def measure_product(report: Report, bench: Bench, name: str, rounds: int) -> None:
    products = Products(bench)
    ways = {
        "plain copies": plain_copies(bench),
        "spills, batch": spills(bench, "batch"),
        "spills, kernel": spills(bench, "kernel"),
        "loads, kernel": kernel_loads(bench),
    }
    slower: dict[str, list[float]] = {label: [] for label in ways}
    speeds: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(min(rounds, PRODUCT_ROUNDS_MAX)):
        for label, traffic in ways.items():
            alone, _ = products.ms()
            beside, speed = products.ms(traffic)
            slower[label].append(100 * (beside / alone - 1))
            speeds[label].append(speed)
    for label in ways:
        report.add(
            f"{name} product slower beside {label}", Spread.of(slower[label]), "%", aim="< 3"
        )
        report.add(f"{name} moved beside the product, {label}", Spread.of(speeds[label]), "GB/s")


def missing() -> str | None:
    """Why nothing can be measured here."""
    if not CUDA_RUNTIME:
        return "this build of hpkv_sglang has no CUDA engine"
    return None if torch.cuda.is_available() else "torch finds no CUDA device here"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=192, help="bytes moved per measurement")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        skipped = json.dumps({"question": QUESTION, "skipped": reason, "rows": []})
        print(skipped if arguments.json else f"SKIPPED: {QUESTION} {reason}")
        return
    properties = torch.cuda.get_device_properties(0)
    report = Report(f"{QUESTION} ({properties.name}, CUDA {CUDA_RUNTIME})")
    share = 100 * KERNEL_BLOCKS / properties.multi_processor_count
    report.add("SMs the copy kernel can take", share, "%")
    rival = sgl_kernels()
    if isinstance(rival, str):
        print(f"SKIPPED: the comparison with sgl_kernel: {rival}", file=sys.stderr)
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="hpkv-bench-", dir="/dev/shm") as directory:
            bench = Bench(model, directory, arguments.mib)
            measure_copies(report, bench, model.name, arguments.rounds)
            measure_product(report, bench, model.name, arguments.rounds)
            bench.close()
            del bench
            torch.cuda.empty_cache()
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
