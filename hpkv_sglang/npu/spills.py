"""Spills of an NPU engine: device pages into staging blocks, staging blocks into the pool.

    submit   caller     events on the streams that may still write the pages; queues; never waits
    read     thread 1   takes free slots, enqueues the copies behind those events, waits for them:
                        from here on the pages may be reused (`device_done`)
    store    thread 2   the core's engine checksums and publishes the slots; then they are free

What is in the pool already is not read. A ticket of more pages than there are slots goes in
batches, as slots come free. Two bounds: the slots, and the pages that may wait in the queue; what
does not fit there is dropped and counted.

Threads: `submit` from any thread; the rest is private to the two threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from hpkv_sglang._core import KeyBatch, Pool, SpillTicket
from hpkv_sglang.npu.lane import Lane, start_threads
from hpkv_sglang.npu.staging import InjectedFaults, JobCount
from hpkv_sglang.npu.streams import DeviceEvent, PageIndices
from hpkv_sglang.npu.tickets import StagedSpill

QUEUED_PAGES_MAX = 1 << 20


@dataclass(slots=True)
class _Job:
    """One ticket. `keys` and `pages` are in the order in which they are to be stored."""

    ticket: StagedSpill
    keys: KeyBatch
    pages: PageIndices
    after: list[DeviceEvent]
    recency: KeyBatch  # head to tail
    turns: tuple[int, int]
    stored: int = 0
    present: int = 0
    batch_count: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pages of a job whose bytes are in `slots`; the last one of a job has none."""

    job: _Job
    keys: KeyBatch | None = None
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SpillCounts:
    """Pages that never reached the core's engine. Written by one thread each."""

    present: int = 0
    dropped_queue: int = 0
    dropped_cancelled: int = 0
    queued: int = 0


