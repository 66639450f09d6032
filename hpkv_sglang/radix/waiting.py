"""Requests that wait for their blocks to be verified or read from disk, agreed between the ranks.

A request is registered when it enters the queue, at the same moment on every rank. Once per
scheduling step, and only while somebody waits, the ranks agree: a request stops waiting when every
rank is done with it, or when one that is not says that its own deadline has passed: a rank with
nothing to do cuts nobody short. Until then SGLang skips this request and no other. Scheduler
thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

VERIFY_DEADLINE_S = 1.0


class Ticket(Protocol):
    """Background work on behalf of a request."""

    @property
    def done(self) -> bool: ...


# Element-wise minimum over the ranks of a group; the identity when there is one rank.
AgreeMin = Callable[[list[int]], list[int]]


@dataclass(slots=True)
class _Waiting:
    tickets: tuple[Ticket, ...]  # empty: this rank has nothing to do
    deadline: float

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    def votes(self, now: float) -> tuple[int, int]:
        """(this rank is done, this rank can go on waiting)."""
        done = self.done
        return int(done), int(done or now <= self.deadline)


class WaitingRequests:
    """Who waits, for what, until when. Keys are SGLang's request handles."""

    def __init__(self, agree_min: AgreeMin):
        self._agree_min = agree_min
        self._waiting: dict[Any, _Waiting] = {}
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, handle: object, tickets: tuple[Ticket, ...], deadline_s: float) -> None:
        self._waiting[handle] = _Waiting(tickets, time.monotonic() + deadline_s)

    def drop(self, handle: object) -> None:
        """Forget an aborted request. Its tickets let their pins go when they are done."""
        self._waiting.pop(handle, None)

    def is_waiting(self, handle: object) -> bool:
        return handle in self._waiting

    def step(self) -> list[Any]:
        """One agreement about everybody who waits; returns who stopped waiting.

        Call at the same step on every rank.
        """
        if not self._waiting:
            return []
        now = time.monotonic()
        agreed = self._agree_min([vote for w in self._waiting.values() for vote in w.votes(now)])
        settled = []
        for index, handle in enumerate(list(self._waiting)):
            done, in_time = agreed[2 * index], agreed[2 * index + 1]
            if done or not in_time:
                del self._waiting[handle]
                self.expired_count += int(not done)
                settled.append(handle)
        return settled

    def clear(self) -> None:
        self._waiting.clear()
