"""What do copies cost on a GPU, against pinned `cudaMemcpyAsync` of the same bytes?

Pages of 64 tokens of two models: 32 layers of 8 grouped heads of 128 (Llama 3 8B), 61 layers of
latent rows of 576 (DeepSeek V3), both bfloat16. All is measured in turns, on one machine, in one
run; the table gives ratios and a few times that they come from:

    D2H, H2D       time on the stream from submission until what follows may run: pages overwritten
                   after a spill, all layers read after a load. Plain is one torch copy from or to
                   pinned memory of the same number of bytes
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
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from report import Report, Spread

from hpkv_sglang._core import CUDA_RUNTIME, KeyBatch, Pool, StreamEngine, cuda_device
from hpkv_sglang.copy.streams import StreamCopies, StreamSpillTicket, TorchCudaStreams
from hpkv_sglang.layout.base import PageTensor, PoolLayout, layout_of

QUESTION = "What do copies cost on a GPU?"
PAGE = 64
MIB = 1 << 20
KERNEL_BLOCKS = 16  # at most: csrc/copy/cuda/device.cu
LONG_S = 60.0
PATHS = ("batch", "kernel")
SUBMITTED = 2048
PRODUCT_SIZE, PRODUCTS = 8192, 16

Figure = tuple[str, str, str]  # label, unit, aim


@dataclass(frozen=True)
class Model:
    """Its name, and the fields of a layer with their bytes per token."""

    name: str
    layers: int
    fields: dict[str, int]

    def layout(self, pages: int) -> PoolLayout:
        """A KV pool on the GPU of so many pages, in SGLang's order."""
        tensors = [
            PageTensor(
                layer=layer,
                field=field,
                pages=torch.zeros(pages, PAGE, row_bytes, dtype=torch.uint8, device="cuda"),
            )
            for layer in range(self.layers)
            for field, row_bytes in self.fields.items()
        ]
        return layout_of(self.name, {}, tensors, replicated=False)


MODELS = (
    Model("GQA", 32, {"k": 8 * 128 * 2, "v": 8 * 128 * 2}),
    Model("MLA", 61, {"latent": 576 * 2}),
)


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def streams_ms(work: Callable[[], Any], stream: torch.cuda.Stream) -> tuple[float, Any]:
    """Milliseconds on `stream` from before `work` to what it made that wait for; its answer."""
    torch.cuda.synchronize()
    begin, end = events()
    begin.record(stream)
    answer = work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)), answer


