"""Promotions of one rank: what is asked of the disk, how long a request waits, when pins go."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="the tree side extends SGLang's classes")

from hpkv_sglang._core import KeyBatch
from hpkv_sglang.config import PromotePolicy
from hpkv_sglang.radix import promotions as promotions_module
from hpkv_sglang.radix.promotions import (
    TIMEOUT_MAX_S,
    TIMEOUT_MIN_S,
    TIMEOUT_UNKNOWN_S,
    WAIT_COMPLETE_CAP_S,
    Promotions,
    Wanted,
)
from hpkv_sglang.radix.worth import SAMPLES_MIN, LoadEconomy

PAGE = 16


class DiskTicket:
    """What the promoter hands out."""

    def __init__(self) -> None:
        self.cancelled = self.released = False

    def cancel(self) -> None:
        self.cancelled = True

    def release(self) -> None:
        self.released = True


class HostPool:
    """Has the first `came` of the blocks that are asked for."""

    came = 0

    def lookup(self, keys: KeyBatch) -> int:
        return min(self.came, len(keys))


class DiskStore:
    """Has the first `reachable` of KEYS; remembers what it was asked to promote."""

    def __init__(self, reachable: int) -> None:
        self.reachable = reachable
        self.tickets: list[DiskTicket] = []
        self.host = HostPool()

    def lookup(self, keys: KeyBatch) -> int:
        has = {bytes(KEYS[i : i + 1]) for i in range(self.reachable)}
        asked = [bytes(keys[i : i + 1]) for i in range(len(keys))]
        return next((i for i, key in enumerate(asked) if key not in has), len(asked))

    def promote(self, _namespace: int, keys: KeyBatch) -> DiskTicket:
        self.promoted = len(keys)
        self.tickets.append(DiskTicket())
        return self.tickets[-1]


def promotions(reachable: int, policy: PromotePolicy) -> tuple[Promotions, DiskStore, LoadEconomy]:
    store, economy = DiskStore(reachable), LoadEconomy(PAGE, 1000)
    return Promotions(store, store.host, policy, economy), store, economy  # type: ignore[arg-type]


KEYS = KeyBatch.from_bytes(b"".join(bytes([number]) * 32 for number in range(10)))


def wanted(present: int, blocks_per_page: int = 1) -> list[Wanted]:
    return [Wanted(0, blocks_per_page, KEYS, present)]


def test_whole_pages_are_promoted_of_the_first_source_that_has_one() -> None:
    running, store, _ = promotions(5, PromotePolicy.TIMEOUT)
    nothing = Wanted(7, 1, KEYS[6:])
    assert running.start("r", [nothing, *wanted(0, blocks_per_page=2)]) is store.tickets[0]
    assert store.promoted == 4, "the fifth block is half a page"
    store.host.came = 3
    running.settle("r")
    assert running.take_from_disk("r") == 1, "the second page is half there"
    running, store, _ = promotions(1, PromotePolicy.TIMEOUT)
    assert running.start("r", wanted(0, blocks_per_page=2)) is None


def test_nothing_is_promoted_when_the_disk_reaches_no_further_than_the_host_pool() -> None:
    running, store, _ = promotions(4, PromotePolicy.TIMEOUT)
    assert running.start("r", wanted(4)) is None and store.tickets == []
    assert running.start("r", wanted(3)) is store.tickets[0]
    assert store.promoted == 4


def test_how_long_a_request_waits_follows_the_policy_and_the_rate_of_computing() -> None:
    patient, _, _ = promotions(4, PromotePolicy.WAIT_COMPLETE)
    eager, _, _ = promotions(4, PromotePolicy.BEST_EFFORT)
    running, _, economy = promotions(4, PromotePolicy.TIMEOUT)
    assert (patient.deadline_s(10), eager.deadline_s(10)) == (WAIT_COMPLETE_CAP_S, 0.0)
    assert running.deadline_s(10) == TIMEOUT_UNKNOWN_S
    for _ in range(SAMPLES_MIN):
        economy.note_prefill(1000, 10.0)  # 100 tokens a second: 6.25 pages
    assert running.deadline_s(25) == pytest.approx(4.0)
    assert running.deadline_s(1) == TIMEOUT_MIN_S
    assert running.deadline_s(10_000) == TIMEOUT_MAX_S


def test_pins_of_a_promotion_go_only_after_the_wait_is_over() -> None:
    running, store, _ = promotions(4, PromotePolicy.TIMEOUT)
    running.start("r", wanted(0))
    (ticket,) = store.tickets
    running.release_settled("r")
    assert not ticket.released
    store.host.came = 3
    running.settle("r")
    assert ticket.cancelled and not ticket.released
    assert (running.take_from_disk("r"), running.take_from_disk("r")) == (3, 0)
    running.release_settled("r")
    assert ticket.released


def test_pins_that_nobody_comes_for_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    running, store, _ = promotions(4, PromotePolicy.TIMEOUT)
    running.start("waits", wanted(0))
    running.start("settled", wanted(0))
    running.settle("settled")
    running.release_old()
    assert not any(ticket.released for ticket in store.tickets)
    monkeypatch.setattr(promotions_module, "KEEP_S", -1.0)
    running.release_old()
    assert [ticket.released for ticket in store.tickets] == [False, True]


def test_an_aborted_or_restarted_request_lets_its_promotion_go() -> None:
    running, store, _ = promotions(4, PromotePolicy.TIMEOUT)
    running.start("r", wanted(0))
    running.start("r", wanted(0))
    running.forget("r")
    assert [(t.cancelled, t.released) for t in store.tickets] == [(True, True)] * 2
    running.start("s", wanted(0))
    running.clear()
    assert store.tickets[2].released
