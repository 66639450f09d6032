"""A device that is not there: streams with real asynchrony over ordinary CPU memory.

Each stream is a thread with a queue. A copy or an operation issued on it runs later, in order, and
takes its bytes when it runs; the host goes on. What is missing between two streams, or between a
stream and the host, therefore shows as wrong bytes. To make it show every time, a test holds a
stream (`hold`), lets everything else run until it is idle or waiting (`settle`), and releases it.

`FakeNpu(skip=...)` leaves one kind of wait out: `("h2d", "forward")` is a wait of stream `h2d` for
an event of stream `forward`; `("host", "d2h")` is a synchronisation of the host with `d2h`. Tests
use it to show that each wait is needed and that they would notice.

Device memory is what `empty` and `adopt` gave out, host memory what `pinned` gave out; operations
check which is which. A device error (`fail_next`) is raised by the call, or, as on a real device,
by the next synchronisation (`break_stream`).

Threads: any. One condition guards the streams' states.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class FakeDeviceError(RuntimeError):
    """What a real device library raises."""


class FakeEvent:
    """A point in a stream."""

    def __init__(self, device: FakeNpu, stream: str) -> None:
        self._device = device
        self.stream = stream
        self.fired = False

    def query(self) -> bool:
        return self.fired

    def synchronize(self) -> None:
        self._device.wait_on_host(self)


class FakeStream:
    """A thread that runs what is enqueued, in order."""

    def __init__(self, device: FakeNpu, name: str) -> None:
        self.name = name
        self._device = device
        self._changed = device.changed
        self._queue: deque[Callable[[], None]] = deque()
        self._held = False
        self._running = False
        self._waits_for: FakeEvent | None = None
        self.error: BaseException | None = None
        self.delay_s = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self._thread.start()

    # ---- what torch's streams have ----

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device, self.name)

        def fire() -> None:
            with self._changed:
                event.fired = True
                self._changed.notify_all()

        self.enqueue(fire)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        if (self.name, event.stream) in self._device.skip:
            return

        def wait() -> None:
            with self._changed:
                self._waits_for = event
                self._changed.notify_all()
                self._changed.wait_for(lambda: event.fired or self._stopped)
                self._waits_for = None

        self.enqueue(wait)

    # ---- for tests ----

    def enqueue(self, operation: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(operation)
            self._changed.notify_all()

    def hold(self) -> None:
        """Start nothing more until `release`; the host may go on enqueueing."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Nothing runs, and nothing will before somebody else acts. With `changed` held."""
        if self._running:
            return self._waits_for is not None and not self._waits_for.fired
        return self._held or not self._queue

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self._queue and not self._held))
                if self._stopped:
                    return
                operation = self._queue.popleft()
                self._running = True
            if self.delay_s:
                threading.Event().wait(self.delay_s)
            try:
                operation()
            except Exception as error:  # noqa: BLE001  # reported by the next synchronisation
                self.error = error
            with self._changed:
                self._running = False
                self._changed.notify_all()


class FakeNpu:
    """What the NPU engine asks of a device. The current stream of a thread is `schedule`, unless
    `on` says otherwise; the model runs on `forward`."""

    def __init__(self, *, skip: Iterable[tuple[str, str]] = (), exchange: Any = None) -> None:
        self.changed = threading.Condition()
        self.skip = frozenset(skip)
        self.exchange = exchange
        self.streams: dict[str, FakeStream] = {}
        self.schedule_stream = self.new_stream("schedule")
        self.forward_stream = self.new_stream("forward")
        self._current = threading.local()
        self._on_device: set[int] = set()
        self._failures: dict[str, int] = {}
        self.issued: Counter[str] = Counter()  # operations, by name

    # ---- streams ----

    def enter_thread(self) -> None:
        """A thread may use this device without."""

    def new_stream(self, name: str) -> FakeStream:
        self.streams[name] = FakeStream(self, name)
        return self.streams[name]

    def current_stream(self) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.schedule_stream)
        return stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # ---- memory ----

    def pinned(self, rows: int, row_bytes: int) -> torch.Tensor:
        return _noise(rows * row_bytes).view(rows, row_bytes)

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor:
        return self.adopt(_noise(rows * row_bytes).view(rows, row_bytes))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """From here on this is device memory."""
        self._on_device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_device

    # ---- operations, on the current stream ----

    def indices(self, pages: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(pages.copy())

    def gather(self, pages: torch.Tensor, indices: torch.Tensor, target: torch.Tensor) -> None:
        assert self.is_device(pages) and self.is_device(target)
        self.compute(lambda: target.copy_(pages[indices]), "gather")

    def scatter(self, source: torch.Tensor, indices: torch.Tensor, pages: torch.Tensor) -> None:
        assert self.is_device(pages) and self.is_device(source)
        self.compute(lambda: pages.index_copy_(0, indices, source), "scatter")

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous()
        assert target.shape == source.shape
        assert self.is_device(target) != self.is_device(source), "one end is on the host"
        self.compute(lambda: target.copy_(source), "copy")

    def compute(self, operation: Callable[[], Any], name: str = "compute") -> None:
        """Enqueue any operation: a kernel of the model, say."""
        if self._failures.get(name, 0):
            self._failures[name] -= 1
            raise FakeDeviceError(f"{name}: injected")
        with self.changed:
            self.issued[name] += 1
        self.current_stream().enqueue(operation)

    # ---- for tests ----

    def fail_next(self, name: str, count: int = 1) -> None:
        """The next `count` calls of `gather`, `scatter` or `copy` raise."""
        self._failures[name] = count

    def break_stream(self, name: str) -> None:
        """What is enqueued on this stream from here on is lost; synchronising with it raises."""

        def lose() -> None:
            raise FakeDeviceError(f"stream {name}: injected")

        self.streams[name].enqueue(lose)

    def wait_on_host(self, event: FakeEvent) -> None:
        """Until `event`; raises what went wrong on its stream. Blocks."""
        if ("host", event.stream) in self.skip:
            return
        with self.changed:
            self.changed.wait_for(lambda: event.fired)
        error = self.streams[event.stream].error
        if error is not None:
            raise FakeDeviceError(str(error)) from error

    def wait_issued(self, name: str, count: int) -> None:
        """Until so many operations of that name have been enqueued, whoever does it. Blocks."""
        with self.changed:
            self.changed.wait_for(lambda: self.issued[name] >= count)

    def settle(self) -> None:
        """Until every stream is idle, held, or waits for an event that nobody is about to record.
        Blocks."""
        with self.changed:
            self.changed.wait_for(lambda: all(s.settled for s in self.streams.values()))

    def close(self) -> None:
        for stream in self.streams.values():
            stream.stop()


def _noise(count: int) -> torch.Tensor:
    """Memory nobody has written: never what a test expects to find there."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8)
