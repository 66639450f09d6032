"""Rules about imports inside the package: they go downwards, and SGLang stays behind one wall.

    5  hpkv_sglang            the public face
    4  plugin, radix          SGLang's side        cli, metrics, dashboard   the operator's side
    3  pool, copy
    2  layout, mla, npu, portable
    1  config, flags, namespace, fingerprint, hooks
    0  errors, _core

A module imports its own level and those below; the two sides of level 4 do not know each other. At
import time there is no cycle; imports inside functions count for the levels but not for cycles.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from repository import Finding

PACKAGE = "hpkv_sglang"
LEVELS = {
    "errors": 0,
    "_core": 0,
    "_core_stream": 0,  # a part of the stub of _core
    "config": 1,
    "flags": 1,
    "namespace": 1,
    "portable": 2,
    "fingerprint": 1,
    "hooks": 1,
    "layout": 2,
    "mla": 2,
    "npu": 2,
    "pool": 3,
    "copy": 3,
    "plugin": 4,
    "radix": 4,
    "cli": 4,
    "metrics": 4,
    "dashboard": 4,
    "": 5,
}
SGLANG_SIDE = {"plugin", "radix"}
OPERATOR_SIDE = {"cli", "metrics", "dashboard"}


class Import(NamedTuple):
    """`module` is imported at `line`; `at_start` when that happens while the file is imported."""

    module: str
    line: int
    at_start: bool


def module_of(path: str) -> str:
    """`hpkv_sglang/radix/cache.py` -> `hpkv_sglang.radix.cache`."""
    name = path.removesuffix(".pyi").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(module: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of `source`; `from a import b` counts as an import of `a.b`."""

    def walk(node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, at_start)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = module.split(".") + ([""] if is_package else [])
                    base = ".".join([*parts[: -child.level], *([base] if base else [])])
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, at_start)
            elif isinstance(child, ast.Call) and _imports_by_name(child):
                yield Import(child.args[0].value, child.lineno, False)  # type: ignore[attr-defined]
            yield from walk(child, at_start and not later and not _type_checking(child))

    yield from walk(ast.parse(source), True)


def _imports_by_name(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("import_module", "__import__") or not call.args:
        return False
    return isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)


def part_of(module: str) -> str:
    """The part of the house a module of the package belongs to; '' is its front door."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in LEVELS else ""


def layer_findings(path: str, source: str) -> list[Finding]:
    """Imports that go upwards or across, and modules the picture has no place for."""
    module = module_of(path)
    if module.count(".") and module.split(".")[1] not in LEVELS:
        return [Finding("layering", path, 0, "has no place in import_rules.LEVELS")]
    here = part_of(module)
    findings = []
    for item in imports(module, source, path.endswith("__init__.py")):
        if item.module.split(".")[0] != PACKAGE:
            continue
        there = part_of(item.module)
        if there == "" and item.module != f"{PACKAGE}.__version__":
            there = item.module.removeprefix(f"{PACKAGE}.").split(".")[0]
        crosses = {here, there} & SGLANG_SIDE and {here, there} & OPERATOR_SIDE
        if LEVELS.get(there, 5) > LEVELS[here] or crosses:
            text = f"line {item.line}: {here or PACKAGE} may not import {item.module}"
            findings.append(Finding("layering", path, 0, text))
    return findings


def sglang_findings(path: str, source: str) -> list[Finding]:
    """Imports of SGLang outside radix/ and plugin.py."""
    module = module_of(path)
    if part_of(module) in SGLANG_SIDE:
        return []
    return [
        Finding("sglang_import", path, 0, f"line {item.line} imports {item.module}")
        for item in imports(module, source, path.endswith("__init__.py"))
        if item.module.split(".")[0] == "sglang"
    ]


def cycle(sources: Mapping[str, str]) -> list[str]:
    """One cycle of modules that import each other while they are imported, or an empty list."""
    modules = {module_of(path): path for path in sources}
    edges: dict[str, list[str]] = {}
    for module, path in modules.items():
        found = imports(module, sources[path], path.endswith("__init__.py"))
        names = [i.module for i in found if i.at_start]
        targets = [n if n in modules else n.rpartition(".")[0] for n in names]
        edges[module] = [t for t in targets if t in modules and t != module]
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in edges[module]:
            found = visit(target, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    return next((found for module in edges if (found := visit(module, []))), [])
