"""What the tree asks of the device: whether its engine works, and whether a forward is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("sglang", reason="the tree side extends SGLang's classes")

from hpkv_sglang._core import CorePoolError
from hpkv_sglang.copy.engines import host_pages
from hpkv_sglang.errors import RefusedError
from hpkv_sglang.layout.heads import Turn
from hpkv_sglang.radix import linker as linker_module
from hpkv_sglang.radix import recompute, wrapper
from hpkv_sglang.radix.linker import HpkvLinker
from hpkv_sglang.radix.loads import NO_BATCH, LayerLoads, QueuedLoad
from hpkv_sglang.radix.runs import Part, Run
from hpkv_sglang.radix.wrapper import HpkvLinkerWrapper

PAGE = 16


class Matched(NamedTuple):
    """The part of SGLang's match result that counts here."""

    device_prefix_len: int = 0
    best_match_node: int = 7
    last_host_node: int = 0
    host_hit_length: int = 0


class ThreePages(Run):
    """Found and verified; nothing is pinned."""

    pages = verified_pages = 3


class Room:
    """So many pages, of whatever source."""

    def __init__(self, pages: int) -> None:
        self.pages, self.asked = pages, list[int]()

    def take(self, lease: Any, source: Any) -> int:
        assert source is None
        self.asked.append(lease.count)
        fitting: int = min(self.pages, lease.count)
        self.pages -= fitting
        return fitting

    def copy(self) -> Room:
        return Room(self.pages)


def run_of(pages: int, verified: int) -> Run:
    lease: Any = SimpleNamespace(count=pages, verified_count=verified)
    source: Any = SimpleNamespace(block=None, blocks_per_page=1)
    return Run([Part(source, lease, pages)])


def tree_side(broken: bool) -> HpkvLinkerWrapper:
    side = HpkvLinkerWrapper.__new__(HpkvLinkerWrapper)
    side.cache = SimpleNamespace(page_size=PAGE)
    side.group_size, side.promotions, side._tick = 1, None, 0
    side._promises, side.hit_markers = {}, {}
    side.tiers = SimpleNamespace(  # type: ignore[assignment]
        suspended=None,
        pool=None,
        sources=None,
        tail_of=lambda *_: SimpleNamespace(hashes=lambda count: ["hash"] * count),
        economy=SimpleNamespace(pages_worth_loading=lambda pages: pages),
        loadable_pages=lambda run: 0 if broken else run.verified_pages,
    )
    return side


@pytest.mark.parametrize(("broken", "promised"), [(False, 3 * PAGE), (True, 0)])
def test_a_broken_engine_promises_nothing(
    broken: bool, promised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper, "find_run", lambda *_: ThreePages())
    req = SimpleNamespace(rid="r")
    result = tree_side(broken).match(["token"] * (4 * PAGE), req, Matched())
    assert result.host_hit_length == promised


@pytest.mark.parametrize(
    ("broken", "verified", "room", "loadable"),
    [(False, 3, None, 3), (False, 2, None, 2), (False, 3, 2, 2), (False, 1, 2, 1), (True, 3, 9, 0)],
)
def test_pages_are_loadable_that_are_verified_and_have_room(
    broken: bool, verified: int, room: int | None, loadable: int
) -> None:
    linker = HpkvLinker.__new__(HpkvLinker)
    linker.loads = LayerLoads(4, lambda pages, seconds: None)
    linker.engine_is_broken = lambda: broken
    linker.room = lambda: None if room is None else Room(room)  # type: ignore[assignment,return-value]
    assert linker.loadable_pages(run_of(pages=3, verified=verified)) == loadable


def test_pages_beside_loads_that_are_queued_have_what_those_left_until_they_are_started() -> None:
    free = [5]
    loads = LayerLoads(4, lambda pages, seconds: None)

    def fitting(pages: int) -> int:
        return loads.fit(run_of(pages, pages), lambda: Room(free[0]))  # type: ignore[arg-type,return-value]

    assert fitting(4) == 4 and fitting(9) == 5, "a question takes nothing"
    loads.queue(QueuedLoad("a", run_of(2, 2), torch.arange(2)))
    free[0] = 0  # the engine does not know of what is queued, and is not asked again
    assert fitting(9) == 3
    loads.queue(QueuedLoad("lost", None, torch.arange(2)))
    loads.queue(QueuedLoad("b", run_of(3, 3), torch.arange(3)))
    assert fitting(9) == 0
    loads.start(SimpleNamespace(load=lambda *_: None))  # type: ignore[arg-type]
    free[0] = 1
    assert fitting(9) == 1


