"""The parts of the tree side that need no server: waiting, fence, loads, page hashes."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="the tree side extends SGLang's classes")

from hpkv_sglang._core import KeyScope
from hpkv_sglang.radix.fence import SpillFence
from hpkv_sglang.radix.loads import NO_BATCH, LayerLoads, QueuedLoad
from hpkv_sglang.radix.lookup import PageLookup, Tail, fastest_hasher, hash_pages
from hpkv_sglang.radix.runs import Part, Run
from hpkv_sglang.radix.sources import Source
from hpkv_sglang.radix.waiting import WaitingRequests
from hpkv_sglang.radix.worth import SAMPLES_MIN, LoadEconomy

PAGE = 16


class Ticket:
    """A ticket that the test completes by hand."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.cancelled = False
        self.waits: list[float] = []
        self.landed = True
        self.elapsed_s = 0.5
        self.waited = False

    @property
    def done(self) -> bool:
        return self.event.is_set()

    device_done = done

    def wait_device(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.event.wait(timeout_s)

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self) -> bool:
        self.waited = True
        self.event.wait()
        return self.landed

    def wait_layer(self, layer: int) -> None:
        self.event.wait()


class Ranks:
    """Two ranks that step together: element-wise minimum of what both voted."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.votes: dict[int, list[int]] = {}
        self.collectives = 0

    def agree(self, rank: int, values: list[int]) -> list[int]:
        self.votes[rank] = values
        self.barrier.wait(10)
        agreed = [min(pair) for pair in zip(self.votes[0], self.votes[1], strict=True)]
        self.collectives += int(rank == 0)
        self.barrier.wait(10)
        return agreed

    def step(self, waiting: list[WaitingRequests]) -> list[list[object]]:
        """Who stopped waiting, by rank."""
        with ThreadPoolExecutor(len(waiting)) as threads:
            return list(threads.map(WaitingRequests.step, waiting, timeout=10))


def two_ranks() -> tuple[Ranks, list[WaitingRequests]]:
    ranks = Ranks()
    waiting = [
        WaitingRequests(lambda values, rank=rank: ranks.agree(rank, values)) for rank in (0, 1)
    ]
    return ranks, waiting


# ---- waiting ----


def test_a_request_waits_until_every_rank_is_done() -> None:
    ranks, waiting = two_ranks()
    slow = Ticket()
    waiting[0].add("r", (), 60)
    waiting[1].add("r", (slow,), 60)
    assert ranks.step(waiting) == [[], []]
    assert waiting[0].is_waiting("r") and waiting[1].is_waiting("r")
    slow.event.set()
    assert ranks.step(waiting) == [["r"], ["r"]]
    assert not waiting[0].is_waiting("r") and not waiting[1].is_waiting("r")


def test_a_request_waits_for_all_of_its_tickets() -> None:
    waiting = WaitingRequests(lambda values: values)
    quick, slow = Ticket(), Ticket()
    quick.event.set()
    waiting.add("r", (quick, slow), 60)
    assert waiting.step() == [] and waiting.is_waiting("r")
    slow.event.set()
    assert waiting.step() == ["r"] and not waiting.is_waiting("r")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_past_its_deadline_ends_the_wait_on_all(late: int) -> None:
    ranks, waiting = two_ranks()
    waiting[late].add("r", (Ticket(),), -1)
    waiting[1 - late].add("r", (Ticket(),), 60)
    assert ranks.step(waiting) == [["r"], ["r"]]
    assert not waiting[0].is_waiting("r") and not waiting[1].is_waiting("r")
    assert [entry.expired_count for entry in waiting] == [1, 1]


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_with_nothing_to_do_cuts_nobody_short(idle: int) -> None:
    ranks, waiting = two_ranks()
    slow = Ticket()
    waiting[idle].add("r", (), -1)
    waiting[1 - idle].add("r", (slow,), 60)
    assert ranks.step(waiting) == [[], []]
    slow.event.set()
    assert ranks.step(waiting) == [["r"], ["r"]]
    assert [entry.expired_count for entry in waiting] == [0, 0]


def test_no_agreement_is_made_while_nobody_waits() -> None:
    ranks, waiting = two_ranks()
    waiting[0].step()  # would wait for its peer for ever
    assert ranks.collectives == 0


def test_an_aborted_request_is_forgotten() -> None:
    waiting = WaitingRequests(lambda values: values)
    waiting.add("r", (Ticket(),), 60)
    waiting.drop("r")
    waiting.drop("r")
    assert not waiting.is_waiting("r") and len(waiting) == 0


# ---- fence ----


def test_nothing_is_waited_for_while_no_slot_was_freed() -> None:
    fence, ticket = SpillFence(wait_budget_s=0.0), Ticket()
    fence.note_spill(ticket)
    fence.settle()
    assert not ticket.cancelled and ticket.waits == []


def test_a_freed_slot_is_not_written_before_its_copy_is_done_or_cancelled() -> None:
    fence, slow, quick = SpillFence(wait_budget_s=0.01), Ticket(), Ticket()
    quick.event.set()
    fence.note_spill(slow)
    fence.note_spill(quick)
    fence.note_freed()
    fence.settle()
    assert slow.cancelled and not quick.cancelled
    assert fence.cancelled_count == 1


def test_all_waits_of_one_settlement_share_one_budget() -> None:
    fence, tickets = SpillFence(wait_budget_s=0.05), [Ticket() for _ in range(20)]
    for ticket in tickets:
        fence.note_spill(ticket)
    fence.note_freed()
    fence.settle()
    assert all(ticket.cancelled for ticket in tickets)
    assert sum(t.waits[0] for t in tickets) < 20 * 0.05
    assert tickets[-1].waits == [0.0]


def test_a_cancelled_spill_is_not_waited_for_again() -> None:
    fence, ticket = SpillFence(wait_budget_s=0.0), Ticket()
    fence.note_spill(ticket)
    fence.note_freed()
    fence.settle()
    fence.note_freed()
    fence.settle()
    assert len(ticket.waits) == 1


# ---- loads ----


class Engine:
    """Hands out the tickets it was given, in order."""

    def __init__(self, *tickets: Ticket) -> None:
        self.tickets = list(tickets)
        self.loaded: list[tuple[Any, list[int], Any]] = []

    def load(self, lease: Any, pages: Any, source: Any = None) -> Ticket:
        self.loaded.append((lease, list(pages), source))
        return self.tickets.pop(0)


def run_of(*parts: tuple[Any, int]) -> Run:
    """A run of (lease, pages); every part after the first is another server's."""
    sources = [SimpleNamespace(block=None if i == 0 else f"source {i}") for i in range(len(parts))]
    return Run([Part(s, *part) for s, part in zip(sources, parts, strict=True)])  # type: ignore[arg-type]


