"""The longest run of pages that the host pool has for a prompt, pinned, whoever wrote them.

A run is a few parts, each from one source; the own namespace goes first at every step. Scheduler
thread only; each pin waits 1 ms at most (see `Pool.pin`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpkv_sglang._core import KeyBatch, Lease, LoadRoom, Pool
from hpkv_sglang.radix.lookup import Tail
from hpkv_sglang.radix.sources import Source, Sources

# A prefix written by turns of several servers is cut at so many seams.
PARTS_MAX = 4


@dataclass(slots=True)
class Part:
    """`pages` pages in a row whose blocks `lease` pins, page by page."""

    source: Source
    lease: Lease
    pages: int

    @property
    def verified_pages(self) -> int:
        return min(self.pages, self.lease.verified_count // self.source.blocks_per_page)

    def keep(self, pages: int) -> None:
        """Unpin what lies behind the first `pages` pages."""
        self.pages = min(self.pages, pages)
        self.lease.keep(self.pages * self.source.blocks_per_page)


@dataclass(slots=True)
class Run:
    """Consecutive pages, head first."""

    parts: list[Part] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return sum(part.pages for part in self.parts)

    @property
    def verified_pages(self) -> int:
        """Leading pages all of whose blocks were checked in this epoch."""
        total = 0
        for part in self.parts:
            verified = part.verified_pages
            total += verified
            if verified < part.pages:
                break
        return total

    @property
    def is_own(self) -> bool:
        """Nothing in it comes from another namespace."""
        return all(part.source.block is None for part in self.parts)

    def fit(self, room: LoadRoom) -> int:
        """Leading pages that fit into `room`; takes off what they need."""
        total = 0
        for part in self.parts:
            fitting = room.take(part.lease, part.source.block)
            total += fitting
            if fitting < part.pages:
                break
        return total

    def keep(self, pages: int) -> None:
        """Unpin what lies behind the first `pages` pages."""
        kept: list[Part] = []
        for part in self.parts:
            part.keep(pages)
            pages -= part.pages
            if part.pages:
                kept.append(part)
        self.parts = kept

    def release(self) -> None:
        for part in self.parts:
            part.lease.release()
        self.parts = []


def find_run(pool: Pool, sources: Sources, tail: Tail) -> Run:
    """Pin the leading pages of `tail` that the pool has."""
    first = _pinned(pool, sources.own, tail.own_keys())
    run = Run([] if first is None else [first])
    own_is_next = False  # the run ends where the own namespace does
    while run.pages < len(tail) and len(run.parts) < PARTS_MAX and sources.foreign():
        part = _pinned(pool, sources.own, tail.own_keys(run.pages)) if own_is_next else None
        part = part or _longest_foreign(pool, sources, tail, run.pages)
        if part is None:
            break
        own_is_next = part.source.block is not None
        run.parts.append(part)
    return run


def _pinned(pool: Pool, source: Source, keys: KeyBatch) -> Part | None:
    lease = pool.pin(keys)
    pages = lease.count // source.blocks_per_page
    part = Part(source, lease, pages)
    part.keep(pages)
    if pages:
        return part
    lease.release()
    return None


def _longest_foreign(pool: Pool, sources: Sources, tail: Tail, begin: int) -> Part | None:
    best: Part | None = None
    for source in sources.foreign():
        # One page tells whether it is worth making the keys of all.
        if pool.lookup(tail.first_keys(source, begin)) < source.blocks_per_page:
            continue
        part = _pinned(pool, source, tail.keys(source, begin))
        if part is not None and (best is None or part.pages > best.pages):
            best, part = part, best
        if part is not None:
            part.lease.release()
    return best