class Bench:
    """One model's pages, a pool, and an engine for each path of spills. One thread."""

    def __init__(self, model: Model, directory: str, mib: int) -> None:
        block_bytes = model.layers * PAGE * sum(model.fields.values())
        self.count = max(4, mib * MIB // block_bytes)
        self.layout = model.layout(2 * self.count)
        self.bytes = self.count * block_bytes
        self.spans = sum(region.piece_count for region in self.layout.block.regions)
        self.stream = torch.cuda.Stream()
        self.pool = Pool.open(directory, pool_bytes=max(20 * self.bytes, 512 * MIB))
        self.index = self.pool.add_namespace(bytes(32), b"", block_bytes)
        self.engines = {path: self.engine(path) for path in PATHS}
        self.plain = Plain(self.bytes)
        firsts = torch.randperm(2 * self.count, device="cuda").to(torch.int64) * PAGE
        self.spilled, self.loaded = firsts[: self.count], firsts[self.count :]
        self._next_key = 0
        self.keys = self.fresh_keys()
        with torch.cuda.stream(self.stream):
            self.spill("batch", self.keys)
        self.held = self.pool.pin(self.keys)  # so that no spill evicts what is loaded

    def engine(self, path: str) -> StreamCopies:
        core = StreamEngine(
            cuda_device(torch.cuda.current_device()),
            self.pool,
            self.index,
            self.layout.block,
            page_size=PAGE,
            staging_bytes=4 * self.bytes,
            spill_path=path,
        )
        streams = TorchCudaStreams(torch.device("cuda"), None)
        return StreamCopies(core, streams, layer_count=self.layout.block.layer_count)

    def fresh_keys(self, count: int = 0) -> KeyBatch:
        first = self._next_key
        self._next_key += count or self.count
        hashes = (sha256(str(i).encode()).digest() for i in range(first, self._next_key))
        return KeyBatch.from_bytes(b"".join(hashes))

    # ---- one measurement each, in milliseconds ----

    def spill(self, path: str, keys: KeyBatch | None = None) -> dict[str, float]:
        """A spill of new keys, from submission to the end."""
        copies, keys = self.engines[path], keys or self.fresh_keys()
        times: dict[str, float] = {}
        begin = time.perf_counter()

        def work() -> StreamSpillTicket:
            begin = time.perf_counter()
            ticket = copies.spill(keys, self.spilled)
            if not ticket.wait_device(LONG_S):
                raise RuntimeError("the reads of a spill were not enqueued in time")
            times["enqueueing"] = 1e3 * (time.perf_counter() - begin)
            return ticket

        times["device"], ticket = streams_ms(work, self.stream)
        ticket.wait()
        times["stored"] = 1e3 * (time.perf_counter() - begin)
        if ticket.stored != self.count:
            raise RuntimeError(f"{ticket.stored} of {self.count} pages were stored")
        return times

    def load(self) -> dict[str, float]:
        """A load of the blocks that are verified, into pages nobody spills."""
        copies, lease = self.engines["kernel"], self.pool.pin(self.keys)
        if lease.count != self.count:
            raise RuntimeError("blocks to load were evicted")
        times: dict[str, float] = {}
        begin, first = events()

        def work() -> None:
            begin.record(self.stream)
            ticket = copies.load(lease, self.loaded)
            ticket.wait_layer(0)
            first.record(self.stream)
            if not ticket.wait():
                raise RuntimeError("a load failed")

        times["device"], _ = streams_ms(work, self.stream)
        times["layer 0"] = float(begin.elapsed_time(first))
        copies.quiesce()
        return times

    def both(self, path: str) -> float:
        """A spill and a load at once."""

        def work() -> None:
            spill = self.engines[path].spill(self.fresh_keys(), self.spilled)
            load = self.engines["kernel"].load(self.pool.pin(self.keys), self.loaded)
            if not (spill.wait_device(LONG_S) and load.wait()):
                raise RuntimeError("a copy failed")

        elapsed, _ = streams_ms(work, self.stream)
        for copies in self.engines.values():
            copies.quiesce()
        return elapsed

    def submission(self) -> float:
        """Of a spill of many pages that is told to drop them all: no copy disturbs the clock."""
        copies, keys = self.engines["kernel"], self.fresh_keys(SUBMITTED)
        pages = self.spilled.repeat(SUBMITTED // self.count + 1)[:SUBMITTED].contiguous()
        copies.fail_next("spill", 1)
        begin = time.perf_counter()
        copies.spill(keys, pages)
        elapsed = 1e3 * (time.perf_counter() - begin)
        copies.quiesce()
        return elapsed

    def close(self) -> None:
        for copies in self.engines.values():
            copies.close()
        self.held.release()
        self.pool.close()


class Plain:
    """torch's copies between pinned memory and the GPU."""

    def __init__(self, count: int) -> None:
        self.hosts = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.devices = [torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.side = torch.cuda.Stream()

    def out(self) -> None:
        self.hosts[0].copy_(self.devices[0], non_blocking=True)

    def back(self) -> None:
        self.devices[1].copy_(self.hosts[1], non_blocking=True)

    def both(self) -> None:
        stream = torch.cuda.current_stream()
        self.side.wait_stream(stream)
        with torch.cuda.stream(self.side):
            self.back()
        self.out()
        stream.wait_stream(self.side)


def one_round(bench: Bench) -> dict[str, float]:
    plain, stream = bench.plain, bench.stream
    row = {
        "plain out": streams_ms(plain.out, stream)[0],
        "plain back": streams_ms(plain.back, stream)[0],
        "plain both": streams_ms(plain.both, stream)[0],
    }
    row["submission"] = bench.submission()
    row |= {f"load {name}": value for name, value in bench.load().items()}
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
