"""Loads of a rank: queued while a batch is built, started before its forward, waited for by layer.

    room      (scheduler) how many pages of a hit the engine takes at once, beside what is queued:
              what it would wait for is not promised, and computed
    queue     slots are allocated, blocks are pinned by a lease
    start     one batch of copies; the engine brings the first layer of all pages first, on
              streams that of all loads of the batch
    wait      attention asks for layer k of the batch it runs: returns when layer k has landed
              (CPU), or when what the stream does next is enqueued behind its arrival (streams)
    finish    the forward is launched: which requests have, or will have found, all their bytes

A load that could not even be started is a failed load, decided here and reported by `finish`, so
that every rank goes through the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hpkv_sglang._core import LoadRoom
from hpkv_sglang.copy.interface import Engine, LoadTicket, Pages
from hpkv_sglang.radix.runs import Run

NO_BATCH = -1


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """One request's load: the engine's pages and the run whose blocks go there."""

    rid: str
    run: Run | None  # None: this rank lost its blocks; the load fails without being started
    pages: Pages

    def start(self, engine: Engine) -> tuple[LoadTicket, ...] | None:
        if self.run is None:
            return None
        tickets = []
        begin = 0
        for part in self.run.parts:
            pages = self.pages[begin : begin + part.pages]
            tickets.append(engine.load(part.lease, pages, part.source.block))
            begin += part.pages
        return tuple(tickets)

    def release(self) -> None:
        if self.run is not None:
            self.run.release()


@dataclass(frozen=True, slots=True)
class _StartedLoad:
    tickets: tuple[LoadTicket, ...] | None  # None: could not be started
    page_count: int

    def wait(self) -> bool:
        """As `LoadTicket.wait`, of all its parts."""
        if self.tickets is None:
            return False
        landed = [ticket.wait() for ticket in self.tickets]  # each, whether one failed or not
        return all(landed)

    @property
    def over(self) -> bool:
        return all(ticket.done for ticket in self.tickets or ())


class LayerLoads:
    """The `layer_done_counter` SGLang's KV pools wait on, and the loads behind it."""

    def __init__(self, num_layers: int, note_landed: Callable[[int, float], None]) -> None:
        """`note_landed(pages, seconds)` is told of every load that landed."""
        self.num_layers = num_layers
        self.consumer_index = NO_BATCH
        self._next_index = 0
        self._queued: list[QueuedLoad] = []
        self._room: LoadRoom | None = None  # beside what is queued; None: without bound
        self._started: dict[int, dict[str, _StartedLoad]] = {}
        self._landing: list[_StartedLoad] = []  # good, and not told of yet
        self._note_landed = note_landed

    # ---- SGLang's counter interface ----

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """What attention does next finds layer `threshold` of the consumer's loads, or they failed.

        A batch that is finished, and one without loads, is waited for by nobody.
        """
        for load in self._started.get(self.consumer_index, {}).values():
            for ticket in load.tickets or ():
                ticket.wait_layer(threshold)

    # ---- the life of a load ----

    def fit(self, run: Run, make_room: Callable[[], LoadRoom | None]) -> int:
        """Leading pages of `run` that can be loaded beside what is queued, and no host waits."""
        if not self._queued:
            self._room = make_room()
        return run.pages if self._room is None else run.fit(self._room.copy())

    def queue(self, load: QueuedLoad) -> None:
        self._queued.append(load)
        if self._room is not None and load.run is not None:
            load.run.fit(self._room)

    def cancel_queued(self, rid: str) -> bool:
        """Forget a load that has not started; its pins are given back."""
        for index, load in enumerate(self._queued):
            if load.rid == rid:
                del self._queued[index]
                load.release()
                return True
        return False

    def start(
        self, engine: Engine, together: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> int:
        """Start what is queued, side by side where the engine's `together` is given; returns the
        batch's index, `NO_BATCH` when nothing is queued."""
        if not self._queued:
            return NO_BATCH
        queued, self._queued = self._queued, []
        index, self._next_index = self._next_index, self._next_index + 1
        with together():
            self._started[index] = {
                load.rid: _StartedLoad(load.start(engine), len(load.pages)) for load in queued
            }
        return index

    def finish(self, index: int) -> dict[str, bool]:
        """Wait as `LoadTicket.wait` does for batch `index`; rid -> its bytes are good."""
        landed = {}
        for rid, load in self._started.get(index, {}).items():
            landed[rid] = load.wait()
            if landed[rid]:
                self._landing.append(load)
        self._started.pop(index, None)
        self._note_times()
        return landed

    def _note_times(self) -> None:
        """Tell of the loads that are over: on streams, some time after their batch was launched."""
        landing, self._landing = self._landing, []
        for load in landing:
            if load.over:
                self._note_landed(load.page_count, max(t.elapsed_s for t in load.tickets or ()))
            else:
                self._landing.append(load)

    @property
    def pending(self) -> bool:
        return bool(self._queued or self._started)

    def reset(self) -> None:
        """Wait for what is started, forget what is queued."""
        for load in self._queued:
            load.release()
        self._queued.clear()
        for index in list(self._started):
            self.finish(index)
        self.consumer_index = NO_BATCH
