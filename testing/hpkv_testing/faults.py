"""Faults for servers under test: slow copies, failed loads, failed allocations, on one rank or all.

A general SGLang plugin of this distribution. It does nothing unless the server was started with
`HPKV_TEST_FAULTS`, a JSON list of faults:

    {"delay": ["load", -1, 50000]}      every layer of every load is late by 50 ms (-1: all layers)
    {"fail_every": ["load", 3]}         every third load completes as failed
    {"alloc_fails_every": 2}            every second allocation for a load finds no slots
    {"losing_every": 2}                 every second load has lost its blocks before it starts
    {"disk_delay": ["read", 6.0]}       every read of blocks from disk is late by 6 s ("write" too)
    {"deadline_s": 0.2}                 how long a request may wait for the tiers
    {"wait_complete_cap_s": 1.0}        the longest wait for the disk under that policy
    {"self_test": "why"}                the page self-test at start finds this
    {"streams": 200}                    not a fault: copies by the stream engine, on a device of
                                        threads that is late by up to 200 us, see host_streams.py
    {"staged_pages": 4}                 of its loads, so many pages at a time have room: nothing is
                                        read in place
    {"device_lost_after": 500}          that device is lost at its 500th call
    {"unhurried": true}                 not a fault: what the tiers give up on a busy machine for
                                        want of time, they wait for: 60 s each

and of observers, which report in the server's log when the tree is flushed:

    {"count": true}                     scheduling steps, and collectives the tiers asked for
    {"audit": true}                     file-system calls, imports and compilations inside the tiers

Each may carry `"rank": 1`: only that rank of the group. The names in the copy engine are those of
`CopyEngine.set_delay` and `fail_next`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "HPKV_TEST_FAULTS"

Fault = dict[str, Any]


def faults_env(*faults: Fault) -> tuple[tuple[str, str], ...]:
    """For `ServerConfig.env`."""
    return ((VARIABLE, json.dumps(faults)),)


def register() -> None:
    """Entry point. A scheduler process has imported the scheduler before it loads plugins."""
    if VARIABLE not in os.environ or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "hpkv_sglang.radix.cache.HpkvRadixCache.init_cache_linker", _inject, HookType.AFTER
    )
    HookRegistry.register(
        "hpkv_sglang.radix.linker.HpkvLinker._self_test", _self_test, HookType.AROUND
    )
    HookRegistry.register(
        "hpkv_sglang.radix.linker.HpkvLinker._make_copier", _make_copier, HookType.AROUND
    )


def _inject(_result: Any, cache: Any, linker: Any) -> None:
    for fault in json.loads(os.environ[VARIABLE]):
        rank = fault.pop("rank", None)
        if rank is None or rank == linker.identity.group_rank:
            ((name, value),) = fault.items()
            _FAULTS[name](cache, linker, value)


def _self_test(test: Callable[[Any], str | None], linker: Any) -> str | None:
    for fault in json.loads(os.environ[VARIABLE]):
        if "self_test" in fault and fault.get("rank") in (None, linker.identity.group_rank):
            return str(fault["self_test"])
    return test(linker)


def _make_copier(make: Callable[..., Any], linker: Any, *place: Any) -> Any:
    options = {}
    for fault in json.loads(os.environ[VARIABLE]):
        rank = fault.pop("rank", None)
        if rank is None or rank == linker.identity.group_rank:
            options.update(fault)
    if "streams" not in options:
        return make(linker, *place)
    from hpkv_testing.host_streams import copier

    staged_pages = options.get("staged_pages")
    return copier(*place, linker.layout, delay_us=options["streams"], staged_pages=staged_pages)


def _delay(_cache: Any, linker: Any, value: list[Any]) -> None:
    linker.engine.set_delay(*value)


def _disk_delay(_cache: Any, linker: Any, value: list[Any]) -> None:
    linker.storage.store.set_delay(value[0], round(value[1] * 1e6))


def _fail_every(_cache: Any, linker: Any, value: list[Any]) -> None:
    kind, period = value
    starts = count(1)

    class Failing:
        """The engine, except that every `period`-th operation of one kind is told to fail."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            if name == kind and next(starts) % period == 0:
                self._engine.fail_next(kind, 1)
            return getattr(self._engine, name)

    linker.engine = Failing(linker.engine)


