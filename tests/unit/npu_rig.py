"""An NPU engine over the fake device, and the KV pool between which and the host pool it copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hpkv_sglang._core import CopyEngine, KeyBatch, Pool
from hpkv_sglang.layout.base import PageTensor, PoolLayout, layout_of
from hpkv_sglang.npu.engine import NpuEngine
from hpkv_testing.fake_npu import FakeNpu

LAYERS = 3
PAGES = 16
POOL_BYTES = 16 << 20


def keys_of(first: int, count: int) -> KeyBatch:
    return KeyBatch.from_bytes(np.random.default_rng(first).bytes(32 * count))


def pages_of(*pages: int) -> npt.NDArray[np.int64]:
    return np.array(pages, dtype=np.int64)


def kv_tensors(row_shapes: Sequence[tuple[int, ...]] = ((2, 8), (2, 4))) -> list[PageTensor]:
    """K and V of each layer, `[16 pages, 4 slots, ...]` of random 16-bit words."""
    return [
        PageTensor(
            layer=layer,
            field=f"field {i}",
            pages=torch.randint(-(1 << 15), 1 << 15, (PAGES, 4, *shape)).to(torch.int16),
        )
        for layer in range(LAYERS)
        for i, shape in enumerate(row_shapes)
    ]


class NpuRig:
    """A KV pool and a host pool. `make` engines, and `close` at the end checks what they left."""

    def __init__(
        self,
        directory: str,
        device: FakeNpu | None = None,
        tensors: list[PageTensor] | None = None,
        verify_always: bool = False,
    ) -> None:
        self.pool = Pool.open(directory, pool_bytes=POOL_BYTES, verify_always=verify_always)
        self.device = FakeNpu() if device is None else device
        self.tensors = kv_tensors() if tensors is None else tensors
        for tensor in self.tensors:
            self.device.adopt(tensor.pages)
        self.layout: PoolLayout = layout_of("test", {}, self.tensors, replicated=False)
        self.namespace = self.pool.add_namespace(bytes(32), b"", self.layout.block.block_bytes)
        self._engines: list[CopyEngine | NpuEngine] = []

    def npu(self, staging_pages: int = 8) -> NpuEngine:
        engine = NpuEngine(
            self.pool, self.namespace, self.layout, self.device, staging_pages=staging_pages
        )
        self._engines.append(engine)
        return engine

    def core(self) -> CopyEngine:
        """The specification: the device is ordinary memory."""
        engine = CopyEngine(self.pool, self.namespace, self.layout.block)
        self._engines.append(engine)
        return engine

    # ---- the KV pool ----

    def page(self, page: int) -> list[bytes]:
        """The bytes of a page now, tensor by tensor."""
        return [bytes(t.pages[page].view(torch.uint8).numpy().tobytes()) for t in self.tensors]

    def writer(self, page: int, value: int) -> Callable[[], None]:
        """Writes a page all over: what a forward pass does."""

        def write() -> None:
            for tensor in self.tensors:
                tensor.pages[page].fill_(value)

        return write

    def written(self, value: int) -> list[bytes]:
        """What `page` answers for a page that was written with `value`."""
        word = int(value).to_bytes(2, "little", signed=True)
        return [word * (t.page_bytes // 2) for t in self.tensors]

    def forward(self, operation: Callable[[], object]) -> None:
        """Enqueue on the model's stream."""
        with self.device.on(self.device.forward_stream):
            self.device.compute(operation)

    def close(self) -> None:
        for stream in self.device.streams.values():
            stream.release()  # a test that failed may have left it held
        for engine in self._engines:
            engine.close()
        self.device.close()
        for engine in self._engines:
            if isinstance(engine, NpuEngine):
                assert engine.check() == []
        assert self.pool.check() == []
        assert self.pool.stats()["pinned"] == 0
        self.pool.close()