def test_a_run_ends_for_a_load_where_one_of_its_parts_does_not_fit() -> None:
    parts: list[Any] = run_of(2, 2).parts + run_of(4, 4).parts + run_of(1, 1).parts
    room = Room(5)
    assert Run(parts).fit(room) == 5  # type: ignore[arg-type]
    assert room.asked == [2, 4], "what lies behind a hole is of no use"


def test_what_was_read_from_disk_stays_pinned_until_its_load_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wrapper, "find_run", lambda *_: ThreePages())
    events: list[str] = []
    looked: list[int] = []
    side = tree_side(broken=False)
    side.promotions = SimpleNamespace(  # type: ignore[assignment]
        release_settled=lambda rid: events.append(f"release {rid}"),
        release_old=lambda: looked.append(side._tick),
    )
    side.waiting = []  # type: ignore[assignment]
    side.private_load_indices, side.inflight_load_rids = {}, []
    side.tiers.queue_load = lambda rid, *_: events.append(f"queue {rid}")  # type: ignore[method-assign]
    transfer = SimpleNamespace(device_indices=[0, 1, 2])
    side._components = [
        SimpleNamespace(build_external_linker_transfer=lambda *_: transfer, component_type=0)
    ]
    monkeypatch.setattr(HpkvLinkerWrapper, "_update_load", lambda *_: None)
    req = SimpleNamespace(rid="r", last_node=None)
    assert side.match(["token"] * (4 * PAGE), req, Matched()).host_hit_length == 3 * PAGE
    for _ in range(3):  # the batch is full: SGLang does not come back for the request
        side.tick()
    side.match(["token"] * (4 * PAGE), req, Matched())
    assert (events, looked) == ([], [1, 2, 3])
    side.load_back(req)
    assert events == ["queue r", "release r"]


def test_pins_go_when_nothing_is_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "find_run", lambda *_: ThreePages())
    released: list[str] = []
    side = tree_side(broken=True)
    side.promotions = SimpleNamespace(release_settled=released.append)  # type: ignore[assignment]
    side.match(["token"] * (4 * PAGE), SimpleNamespace(rid="r"), Matched())
    assert released == ["r"]


@pytest.mark.parametrize("on_host", [True, False])
def test_a_prefill_is_measured_only_where_it_is_over_when_the_call_returns(on_host: bool) -> None:
    noted: list[int] = []
    tiers = SimpleNamespace(
        computes_on_host=on_host,
        fence=SimpleNamespace(settle=lambda: None),
        economy=SimpleNamespace(note_prefill=lambda tokens, _seconds: noted.append(tokens)),
    )
    tree = SimpleNamespace(tiers=tiers, failed_load_reqs=())
    batch: Any = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        hicache_consumer_index=-1,
        extend_num_tokens=200,
    )
    scheduler = SimpleNamespace(tree_cache=tree)
    assert recompute.run_batch(lambda *_: "done", scheduler, batch) == "done"
    assert noted == ([200] if on_host else [])


def test_a_spill_is_handed_over_with_the_ranks_turn() -> None:
    handed: list[tuple[Any, ...]] = []
    linker = HpkvLinker.__new__(HpkvLinker)
    linker.suspended, linker.page_size, linker.pages_of = None, PAGE, host_pages
    linker.identity = SimpleNamespace(turn=Turn(1, 2))  # type: ignore[assignment]
    linker.scope = SimpleNamespace(keys=tuple)  # type: ignore[assignment]
    linker.fence = SimpleNamespace(note_spill=lambda ticket: None)  # type: ignore[assignment]
    linker.engine = SimpleNamespace(spill=lambda *what: handed.append(what))  # type: ignore[assignment]
    linker.engine_is_broken = lambda: False
    linker.spill(["a", "b"], torch.arange(2 * PAGE) + 3 * PAGE)
    linker.engine_is_broken = lambda: True
    linker.spill(["c"], torch.arange(PAGE))
    ((keys, pages, *turn),) = handed
    assert (keys, list(pages), turn) == (("a", "b"), [3, 4], [1, 2])