def _alloc_fails_every(cache: Any, _linker: Any, period: int) -> None:
    component, calls = cache.linker._components[0], count(1)
    build: Callable[..., Any] = component.build_external_linker_transfer

    def failing(phase: Any, node: Any, keys: Any) -> Any:
        transfer = build(phase, node, keys)
        if phase.name == "LOAD" and transfer is not None and next(calls) % period == 0:
            component._full_allocator().free(transfer.device_indices)
            return None
        return transfer

    component.build_external_linker_transfer = failing


def _losing_every(_cache: Any, linker: Any, period: int) -> None:
    queue, calls = linker.queue_load, count(1)

    def losing(rid: str, run: Any, pages: int, slots: Any) -> None:
        if next(calls) % period == 0 and run is not None:
            run.release()
            run = None
        queue(rid, run, pages, slots)

    linker.queue_load = losing


def _deadline_s(cache: Any, _linker: Any, value: float) -> None:
    waiting = cache.linker.waiting
    add = waiting.add
    waiting.add = lambda handle, tickets, _deadline_s: add(handle, tickets, value)


def _wait_complete_cap_s(_cache: Any, _linker: Any, value: float) -> None:
    from hpkv_sglang.radix import promotions

    promotions.WAIT_COMPLETE_CAP_S = value


def _unhurried(_cache: Any, linker: Any, _value: bool) -> None:
    from hpkv_sglang.radix import promotions, wrapper

    patience_s = 60.0
    drain = linker.fence.drain
    linker.fence.wait_budget_s = patience_s
    linker.fence.drain = lambda _budget_s=None: drain(patience_s)
    linker.economy.pages_worth_loading = lambda pages: pages
    wrapper.VERIFY_DEADLINE_S = patience_s  # type: ignore[attr-defined]
    promotions.TIMEOUT_MIN_S = promotions.TIMEOUT_UNKNOWN_S = patience_s
    promotions.TIMEOUT_MAX_S = patience_s


def _device_lost_after(_cache: Any, linker: Any, calls: int) -> None:
    linker.engine._engine.lose_device_after(calls)


def _count(cache: Any, _linker: Any, _value: bool) -> None:
    seen = {"steps": 0, "collectives": 0}
    step, reduce, reset = cache.check_hicache_events, cache._all_reduce_attn_groups, cache.reset

    def counted_step() -> None:
        seen["steps"] += 1
        step()

    def counted_reduce(*args: Any) -> None:
        seen["collectives"] += 1
        reduce(*args)

    def reporting_reset() -> None:
        logger.info("hpkv-test: steps=%(steps)d collectives=%(collectives)d", seen)
        seen.update(steps=0, collectives=0)
        reset()

    cache.check_hicache_events = counted_step
    cache._all_reduce_attn_groups = counted_reduce
    cache.reset = reporting_reset


def _audit(cache: Any, _linker: Any, _value: bool) -> None:
    """Watch what Python does on this thread while it is inside one of the tiers' methods."""
    thread, inside, seen = threading.get_ident(), [0], set()
    watched = ("open", "os.", "import", "compile", "exec", "subprocess.", "socket.", "shutil.")

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if inside[0] and threading.get_ident() == thread and event.startswith(watched):
            seen.add(f"{event}{args[:1]}")

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            inside[0] += 1
            try:
                return method(*args)
            finally:
                inside[0] -= 1

        return call

    wrapper, reset = cache.linker, cache.reset
    for name in ("tick", "match", "wait_for_tiers", "load_back", "finish_loads", "spill_node"):
        setattr(wrapper, name, guarded(getattr(wrapper, name)))
    wrapper.start_layer_wise_loading = guarded(wrapper.start_layer_wise_loading)

    def reporting_reset() -> None:
        logger.info("hpkv-test: inside the tiers: %s", sorted(seen))
        reset()

    cache.reset = reporting_reset
    sys.addaudithook(watch)


_FAULTS: dict[str, Callable[[Any, Any, Any], None]] = {
    "delay": _delay,
    "disk_delay": _disk_delay,
    "fail_every": _fail_every,
    "alloc_fails_every": _alloc_fails_every,
    "losing_every": _losing_every,
    "deadline_s": _deadline_s,
    "device_lost_after": _device_lost_after,
    "unhurried": _unhurried,
    "wait_complete_cap_s": _wait_complete_cap_s,
    "self_test": lambda *_: None,  # hooked, as the next two: there is no tree yet
    "streams": lambda *_: None,
    "staged_pages": lambda *_: None,
    "count": _count,
    "audit": _audit,
}
