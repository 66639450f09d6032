"""What the NPU engine needs of a device, and the same over `torch.npu`.

Owns nothing of SGLang's: streams of its own, events, pinned host memory, a little device memory.
The engine calls a device through `DeviceStreams` only, so that the fake device of the tests and
`TorchNpuStreams` run the same engine code. Operations are enqueued on the current stream of the
calling thread (`on` sets it) and have not run when they return; what orders them is the stream, or
an event. Tensors here are bytes: `[rows, row_bytes]`, `uint8`.

Threads: every method may be called from any thread that has called `enter_thread` once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hpkv_sglang.errors import RefusedError

if TYPE_CHECKING:
    import torch

PageIndices = npt.NDArray[np.int64]
# (device pages, host rows, page indices, row indices, to_host): page `pages[i]` and row `rows[i]`.
PageExchange = Callable[["torch.Tensor", "torch.Tensor", PageIndices, PageIndices, bool], None]


class DeviceEvent(Protocol):
    """A point in a stream; recorded once."""

    def query(self) -> bool:
        """Whether the stream has got there."""

    def synchronize(self) -> None:
        """Until it has. Blocks without the GIL."""


class DeviceStream(Protocol):
    def record_event(self) -> Any:
        """A `DeviceEvent` behind everything enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """What is enqueued from here on runs after `event`. Never blocks the host."""


class DeviceStreams(Protocol):
    """One device as the engine sees it."""

    @property
    def forward_stream(self) -> DeviceStream | None:
        """The stream the model writes KV on; None when the current stream is its only writer."""

    @property
    def exchange(self) -> PageExchange | None:
        """Copies pages between device and host memory directly, on the current stream, or None."""

    def enter_thread(self) -> None:
        """Make this device the calling thread's."""

    def new_stream(self, name: str) -> DeviceStream: ...
    def current_stream(self) -> DeviceStream: ...
    def on(self, stream: Any) -> AbstractContextManager[Any]: ...

    def pinned(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Host memory that asynchronous copies may use."""

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Device memory."""

    def indices(self, pages: PageIndices) -> Any:
        """`pages` on the device, for `gather` and `scatter` on the current stream."""

    def gather(self, pages: torch.Tensor, indices: Any, target: torch.Tensor) -> None:
        """`target[i] = pages[indices[i]]`, all on the device; rows of `target` may be apart."""

    def scatter(self, source: torch.Tensor, indices: Any, pages: torch.Tensor) -> None:
        """`pages[indices[i]] = source[i]`, all on the device; rows of `source` may be apart."""

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Contiguous bytes between pinned host memory and the device."""


class TorchNpuStreams:
    """`DeviceStreams` of the current NPU. RefusedError when `torch_npu` cannot be imported.

    The project's own tests have no NPU: they run the engine over a fake device, and `SglExchange`
    against a stand-in for the kernel. This class itself is untried on hardware.
    """

    def __init__(self, forward_stream: Any = None) -> None:
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise RefusedError.build(
                "--enable-hpkv",
                "the KV pool is on an NPU",
                f"torch_npu cannot be imported ({error})",
                "Install torch_npu for this torch, or run without --enable-hpkv.",
            ) from error
        import torch

        self._torch: Any = torch
        self._npu: Any = torch.npu
        self._index: int = self._npu.current_device()
        self._device = f"npu:{self._index}"
        self._forward_stream = forward_stream
        self._exchange = sgl_exchange()

    @property
    def forward_stream(self) -> DeviceStream | None:
        stream: DeviceStream | None = self._forward_stream
        return stream

    @property
    def exchange(self) -> PageExchange | None:
        return self._exchange

    def enter_thread(self) -> None:
        self._npu.set_device(self._index)

    def new_stream(self, name: str) -> DeviceStream:
        stream: DeviceStream = self._npu.Stream(device=self._device)
        return stream

    def current_stream(self) -> DeviceStream:
        stream: DeviceStream = self._npu.current_stream()
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._npu.stream(stream)
        return context

    def pinned(self, rows: int, row_bytes: int) -> torch.Tensor:
        return self._torch.empty((rows, row_bytes), dtype=self._torch.uint8, pin_memory=True)

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor:
        return self._torch.empty((rows, row_bytes), dtype=self._torch.uint8, device=self._device)

    def indices(self, pages: PageIndices) -> Any:
        # Pinned, so that the copy does not wait for the stream; torch keeps the host side until
        # the copy is over.
        host = self._torch.from_numpy(pages.copy()).pin_memory()
        return host.to(self._device, non_blocking=True)

    def gather(self, pages: torch.Tensor, indices: Any, target: torch.Tensor) -> None:
        # Indexing of bytes is what SGLang itself moves pages with on this device.
        target.copy_(pages[indices])

    def scatter(self, source: torch.Tensor, indices: Any, pages: torch.Tensor) -> None:
        pages[indices] = source

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)


class SglExchange:
    """A `PageExchange` by SGLang's kernel, `sgl_kernel_npu.kvcacheio.transfer_kv_dim_exchange`.

    As SGLang's callers and the kernel's public source have it: the device side is `[layer, page,
    slot, head, dim]`, the host side `[page, layer, slot, head, dim]`, indices count tokens, V may
    be empty, and the copies are enqueued on the current stream (older builds also wait for them).
    One call of ours has one layer and pages of one slot, which is how SGLang itself calls it for
    pools whose layers are apart. The kernel copies all layers of a page in one go only when K and V
    are apart on the host, which in our blocks they are not. It does not report a copy that the
    driver refuses; the page self-test at start is what finds an unfit build.
    """

    def __init__(self, kernel: Any, directions: Any) -> None:
        """`directions` is the module's `TransferDirection`."""
        self._kernel = kernel
        self._directions = directions

    def __call__(
        self,
        pages: torch.Tensor,
        rows: torch.Tensor,
        page_indices: PageIndices,
        row_indices: PageIndices,
        to_host: bool,
    ) -> None:
        import torch

        self._kernel(
            device_indices=torch.from_numpy(page_indices),
            host_indices=torch.from_numpy(row_indices),
            device_k=_five_dims(pages, layer_dim=0),
            host_k=_five_dims(rows, layer_dim=1),
            device_v=torch.empty(0, device=pages.device),
            host_v=torch.empty(0),
            page_size=1,
            direction=self._directions.D2H if to_host else self._directions.H2D,
        )


def _five_dims(rows: torch.Tensor, layer_dim: int) -> torch.Tensor:
    """`[n, bytes]` as pages of one slot with one head, and one layer at `layer_dim`."""
    count, width = rows.shape
    shape, stride = [count, 1, 1, width], [rows.stride(0), width, width, 1]
    shape.insert(layer_dim, 1)
    # Never stepped over; the kernel wants whole pages on the host, a whole pool on the device.
    stride.insert(layer_dim, width if layer_dim == 1 else rows.stride(0) * count)
    return rows.as_strided(shape, stride)


def sgl_exchange() -> PageExchange | None:
    """SGLang's page copies, or None when this machine has no `sgl_kernel_npu` that offers them."""
    try:
        kernel = importlib.import_module("sgl_kernel_npu.kvcacheio")
        return SglExchange(kernel.transfer_kv_dim_exchange, kernel.TransferDirection)
    except (ImportError, AttributeError):
        return None
