"""What one direction of copying works with, spills and loads alike.

Immutable; its parts have their own threading rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpkv_sglang._core import CopyEngine
from hpkv_sglang.npu.staging import DeviceHealth, StagingSlots
from hpkv_sglang.npu.streams import DeviceEvent, DeviceStreams
from hpkv_sglang.npu.transfer import LayerPages, PageTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`slots` are this direction's own; `inner` takes the staging area for the device."""

    device: DeviceStreams
    inner: CopyEngine
    layers: tuple[LayerPages, ...]
    transfer: PageTransfer
    slots: StagingSlots
    health: DeviceHealth

    def events_of_users(self, operation: str) -> list[DeviceEvent] | None:
        """Events behind everything enqueued so far by whoever may still use the pages.

        That is the stream that chose them, and the model's. None when the device fails, which is
        the end of `operation` and of all that follow.
        """
        try:
            streams = [self.device.current_stream(), self.device.forward_stream]
            return [stream.record_event() for stream in streams if stream is not None]
        except Exception as error:  # noqa: BLE001  # whatever a device library raises
            self.health.fail(operation, error)
            return None


def start_threads(bodies: Mapping[str, Callable[[], None]]) -> list[threading.Thread]:
    """A daemon thread for each, named after it."""
    threads = [
        threading.Thread(target=body, name=f"hpkv-npu-{name}", daemon=True)
        for name, body in bodies.items()
    ]
    for thread in threads:
        thread.start()
    return threads
