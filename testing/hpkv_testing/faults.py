"""Faults for servers under test: slow copies, failed loads, failed allocations, on one rank or all.

A general SGLang plugin of this distribution. It does nothing unless the server was started with
`HPKV_TEST_FAULTS`, a JSON list of faults:

    {"delay": ["load", -1, 50000]}      every layer of every load is late by 50 ms (-1: all layers)
    {"fail_every": ["load", 3]}         every third load completes as failed
    {"alloc_fails_every": 2}            every second allocation for a load finds no slots
    {"losing_every": 2}                 every second load has lost its blocks before it starts
    {"deadline_s": 0.2}                 how long a request may wait for the tiers

Each may carry `"rank": 1`: only that rank of the group. The names in the copy engine are those of
`CopyEngine.set_delay` and `fail_next`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

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


def _inject(_result: Any, cache: Any, linker: Any) -> None:
    for fault in json.loads(os.environ[VARIABLE]):
        rank = fault.pop("rank", None)
        if rank is None or rank == linker.identity.group_rank:
            ((name, value),) = fault.items()
            _FAULTS[name](cache, linker, value)


def _delay(_cache: Any, linker: Any, value: list[Any]) -> None:
    linker.engine.set_delay(*value)


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

    def losing(rid: str, lease: Any, pages: int, slots: Any) -> None:
        if next(calls) % period == 0 and lease is not None:
            lease.release()
            lease = None
        queue(rid, lease, pages, slots)

    linker.queue_load = losing


def _deadline_s(cache: Any, _linker: Any, value: float) -> None:
    cache.linker.waiting._deadline_s = value


_FAULTS: dict[str, Callable[[Any, Any, Any], None]] = {
    "delay": _delay,
    "fail_every": _fail_every,
    "alloc_fails_every": _alloc_fails_every,
    "losing_every": _losing_every,
    "deadline_s": _deadline_s,
}
