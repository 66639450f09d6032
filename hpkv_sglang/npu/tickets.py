"""Tickets of the NPU engine: the same promises as `_core.SpillTicket` and `_core.LoadTicket`.

Callers (any thread) poll or wait; the engine's threads report progress. One condition per ticket
guards all its fields. What a ticket says only becomes true: `done` follows when everything that it
pinned is given back.
"""

from __future__ import annotations

import threading
import time

from hpkv_sglang.npu.streams import DeviceEvent, DeviceStreams


class StagedSpill:
    """A spill on its way: device pages into staging blocks, and from there into the pool."""

    def __init__(self, page_count: int) -> None:
        self._changed = threading.Condition()
        self._unread = page_count  # neither read nor passed over
        self._reading = 0
        self._cancelled = False
        self.done = page_count == 0
        self.stored = 0
        self.present = 0
        self.dropped = 0

    # ---- callers ----

    @property
    def device_done(self) -> bool:
        """True once no copy of this ticket reads device memory any more."""
        with self._changed:
            return self._reads_over()

    def wait_device(self, timeout_s: float) -> bool:
        """`device_done`, waiting for it at most that long. Blocks."""
        with self._changed:
            return self._changed.wait_for(self._reads_over, max(0.0, timeout_s))

    def wait(self) -> None:
        """Until done. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self.done)

    def cancel(self) -> None:
        """From its return on nothing read from device memory is published. Never waits for a copy.

        Pages not started are not read; pages being read are dropped when the device is through.
        """
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # ---- the engine's threads ----

    def begin_read(self) -> bool:
        """Before the first copy of a batch; False once cancelled: it must be dropped, unread."""
        with self._changed:
            if not self._cancelled:
                self._reading += 1
            return not self._cancelled

    def end_read(self, pages: int) -> bool:
        """When the device is through; False when a cancellation came in between."""
        with self._changed:
            self._reading -= 1
            self._unread -= pages
            self._changed.notify_all()
            return not self._cancelled

    def pass_over(self, pages: int) -> None:
        """These are not going to be read."""
        with self._changed:
            self._unread -= pages
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """For that long, or until cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled, seconds)

    def finish(self, *, stored: int, present: int, dropped: int) -> None:
        with self._changed:
            self.stored, self.present, self.dropped = stored, present, dropped
            self.done = True
            self._unread = 0
            self._changed.notify_all()

    def _reads_over(self) -> bool:
        return self._reading == 0 and (self._cancelled or self._unread == 0)


class StagedLoad:
    """A load on its way: pool into staging blocks, and from there onto the device, by layers."""

    def __init__(self, device: DeviceStreams, layer_count: int) -> None:
        self._device = device
        self._layer_count = layer_count
        self._changed = threading.Condition()
        self._events: dict[int, DeviceEvent] = {}  # by layer, once all its copies are enqueued
        self._failed = False
        self._submitted = time.monotonic()
        self.elapsed_s = 0.0
        self.done = False

    # ---- callers ----

    @property
    def ok(self) -> bool:
        """Everything landed; False while not done."""
        return self.done and not self._failed

    def layer_done(self, layer: int) -> bool:
        """The layer has landed for every page, or the ticket has failed and nobody writes it."""
        self._check_layer(layer)
        if self.done:
            return True
        event = self._events.get(layer)
        return event is not None and event.query()

    def wait_layer(self, layer: int) -> None:
        """What the calling thread enqueues from here on finds the layer landed. IndexError.

        Waits on the host only until the copies of that layer are enqueued; then the current stream
        waits for them on the device. Returns at once when the ticket has failed. A load larger
        than the staging area enqueues its layers with its last pages.
        """
        self._check_layer(layer)
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self.done or layer in self._events)
            event = self._events.get(layer)
        if event is not None and not self.done:
            self._device.current_stream().wait_event(event)

    def wait(self) -> bool:
        """Until nothing of this ticket writes device memory and its pins are given back; True when
        all landed. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self.done)
        return self.ok

    # ---- the engine's threads ----

    @property
    def failed(self) -> bool:
        return self._failed

    def enqueued(self, layer: int, event: DeviceEvent) -> None:
        """Every copy of the layer is before `event`."""
        with self._changed:
            self._events[layer] = event
            self._changed.notify_all()

    def fail(self) -> None:
        """Ends waits for layers at once; what is enqueued runs to its end."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """After the last copy, and after the pins are given back."""
        with self._changed:
            self.elapsed_s = time.monotonic() - self._submitted
            self.done = True
            self._changed.notify_all()

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self._layer_count:
            raise IndexError(f"layer {layer} is not in [0, {self._layer_count})")
