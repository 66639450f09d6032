"""What the tree needs of a copy engine, whichever device it copies from.

`_core.CopyEngine` is the specification; an engine of another device keeps the same promises. What
differs is only what `LoadTicket.wait_layer` waits with: a host thread, or the device's own stream.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpkv_sglang._core import BlockSource, KeyBatch, Lease

PageIndices = npt.NDArray[np.int64]


class SpillTicket(Protocol):
    """See `_core.SpillTicket`."""

    @property
    def device_done(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def stored(self) -> int: ...
    def wait_device(self, timeout_s: float) -> bool: ...
    def wait(self) -> None: ...
    def cancel(self) -> None: ...


class LoadTicket(Protocol):
    """See `_core.LoadTicket`."""

    @property
    def done(self) -> bool: ...
    @property
    def elapsed_s(self) -> float: ...
    def wait_layer(self, layer: int) -> None: ...
    def wait(self) -> bool: ...


class VerifyTicket(Protocol):
    """See `_core.VerifyTicket`."""

    @property
    def done(self) -> bool: ...


class Engine(Protocol):
    """See `_core.CopyEngine`."""

    def spill(
        self, keys: KeyBatch, pages: PageIndices, turn: int = 0, turns: int = 1
    ) -> SpillTicket: ...
    def load(
        self, lease: Lease, pages: PageIndices, source: BlockSource | None = None
    ) -> LoadTicket: ...
    def verify(self, lease: Lease) -> VerifyTicket: ...
    def quiesce(self) -> None: ...
    def close(self) -> None: ...
