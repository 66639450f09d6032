"""Imports go downwards, SGLang stays behind its wall, and nothing is imported in a circle."""

import pytest
from import_rules import cycle, imports, layer_findings, sglang_findings
from repository import allowed_exceptions, source_of, tracked_files, verdict


def package() -> list[str]:
    paths = tracked_files(".py", ".pyi", under="hpkv_sglang")
    assert paths, "no file to look at: the rule would be blind"
    return paths


def test_imports_go_downwards() -> None:
    findings = [f for path in package() for f in layer_findings(path, source_of(path))]
    assert verdict(("layering",), findings, allowed_exceptions()) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("hpkv_sglang/errors.py", "from hpkv_sglang import config"),
        ("hpkv_sglang/config.py", "def f():\n  import hpkv_sglang.pool"),
        ("hpkv_sglang/layout/gqa.py", "from ..copy import engine"),
        ("hpkv_sglang/pool/__init__.py", "from ..radix.cache import X"),
        ("hpkv_sglang/cli/stat.py", "from hpkv_sglang.radix import cache"),
        ("hpkv_sglang/radix/cache.py", "from hpkv_sglang.cli import main"),
        ("hpkv_sglang/copy/__init__.py", "from hpkv_sglang import register"),
        ("hpkv_sglang/helpers.py", ""),
    ],
)
def test_the_layer_rule_sees_an_import_that_goes_up_or_across(path: str, line: str) -> None:
    assert [f.rule for f in layer_findings(path, line)] == ["layering"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("hpkv_sglang/pool/__init__.py", "from hpkv_sglang.errors import PoolError"),
        ("hpkv_sglang/layout/detect.py", "from hpkv_sglang.mla.layout import X"),
        ("hpkv_sglang/cli/stat.py", "from hpkv_sglang.pool import open_pool"),
        ("hpkv_sglang/__init__.py", "def f():\n  from hpkv_sglang import plugin"),
    ],
)
def test_the_layer_rule_accepts_imports_that_go_down(path: str, line: str) -> None:
    assert layer_findings(path, line) == []


def test_only_radix_and_plugin_import_sglang() -> None:
    findings = [f for path in package() for f in sglang_findings(path, source_of(path))]
    assert verdict(("sglang_import",), findings, allowed_exceptions()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import sglang.srt as s",
        "def f():\n  from sglang.srt.plugins import x",
        "import importlib\nimportlib.import_module('sglang.srt')",
    ],
)
def test_the_wall_rule_sees_an_import_of_sglang(line: str) -> None:
    assert sglang_findings("hpkv_sglang/pool/__init__.py", line) != []
    assert sglang_findings("hpkv_sglang/radix/cache.py", line) == []


def test_no_module_is_imported_in_a_circle() -> None:
    assert cycle({path: source_of(path) for path in package() if path.endswith(".py")}) == []


def test_the_circle_rule_sees_a_circle_and_not_a_late_import() -> None:
    a, b = "from hpkv_sglang import b\n", "from hpkv_sglang.a import x\n"
    circle = cycle({"hpkv_sglang/a.py": a, "hpkv_sglang/b.py": b})
    assert circle == ["hpkv_sglang.a", "hpkv_sglang.b", "hpkv_sglang.a"]
    late = f"def f():\n  {b}"
    assert cycle({"hpkv_sglang/a.py": a, "hpkv_sglang/b.py": late}) == []


def test_relative_imports_are_resolved() -> None:
    found = [i.module for i in imports("hpkv_sglang.radix.cache", "from ..pool import open_pool")]
    assert found == ["hpkv_sglang.pool.open_pool"]
    found = [i.module for i in imports("hpkv_sglang.radix", "from . import cache", is_package=True)]
    assert found == ["hpkv_sglang.radix.cache"]
