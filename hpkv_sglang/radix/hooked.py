"""What this process has hooked into SGLang, and whether all of it took.

`registered` is written by the plugin (hpkv_sglang/plugin.py) before anything is served, and read
where SGLang's tree is built. It imports nothing heavy: processes without the tiers have it too.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from dataclasses import dataclass, field

from hpkv_sglang.errors import HookError
from hpkv_sglang.hooks import HookType, Patcher, Registry, verify

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_LAUNCHER_HOOKS = 3
_PATCHER = Patcher()  # for forks without SGLang's registry; empty otherwise


@dataclass
class Registered:
    """`targets` of our hooks; `done` makes a second registration a no-op."""

    done: bool = False
    targets: list[str] = field(default_factory=list)


registered = Registered()


def hook_registry() -> tuple[Registry, type[enum.Enum]]:
    """(registry, its HookType): SGLang's, or our patcher in a fork that has none."""
    if not has_registry():
        return _PATCHER, HookType
    from sglang.srt.plugins import hook_registry as sglang_hooks

    return sglang_hooks.HookRegistry, sglang_hooks.HookType


def has_registry() -> bool:
    """Whether this SGLang has a hook registry."""
    try:
        return importlib.util.find_spec("sglang.srt.plugins.hook_registry") is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or was blocked on purpose
        return False


def verify_hooks() -> None:
    """Raise HookError unless every hook of this process took. Called when the tree is built."""
    registry, _ = hook_registry()
    if SCHEDULER_MODULE in sys.modules and len(registered.targets) <= _LAUNCHER_HOOKS:
        raise HookError.build(
            "checking the hooks into SGLang",
            "scheduler process",
            registered.targets,
            "The plugin was registered before it was switched on: set SGLANG_ENABLE_HPKV=1 in the "
            "environment of the launcher.",
        )
    verify(registry, registered.targets)
