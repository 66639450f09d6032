"""What happens to a batch with a failed load, and to what is pinned when generation pauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the tree side extends SGLang's classes")

import torch

from hpkv_sglang.radix import recompute
from hpkv_sglang.radix.waiting import WaitingRequests
from hpkv_sglang.radix.wrapper import HpkvLinkerWrapper, _Promise


def request(name: str, *, dropped: bool = False) -> Any:
    return SimpleNamespace(rid=name, is_retracted=dropped, hpkv_requeue=dropped)


class Scheduler:
    """The parts of SGLang's scheduler that the hooks touch."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.tree_cache = SimpleNamespace(let_go=lambda: self.said.append("let go"))
        self.said: list[str] = []
        self.last_batch: Any = None
        count = SimpleNamespace(calculate_num_input_logprobs=lambda _req, n, start: n - start)
        self.batch_result_processor = SimpleNamespace(logprob_result_processor=count)

    def _add_request_to_queue(self, req: Any, is_retracted: bool) -> None:
        assert is_retracted
        self.waiting_queue.append(req)


class Output:
    def __init__(self, rows: int) -> None:
        self.input_token_logprobs = torch.arange(rows, dtype=torch.float32)
        self.finalized = False

    def finalize_input_logprobs(self) -> None:
        self.finalized = True


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([0], [3, 4, 5, 6, 7]),
        ([1], [0, 1, 2, 5, 6, 7]),
        ([0, 3], [3, 4]),
        ([2], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_rows_of_dropped_requests_are_cut_out_and_no_others(
    lost: list[int], left: list[int]
) -> None:
    """Rows: 3 of the first request, 2 of the second, none of the third, 3 of the last."""
    scheduler = Scheduler()
    reqs = [request(str(i), dropped=i in lost) for i in range(4)]
    batch = SimpleNamespace(reqs=reqs, return_logprob=True)
    output = Output(8)
    synchronized: list[bool] = []
    result = SimpleNamespace(
        logits_output=output,
        copy_done=SimpleNamespace(synchronize=lambda: synchronized.append(True)),
        extend_input_len_per_req=[5, 2, 7, 4],
        extend_logprob_start_len_per_req=[2, 0, 7, 1],
    )
    seen: list[list[float]] = []
    recompute.process_batch_result(
        lambda *_: seen.append(output.input_token_logprobs.tolist()), scheduler, batch, result
    )
    assert seen == [left]
    assert synchronized and output.finalized
    assert scheduler.waiting_queue == [reqs[i] for i in lost]
    assert not any(req.hpkv_requeue for req in reqs)


@pytest.mark.parametrize("output", [None, SimpleNamespace(input_token_logprobs=None)])
def test_a_batch_without_input_logprobs_is_left_as_it_is(output: Any) -> None:
    scheduler = Scheduler()
    batch = SimpleNamespace(reqs=[request("a", dropped=True)], return_logprob=True)
    recompute.process_batch_result(
        lambda *_: None, scheduler, batch, SimpleNamespace(logits_output=output)
    )
    assert [req.rid for req in scheduler.waiting_queue] == ["a"]


def test_a_pause_finds_no_dropped_request_in_the_last_batch() -> None:
    """SGLang then retracts all requests of it, and one without KV ends the scheduler."""
    scheduler: Any = Scheduler()
    kept, dropped = request("kept"), request("dropped", dropped=True)
    batch = SimpleNamespace(reqs=[kept, dropped], chunked_req=dropped)

    def filter_batch(reqs_to_exclude: list[Any]) -> None:
        batch.reqs = [req for req in batch.reqs if req not in reqs_to_exclude]

    batch.filter_batch = filter_batch
    scheduler.last_batch = batch
    scheduler.hpkv_dropped = recompute._Dropped(batch, (dropped,))

    def retract(paused: Any, _request: Any) -> str:
        assert paused.last_batch.reqs == [kept] and paused.last_batch.chunked_req is None
        paused.said.append("retracted")
        return "answer"

    assert recompute.pause_generation(retract, scheduler, None) == "answer"
    assert scheduler.said == ["retracted", "let go"]
    assert scheduler.hpkv_dropped is None


class Run:
    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


@pytest.fixture
def wrapper() -> Any:
    """A wrapper without tree and linker."""
    wrapper = HpkvLinkerWrapper.__new__(HpkvLinkerWrapper)
    wrapper.cache = SimpleNamespace(page_size=1)
    wrapper.tiers = SimpleNamespace(suspended=None, loads=SimpleNamespace(pending=False))
    wrapper.hit_markers, wrapper._promises = {}, {}
    wrapper.promotions = None
    wrapper.waiting = WaitingRequests(lambda votes: votes)
    return wrapper


def test_who_waits_for_blocks_stands_against_no_flush(wrapper: Any) -> None:
    wrapper.waiting.add(object(), (), 1.0)
    assert not wrapper.pending
    wrapper.tiers.loads.pending = True
    assert wrapper.pending


def test_letting_go_releases_every_pin_and_takes_back_every_promise(wrapper: Any) -> None:
    run = Run()
    wrapper._promises["a"] = _Promise(None, run, 0)  # type: ignore[arg-type]
    wrapper.hit_markers["a"] = object()
    wrapper.let_go()
    assert run.released
    assert not wrapper._promises and not wrapper.hit_markers


def test_a_beam_search_takes_nothing_from_the_tiers(wrapper: Any) -> None:
    result = SimpleNamespace(device_prefix_len=0)
    req = SimpleNamespace(rid="a", beam_group=object())
    assert wrapper.match([1, 2, 3], req, result) is result
    assert not wrapper.hit_markers
