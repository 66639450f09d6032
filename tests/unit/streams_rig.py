"""A copy engine on streams over a device of host threads, and what its tests do with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
from layout_rig import gqa_pool, page_rows, scribble

from hpkv_sglang import _core
from hpkv_sglang._core import KeyBatch, Pool
from hpkv_sglang.copy.streams import StreamCopies, resident_pages
from hpkv_sglang.layout import gqa
from hpkv_testing import host_streams

PAGE, PAGES, LAYERS = 4, 16, 3
POOL_BYTES = 16 << 20


def keys_of(first: int, count: int) -> KeyBatch:
    return KeyBatch.from_bytes(b"".join(sha256(bytes([first + i])).digest() for i in range(count)))


class Rig:
    """Pages in host memory, a device of threads over them, a pool, and the engine between."""

    def __init__(self, directory: str, *, overlap: bool) -> None:
        self.kv = gqa_pool(
            layers=LAYERS,
            slots=PAGE * PAGES,
            kv_heads=2,
            head_dims=(16, 8),
            dtype=torch.float16,
        )
        self.layout = gqa.describe(self.kv, PAGE)
        self.device = _core.AsyncHostDevice(delay_us=20)
        self.streams = host_streams.HostStreams(self.device, overlap=overlap)
        engine_streams = 2 if overlap else 1
        self.pool = Pool.open(directory, pool_bytes=POOL_BYTES)
        index = self.pool.add_namespace(bytes(32), b"", self.layout.block.block_bytes)
        core = _core.StreamEngine(
            self.device, self.pool, index, self.layout.block, page_size=PAGE, staging_bytes=1 << 20
        )
        self.copies = StreamCopies(core, self.streams, layer_count=LAYERS)
        # In the order in which an engine makes its streams.
        self.writes = self.device.made_stream(engine_streams)
        self.reads = self.device.made_stream(engine_streams + 2)

    def pages(self, *indices: int) -> torch.Tensor:
        slots = (torch.tensor(indices)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
        return resident_pages(slots, PAGE)

    def rows(self, *indices: int) -> list[list[bytes]]:
        return [page_rows(self.kv, PAGE, index) for index in indices]

    def blocks(self, keys: KeyBatch) -> list[bytes]:
        """What the pool holds, as `rows` one after the other."""
        found = []
        for row in range(len(keys)):
            out = bytearray(self.layout.block.block_bytes)
            assert self.pool.get(bytes(keys[row : row + 1]), out)
            found.append(bytes(out))
        return found

    def stored(self, *indices: int) -> tuple[KeyBatch, list[list[bytes]]]:
        """Blocks of these pages, and their rows; the pages hold other bytes by now."""
        keys, rows = keys_of(0, len(indices)), self.rows(*indices)
        spill = self.copies.spill(keys, self.pages(*indices))
        spill.wait()
        assert spill.stored == len(indices)
        scribble(self.kv)
        return keys, rows

    def settle(self) -> None:
        """Whatever runs behind a wait of the forward stream may run."""
        self.device.synchronize_stream(self.streams.forward)


class Calling(threading.Thread):
    """A call on another thread; `result` is its answer."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        self.result = self._call()

    def returns(self, within_s: float) -> bool:
        self.join(within_s)
        return not self.is_alive()
