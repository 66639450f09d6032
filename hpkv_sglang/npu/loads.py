"""Loads of an NPU engine: the pool into staging blocks, staging blocks onto the device, by layers.

    submit   caller     events on the streams that may still use the target pages; queues
    copy     thread 1   the core's engine checks and copies blocks into slots; as each layer has
                        landed there, its copies onto the device are enqueued behind those events
    finish   thread 2   waits for the device; only then are the slots free, and the ticket is done

A load that fits the staging area goes as one batch, so its first layer is on the device while the
last ones are still in the pool. A larger one goes in batches of half the area, and its layers are
enqueued for good with the last batch.

No deadlock: the forward that waits for a load runs after the events the load waits for, and slots
come free by device work that is enqueued already.

Threads: `submit` from any thread; the rest is private to the two threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from hpkv_sglang._core import Lease, LoadTicket
from hpkv_sglang.npu.lane import Lane, start_threads
from hpkv_sglang.npu.staging import InjectedFaults, JobCount
from hpkv_sglang.npu.streams import DeviceEvent, PageIndices
from hpkv_sglang.npu.tickets import StagedLoad

if TYPE_CHECKING:
    from hpkv_sglang._core import BlockSource

TICKETS_MAX = 4096


@dataclass(slots=True)
class _Job:
    ticket: StagedLoad
    lease: Lease
    pages: PageIndices
    source: BlockSource | None
    after: list[DeviceEvent]


@dataclass(frozen=True, slots=True)
class _Used:
    """Slots that the device reads until `event`; with a job, that job's last work."""

    event: DeviceEvent | None
    slots: list[int] = field(default_factory=list)
    job: _Job | None = None


class StagedLoads:
    """Both threads and what they share. Close the core's engine first: that ends its tickets."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._stream = lane.device.new_stream("h2d")
        self.faults = InjectedFaults()
        self.jobs = JobCount()
        self.ticket_count = 0
        self.failed_count = 0
        self._lock = threading.Lock()  # counts, and whether the queue is open
        self._closed = False
        self._open_tickets: set[StagedLoad] = set()
        self._to_copy: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_finish: SimpleQueue[_Used | None] = SimpleQueue()
        self._threads = start_threads({"load": self._copy_all, "land": self._finish_all})

    # ---- callers ----

    def submit(self, lease: Lease, pages: PageIndices, source: BlockSource | None) -> StagedLoad:
        """Queue and return. The ticket takes the lease over; an empty one fails it."""
        ticket = StagedLoad(self._lane.device, len(self._lane.layers))
        failing = self.faults.take_failure() or self._lane.health.poisoned
        failing = failing or (lease.count == 0 and len(pages) > 0)
        after = None if failing else self._lane.events_of_users("load")
        with self._lock:
            self.ticket_count += 1
            if len(pages) == 0:
                ticket.finish()
                return ticket
            if after is not None and not self._closed and len(self._open_tickets) < TICKETS_MAX:
                self._open_tickets.add(ticket)
                self.jobs.add()
                # All pins in an object of ours: the caller's lease is empty from here on.
                mine = lease.take(lease.count)
                self._to_copy.put(_Job(ticket, mine, pages.copy(), source, after))
                return ticket
            self.failed_count += 1
        lease.release()
        ticket.fail()
        ticket.finish()
        return ticket

    def fail_all(self) -> None:
        """Fail what is not over and end its waits; later submissions fail."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._to_copy.put(None)
            tickets = list(self._open_tickets)
        for ticket in tickets:
            ticket.fail()
        self._lane.slots.close()

    def close(self) -> None:
        """Wait for copies in progress. Blocks. `fail_all` before it."""
        for thread in self._threads:
            thread.join()

    def check(self) -> list[str]:
        return self._lane.slots.check()

    # ---- the copying thread ----

    def _copy_all(self) -> None:
        self._lane.device.enter_thread()
        while (job := self._to_copy.get()) is not None:
            landed = False
            try:
                landed = self._copy(job)
            except Exception as error:  # noqa: BLE001  # whatever a device library raises
                self._lane.health.fail("load", error)
            job.lease.release()
            if not landed:
                job.ticket.fail()
            self._to_finish.put(_Used(self._enqueued_so_far(), job=job))
        self._to_finish.put(None)

    def _enqueued_so_far(self) -> DeviceEvent | None:
        try:
            event: DeviceEvent = self._stream.record_event()
        except Exception as error:  # noqa: BLE001  # whatever a device library raises
            self._lane.health.fail("load", error)
            return None
        return event

    def _copy(self, job: _Job) -> bool:
        """Enqueue all of a load; False as soon as it cannot succeed any more."""
        for event in job.after:
            self._stream.wait_event(event)
        count = len(job.pages)
        size = count if count <= self._lane.slots.count else max(1, self._lane.slots.count // 2)
        per_page = 1 if job.source is None else job.source.blocks_per_page
        for first in range(0, count, size):
            pages = job.pages[first : first + size]
            slots = self._lane.slots.take(len(pages), len(pages))
            if not slots or job.ticket.failed or self._lane.health.poisoned:
                self._lane.slots.give(slots)
                return False
            part = job.lease.take(len(pages) * per_page)
            if not self._copy_batch(job, part, pages, slots, is_last=first + size >= count):
                return False
        return True

    def _copy_batch(
        self, job: _Job, lease: Lease, pages: PageIndices, slots: list[int], *, is_last: bool
    ) -> bool:
        """One batch, layer by layer. Gives the slots on to the finishing thread, come what may."""
        where = np.asarray(slots, dtype=np.int64)
        if job.source is None:
            inner = self._lane.inner.load(lease, where)
        else:
            inner = self._lane.inner.load(lease, where, job.source)
        try:
            with self._lane.device.on(self._stream):
                indices = self._lane.transfer.prepare(pages)
                for number, layer in enumerate(self._lane.layers):
                    inner.wait_layer(number)
                    if _has_failed(inner) or job.ticket.failed:
                        break
                    self._lane.transfer.to_device(layer, indices, slots)
                    if is_last:
                        job.ticket.enqueued(number, self._stream.record_event())
        finally:
            # Until then the core's engine writes the slots, and holds the pins.
            landed = inner.wait()
            self._to_finish.put(_Used(self._enqueued_so_far(), slots))
        return landed

    # ---- the finishing thread ----

    def _finish_all(self) -> None:
        self._lane.device.enter_thread()
        while (used := self._to_finish.get()) is not None:
            try:
                if used.event is not None:
                    used.event.synchronize()
            except Exception as error:  # noqa: BLE001  # whatever a device library raises
                self._lane.health.fail("load", error)
            self._lane.slots.give(used.slots)
            if used.job is not None:
                self._finish(used.job)

    def _finish(self, job: _Job) -> None:
        if self._lane.health.poisoned:
            job.ticket.fail()
        with self._lock:
            self._open_tickets.discard(job.ticket)
            self.failed_count += job.ticket.failed
        job.ticket.finish()
        self.jobs.finish()


def _has_failed(inner: LoadTicket) -> bool:
    return inner.done and not inner.ok
