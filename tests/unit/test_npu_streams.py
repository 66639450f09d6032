"""Page copies of an NPU: over torch's own operations, and over SGLang's kernel where there is one.

The kernel is a stand-in written after the rules that its public source checks; nothing here shows
how the real one behaves.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from npu_rig import LAYERS, PAGES, NpuRig, keys_of, kv_tensors

from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.base import PageTensor
from hpkv_sglang.npu.streams import SglExchange, TorchNpuStreams, sgl_exchange
from hpkv_testing.fake_npu import FakeNpu


class TransferDirection(Enum):
    H2D = 1
    D2H = 2


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of the kernel: device `[layer, page, slot, head, dim]`, host `[page, layer,
    slot, head, dim]`."""

    device_indices: torch.Tensor
    host_indices: torch.Tensor
    device_k: torch.Tensor
    host_k: torch.Tensor
    device_v: torch.Tensor
    host_v: torch.Tensor
    page_size: int
    direction: TransferDirection


def transfer_kv_dim_exchange(**arguments: Any) -> None:
    call = Call(**arguments)
    device, host, page_size = call.device_k, call.host_k, call.page_size
    pages, rows = call.device_indices, call.host_indices
    assert device.dim() == host.dim() == 5 and device.shape[0] == host.shape[1]
    assert device.shape[2] == host.shape[2] == page_size
    assert call.device_v.numel() == call.host_v.numel() == 0
    assert pages.dtype == rows.dtype == torch.int64
    assert len(pages) == len(rows) and len(rows) % page_size == 0
    width = page_size * device.shape[3] * device.shape[4]
    # A row of the copy is flat, and pages follow each other without gaps.
    assert device.stride(1) == host.stride(1) == width
    for first in range(0, len(pages), page_size):
        page, row = int(pages[first]) // page_size, int(rows[first]) // page_size
        assert 0 <= page < device.shape[1] and 0 <= row < host.shape[0]
        for layer in range(device.shape[0]):
            on_device = _flat(device, layer * device.stride(0) + page * width, width)
            on_host = _flat(host, row * host.stride(0) + layer * width, width)
            if call.direction is TransferDirection.D2H:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)


