"""Which functions of SGLang are hooked in a scheduler process, and why.

Registered only when the tiers are on. The list is returned so that start-up can check that every
hook took: SGLang itself only logs a hook that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


class Hook(NamedTuple):
    target: str
    function: Callable[..., Any]
    kind: str  # a name of SGLang's HookType


class Registry(Protocol):
    def __call__(self, target: str, function: Callable[..., Any], kind: str) -> None: ...


def _build_tree(create: Callable[..., Any], ctx: Any, **kwargs: Any) -> Any:
    from hpkv_sglang.radix.cache import HpkvRadixCache

    return create(ctx, cache_class=HpkvRadixCache)


def _open_skip_path(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler asks the tree whether a waiting request is ready only behind this switch.

    Set on the instance: the server's own setting, which starts another backend, stays off.
    """
    scheduler.enable_lmcache = True
    return result


def scheduler_hooks() -> list[Hook]:
    from hpkv_sglang.radix import keys, recompute, weights

    return [
        Hook(
            "sglang.srt.mem_cache.registry.create_unified_radix_cache", _build_tree, "AROUND"
        ),
        Hook(SCHEDULER + "__init__", _open_skip_path, "AFTER"),
        Hook(SCHEDULER + "run_batch", recompute.run_batch, "AROUND"),
        Hook(SCHEDULER + "get_next_batch_to_run", recompute.get_next_batch_to_run, "AROUND"),
        Hook(SCHEDULER + "process_batch_result", recompute.process_batch_result, "AFTER"),
        *keys.hooks(),
        *weights.hooks(),
    ]


def install(register: Registry) -> list[str]:
    """Register every hook; returns the targets, for the start-up check."""
    hooks = scheduler_hooks()
    for hook in hooks:
        register(hook.target, hook.function, hook.kind)
    return [hook.target for hook in hooks]
