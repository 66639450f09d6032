"""What the threads of an NPU engine share: staging slots, the device's health, injected faults.

Threads: any, each class has its own lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable

logger = logging.getLogger(__name__)


class StagingSlots:
    """Blocks of the staging area that are free. A slot has one owner between take and give."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self.count = len(self._free)
        self._closed = False
        self._changed = threading.Condition()

    def take(self, at_least: int, at_most: int) -> list[int]:
        """As many slots as are free, `at_least` of them; none once closed. Blocks."""
        assert at_least <= min(at_most, self.count)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._free) >= at_least)
            if self._closed:
                return []
            taken, self._free = self._free[:at_most], self._free[at_most:]
            return taken

    def give(self, slots: Iterable[int]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait for a slot."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> list[str]:
        """Violated invariants, in words."""
        with self._changed:
            if len(set(self._free)) != len(self._free) or len(self._free) > self.count:
                return [f"free slots {sorted(self._free)} of {self.count}"]
            return []


class DeviceHealth:
    """Whether the device still does what it is told. One failure is the end: its streams may be in
    any state, so nothing is sent to it any more, and all is answered as failed or dropped."""

    def __init__(self) -> None:
        self.error_count = 0
        self._lock = threading.Lock()

    @property
    def poisoned(self) -> bool:
        return self.error_count != 0

    def fail(self, operation: str, error: BaseException) -> None:
        """Count; log the first one."""
        with self._lock:
            self.error_count += 1
            first = self.error_count == 1
        if first:
            logger.error(
                "hpkv: a %s between device and staging area failed: %r. The tiers answer 'miss' "
                "on this rank from here on; restart the server to use them again.",
                operation,
                error,
                exc_info=error,
            )


class InjectedFaults:
    """Fault injection of one kind: delays in microseconds by layer (-1: all), failures to come."""

    def __init__(self) -> None:
        self.delay_us: Counter[int] = Counter()
        self._failures = 0
        self._lock = threading.Lock()

    def fail_next(self, count: int) -> None:
        with self._lock:
            self._failures = count

    def take_failure(self) -> bool:
        """Whether the ticket being submitted is to fail; counts it."""
        with self._lock:
            failing = self._failures > 0
            self._failures -= failing
            return failing


class JobCount:
    """How much work a pipeline has, for `quiesce` and for the bound of its queue."""

    def __init__(self) -> None:
        self._jobs = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._jobs += 1

    def finish(self) -> None:
        with self._changed:
            self._jobs -= 1
            self._changed.notify_all()

    def wait_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs == 0)
