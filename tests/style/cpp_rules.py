"""Rules about C++ and CUDA sources: file size, function size, parameter count, environment access.

There is no parser here: comments, strings and preprocessor lines are blanked, then braces are
matched. A brace opens a function when the text before it (back to the last `;`, `{` or `}`) has a
parameter list and is neither a type, a namespace nor a control statement. That is right for code in
clang-format's style; the tests of this file show what it sees. Statements inside a function,
lambdas included, belong to that function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from repository import Finding

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6

_NOISE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_CONTAINER = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")


def blanked(source: str) -> str:
    """`source` without comments, literals and preprocessor lines, every line kept in place."""

    def blank(match: re.Match[str]) -> str:
        return "".join(c if c == "\n" else " " for c in match[0])

    return _NOISE.sub(blank, source)


class Body(NamedTuple):
    """A function definition: its name, first line (1-based), length in lines and parameters."""

    name: str
    line: int
    lines: int
    parameters: int


def _split(text: str) -> int:
    """How many comma-separated parts `text` has at its outermost level; 0 when it is empty."""
    if not text.strip() or text.strip() == "void":
        return 0
    depth, parts = 0, 1
    for char in text:
        if char in "(<{[":
            depth += 1
        elif char in ")>}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts += 1
    return parts


def _parameter_list(header: str) -> tuple[str, str] | None:
    """(name, text between the parentheses) of a function header, or None when it is none."""
    header = re.sub(
        r"\[\[.*?\]\]|\balignas\s*\([^)]*\)|\b__\w+\s*\([^)]*\)", " ", header, flags=re.S
    )
    match = re.search(r"((?:[\w~]+\s*::\s*)*(?:operator\s*(?:\(\)|[^\s(]+)|~?\w+))\s*\(", header)
    if match is None:
        return None
    depth, begin = 1, match.end()
    for index in range(begin, len(header)):
        depth += {"(": 1, ")": -1}.get(header[index], 0)
        if depth == 0:
            return match[1].replace(" ", ""), header[begin:index]
    return None


def _is_initializer(text_before: str) -> bool:
    """Whether a brace right after this text starts a value (`x_{1}`, `= {`, `f({`)."""
    stripped = text_before.rstrip()
    if stripped == text_before and re.search(r"[\w>\]]$", stripped):
        return True
    return bool(re.search(r"(?:[=,(\[<?]|\breturn)$", stripped))


def _ends_statement(char: str, text_before: str, stack: list[str]) -> bool:
    if char == ";":
        return not stack or stack[-1] == "container"
    return char == ":" and bool(re.search(r"\b(public|private|protected)\s*$", text_before))


def bodies(source: str) -> Iterator[Body]:
    """Every function that `source` defines, outermost only."""
    text = blanked(source)
    stack: list[str] = []  # what each open brace is: container, function, other
    open_function: tuple[str, int, int] = ("", 0, 0)
    start = 0  # where the current statement begins
    for index, char in enumerate(text):
        if char == "{":
            header = text[start:index]
            kind = "other"
            if "function" not in stack and not _is_initializer(header):
                head = _parameter_list(header)
                without_list = header.split("(")[0]
                if _CONTAINER.search(without_list) and (head is None or ")" not in header):
                    kind = "container"
                elif head is not None:
                    kind = "function"
                    first = start + len(header) - len(header.lstrip())
                    line = text.count("\n", 0, first) + 1
                    open_function = (head[0], line, _split(head[1]))
                elif _CONTAINER.search(header):
                    kind = "container"
            stack.append(kind)
            if kind != "other":
                start = index + 1
        elif char == "}" and stack:
            kind = stack.pop()
            if kind == "function":
                name, line, parameters = open_function
                yield Body(name, line, text.count("\n", 0, index) + 2 - line, parameters)
            if kind != "other":
                start = index + 1
        elif _ends_statement(char, text[start:index], stack):
            start = index + 1


def size_findings(path: str, source: str) -> list[Finding]:
    """Files, functions and parameter lists over the caps."""
    findings = []
    lines = len(source.splitlines())
    if lines > FILE_LINES_MAX:
        findings.append(Finding("file_lines", path, lines, f"{lines} lines, cap {FILE_LINES_MAX}"))
    for body in bodies(source):
        place = f"{path}:{body.name}"
        if body.lines > FUNCTION_LINES_MAX:
            text = f"line {body.line}: {body.lines} lines, cap {FUNCTION_LINES_MAX}"
            findings.append(Finding("function_lines", place, body.lines, text))
        if body.parameters > PARAMETERS_MAX:
            text = f"line {body.line}: {body.parameters} parameters, cap {PARAMETERS_MAX}"
            findings.append(Finding("parameters", place, body.parameters, text))
    return findings


def environment_findings(path: str, source: str) -> list[Finding]:
    """Any use of the process environment."""
    found = re.search(r"\b(?:secure_)?getenv\b|\bsetenv\b|\bputenv\b|\benviron\b", blanked(source))
    if found is None:
        return []
    return [Finding("environment", path, 0, f"uses {found[0]}; settings come from config.py")]


def dependency_findings(path: str, source: str) -> list[Finding]:
    """The core includes neither Python nor torch; pool and engine know no CUDA."""
    findings = []
    for name in re.findall(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"]", source, re.MULTILINE):
        if re.match(r"(Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/)", name):
            text = f"includes {name}; only csrc/bind knows Python, and nothing knows torch"
            findings.append(Finding("core_dependency", path, 0, text))
    return findings