class StagedSpills:
    """Both threads and what they share. `close` before the core's engine is closed."""

    def __init__(self, lane: Lane, pool: Pool) -> None:
        self._lane = lane
        self._pool = pool
        self._stream = lane.device.new_stream("d2h")
        self.faults = InjectedFaults()
        self.counts = SpillCounts()
        self.jobs = JobCount()
        self._lock = threading.Lock()  # counts, and whether the queue is open
        self._closed = False
        self._open_tickets: set[StagedSpill] = set()
        self._to_read: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_store: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = start_threads({"read": self._read_all, "store": self._store_all})

    # ---- callers ----

    def submit(self, keys: KeyBatch, pages: PageIndices, turn: int, turns: int) -> StagedSpill:
        """Queue and return."""
        ticket = StagedSpill(len(pages))
        if ticket.done:
            return ticket
        failing = self.faults.take_failure() or self._lane.health.poisoned
        after = None if failing else self._lane.events_of_users("spill")
        order = _turn_order(len(pages), turn, turns)
        job = _Job(ticket, _reordered(keys, order), pages[order], after or [], keys, (turn, turns))
        with self._lock:
            full = self.counts.queued + len(pages) > QUEUED_PAGES_MAX
            if after is not None and not full and not self._closed:
                self.counts.queued += len(pages)
                self.jobs.add()
                self._open_tickets.add(ticket)
                self._to_read.put(job)
                return ticket
            if full:
                self.counts.dropped_queue += len(pages)
            else:
                self.counts.dropped_cancelled += len(pages)
        ticket.finish(stored=0, present=0, dropped=len(pages))
        return ticket

    def close(self) -> None:
        """Drop what is not read, finish what is. Blocks. Later submissions are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._to_read.put(None)
            tickets = list(self._open_tickets)
        for ticket in tickets:
            ticket.cancel()
        self._lane.slots.close()
        for thread in self._threads:
            thread.join()

    def check(self) -> list[str]:
        return self._lane.slots.check()

    # ---- the reading thread ----

    def _read_all(self) -> None:
        self._lane.device.enter_thread()
        while (job := self._to_read.get()) is not None:
            try:
                for first, end in self._absent_runs(job):
                    self._read_run(job, first, end)
            except Exception as error:  # noqa: BLE001  # a bug of ours must not end this thread
                self._lane.health.fail("spill", error)
            with self._lock:
                self.counts.queued -= len(job.pages)
            self._to_store.put(_Batch(job))
        self._to_store.put(None)

    def _absent_runs(self, job: _Job) -> Iterator[tuple[int, int]]:
        """Half-open runs of pages that are not in the pool, as long as slots allow."""
        first, count = 0, len(job.pages)
        while first < count:
            present = self._pool.lookup(job.keys[first:count])
            if present:
                job.present += present
                self._count_present(present)
                job.ticket.pass_over(present)
                first += present
                continue
            end = first + 1
            while end < min(count, first + self._lane.slots.count) and not self._pool.lookup(
                job.keys[end : end + 1]
            ):
                end += 1
            yield first, end
            first = end

    def _read_run(self, job: _Job, first: int, end: int) -> None:
        """Read pages `[first, end)` in as many batches as free slots make it, or drop them."""
        while first < end:
            self._delay(job)
            # Half of the slots are read into while the other half is stored.
            half = max(1, self._lane.slots.count // 2)
            slots = self._lane.slots.take(min(half, end - first), end - first)
            if not slots or self._lane.health.poisoned or not job.ticket.begin_read():
                self._lane.slots.give(slots)
                break
            count = len(slots)
            landed = self._read_batch(job, first, slots)
            if job.ticket.end_read(count) and landed:
                job.batch_count += 1
                self._to_store.put(_Batch(job, job.keys[first : first + count], slots))
            else:
                self._lane.slots.give(slots)
                self._count_dropped(count)
            first += count
        self._count_dropped(end - first)
        job.ticket.pass_over(end - first)

    def _read_batch(self, job: _Job, first: int, slots: list[int]) -> bool:
        """Copy one batch and wait until the device is through with it."""
        try:
            with self._lane.device.on(self._stream):
                for event in job.after:
                    self._stream.wait_event(event)
                pages = self._lane.transfer.prepare(job.pages[first : first + len(slots)])
                for number, layer in enumerate(self._lane.layers):
                    self._lane.transfer.to_host(layer, pages, slots)
                    if self.faults.delay_us[number]:
                        time.sleep(self.faults.delay_us[number] / 1e6)
                read = self._stream.record_event()
            read.synchronize()
        except Exception as error:  # noqa: BLE001  # whatever a device library raises
            self._lane.health.fail("spill", error)
            return False
        return True

    def _delay(self, job: _Job) -> None:
        if self.faults.delay_us[-1]:
            job.ticket.sleep(self.faults.delay_us[-1] / 1e6)

    # ---- the storing thread ----

    def _store_all(self) -> None:
        while (batch := self._to_store.get()) is not None:
            if batch.keys is None:
                self._finish(batch.job)
                continue
            try:
                stored = self._spill(batch.job, batch.keys, np.asarray(batch.slots, dtype=np.int64))
                stored.wait()
                batch.job.stored += stored.stored
                batch.job.present += stored.present
            except Exception as error:  # noqa: BLE001  # a bug of ours must not end this thread
                self._lane.health.fail("spill", error)
            self._lane.slots.give(batch.slots)

    def _spill(self, job: _Job, keys: KeyBatch, slots: PageIndices) -> SpillTicket:
        turn, turns = job.turns
        if turns == 1:
            return self._lane.inner.spill(keys, slots)
        # In order already; the core's engine is told so that it counts what others write.
        return self._lane.inner.spill(keys, slots, turn, turns)

    def _finish(self, job: _Job) -> None:
        # Within a batch the tail is older than the head and goes first; batches, and pages that
        # were there already, need the run stamped again as a whole.
        if job.batch_count > 1 or job.present or job.turns[1] > 1:
            try:
                self._pool.touch(job.recency)
            except Exception as error:  # noqa: BLE001  # a bug of ours must not end this thread
                self._lane.health.fail("spill", error)
        dropped = len(job.pages) - job.stored - job.present
        job.ticket.finish(stored=job.stored, present=job.present, dropped=dropped)
        with self._lock:
            self._open_tickets.discard(job.ticket)
        self.jobs.finish()

    # ---- counts ----

    def _count_present(self, pages: int) -> None:
        with self._lock:
            self.counts.present += pages

    def _count_dropped(self, pages: int) -> None:
        with self._lock:
            self.counts.dropped_cancelled += pages


def _turn_order(count: int, turn: int, turns: int) -> PageIndices:
    """What to store first: pages `turn`, `turn + turns`, ..., then those of the next turn, ..."""
    return np.concatenate([np.arange((turn + k) % turns, count, turns) for k in range(turns)])


def _reordered(keys: KeyBatch, order: PageIndices) -> KeyBatch:
    rows = np.frombuffer(bytes(keys), dtype=np.uint8).reshape(-1, 32)
    return KeyBatch.from_bytes(rows[order].tobytes())
