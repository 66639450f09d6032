"""Pages on a GPU, a pool, and engines to measure: what `cuda_copies.py` stands on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from cuda_sgl import SglCopies, sgl_kernels

from hpkv_sglang._core import KeyBatch, Pool, StreamEngine, cuda_device
from hpkv_sglang.copy.streams import StreamCopies, StreamSpillTicket, TorchCudaStreams
from hpkv_sglang.layout.base import PageTensor, layout_of

PAGE = 64
MIB = 1 << 20
LONG_S = 60.0
PATHS = ("batch", "kernel")
SUBMITTED = 2048
POOL_TIMES = 20  # the bytes of one measurement
REGISTERING_S = 10.0


@dataclass(frozen=True)
class Model:
    """Its name, and the fields of a layer with their bytes per token."""

    name: str
    layers: int
    fields: dict[str, int]

    def tensors(self, pages: int) -> list[PageTensor]:
        """A KV pool on the GPU of so many pages, in SGLang's order."""
        return [
            PageTensor(
                layer=layer,
                field=field,
                pages=torch.zeros(pages, PAGE, row_bytes, dtype=torch.uint8, device="cuda"),
            )
            for layer in range(self.layers)
            for field, row_bytes in self.fields.items()
        ]


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
    """One model's pages, a pool, and engines: one for each path of spills, of which "kernel" also
    loads in place, and "staged" for loads by way of pinned memory. One thread."""

    def __init__(self, model: Model, directory: str, mib: int) -> None:
        block_bytes = model.layers * PAGE * sum(model.fields.values())
        self.count = max(4, mib * MIB // block_bytes)
        tensors = model.tensors(2 * self.count)
        self.layout = layout_of(model.name, {}, tensors, replicated=False)
        self.block_bytes = block_bytes
        self.bytes = self.count * block_bytes
        self.spans = sum(region.piece_count for region in self.layout.block.regions)
        # All that are ever needed: torch has a few, and hands them out again.
        self.stream, self.product, self.busy = (torch.cuda.Stream() for _ in range(3))
        self.pool = Pool.open(directory, pool_bytes=max(POOL_TIMES * self.bytes, 512 * MIB))
        self.index = self.pool.add_namespace(bytes(32), b"", block_bytes)
        # Memory is registered once in a process: by the engine that loads in place.
        self.engines = {path: self.engine(path, path == "kernel") for path in PATHS}
        self.engines["staged"] = self.engine("kernel", False)
        self.plain = Plain(self.bytes)
        firsts = torch.randperm(2 * self.count, device="cuda").to(torch.int64) * PAGE
        self.spilled, self.loaded = firsts[: self.count], firsts[self.count :]
        kernels = sgl_kernels()
        self.sgl: SglCopies | None = None
        if not isinstance(kernels, str):
            self.sgl = SglCopies(kernels, tensors, self.spilled, self.loaded)
            self.sgl.check()
        self._next_key = 0
        self.keys = self.fresh_keys()
        with torch.cuda.stream(self.stream):
            self.spill("batch", self.keys)
        self.held = self.pool.pin(self.keys)  # so that no spill evicts what is loaded

    def warm_up(self) -> None:
        """Blocks that are loaded are registered, if the driver registers any, and no place of the
        pool is written for the first time by what is measured."""
        deadline = time.monotonic() + REGISTERING_S
        with torch.cuda.stream(self.stream):
            while self.load("kernel", self.count)["in place"] < self.count:
                if time.monotonic() > deadline:
                    break
            for _ in range(3 * POOL_TIMES):
                evicted = self.pool.stats()["evictions"]
                self.spill("kernel")
                if self.pool.stats()["evictions"] >= evicted + self.count:
                    break

    def engine(self, path: str, register_pool: bool) -> StreamCopies:
        core = StreamEngine(
            cuda_device(torch.cuda.current_device()),
            self.pool,
            self.index,
            self.layout.block,
            page_size=PAGE,
            staging_bytes=4 * self.bytes,
            spill_path=path,
            register_pool=register_pool,
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

    def load(self, engine: str, pages: int) -> dict[str, float]:
        """A load of blocks that are verified, into pages nobody spills. "in place" are how many
        blocks were read in the pool."""
        copies, lease = self.engines[engine], self.pool.pin(self.keys[:pages])
        if lease.count != pages:
            raise RuntimeError(f"{lease.count} of {pages} blocks are left to load")
        before = copies.stats()["loaded_in_place"]
        times: dict[str, float] = {}
        begin, first = events()

        def work() -> None:
            begin.record(self.stream)
            ticket = copies.load(lease, self.loaded[:pages])
            ticket.wait_layer(0)
            first.record(self.stream)
            if not ticket.wait():
                raise RuntimeError("a load failed")

        times["device"], _ = streams_ms(work, self.stream)
        times["layer 0"] = float(begin.elapsed_time(first))
        copies.quiesce()
        times["in place"] = copies.stats()["loaded_in_place"] - before
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

    def back(self, count: int | None = None) -> None:
        """All bytes, or so many."""
        self.devices[1][:count].copy_(self.hosts[1][:count], non_blocking=True)

    def both(self) -> None:
        stream = torch.cuda.current_stream()
        self.side.wait_stream(stream)
        with torch.cuda.stream(self.side):
            self.back()
        self.out()
        stream.wait_stream(self.side)
