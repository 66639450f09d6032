"""Rules about Python sources, each a function from one file's text to its findings.

Sizes: a file has at most 400 lines, a function 60 (from `def` to its last line, docstring
included), and takes at most 6 parameters. Not counted: `self` and `cls`, and the keyword-only
parameters of `__init__`. Like the fields of a dataclass, a call spells those out one by one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repository import Finding

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, function, whether it is a method) of every function in `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = f"{prefix}{child.name}"
            yield name, child, isinstance(node, ast.ClassDef)
            yield from _functions(child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _parameter_count(function: Function, is_method: bool) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    if is_method and names and not static:
        names = names[1:]
    if function.name != "__init__":
        names += [a.arg for a in arguments.kwonlyargs]
    return len(names) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def size_findings(path: str, source: str) -> list[Finding]:
    """Files, functions and parameter lists over the caps."""
    findings = []
    lines = len(source.splitlines())
    if lines > FILE_LINES_MAX:
        findings.append(Finding("file_lines", path, lines, f"{lines} lines, cap {FILE_LINES_MAX}"))
    for name, function, is_method in _functions(ast.parse(source)):
        place = f"{path}:{name}"
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            text = f"{length} lines, cap {FUNCTION_LINES_MAX}"
            findings.append(Finding("function_lines", place, length, text))
        count = _parameter_count(function, is_method)
        if count > PARAMETERS_MAX:
            text = f"{count} parameters, cap {PARAMETERS_MAX}"
            findings.append(Finding("parameters", place, count, text))
    return findings


_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment_findings(path: str, source: str) -> list[Finding]:
    """Any use of the process environment."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        names: set[str] = set()
        if isinstance(node, ast.Attribute):
            names = {node.attr} & _ENVIRONMENT
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            names = {alias.name for alias in node.names} & _ENVIRONMENT
        for name in sorted(names):
            text = f"line {node.lineno} uses os.{name}; only config.py reads the environment"
            findings.append(Finding("environment", path, 0, text))
    return findings


Loop = ast.For | ast.AsyncFor | ast.comprehension


def _words(loop: Loop) -> set[str]:
    """Which of `page` and `layer` the loop's variables or what it runs over are named after."""
    names: list[str] = []
    for part in (loop.target, loop.iter):
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                names.append(node.id)
            elif isinstance(node, ast.Attribute):
                names.append(node.attr)
            elif isinstance(node, ast.keyword):
                names.append(node.arg or "")
    text = " ".join(names).lower()
    kinds = {"page": ("page", "block", "slot"), "layer": ("layer",)}
    return {kind for kind, words in kinds.items() if any(word in text for word in words)}


def _check_loops(node: ast.AST, around: set[str], lines: list[int]) -> None:
    """Collect the lines where a loop over one of the two runs inside a loop over the other."""
    here = around
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        loops: list[Loop] = list(node.generators)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        loops = [node]
    else:
        loops = []
    for loop in loops:
        words = _words(loop)
        if ("page" in here and "layer" in words) or ("layer" in here and "page" in words):
            lines.append(node.lineno)  # type: ignore[attr-defined]
        here = here | words
    for child in ast.iter_child_nodes(node):
        _check_loops(child, here, lines)


def loop_findings(path: str, source: str) -> list[Finding]:
    """Nested loops, or comprehensions, over pages and layers: that is the extension's work."""
    lines: list[int] = []
    _check_loops(ast.parse(source), set(), lines)
    text = "line {} loops over pages times layers; describe a Region and let C++ expand it"
    return [Finding("page_layer_loop", path, 0, text.format(line)) for line in lines]


def docstring_findings(path: str, source: str) -> list[Finding]:
    """Modules that do not say what they own."""
    tree = ast.parse(source)
    if tree.body and not ast.get_docstring(tree):
        return [Finding("module_docstring", path, 0, "has no module docstring")]
    return []


def broad_except_findings(path: str, source: str) -> list[Finding]:
    """`except:` and `except (Base)Exception:` whose body does nothing at all."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        silent = all(
            isinstance(s, (ast.Pass, ast.Continue))
            or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in node.body
        )
        if broad and silent:
            text = f"line {node.lineno} swallows every exception in silence"
            findings.append(Finding("silent_except", path, 0, text))
    return findings