def queued(rid: str, run: Run | None = None) -> QueuedLoad:
    run = run or run_of(("lease", 1))
    return QueuedLoad(rid, run, np.arange(run.pages, dtype=np.int64))


def test_a_lost_lease_is_a_failed_load_and_not_an_error() -> None:
    loads, done = LayerLoads(4, lambda pages, seconds: None), Ticket()
    done.event.set()
    loads.queue(queued("good"))
    loads.queue(QueuedLoad("lost", None, np.zeros(1, dtype=np.int64)))
    index = loads.start(Engine(done))
    assert loads.finish(index) == {"good": True, "lost": False}
    assert not loads.pending


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_load_lands_when_all_its_parts_have(failing: int | None) -> None:
    loads, parts = LayerLoads(4, lambda pages, seconds: None), [Ticket(), Ticket()]
    for part in parts:
        part.event.set()
    if failing is not None:
        parts[failing].landed = False
    loads.queue(queued("r", run_of(("own", 2), ("foreign", 3))))
    engine = Engine(*parts)
    assert loads.finish(loads.start(engine)) == {"r": failing is None}
    assert engine.loaded == [("own", [0, 1], None), ("foreign", [2, 3, 4], "source 1")]
    assert all(part.waited for part in parts), "one still writes the device"


def test_each_request_of_a_batch_fails_or_lands_by_itself() -> None:
    loads, good, bad = LayerLoads(4, lambda pages, seconds: None), Ticket(), Ticket()
    good.event.set()
    bad.event.set()
    bad.landed = False
    loads.queue(queued("bad"))
    loads.queue(queued("good"))
    index = loads.start(Engine(bad, good))
    assert loads.finish(index) == {"bad": False, "good": True}


def test_waiting_for_a_layer_returns_at_once_without_loads_and_after_finish() -> None:
    loads, ticket = LayerLoads(4, lambda pages, seconds: None), Ticket()
    loads.set_consumer(NO_BATCH)
    loads.wait_until(0)
    loads.queue(queued("r"))
    index = loads.start(Engine(ticket))
    loads.set_consumer(index)
    waiter = threading.Thread(target=loads.wait_until, args=(0,), daemon=True)
    waiter.start()
    assert waiter.is_alive()
    ticket.event.set()
    waiter.join(10)
    assert not waiter.is_alive()
    loads.finish(index)
    loads.wait_until(3)  # a retired index


def test_a_cancelled_load_is_never_started_and_releases_its_lease() -> None:
    released = []
    lease = SimpleNamespace(release=lambda: released.append(1))
    loads = LayerLoads(4, lambda pages, seconds: None)
    loads.queue(queued("r", run_of((lease, 1))))
    assert loads.cancel_queued("r") and not loads.cancel_queued("r")
    assert loads.start(Engine()) == NO_BATCH
    assert released == [1]


