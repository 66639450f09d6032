"""Which functions of SGLang are hooked in a scheduler process, and why.

Registered only when the tiers are on. The targets are returned so that start-up can check that
every hook took: SGLang itself only logs a hook that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpkv_sglang.hooks import Hook, HookType

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


def _build_tree(create: Callable[..., Any], ctx: Any, **kwargs: Any) -> Any:
    """AROUND the factory of the tree: the same construction, our class."""
    from hpkv_sglang.radix.cache import HpkvRadixCache

    return create(ctx, cache_class=HpkvRadixCache)


def _open_skip_path(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Scheduler.__init__: ask the tree whether a waiting request is ready.

    The scheduler does so only behind this switch. Set on the instance: the server's own setting,
    which starts another backend, stays off.
    """
    scheduler.enable_lmcache = True


def scheduler_hooks() -> tuple[Hook, ...]:
    """Every hook of a scheduler process."""
    from hpkv_sglang.radix import keys, recompute, weights

    return (
        Hook(
            "sglang.srt.mem_cache.registry.create_unified_radix_cache",
            _build_tree,
            HookType.AROUND,
        ),
        Hook(_SCHEDULER + "__init__", _open_skip_path),
        Hook(_SCHEDULER + "run_batch", recompute.run_batch, HookType.AROUND),
        Hook(
            _SCHEDULER + "get_next_batch_to_run",
            recompute.get_next_batch_to_run,
            HookType.AROUND,
        ),
        Hook(_SCHEDULER + "pause_generation", recompute.pause_generation, HookType.AROUND),
        Hook(_SCHEDULER + "process_batch_result", recompute.process_batch_result, HookType.AROUND),
        *keys.hooks(),
        *weights.hooks(),
    )


def install(register: Callable[[str, Callable[..., Any], HookType], None]) -> list[str]:
    """Register every hook; returns the targets, for the start-up check."""
    hooks = scheduler_hooks()
    for hook in hooks:
        register(hook.target, hook.function, hook.kind)
    return [hook.target for hook in hooks]
