"""What do copies cost on a GPU, against pinned `cudaMemcpyAsync` of the same bytes?

Pages of 64 tokens of two models: 32 layers of 8 grouped heads of 128 (Llama 3 8B), 61 layers of
latent rows of 576 (DeepSeek V3), both bfloat16. All is measured in turns, on one machine, in one
run; the table gives ratios and a few times that they come from:

    D2H, H2D       time on the stream from submission until what follows may run: pages overwritten
                   after a spill, all layers read after a load. Plain is one torch copy from or to
                   pinned memory of the same number of bytes
    sgl_kernel     SGLang's own transfer kernels on the same pages, where they are installed
    in place       loads that read the registered pool against loads by way of pinned memory, of few
                   and of many pages: which way a block takes follows from what is registered
    both           a spill and a load at once, against two plain copies on two streams at once
    layer 0        when the first layer of a load may be read, as a share of the whole load
    product        a bf16 matrix product while another stream is kept busy by copies, against the
                   product alone
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
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from cuda_bench import MODELS, PATHS, SUBMITTED, Bench, events, streams_ms
from cuda_sgl import sgl_kernels
from report import Report, Spread

from hpkv_sglang._core import CUDA_RUNTIME

QUESTION = "What do copies cost on a GPU?"
KERNEL_BLOCKS = 16  # at most: csrc/copy/cuda/device.cu
PRODUCT_SIZE, PRODUCTS = 8192, 16

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
    }
    if bench.sgl is not None:
        row["sgl out"] = streams_ms(bench.sgl.out, stream)[0]
        row["sgl back"] = streams_ms(bench.sgl.back, stream)[0]
    row["submission"] = bench.submission()
    row |= {f"load {name}": value for name, value in bench.load("kernel", bench.count).items()}
    for engine, pages in itertools.product(("kernel", "staged"), loads(bench)):
        row[f"{engine} load {pages}"] = bench.load(engine, pages)["device"]
    for path in PATHS:
        row |= {f"{path} {name}": value for name, value in bench.spill(path).items()}
        row[f"{path} both"] = bench.both(path)
    return row


def figures(bench: Bench, ms: dict[str, float]) -> dict[Figure, float]:
    gigabytes, micros = bench.bytes / 1e6, 1e3 / bench.count
    out: dict[Figure, float] = {
        ("plain D2H", "GB/s", ""): gigabytes / ms["plain out"],
        ("plain H2D", "GB/s", ""): gigabytes / ms["plain back"],
        ("H2D kernel / plain", "ratio", ">= 0.95"): ms["plain back"] / ms["load device"],
    }
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
        in_place, staged = ms[f"kernel load {pages}"], ms[f"staged load {pages}"]
        out[f"H2D in place / staged, {pages} pages", "ratio", "> 1"] = staged / in_place
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
    with torch.cuda.stream(bench.stream):
        for _ in range(2):  # every place of the pool and every kernel has been touched
            one_round(bench)
        rows = [figures(bench, one_round(bench)) for _ in range(rounds)]
    for label, unit, aim in rows[0]:
        values = Spread.of(row[label, unit, aim] for row in rows)
        report.add(f"{name} {label}", values, unit, aim=aim)


# ---- what the forward pass notices ----


@contextmanager
def kept_busy(work: Callable[[], None]) -> Iterator[None]:
    """`work`, again and again, on a thread and a stream of its own."""
    stop = threading.Event()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                work()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield
        finally:
            stop.set()
        running.result()


def copies_meanwhile(bench: Bench) -> dict[str, Callable[[], None]]:
    """Each submits several copies and waits for them on its own thread."""

    def spill(path: str) -> None:
        for _ in range(2):
            bench.engines[path].spill(bench.fresh_keys(), bench.spilled)
        bench.engines[path].quiesce()

    def load() -> None:
        for _ in range(2):
            bench.engines["kernel"].load(bench.pool.pin(bench.keys), bench.loaded)
        bench.engines["kernel"].quiesce()

    def plain() -> None:
        bench.plain.out()
        bench.plain.back()
        torch.cuda.current_stream().synchronize()

    return {
        "plain copies": plain,
        "spills, batch": lambda: spill("batch"),
        "spills, kernel": lambda: spill("kernel"),
        "loads, kernel": load,
    }


def measure_product(report: Report, bench: Bench, name: str, rounds: int) -> None:
    stream = torch.cuda.Stream()
    shape = (3, PRODUCT_SIZE, PRODUCT_SIZE)
    left, right, out = torch.randn(shape, dtype=torch.bfloat16, device="cuda").unbind()

    def products() -> None:
        with torch.cuda.stream(stream):
            for _ in range(PRODUCTS):
                torch.matmul(left, right, out=out)

    def product_ms(meanwhile: Callable[[], None] | None) -> float:
        with nullcontext() if meanwhile is None else kept_busy(meanwhile):
            begin, end = events()
            products()  # the copies are under way when the measured ones begin
            begin.record(stream)
            products()
            end.record(stream)
            end.synchronize()
        return float(begin.elapsed_time(end))

    ways = copies_meanwhile(bench)
    samples: dict[str, list[float]] = {label: [] for label in ways}
    product_ms(None)
    for _ in range(rounds):
        for label, work in ways.items():
            alone = product_ms(None)
            samples[label].append(100 * (product_ms(work) / alone - 1))
    for label, values in samples.items():
        report.add(f"{name} product slower beside {label}", Spread.of(values), "%", aim="< 3")


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
