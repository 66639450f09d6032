"""The stream engine on a server without a GPU: device memory is the host's, streams are threads.

`copier` is what `hpkv_sglang.copy.engines.copier_for` is for a GPU, over `_core.AsyncHostDevice`.
Everything of a GPU's server runs here: the engine, its tickets, indices that "only the device" has.
The forward pass, though, is the CPU's and not a stream's. So where a stream is made to wait for the
device, the host then waits for that stream: the one difference. Copies run late and in any order
that the waits allow, so a wait that is missing shows as wrong bytes.

For builds with HPKV_RIG. Importing this needs neither torch nor the plugin.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpkv_sglang._core import AsyncHostDevice, Pool
    from hpkv_sglang.copy.engines import Copier
    from hpkv_sglang.layout.base import PoolLayout


def missing() -> str | None:
    """Why there is no such device in this build; None when there is."""
    from hpkv_sglang import _core

    if hasattr(_core, "AsyncHostDevice"):
        return None
    return "this build of hpkv_sglang has no device of host threads (HPKV_RIG)"


class HostStreams:
    """A schedule and a forward stream on a device of threads, as `copy.streams` asks for them."""

    def __init__(self, device: AsyncHostDevice, *, overlap: bool = True) -> None:
        """Without overlap both are the same stream."""
        self.schedule = device.make_stream()
        self.forward = device.make_stream() if overlap else self.schedule
        self._current = self.schedule

    def current(self) -> int:
        return self._current

    def writers(self) -> list[int]:
        return [self.forward]

    def enter_forward(self) -> None:
        """From here on the current stream is the forward pass's, as in `with torch.cuda.stream`."""
        self._current = self.forward

    def leave_forward(self) -> None:
        self._current = self.schedule


def _wait_for(device: AsyncHostDevice, stream: int) -> None:
    from hpkv_sglang._core import CorePoolError

    with suppress(CorePoolError):  # a lost device runs nothing any more; its engine says so
        device.synchronize_stream(stream)


class _SettledSpill:
    """A core ticket; who waits for its reads on a stream has them behind him on the host too."""

    def __init__(self, ticket: Any, device: AsyncHostDevice) -> None:
        self._ticket = ticket
        self._device = device

    def wait_reads_on(self, stream: int, timeout_s: float) -> bool:
        in_time = bool(self._ticket.wait_reads_on(stream, timeout_s))
        _wait_for(self._device, stream)
        return in_time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)


class _SettledLoad:
    """The same of a load and its layers."""

    def __init__(self, ticket: Any, device: AsyncHostDevice) -> None:
        self._ticket = ticket
        self._device = device

    def wait_layer_on(self, stream: int, layer: int) -> bool:
        good = bool(self._ticket.wait_layer_on(stream, layer))
        _wait_for(self._device, stream)
        return good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)


class SettledEngine:
    """A `_core.StreamEngine` for whose tickets the host waits where a stream does."""

    def __init__(self, engine: Any, device: AsyncHostDevice) -> None:
        self._engine = engine
        self._device = device

    def spill(self, *args: Any) -> _SettledSpill:
        return _SettledSpill(self._engine.spill(*args), self._device)

    def load(self, *args: Any) -> _SettledLoad:
        return _SettledLoad(self._engine.load(*args), self._device)

    def lose_device_after(self, calls: int) -> None:
        """The device is lost at that call of it from now on, as a GPU is after a fault."""
        self._device.fail_call(calls, lost=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def copier(
    pool: Pool,
    namespace_index: int,
    layout: PoolLayout,
    *,
    delay_us: int = 50,
    staged_pages: int | None = None,
) -> Copier:
    """The engine between `layout`'s pages in host memory and `pool`.

    Each piece of work of the device is late by up to `delay_us`. With `staged_pages` nothing of the
    pool is registered, and so many pages at a time are loaded by way of staging. CorePoolError and
    ValueError as of `_core.StreamEngine`.
    """
    from hpkv_sglang._core import AsyncHostDevice, StreamEngine
    from hpkv_sglang.copy.engines import stream_copier
    from hpkv_sglang.copy.streams import StreamCopies

    device = AsyncHostDevice(delay_us=delay_us)
    engine = StreamEngine(
        device,
        pool,
        namespace_index,
        layout.block,
        page_size=layout.page_size,
        staging_bytes=_staging_bytes(layout, staged_pages),
        register_pool=staged_pages is None,
    )
    settled: Any = SettledEngine(engine, device)
    copies = StreamCopies(
        settled,
        HostStreams(device),
        layer_count=layout.block.layer_count,
    )
    return stream_copier(copies, layout)


def _staging_bytes(layout: PoolLayout, load_pages: int | None) -> int:
    page = layout.block.block_bytes
    if load_pages is None:
        return max(16 << 20, 8 * page)
    # Half of it is for loads; a slot has a table of 4 KiB, and starts at a multiple of 256 bytes.
    return 2 * load_pages * (-(-page // 256) * 256 + 4096)
