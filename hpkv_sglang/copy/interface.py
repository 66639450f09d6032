"""What the tree needs of a copy engine, whichever device it copies from.

`_core.CopyEngine` is the specification; an engine of another device keeps the same promises. What
differs is what its tickets wait with, a host thread or the device's own stream, and what stands for
pages: indices on the host, or slots that never leave the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpkv_sglang._core import BlockSource, KeyBatch, Lease

PageIndices = npt.NDArray[np.int64]
Pages = Any  # what `Copier.pages_of` of the same engine made: one element per page, may be sliced


class SpillTicket(Protocol):
    """See `_core.SpillTicket`. On streams `wait_device` answers for what is enqueued afterwards."""

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
    """See `_core.LoadTicket`.

    `wait` is True when the bytes are good and whatever is enqueued for the device afterwards finds
    them; False when that is not so, and then nothing of the load writes pages any more. Only on the
    host does it say `done` as well.
    """

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

    def spill(self, keys: KeyBatch, pages: Pages, turn: int = 0, turns: int = 1) -> SpillTicket: ...
    def load(self, lease: Lease, pages: Pages, source: BlockSource | None = None) -> LoadTicket: ...
    def verify(self, lease: Lease) -> VerifyTicket: ...
    def quiesce(self) -> None: ...
    def close(self) -> None: ...
