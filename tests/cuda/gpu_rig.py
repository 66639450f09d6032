"""KV pools on a GPU as SGLang makes them, a host pool, and stream engines between the two.

    schedule   stream on which slots are chosen and copies are submitted
    forward    stream on which pages are written and read; with overlap off it is the same one

`spin` keeps the forward stream busy for half a second or more. Everything that a test enqueues
behind it is enqueued without waiting: bytes and page numbers are on the device beforehand, and
every kernel involved has run once (`warm_up`), because the first launch of a kernel may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch

from hpkv_sglang._core import KeyBatch, Pool, StreamEngine, cuda_device
from hpkv_sglang.copy.streams import StreamCopies, TorchCudaStreams, resident_pages
from hpkv_sglang.layout import gqa
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.mla import layout as mla

DEVICE = "cuda"
PAGES = 24
LAYERS = 3
POOL_BYTES = 96 << 20
STAGING_BYTES = 16 << 20
SPIN_CYCLES = 1_200_000_000
PATIENCE_S = 20.0

Snapshot = list[torch.Tensor]  # bytes of each tensor of a KV pool


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes on the device, as a tensor of that type."""
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).view(dtype)


def gqa_pool(
    slots: int, heads: int, head_dims: tuple[int, int], dtype: torch.dtype, slot_gap: int = 0
) -> Any:
    """What the GQA layout reads of SGLang's pool; `slot_gap` unused elements lie between slots."""

    def buffers(dim: int) -> list[torch.Tensor]:
        rows = [noise((slots, heads * dim + slot_gap), dtype) for _ in range(LAYERS)]
        return [row[:, : heads * dim].unflatten(1, (heads, dim)) for row in rows]

    return SimpleNamespace(
        kv_cache_layout="nhd",
        is_quantized_kv_cache=False,
        layer_shard_enabled=False,
        layer_num=LAYERS,
        head_num=heads,
        head_dim=head_dims[0],
        v_head_dim=head_dims[1],
        store_dtype=dtype,
        k_buffer=buffers(head_dims[0]),
        v_buffer=buffers(head_dims[1]),
    )


def mla_pool(slots: int, rank: int, rope: int, dtype: torch.dtype) -> Any:
    """What the MLA layout reads of SGLang's pool."""
    return SimpleNamespace(
        use_dsa=False,
        dsa_kv_cache_store_fp8=False,
        kv_scale_buffer=None,
        layer_shard_enabled=False,
        layer_num=LAYERS,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        store_dtype=dtype,
        kv_buffer=[noise((slots, 1, rank + rope), dtype) for _ in range(LAYERS)],
    )


Form = Callable[[int], PoolLayout]  # of a page size


def _slots(page_size: int, pages: int) -> int:
    return (pages + 1) * page_size  # SGLang's first page is padding


def form(make: Callable[[int], Any], describe: Callable[[Any, int], PoolLayout]) -> Form:
    return lambda page_size: describe(make(_slots(page_size, PAGES)), page_size)


# Rows of whole 16-byte words, of 8-bit floats (which SGLang stores as bytes), and of odd lengths.
FORMS: dict[str, Form] = {
    "gqa-bf16": form(lambda n: gqa_pool(n, 2, (64, 64), torch.bfloat16), gqa.describe),
    "gqa-fp8": form(lambda n: gqa_pool(n, 4, (64, 32), torch.uint8), gqa.describe),
    "gqa-odd": form(lambda n: gqa_pool(n, 3, (13, 7), torch.uint8, 1), gqa.describe),
    "mla-bf16": form(lambda n: mla_pool(n, 512, 64, torch.bfloat16), mla.describe),
    "mla-fp8": form(lambda n: mla_pool(n, 512, 64, torch.uint8), mla.describe),
    "mla-odd": form(lambda n: mla_pool(n, 33, 10, torch.uint8), mla.describe),
}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def snapshot(layout: PoolLayout) -> Snapshot:
    """All pages of all tensors, read through torch and not as the layout describes them."""
    return [bytes_of(tensor.pages).clone() for tensor in layout.tensors]


def read(layout: PoolLayout, pages: Sequence[int], out: Snapshot | None = None) -> Snapshot:
    """The bytes of these pages, `[pages, ...]` for every tensor; enqueued on the current stream."""
    whole = [bytes_of(tensor.pages) for tensor in layout.tensors]
    out = out or [torch.empty_like(part[: len(pages)]) for part in whole]
    for part, into in zip(whole, out, strict=True):
        for row, page in enumerate(pages):
            into[row].copy_(part[page])
    return out


