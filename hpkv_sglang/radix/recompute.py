"""A request whose load failed is computed again.

Stock SGLang answers such a request with an error. Its forward has run on slots that do not hold
what was promised, so its output must never be seen and its KV never enter the tree:

    run_batch                  release the request's slots and drop it from the batch's results
    get_next_batch_to_run      take it out of the batch just launched, before batches are merged
    pause_generation           the same, before that batch's requests are retracted
    process_batch_result       of that same batch: cut its rows out; only afterwards put it back
                               into the queue (earlier, a retracted request would be processed as
                               if it were this batch's)

The functions are hooks on `Scheduler`; the state they share is on the tree (the failed requests)
and on the scheduler (the batch they were in). Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Dropped(NamedTuple):
    batch: Any
    reqs: tuple[Any, ...]


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND `Scheduler.run_batch`: settle freed slots before, take failed loads out after."""
    tree = scheduler.tree_cache
    tree.tiers.fence.settle()
    launched = time.monotonic()
    result = original(scheduler, batch, *args, **kw)
    computed = batch.forward_mode.is_extend() and batch.hicache_consumer_index < 0
    if computed and tree.tiers.computes_on_host:  # elsewhere only the launch is over
        tree.tiers.economy.note_prefill(batch.extend_num_tokens or 0, time.monotonic() - launched)
    failed, tree.failed_load_reqs = tree.failed_load_reqs, ()
    for req in failed:
        _release(scheduler, req)
    if failed:
        scheduler.hpkv_dropped = _Dropped(batch, failed)
    return result


def get_next_batch_to_run(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any
) -> Any:
    """AROUND `Scheduler.get_next_batch_to_run`: the dropped requests do not go on to decode."""
    _leave_dropped_behind(scheduler, last_batch)
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def pause_generation(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """AROUND `Scheduler.pause_generation`: dropped requests have nothing left to retract.

    No step follows for as long as the pause lasts, so nothing stays pinned for who is queued.
    """
    _leave_dropped_behind(scheduler, scheduler.last_batch)
    result = original(scheduler, request)
    scheduler.tree_cache.let_go()
    return result


def process_batch_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND `Scheduler.process_batch_result`: dropped requests return to the queue."""
    dropped = [r for r in batch.reqs if r.is_retracted and getattr(r, "hpkv_requeue", False)]
    if dropped and batch.return_logprob:
        _cut_input_logprobs(scheduler, batch, result, dropped)
    answer = original(scheduler, batch, result, *args, **kw)
    if dropped:
        queued = {id(req) for req in scheduler.waiting_queue}
        for req in dropped:
            req.hpkv_requeue = False
            if id(req) not in queued:
                scheduler._add_request_to_queue(req, is_retracted=True)
    return answer


def _leave_dropped_behind(scheduler: Any, last_batch: Any) -> None:
    dropped: _Dropped | None = getattr(scheduler, "hpkv_dropped", None)
    if dropped is None:
        return
    scheduler.hpkv_dropped = None
    if last_batch is dropped.batch:
        last_batch.filter_batch(reqs_to_exclude=list(dropped.reqs))
        if last_batch.chunked_req in dropped.reqs:
            last_batch.chunked_req = None


def _cut_input_logprobs(scheduler: Any, batch: Any, result: Any, dropped: list[Any]) -> None:
    """Take the dropped requests' rows out of the input logprobs, float[tokens of the batch].

    SGLang deals the rows out to the batch's requests in order, and passes over a retracted request
    without passing over its rows: the next one would get them. Waits for the copy of the results,
    as SGLang does right afterwards.
    """
    output = result.logits_output
    if output is None or output.input_token_logprobs is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    output.finalize_input_logprobs()
    count = scheduler.batch_result_processor.logprob_result_processor.calculate_num_input_logprobs
    kept, at = [], 0
    extents = zip(
        batch.reqs,
        result.extend_input_len_per_req,
        result.extend_logprob_start_len_per_req,
        strict=True,
    )
    for req, length, start in extents:
        rows = max(count(req, length, start), 0)
        if all(req is not one for one in dropped):
            kept.append(output.input_token_logprobs[at : at + rows])
        at += rows
    kept.append(output.input_token_logprobs[at:])
    output.input_token_logprobs = torch.cat(kept)


def _release(scheduler: Any, req: Any) -> None:
    """Give the request's slots back and make it look as if it had never been scheduled."""
    from sglang.srt.managers.schedule_batch import release_req

    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    # The retry reports what it found cached itself; the failed load counts as nothing.
    req.retracted_stain = False
    req._cache_breakdown_computed = False
    req.cached_tokens = 0
    req.skip_radix_cache_insert = req.hpkv_skipped_insert
    req.hpkv_requeue = True
