"""Requests that wait for their blocks to be verified, agreed between the ranks of a group.

A request is registered when it enters the queue, at the same moment on every rank. Once per
scheduling step, and only while somebody waits, the ranks agree: a request stops waiting when every
rank is done with it, or when rank 0 says its deadline has passed. Until then SGLang skips this
request and no other. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpkv_sglang._core import VerifyTicket

WAIT_DEADLINE_S = 1.0

# Element-wise minimum over the ranks of a group; the identity when there is one rank.
AgreeMin = Callable[[list[int]], list[int]]


@dataclass(slots=True)
class _Waiting:
    ticket: VerifyTicket | None  # None: this rank has nothing to check
    deadline: float


class WaitingRequests:
    """Who waits, for what, until when. Keys are SGLang's request handles."""

    def __init__(self, agree_min: AgreeMin, *, decides: bool, deadline_s: float = WAIT_DEADLINE_S):
        self._agree_min = agree_min
        self._decides = decides  # rank 0 of the group: its clock decides on deadlines
        self._deadline_s = deadline_s
        self._waiting: dict[object, _Waiting] = {}
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, handle: object, ticket: VerifyTicket | None) -> None:
        self._waiting[handle] = _Waiting(ticket, time.monotonic() + self._deadline_s)

    def drop(self, handle: object) -> None:
        """Forget an aborted request. Its ticket lets its pins go when it is done."""
        self._waiting.pop(handle, None)

    def is_waiting(self, handle: object) -> bool:
        return handle in self._waiting

    def step(self) -> None:
        """One agreement about everybody who waits. Call at the same step on every rank."""
        if not self._waiting:
            return
        now = time.monotonic()
        votes: list[int] = []
        for entry in self._waiting.values():
            votes.append(int(entry.ticket is None or entry.ticket.done))
            votes.append(int(not (self._decides and now > entry.deadline)))
        agreed = self._agree_min(votes)
        for index, handle in enumerate(list(self._waiting)):
            done, in_time = agreed[2 * index], agreed[2 * index + 1]
            if done or not in_time:
                del self._waiting[handle]
                self.expired_count += int(not done)

    def clear(self) -> None:
        self._waiting.clear()