def test_all_loads_of_a_batch_are_started_together() -> None:
    steps: list[str] = []

    @contextmanager
    def together() -> Iterator[None]:
        steps.append("begin")
        yield
        steps.append("end")

    linker = HpkvLinker.__new__(HpkvLinker)
    linker.fence = SimpleNamespace(settle=lambda: None)  # type: ignore[assignment]
    linker.loads = LayerLoads(4, lambda pages, seconds: None)
    linker.engine = SimpleNamespace(load=lambda *_: steps.append("load"))  # type: ignore[assignment]
    linker.together = together
    assert linker.start_layer_wise_loading() == NO_BATCH and steps == []
    part: Any = SimpleNamespace(lease="lease", pages=1, source=SimpleNamespace(block=None))
    linker.loads.queue(QueuedLoad("a", Run([part, part]), torch.arange(2)))
    linker.loads.queue(QueuedLoad("b", Run([part]), torch.arange(1)))
    linker.start_layer_wise_loading()
    assert steps == ["begin", "load", "load", "load", "end"]


@pytest.mark.parametrize(("resolved", "found"), [(False, "forward"), (True, None)])
def test_the_stream_of_forwards_follows_the_resolved_arguments(
    resolved: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang switches overlap off itself where it must; the record keeps what the user typed."""
    view = SimpleNamespace(disable_overlap_schedule=resolved)
    monkeypatch.setattr(linker_module, "view_of", lambda _typed: view)
    typed = SimpleNamespace(disable_overlap_schedule=not resolved)
    assert linker_module.stream_of_forwards(typed, "forward") == found


class Identity:
    """A rank whose namespace is that of its weights."""

    def __init__(self, version: str) -> None:
        self.namespace = SimpleNamespace(id=version.encode())
        self.weights_are_private = version.startswith("private:")

    with_weights = classmethod(lambda cls, version: cls(version))


def changing(
    before: str, after: str | None, off: str | None = None
) -> tuple[HpkvLinker, list[str]]:
    """A linker with weights `before` that `reset` opens with weights `after`, and what it does."""
    said: list[str] = []
    linker = HpkvLinker.__new__(HpkvLinker)
    linker.loads = SimpleNamespace(reset=lambda: None)  # type: ignore[assignment]
    linker.engine = SimpleNamespace(close=lambda: said.append("close"))  # type: ignore[assignment]
    linker.identity, linker.namespace_index = Identity(before), 7  # type: ignore[assignment]
    linker.pool = SimpleNamespace(  # type: ignore[assignment]
        drop_namespace=lambda id_: said.append(f"drop {id_.decode()}"),
        leave_namespace=lambda index: said.append(f"leave {index}"),
    )
    linker.storage = SimpleNamespace(  # type: ignore[assignment]
        drop_namespace_soon=lambda id_: said.append(f"drop on disk {id_.decode()}")
    )
    linker._quiesce = lambda: None  # type: ignore[method-assign]
    linker._enter_namespace = lambda: said.append("enter")  # type: ignore[method-assign]
    linker._off, linker.suspended, linker._reopen_version = off, "weights", after
    return linker, said


@pytest.mark.parametrize("kind", [RefusedError, RuntimeError, CorePoolError])
def test_a_rank_that_cannot_copy_after_new_weights_goes_on_and_promises_nothing(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory() -> None:
        raise kind("system", "no pinned memory")

    linker, _ = changing("content:1", "content:2")
    linker._enter_namespace = no_memory  # type: ignore[method-assign]
    linker.reset()
    # Not suspended: this rank takes part in every agreement, as the others do.
    assert linker.suspended is None and linker.engine_is_broken()
    assert "no pinned memory" in caplog.text


@pytest.mark.parametrize("off", [None, "the self-test failed"])
def test_new_weights_open_the_tiers_again_unless_they_are_off_for_good(off: str | None) -> None:
    linker, _ = changing("content:1", "content:2", off)
    linker.reset()
    assert linker.suspended == off


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ("content:1", "content:2", ["close", "leave 7", "enter"]),
        (
            "private:1",
            "private:2",
            ["close", "drop on disk private:1", "drop private:1", "leave 7", "enter"],
        ),
        ("private:1", "private:1", ["close", "enter"]),
        ("private:1", None, []),
    ],
)
def test_weights_that_never_come_back_take_their_blocks_with_them(
    before: str, after: str | None, steps: list[str]
) -> None:
    """A trainer pushes thousands of times; a pool has places for 128 namespaces."""
    linker, said = changing(before, after)
    linker.reset()
    assert said == steps
