"""Hooks: our patcher behaves as SGLang's registry does, and `verify` believes nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from hpkv_sglang.errors import HookError
from hpkv_sglang.hooks import Hook, HookType, Patcher, register_all, verify

TARGET = "hooked_module."


def make_double() -> Any:
    """A new function each time: hooks replace every module's reference to it, this module's too."""

    def double(value: int) -> int:
        return 2 * value

    return double


class Thing:
    def method(self, value: int) -> int:
        return value + 1

    @classmethod
    def made(cls, value: int) -> tuple[type, int]:
        return cls, value

    @staticmethod
    def static(value: int) -> int:
        return value + 2


@pytest.fixture
def modules() -> Iterator[tuple[Any, Any]]:
    """A module with functions to hook, and one that imported a function by name."""
    fresh = type("Thing", (), dict(vars(Thing)))
    owner, importer = types.ModuleType("hooked_module"), types.ModuleType("importing_module")
    owner.double, owner.Thing = make_double(), fresh  # type: ignore[attr-defined]
    importer.renamed = owner.double  # type: ignore[attr-defined]
    sys.modules |= {owner.__name__: owner, importer.__name__: importer}
    yield owner, importer
    del sys.modules[owner.__name__], sys.modules[importer.__name__]


@pytest.fixture(params=["ours", "sglang"])
def registry(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    if request.param == "ours":
        yield Patcher(), HookType
        return
    hook_registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
    yield hook_registry.HookRegistry, hook_registry.HookType
    hook_registry.HookRegistry.reset()


def ours(function: Any) -> Any:
    """The hooks under test live in this file; `verify` looks for those of the package."""
    function.__module__ = "hpkv_sglang.somewhere"
    return function


def add_one(result: Any, *_args: Any) -> Any:
    return result + 1


def around(original: Any, *args: Any) -> Any:
    return ("around", original(*args))


def shift(*args: Any) -> Any:
    return ((*args[:-1], args[-1] + 10), {})


def replacement(*_args: Any) -> str:
    return "replaced"


for function in (add_one, around, shift, replacement):
    ours(function)


def apply(registry: tuple[Any, Any], *hooks: Hook) -> list[str]:
    targets = register_all(*registry, hooks)
    registry[0].apply_hooks()
    return targets


@pytest.mark.parametrize(
    ("function", "kind", "expected"),
    [
        (add_one, HookType.AFTER, 7),
        (around, HookType.AROUND, ("around", 6)),
        (shift, HookType.BEFORE, 26),
        (replacement, HookType.REPLACE, "replaced"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_kind_of_hook_reaches_callers_and_importers(
    modules: tuple[Any, Any],
    registry: tuple[Any, Any],
    function: Any,
    kind: HookType,
    expected: object,
) -> None:
    targets = apply(registry, Hook(TARGET + "double", function, kind))
    assert modules[0].double(3) == expected
    assert modules[1].renamed(3) == expected
    verify(registry[0], targets)


@pytest.mark.parametrize("name", ["method", "made", "static"])
def test_methods_of_every_kind_stay_what_they_are(
    modules: tuple[Any, Any], registry: tuple[Any, Any], name: str
) -> None:
    plain = getattr(modules[0].Thing(), name)(3)
    targets = apply(registry, Hook(f"{TARGET}Thing.{name}", around, HookType.AROUND))
    assert getattr(modules[0].Thing(), name)(3) == ("around", plain)
    verify(registry[0], targets)


def test_applying_twice_hooks_once(modules: tuple[Any, Any], registry: tuple[Any, Any]) -> None:
    apply(registry, Hook(TARGET + "double", add_one))
    registry[0].apply_hooks()
    assert modules[0].double(3) == 7


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("target", [TARGET + "gone", "no_such_module.f", TARGET + "Thing.gone"])
def test_a_hook_on_something_that_is_gone_is_an_error_that_names_it(target: str) -> None:
    with pytest.raises(HookError, match=target):
        apply((Patcher(), HookType), Hook(target, add_one))


def test_a_hook_that_sglang_failed_to_apply_is_found(modules: tuple[Any, Any]) -> None:
    hook_registry = pytest.importorskip("sglang.srt.plugins.hook_registry")
    registry = (hook_registry.HookRegistry, hook_registry.HookType)
    try:
        targets = apply(registry, Hook(TARGET + "Thing", add_one))  # a class cannot be wrapped
        with pytest.raises(HookError, match="did not take"):
            verify(registry[0], targets)
    finally:
        hook_registry.HookRegistry.reset()


def test_a_hook_that_somebody_overwrote_is_found(
    modules: tuple[Any, Any], registry: tuple[Any, Any]
) -> None:
    targets = apply(registry, Hook(TARGET + "double", add_one))
    modules[0].double = make_double()
    with pytest.raises(HookError, match="did not take"):
        verify(registry[0], targets)


def test_a_hook_that_was_never_registered_is_found(
    modules: tuple[Any, Any], registry: tuple[Any, Any]
) -> None:
    with pytest.raises(HookError, match="did not take"):
        verify(registry[0], [TARGET + "double"])


def test_a_hook_below_another_plugins_hook_still_counts(
    modules: tuple[Any, Any], registry: tuple[Any, Any]
) -> None:
    targets = register_all(*registry, [Hook(TARGET + "double", add_one)])
    foreign = lambda original, value: original(value)  # noqa: E731
    registry[0].register(TARGET + "double", foreign, registry[1].AROUND)
    registry[0].apply_hooks()
    verify(registry[0], targets)


def test_one_missing_of_two_hooks_on_a_target_is_found(modules: tuple[Any, Any]) -> None:
    patcher = Patcher()
    targets = apply((patcher, HookType), Hook(TARGET + "double", add_one))
    patcher.register(TARGET + "double", around, HookType.AROUND)  # too late: already patched
    with pytest.raises(HookError, match="did not take"):
        verify(patcher, targets)
