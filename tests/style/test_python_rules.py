"""Sizes, environment access, loops and exception handling of the Python sources."""

from collections.abc import Callable

import pytest
from python_rules import (
    broad_except_findings,
    docstring_findings,
    environment_findings,
    loop_findings,
    size_findings,
)
from repository import Finding, allowed_exceptions, source_of, tracked_files, verdict

Rule = Callable[[str, str], list[Finding]]


def problems(rule: Rule, names: tuple[str, ...], paths: list[str]) -> list[str]:
    assert paths, "no file to look at: the rule would be blind"
    findings = [f for path in paths for f in rule(path, source_of(path))]
    return verdict(names, findings, allowed_exceptions(".py", ".pyi"))


def package(*suffixes: str) -> list[str]:
    return tracked_files(*(suffixes or (".py",)), under="hpkv_sglang")


def test_python_files_functions_and_parameter_lists_stay_small() -> None:
    rules = ("file_lines", "function_lines", "parameters")
    assert problems(size_findings, rules, tracked_files(".py", ".pyi")) == []


def test_the_size_rules_see_an_oversized_file_function_and_parameter_list() -> None:
    body = "".join(f"    x = {i}\n" for i in range(60))
    source = f"class A:\n  def f(self, a, b, c, d, *, e, f, g):\n{body}" + "y = 1\n" * 400
    found = [(f.rule, f.place, f.value) for f in size_findings("m.py", source)]
    assert found == [
        ("file_lines", "m.py", 462),
        ("function_lines", "m.py:A.f", 61),
        ("parameters", "m.py:A.f", 7),
    ]


def test_the_size_rules_accept_exactly_the_caps() -> None:
    body = "".join(f"    x = {i}\n" for i in range(59))
    source = f"def f(a, b, c, *d, e, **f):\n{body}" + "y = 1\n" * 340
    assert len(source.splitlines()) == 400
    assert size_findings("m.py", source) == []


def test_keyword_only_parameters_of_init_are_not_counted() -> None:
    assert size_findings("m.py", "class A:\n def __init__(self, *, a, b, c, d, e, f, g): ...") == []
    assert size_findings("m.py", "class A:\n def __init__(self, a, b, c, d, e, f, g): ...") != []


def test_only_config_touches_the_environment() -> None:
    paths = [p for p in package() if p != "hpkv_sglang/config.py"]
    assert problems(environment_findings, ("environment",), paths) == []


@pytest.mark.parametrize(
    "line",
    [
        "import os\nx = os.environ['A']",
        "import os as o\nx = o.getenv('A')",
        "from os import environ",
        "from os import path, putenv as p",
        "import os\nx = getattr(os, 'x') or os.environb",
    ],
)
def test_the_environment_rule_sees_every_way_in(line: str) -> None:
    assert [f.rule for f in environment_findings("m.py", line)] == ["environment"]


def test_python_never_loops_over_pages_times_layers() -> None:
    assert problems(loop_findings, ("page_layer_loop",), package()) == []


@pytest.mark.parametrize(
    "source",
    [
        "for page in pages:\n  for layer in range(n):\n    copy(page, layer)",
        "for i in range(layer_count):\n  if x:\n    for j in block_indices: f(i, j)",
        "s = [f(p, l) for p in pages for l in range(layer_num)]",
        "for l in self.layers:\n  s = {p: l for p in self.pages}",
        "for s in slots:\n  x = sum(b for b in layer_buffers)",
    ],
)
def test_the_loop_rule_sees_nested_loops_and_comprehensions(source: str) -> None:
    assert [f.rule for f in loop_findings("m.py", source)] == ["page_layer_loop"]


@pytest.mark.parametrize(
    "source",
    [
        "for page in pages:\n  f(page)\nfor layer in layers:\n  g(layer)",
        "for layer in layers:\n  for tensor in (k, v): f(layer, tensor)",
    ],
)
def test_the_loop_rule_accepts_loops_over_one_of_the_two(source: str) -> None:
    assert loop_findings("m.py", source) == []


def test_every_module_of_the_package_says_what_it_owns() -> None:
    assert problems(docstring_findings, ("module_docstring",), package(".py", ".pyi")) == []
    assert docstring_findings("m.py", "import os\n") != []
    assert docstring_findings("m.py", "") == []


def test_nothing_is_swallowed_in_silence() -> None:
    assert problems(broad_except_findings, ("silent_except",), tracked_files(".py")) == []


@pytest.mark.parametrize("handler", ["except:", "except Exception:", "except BaseException as e:"])
def test_the_except_rule_sees_a_silent_broad_handler(handler: str) -> None:
    assert broad_except_findings("m.py", f"try: f()\n{handler}\n  pass\n") != []
    assert broad_except_findings("m.py", f"try: f()\n{handler}\n  count += 1\n") == []
