"""What benchmarks print."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks" / "report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_report", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_spread_is_median_and_outer_tenths(report: ModuleType) -> None:
    spread = report.Spread.of([float(n) for n in reversed(range(11))])
    assert (spread.low, spread.median, spread.high, spread.count) == (1.0, 5.0, 9.0, 11)
    assert report.Spread.of([3.0]) == report.Spread(3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="sample"):
        report.Spread.of([])


def test_json_names_machine_commit_and_every_row(
    report: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report.Report("How fast?")
    page.add("one", report.Spread.of([1.0, 2.0, 3.0]), "us", aim="< 4")
    page.add("two", 0.5, "ratio")
    page.print(as_json=True)
    read = json.loads(capsys.readouterr().out)
    assert read["question"] == "How fast?" and read["machine"] and read["commit"]
    assert [(r["name"], r["median"], r["aim"]) for r in read["rows"]] == [
        ("one", 2.0, "< 4"),
        ("two", 0.5, ""),
    ]


def test_the_table_shows_the_aim_beside_the_number(
    report: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report.Report("How fast?")
    page.add("one", 12345.6, "us", aim="< 9")
    page.print()
    printed = capsys.readouterr().out
    assert "12,346" in printed and "< 9" in printed and "commit" in printed