def write(layout: PoolLayout, pages: Sequence[int], values: Snapshot) -> None:
    """The other way round."""
    for tensor, value in zip(layout.tensors, values, strict=True):
        for row, page in enumerate(pages):
            bytes_of(tensor.pages[page]).copy_(value[row])


def noise_for(layout: PoolLayout, pages: int) -> Snapshot:
    """Values that `write` takes."""
    parts = [bytes_of(tensor.pages[:pages]) for tensor in layout.tensors]
    return [noise(tuple(part.shape), torch.uint8) for part in parts]


def scribble(layout: PoolLayout) -> None:
    """Overwrite everything with random bytes."""
    write(layout, range(layout.block.page_count), noise_for(layout, layout.block.page_count))


def same(first: Snapshot, second: Snapshot) -> bool:
    """Waits for the current stream."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def block_of(values: Snapshot, row: int) -> bytes:
    """What a block of page `row` of these values holds."""
    return b"".join(value[row].cpu().numpy().tobytes() for value in values)


def keys_of(first: int, count: int) -> KeyBatch:
    """Like real keys they are hashes, which a table spreads evenly."""
    hashes = (sha256(str(first + i).encode()).digest() for i in range(count))
    return KeyBatch.from_bytes(b"".join(hashes))


class Rig:
    """One layout, one host pool, engines between the two. Make and use it on one thread."""

    def __init__(
        self,
        directory: str,
        layout: PoolLayout,
        *,
        overlap: bool = True,
        namespace: bytes = bytes(32),
    ) -> None:
        self.layout = layout
        self.schedule = torch.cuda.Stream()
        self.forward = torch.cuda.Stream() if overlap else self.schedule
        self.overlap = overlap
        self.pool = Pool.open(directory, pool_bytes=POOL_BYTES)
        self.index = self.pool.add_namespace(namespace, b"", layout.block.block_bytes)
        self._engines: list[StreamCopies] = []

    def engine(self, layout: PoolLayout | None = None, **options: Any) -> StreamCopies:
        """One more engine under the rig's namespace; `options` are those of `StreamEngine`."""
        layout = layout or self.layout
        engine = StreamEngine(
            cuda_device(torch.cuda.current_device()),
            self.pool,
            self.index,
            layout.block,
            **{"page_size": layout.page_size, "staging_bytes": STAGING_BYTES, **options},
        )
        copies = StreamCopies(
            engine,
            TorchCudaStreams(torch.device(DEVICE), self.forward if self.overlap else None),
            layer_count=layout.block.layer_count,
        )
        self._engines.append(copies)
        return copies

    def slots(self, indices: Sequence[int]) -> torch.Tensor:
        """The slots of the tokens of these pages, as SGLang has them."""
        size = self.layout.page_size
        firsts = torch.tensor(indices, dtype=torch.int64, device=DEVICE) * size
        return (firsts[:, None] + torch.arange(size, device=DEVICE)).reshape(-1)

    def pages(self, indices: Sequence[int]) -> torch.Tensor:
        """These pages as the tree hands them to an engine. May wait for the current stream."""
        return resident_pages(self.slots(indices), self.layout.page_size)

    def block(self, keys: KeyBatch, row: int) -> bytes | None:
        """What the host pool holds under key `row`."""
        out = bytearray(self.layout.block.block_bytes)
        return bytes(out) if self.pool.get(bytes(keys[row : row + 1]), out) else None

    @contextmanager
    def on_forward(self) -> Iterator[None]:
        with torch.cuda.stream(self.forward):
            yield

    def spin(self) -> torch.cuda.Event:
        """Occupy the forward stream; the event passes when that is over."""
        with self.on_forward():
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()
            event.record(self.forward)
        return event

    def warm_up(self, copies: StreamCopies) -> None:
        """Every kernel that a test may enqueue behind a spin has run afterwards."""
        pages = self.pages([0, 1])
        keys = keys_of(1 << 40, 2)
        spill = copies.spill(keys, pages)
        assert spill.wait_device(60.0)
        spill.wait()
        load = copies.load(self.pool.pin(keys), pages)
        load.wait_layer(0)
        assert load.wait()
        with self.on_forward():
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
            write(self.layout, [0, 1], read(self.layout, [0, 1]))
        torch.full_like(pages, 0)
        copies.quiesce()
        torch.cuda.synchronize()
        self.pool.clear()

    def close(self) -> None:
        """The pool is sound and nothing is pinned when the engines are gone."""
        for copies in self._engines:
            copies.close()
        torch.cuda.synchronize()
        assert self.pool.check() == []
        assert self.pool.stats()["pinned"] == 0
        self.pool.close()
