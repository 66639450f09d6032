"""Hooks into another package's functions: what one is, whether it took, and a small patcher.

Owns: `Hook` (what to attach where), `Patcher` (the registry for SGLang forks that have none, with
the interface of SGLang's), `verify` (did every hook reach the function that will be called?).

Invariants: `Patcher.apply_hooks` patches a target once; static and class methods stay what they
are; modules that imported the function by name see the hook too. SGLang only logs a hook that
fails to apply, so nothing here is believed before `verify` has walked the function itself.

Threading: registration, application and verification run in the main thread, before serving.
"""

from __future__ import annotations

import enum
import functools
import pkgutil
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from hpkv_sglang.errors import HookError

__all__ = ["Hook", "HookType", "Patcher", "Registry", "register_all", "verify"]

Function = Callable[..., Any]

SGLANG_VERSION = "0.5.23"  # the one whose functions are hooked; also in pyproject.toml


class HookType(enum.Enum):
    """How a hook relates to the function it is attached to; values as in SGLang."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Hook(NamedTuple):
    """`function` attached to the dotted path `target`.

    before:  function(*args, **kwargs) -> (args, kwargs) or None
    after:   function(result, *args, **kwargs) -> new result, or None to keep it
    around:  function(original, *args, **kwargs) -> result
    replace: function(*args, **kwargs) -> result
    """

    target: str
    function: Function
    kind: HookType = HookType.AFTER


class Registry(Protocol):
    """What SGLang's hook registry and `Patcher` have in common."""

    _hooks: Any

    def register(self, target: str, hook: Function, hook_type: Any) -> None:
        """Note a hook; nothing is patched yet."""

    def apply_hooks(self) -> None:
        """Patch every target that is not patched yet."""


class Patcher:
    """A hook registry for forks without SGLang's. Unlike SGLang's it raises what goes wrong."""

    def __init__(self) -> None:
        self._hooks: defaultdict[str, list[tuple[HookType, Function, None]]] = defaultdict(list)
        self._patched: set[str] = set()

    def register(self, target: str, hook: Function, hook_type: HookType = HookType.AFTER) -> None:
        """Note a hook on `target`; hooks registered later wrap those registered earlier."""
        self._hooks[target].append((hook_type, hook, None))

    def apply_hooks(self) -> None:
        """Patch every target that is not patched yet. Raises HookError on a missing target."""
        for target, hooks in self._hooks.items():
            if target in self._patched:
                continue
            owner, name, raw = _find(target)
            original = getattr(raw, "__func__", raw)
            wrapped = original
            for kind, hook, _ in hooks:
                wrapped = _wrap(wrapped, hook, kind)
            if isinstance(raw, (classmethod, staticmethod)):
                wrapped = type(raw)(wrapped)
            setattr(owner, name, wrapped)
            if isinstance(owner, types.ModuleType):
                _rebind_importers(original, wrapped)
            self._patched.add(target)


def _find(target: str) -> tuple[Any, str, Any]:
    """(owner, attribute name, attribute as the owner stores it) of a dotted path."""
    path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        bound = getattr(owner, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError.build(
            "hooking SGLang",
            target,
            str(error),
            f"This version of SGLang has no such function: use SGLang {SGLANG_VERSION}.",
        ) from error
    return owner, name, vars(owner).get(name, bound)


def _wrap(original: Function, hook: Function, kind: HookType) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.REPLACE:
            return hook(*args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


def _rebind_importers(original: object, wrapped: object) -> None:
    """`from module import function` copies the reference: replace the copies too."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, wrapped)


def register_all(
    registry: Registry, hook_types: type[enum.Enum], hooks: Iterable[Hook]
) -> list[str]:
    """Register `hooks` and return their targets. `hook_types` is the registry's own HookType."""
    targets = []
    for hook in hooks:
        registry.register(hook.target, hook.function, hook_types(hook.kind.value))
        targets.append(hook.target)
    return targets


def verify(registry: Registry, targets: Iterable[str]) -> None:
    """Raise HookError unless each of our hooks on `targets` is in the function a caller gets."""
    for target in targets:
        ours = [hook for _, hook, _ in registry._hooks.get(target, ()) if _is_ours(hook)]
        _, _, raw = _find(target)
        reached = list(_functions_within(getattr(raw, "__func__", raw)))
        if not ours or any(hook not in reached for hook in ours):
            raise HookError.build(
                "checking the hooks into SGLang",
                target,
                raw,
                "The hook did not take: another plugin replaced this function, or this version "
                "of SGLang differs. Remove the other plugin or start without --enable-hpkv.",
            )


def _is_ours(hook: Function) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _functions_within(function: Any) -> Iterator[Any]:
    """`function` and every callable its wrappers close over, each once."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        current = waiting.pop()
        if id(current) in seen or not callable(current):
            continue
        seen.add(id(current))
        yield current
        cells = getattr(current, "__closure__", None) or ()
        waiting += [cell.cell_contents for cell in cells if _is_filled(cell)]
        waiting.append(getattr(current, "__wrapped__", None))


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the only sign of an empty cell
        return False
    return True
