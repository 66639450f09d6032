"""Blocks on their way from disk to the host pool, for requests that wait in the queue.

    start     a request enters the queue: its whole tail is handed to the promoter, which pins what
              the host pool has and reads what only the disk has, head to tail
    settle    the wait is over (done, or the deadline): nothing more is read for this request; how
              many tokens came from disk is kept for SGLang's report
    release   the load took over, or there is none: the pins may go. A batch that is full keeps an
              admitted request out for a while, and what was read for it is not to be evicted then

Scheduler thread only; nothing here blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hpkv_sglang._core import KeyBatch, Pool, PromoteTicket, Store
from hpkv_sglang.config import PromotePolicy
from hpkv_sglang.radix.worth import LoadEconomy

WAIT_COMPLETE_CAP_S = 60.0
# Bounds of `timeout`, which lies where computing the tokens would be done.
TIMEOUT_MIN_S = 0.25
TIMEOUT_MAX_S = 10.0
TIMEOUT_UNKNOWN_S = 2.0  # nothing was computed yet
KEEP_S = 10.0  # how long a settled request may take to be loaded before its pins go


class Wanted(NamedTuple):
    """Blocks of one source that a request could use, head first; `namespace`: the pool's number.

    The first `present` of them are in the host pool and are pinned again with the rest.
    """

    namespace: int
    blocks_per_page: int
    keys: KeyBatch
    present: int = 0


@dataclass(slots=True)
class _Promotion:
    ticket: PromoteTicket
    missing: KeyBatch  # were on disk only when it began
    blocks_per_page: int
    settled_at: float | None = None


class Promotions:
    """The promotions of one rank, by request id."""

    def __init__(
        self, store: Store, pool: Pool, policy: PromotePolicy, economy: LoadEconomy
    ) -> None:
        self._store = store
        self._pool = pool
        self._policy = policy
        self._economy = economy
        self._running: dict[str, _Promotion] = {}
        self._from_disk: dict[str, int] = {}

    def start(self, rid: str, wanted: Iterable[Wanted]) -> PromoteTicket | None:
        """Begin to read blocks of the source of which the disk has the most pages; None: of none.

        Of several with as many, the first.
        """
        self.forget(rid)
        best, most = None, 0
        for each in wanted:
            pages = self.reach(each.keys[each.present :]) // each.blocks_per_page
            if pages > most:
                best, most = each, pages
        if best is None:
            return None
        end = best.present + most * best.blocks_per_page
        ticket = self._store.promote(best.namespace, best.keys[:end])
        missing = best.keys[best.present : end]
        self._running[rid] = _Promotion(ticket, missing, best.blocks_per_page)
        return ticket

    def reach(self, keys: KeyBatch) -> int:
        """Length of the leading run of blocks that the host pool or the disk has."""
        return self._store.lookup(keys)

    def deadline_s(self, pages: int) -> float:
        """How long a request may wait for `pages` pages."""
        if self._policy is PromotePolicy.BEST_EFFORT:
            return 0.0
        if self._policy is PromotePolicy.WAIT_COMPLETE:
            return WAIT_COMPLETE_CAP_S
        compute_s = self._economy.compute_s(pages)
        if compute_s is None:
            return TIMEOUT_UNKNOWN_S
        return min(max(compute_s, TIMEOUT_MIN_S), TIMEOUT_MAX_S)

    def settle(self, rid: str) -> None:
        """The request waits no longer."""
        promotion = self._running.get(rid)
        if promotion is None:
            return
        promotion.ticket.cancel()
        promotion.settled_at = time.monotonic()
        # Whoever read them: ranks that hold the same bytes read them for each other.
        came = self._pool.lookup(promotion.missing)
        self._from_disk[rid] = came // promotion.blocks_per_page

    def take_from_disk(self, rid: str) -> int:
        """Pages that came from disk for this request, told once."""
        return self._from_disk.pop(rid, 0)

    def release_settled(self, rid: str) -> None:
        """Let the ticket's pins go once the wait is over; before that, nothing."""
        promotion = self._running.get(rid)
        if promotion is not None and promotion.settled_at is not None:
            promotion.ticket.release()
            del self._running[rid]

    def release_old(self) -> None:
        """Let pins go that nobody came for in time. Costs nothing while there are none."""
        if not self._running:
            return
        oldest = time.monotonic() - KEEP_S
        for rid, promotion in list(self._running.items()):
            if promotion.settled_at is not None and promotion.settled_at < oldest:
                self.release_settled(rid)

    def forget(self, rid: str) -> None:
        """The request is gone: stop reading, let the pins go."""
        self._from_disk.pop(rid, None)
        promotion = self._running.pop(rid, None)
        if promotion is not None:
            promotion.ticket.cancel()
            promotion.ticket.release()

    def clear(self) -> None:
        for rid in list(self._running):
            self.forget(rid)
        self._from_disk.clear()