def test_only_loads_that_landed_are_measured() -> None:
    noted: list[tuple[int, float]] = []
    good, bad = Ticket(), Ticket()
    loads = LayerLoads(4, lambda pages, seconds: noted.append((pages, seconds)))
    bad.landed = False
    good.event.set()
    bad.event.set()
    loads.queue(queued("good"))
    loads.queue(queued("bad"))
    loads.finish(loads.start(Engine(good, bad)))
    assert noted == [(1, 0.5)]


# ---- load or recompute ----


def economy(load_s_per_page: float, prefill_tokens_per_s: float) -> LoadEconomy:
    measured = LoadEconomy(page_size=PAGE, block_bytes=1000)
    for _ in range(SAMPLES_MIN):
        measured.note_load(10, 10 * load_s_per_page)
        measured.note_prefill(1000, 1000 / prefill_tokens_per_s)
    return measured


def test_a_hit_slower_than_computing_is_not_taken_and_counted() -> None:
    """Field report F42. A page of 16 tokens takes 16 ms to compute at 1,000 tokens/s."""
    slow, quick = economy(0.020, 1000), economy(0.012, 1000)
    assert slow.pages_worth_loading(40) == 0
    assert slow.refused_count == 1
    assert quick.pages_worth_loading(40) == 40
    assert quick.refused_count == 0


def test_one_refused_hit_in_sixteen_is_taken_to_measure_again() -> None:
    slow = economy(0.020, 1000)
    assert [slow.pages_worth_loading(40) > 0 for _ in range(32)].count(True) == 2
    for _ in range(100):
        slow.note_load(10, 0.01)  # the tier has recovered
    assert slow.pages_worth_loading(40) == 40


def test_every_hit_is_taken_before_both_rates_are_known() -> None:
    fresh = LoadEconomy(page_size=PAGE, block_bytes=1000)
    for _ in range(100):
        fresh.note_load(1, 10.0)
    assert fresh.pages_worth_loading(5) == 5


# ---- page hashes ----


class Key:
    """As much of SGLang's RadixKey as the lookup reads."""

    def __init__(self, tokens: list[int], extra_key: str | None = None) -> None:
        self.token_ids = array("q", tokens)
        self.extra_key = extra_key
        self.cache_salt = None

    def __len__(self) -> int:
        return len(self.token_ids)


def test_the_reference_hash_equals_sglangs_compiled_one() -> None:
    tokens = array("q", [7 * i % 50_000 for i in range(10 * PAGE)])
    tokens[3 * PAGE] = 2**40  # a page with a wide token is hashed in another form
    compiled = fastest_hasher()
    assert compiled is not hash_pages, "SGLang's compiled tree core is not importable"
    for prior in (None, "ab" * 32):
        assert compiled(tokens, prior, PAGE) == hash_pages(tokens, prior, PAGE)


def test_hashes_are_extended_and_never_computed_twice() -> None:
    hashed: list[int] = []

    def counting(tokens: Any, prior: str | None, page_size: int) -> list[str]:
        hashed.append(len(tokens) // page_size)
        return hash_pages(tokens, prior, page_size)

    lookup, scope, req = PageLookup(PAGE, counting), KeyScope(b"\0" * 32), SimpleNamespace()
    tokens = list(range(10 * PAGE + 5))
    short = lookup.pages(req, Key(tokens[: 4 * PAGE]), scope)
    assert len(short.hashes) == 4
    grown = lookup.pages(req, Key(tokens), scope)
    again = lookup.pages(req, Key(tokens), scope)
    assert hashed == [4, 6]
    assert grown.hashes == again.hashes == hash_pages(array("q", tokens), None, PAGE)
    assert bytes(grown.keys) == bytes.fromhex("".join(grown.hashes))


def test_a_new_namespace_gives_new_keys() -> None:
    lookup, req, key = PageLookup(PAGE, hash_pages), SimpleNamespace(), Key(list(range(PAGE)))
    first = bytes(lookup.pages(req, key, KeyScope(b"\1" * 32)).keys)
    second = bytes(lookup.pages(req, key, KeyScope(b"\2" * 32)).keys)
    assert first != second


def test_a_tail_has_the_keys_of_its_pages_elsewhere_too() -> None:
    """Two blocks there are one page here; what was known before the request grew is made anew."""
    here, there = KeyScope(b"\0" * 32), (KeyScope(b"\1" * 32), KeyScope(b"\2" * 32))
    source = Source(namespace_id=b"n" * 32, scopes=there)
    lookup, req, tokens = PageLookup(PAGE, hash_pages), SimpleNamespace(), list(range(6 * PAGE))
    for count in (4, 6):
        pages = lookup.pages(req, Key(tokens[: count * PAGE]), here)
        tail = Tail(pages, 1, count)
        assert bytes(tail.keys(source, 2)) == bytes(source.keys(pages.hashes[3:count]))
        assert bytes(tail.first_keys(source, 2)) == bytes(source.keys(pages.hashes[3:4]))
        assert bytes(tail.own_keys(2)) == bytes.fromhex("".join(pages.hashes[3:count]))
