"""The fence: a freed slot is not written while a spill may still publish what it reads there.

Spills take no lock on the tree, so an eviction may free slots that a copy is still reading. Before
anything writes device memory (a forward, a load) `settle` is called:

    nothing was freed since the last time      ->  return, whatever is in flight
    copies in flight                           ->  wait, at most the budget
    still in flight when the budget is spent   ->  cancel: what was not published yet never will be

A cancelled copy may go on reading for a moment; it checks the cancellation after its last read and
before it publishes, so torn bytes are dropped. Hence the scheduler never waits longer than the
budget, and a slow spill costs a later recompute, not a stall. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections import deque

from hpkv_sglang.copy.interface import SpillTicket

WAIT_BUDGET_S = 0.05
# A flush or a weight update gives spills a little longer: what they store is not lost by it.
DRAIN_BUDGET_S = 1.0


class SpillFence:
    """Spills in flight, oldest first, and whether slots were freed since the last settlement."""

    def __init__(self, wait_budget_s: float = WAIT_BUDGET_S) -> None:
        self.wait_budget_s = wait_budget_s
        self.cancelled_count = 0
        self._in_flight: deque[SpillTicket] = deque()
        self._slots_freed = False

    def note_spill(self, ticket: SpillTicket) -> None:
        while self._in_flight and self._in_flight[0].device_done:
            self._in_flight.popleft()
        self._in_flight.append(ticket)

    def note_freed(self) -> None:
        self._slots_freed = True

    def settle(self) -> None:
        """Make every freed slot safe to write. Waits at most `wait_budget_s`."""
        if self._slots_freed:
            self.drain(self.wait_budget_s)

    def drain(self, budget_s: float = DRAIN_BUDGET_S) -> None:
        """No copy publishes what it reads from here on. Waits at most `budget_s`."""
        self._slots_freed = False
        deadline = time.monotonic() + budget_s
        while self._in_flight:
            ticket = self._in_flight.popleft()
            if ticket.device_done or ticket.wait_device(max(0.0, deadline - time.monotonic())):
                continue
            ticket.cancel()
            self.cancelled_count += 1