def _flat(tensor: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    return tensor.as_strided((width,), (1,), tensor.storage_offset() + offset)


class ExchangeNpu(FakeNpu):
    """A fake device with SGLang's kernel; it runs on the stream that was current."""

    def __init__(self, kernel: Any = transfer_kv_dim_exchange) -> None:
        super().__init__()
        self._exchange = SglExchange(kernel, TransferDirection)
        self.exchange = self.run

    def run(self, pages: Any, rows: Any, page_indices: Any, row_indices: Any, out: bool) -> None:
        assert self.is_device(pages) and not self.is_device(rows)
        self.compute(
            lambda: self._exchange(pages, rows, page_indices, row_indices, out), "exchange"
        )


def round_trip(rig: NpuRig) -> None:
    """Seven pages through three staging blocks, to other pages; nothing else changes."""
    engine = rig.npu(staging_pages=6)
    keys = keys_of(1, 7)
    sources = np.array([15, 0, 7, 3, 4, 5, 9], dtype=np.int64)
    targets = np.array([0, 15, 1, 2, 8, 10, 9], dtype=np.int64)
    wanted = {int(t): rig.page(int(s)) for s, t in zip(sources, targets, strict=True)}
    engine.spill(keys, sources).wait()
    for page in range(PAGES):
        rig.writer(page, page)()
    assert engine.load(rig.pool.pin(keys), targets).wait()
    for page in range(PAGES):
        assert rig.page(page) == wanted.get(page, rig.written(page))
    assert not engine.poisoned


def test_pages_go_through_sglangs_kernel_where_there_is_one(directory: str) -> None:
    rig = NpuRig(directory, ExchangeNpu())
    round_trip(rig)
    # Two batches of three pages and one of one, each way; and the trial at start.
    assert rig.device.issued["exchange"] >= 2 * 3 * 2 * LAYERS
    assert rig.device.issued["gather"] == rig.device.issued["copy"] == 0
    rig.close()


def test_a_kernel_that_refuses_the_call_is_passed_over(directory: str) -> None:
    def other_build(**arguments: Any) -> None:
        raise TypeError("flags must be an int")

    class Refusing(ExchangeNpu):
        def run(self, pages: Any, rows: Any, *rest: Any) -> None:
            self._exchange(pages, rows, *rest)

    rig = NpuRig(directory, Refusing(other_build))
    round_trip(rig)
    assert rig.device.issued["gather"] > 0
    rig.close()


def test_pages_that_are_apart_do_not_go_through_the_kernel(directory: str) -> None:
    apart = [
        PageTensor(layer=t.layer, field=t.field, pages=t.pages.repeat(1, 2, 1)[:, :4])
        for t in kv_tensors(((16,),))
    ]
    assert apart[0].pages.stride(0) * apart[0].pages.element_size() == 2 * apart[0].page_bytes
    rig = NpuRig(directory, ExchangeNpu(), apart)
    round_trip(rig)
    assert rig.device.issued["exchange"] == 0
    rig.close()


def test_without_the_kernel_there_is_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel_npu", None)
    assert sgl_exchange() is None
    package = ModuleType("sgl_kernel_npu")
    module = ModuleType("sgl_kernel_npu.kvcacheio")
    monkeypatch.setitem(sys.modules, "sgl_kernel_npu", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel_npu.kvcacheio", module)
    assert sgl_exchange() is None, "a build without the function"
    module.transfer_kv_dim_exchange = transfer_kv_dim_exchange  # type: ignore[attr-defined]
    module.TransferDirection = TransferDirection  # type: ignore[attr-defined]
    assert isinstance(sgl_exchange(), SglExchange)


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RefusedError, match="torch_npu"):
        TorchNpuStreams()


class PlainEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Everything has run already."""


class PlainStream:
    """What `torch.npu.Stream` has, for work that runs at once."""

    def __init__(self, device: str) -> None:
        assert device == "npu:3"

    def record_event(self) -> PlainEvent:
        return PlainEvent()

    def wait_event(self, event: PlainEvent) -> None:
        assert isinstance(event, PlainEvent)


def test_the_engine_runs_on_torchs_calls(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.npu` as far as it is used, without the device: names and arguments, no asynchrony."""
    rig = NpuRig(directory)
    devices: list[int] = []
    calls = SimpleNamespace(
        current_device=lambda: 3,
        set_device=devices.append,
        Stream=PlainStream,
        current_stream=lambda: PlainStream("npu:3"),
        stream=nullcontext,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "sgl_kernel_npu", None)
    monkeypatch.setattr(torch, "npu", calls, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    device = TorchNpuStreams(forward_stream=PlainStream("npu:3"))
    assert device.exchange is None

    def empty(shape: Any, *, dtype: Any, device: str = "", pin_memory: bool = False) -> Any:
        assert pin_memory != (device == "npu:3")
        return torch.zeros(shape, dtype=dtype)

    device._torch = SimpleNamespace(empty=empty, uint8=torch.uint8, from_numpy=torch.from_numpy)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, where, non_blocking: self)
    fake, rig.device = rig.device, cast(Any, device)
    round_trip(rig)
    assert devices == [3, 3, 3], "each thread that drives the device chooses it"
    rig.device = fake
    rig.close()


def test_gather_and_scatter_take_rows_that_are_apart() -> None:
    """Torch's operations are the same on every device, so those of the NPU are tried on the CPU."""
    device = cast(Any, None)
    pages = torch.arange(40, dtype=torch.uint8).view(8, 5)
    wide = torch.zeros((3, 9), dtype=torch.uint8)
    indices = torch.tensor([7, 0, 3])
    TorchNpuStreams.gather(device, pages, indices, wide[:, 2:7])
    assert torch.equal(wide[:, 2:7], pages[[7, 0, 3]])
    assert wide[:, :2].sum() == wide[:, 7:].sum() == 0
    back = torch.full((8, 5), 99, dtype=torch.uint8)
    TorchNpuStreams.scatter(device, wide[:, 2:7], indices, back)
    assert torch.equal(back[[7, 0, 3]], pages[[7, 0, 3]])
    assert int((back == 99).sum()) == 25
