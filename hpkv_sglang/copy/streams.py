"""Copies on the streams of a GPU: `_core.StreamEngine` as the interface of copy engines wants it.

    schedule stream   slots are chosen            `chooser`: their numbers are valid behind it
    forward stream    pages are written and read  `user`: pages may be copied behind it

Indices stay on the device: what `resident_pages` makes of SGLang's slots is an int64 tensor of each
page's first slot, and the engine is given its address. The allocator of device memory knows nothing
of the engine's streams, so the tensor is kept here until the ticket is done.

The host waits for no copy. Where the interface says that pages may be written again, or that a load
has landed, the stream that goes on is made to wait instead; what such a wait covers is whatever is
enqueued on that stream afterwards. Scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from hpkv_sglang._core import StreamEngine, StreamLoad, StreamSpill

if TYPE_CHECKING:
    import torch

    from hpkv_sglang._core import BlockSource, KeyBatch, Lease, LoadRoom, VerifyTicket

logger = logging.getLogger(__name__)


class ServerStreams(Protocol):
    """SGLang's streams, as handles of the device library."""

    def current(self) -> int:
        """The stream on which the calling thread enqueues."""
        ...

    def writers(self) -> list[int]:
        """The streams whose work writes pages: the forward pass's."""
        ...


class TorchCudaStreams:
    """The streams of one CUDA device in this process."""

    def __init__(self, device: torch.device, forward_stream: Any) -> None:
        """`forward_stream`: torch's stream of the forward passes; None when they run on the
        scheduler's own, which then is the current one."""
        import torch

        self._current = torch.cuda.current_stream
        self._device = device
        self._forward: int | None = (
            None if forward_stream is None else int(forward_stream.cuda_stream)
        )

    def current(self) -> int:
        return int(self._current(self._device).cuda_stream)

    def writers(self) -> list[int]:
        return [self.current() if self._forward is None else self._forward]


class StreamSpillTicket:
    """A spill whose reads are over for whoever waited for them on its own stream."""

    def __init__(self, ticket: StreamSpill, streams: ServerStreams) -> None:
        self._ticket = ticket
        self._streams = streams

    @property
    def device_done(self) -> bool:
        return self._ticket.device_done

    @property
    def done(self) -> bool:
        return self._ticket.done

    @property
    def stored(self) -> int:
        return self._ticket.stored

    def wait_device(self, timeout_s: float) -> bool:
        """Put the forward passes from here on behind the reads; False when some are not enqueued
        in time. Waits on the host only for that."""
        deadline = time.monotonic() + timeout_s
        return all(
            self._ticket.wait_reads_on(stream, max(0.0, deadline - time.monotonic()))
            for stream in self._streams.writers()
        )

    def wait(self) -> None:
        self._ticket.wait()

    def cancel(self) -> None:
        self._ticket.cancel()


class StreamLoadTicket:
    """A load that streams wait for, layer by layer."""

    def __init__(self, ticket: StreamLoad, last_layer: int, streams: ServerStreams) -> None:
        self._ticket = ticket
        self._last_layer = last_layer
        self._streams = streams

    @property
    def done(self) -> bool:
        return self._ticket.done

    @property
    def elapsed_s(self) -> float:
        return self._ticket.elapsed_s

    def wait_layer(self, layer: int) -> None:
        """What the current stream does from here on finds the layer. IndexError.

        Waits on the host until the layer's copies are enqueued. Returns at once after a failure.
        """
        self._ticket.wait_layer_on(self._streams.current(), layer)

    def wait(self) -> bool:
        """Whether the bytes were good and their copies are enqueued: forward passes from here on
        run behind them. When not, nothing of the load writes pages any more."""
        if all(
            self._ticket.wait_layer_on(stream, self._last_layer)
            for stream in self._streams.writers()
        ):
            return True
        self._ticket.wait()
        return False


class StreamCopies:
    """The engine. Close it before the pool, and before the device memory of its layout goes."""

    def __init__(self, engine: StreamEngine, streams: ServerStreams, *, layer_count: int) -> None:
        self._engine = engine
        self._streams = streams
        self._last_layer = layer_count - 1
        self._told = self._noticed = False
        self._kept: deque[tuple[StreamSpill | StreamLoad, torch.Tensor]] = deque()

    @property
    def poisoned(self) -> bool:
        """The device failed once: nothing is copied any more. The first to ask logs why."""
        poisoned = self._engine.poisoned
        if poisoned and not self._told:
            self._told = True
            logger.error(
                "hpkv: the tiers are off, copies failed on the device: %s", self._engine.first_error
            )
        return poisoned

    def spill(
        self, keys: KeyBatch, pages: torch.Tensor, turn: int = 0, turns: int = 1
    ) -> StreamSpillTicket:
        chooser, user = self._users()
        ticket = self._engine.spill(keys, pages.data_ptr(), chooser, user, turn, turns)
        self._keep(ticket, pages)
        return StreamSpillTicket(ticket, self._streams)

    def load(
        self, lease: Lease, pages: torch.Tensor, source: BlockSource | None = None
    ) -> StreamLoadTicket:
        self._log_notice()
        chooser, user = self._users()
        ticket = self._engine.load(lease, pages.data_ptr(), len(pages), chooser, user, source)
        self._keep(ticket, pages)
        return StreamLoadTicket(ticket, self._last_layer, self._streams)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Loads that are started inside are for one forward pass, and begin side by side when it is
        left. Wait for none of them inside."""
        self._engine.hold_loads()
        try:
            yield
        finally:
            self._engine.release_loads()

    def room(self) -> LoadRoom:
        """What loads could take now without waiting for any before them."""
        return self._engine.load_room()

    def verify(self, lease: Lease) -> VerifyTicket:
        return self._engine.verify(lease)

    def quiesce(self) -> None:
        """Until no copy is queued or running. Blocks."""
        self._engine.quiesce()

    def close(self) -> None:
        """Drop and fail what is not over, wait for copies in progress. Blocks. Idempotent."""
        self._engine.close()
        self._kept.clear()

    def stats(self) -> dict[str, int]:
        """Those of `_core.CopyEngine`, and `device_errors`."""
        return {**self._engine.stats(), "device_errors": self._engine.error_count}

    def set_delay(self, kind: str, layer: int, microseconds: int) -> None:
        self._engine.set_delay(kind, layer, microseconds)

    def fail_next(self, kind: str, count: int) -> None:
        self._engine.fail_next(kind, count)

    def check(self) -> list[str]:
        """Violated invariants, in words; call it while nothing is copied."""
        return self._engine.check()

    def _log_notice(self) -> None:
        if not self._noticed and (notice := self._engine.notice):
            self._noticed = True
            logger.warning("hpkv: %s", notice)

    def _users(self) -> tuple[int, int]:
        return self._streams.current(), self._streams.writers()[0]

    def _keep(self, ticket: StreamSpill | StreamLoad, pages: torch.Tensor) -> None:
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()
        self._kept.append((ticket, pages))


def resident_pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """A copy of the first slot of each page, int64, on the slots' device. Never waits for it."""
    import torch

    return slots[::page_size].to(torch.int64, copy=True).contiguous()
