"""What a benchmark prints: measurements with their spread, the machine and the commit.

    report = Report("How fast is a lookup?")
    report.add("lookup, 100,000 blocks", Spread.of(samples), "us per key", aim="< 0.15")
    report.print(as_json=arguments.json)

Nothing is asserted: an aim is printed beside the number. Ratios come from one run. Single thread.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile, and how many samples they stand for."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Self:
        """ValueError without a sample."""
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("a spread needs at least one sample")
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered),
            low=ordered[round(0.1 * last)],
            high=ordered[round(0.9 * last)],
            count=len(ordered),
        )


class Report:
    """Rows of one benchmark, printed once."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: Spread | float, unit: str, *, aim: str = "") -> None:
        """One row. `aim` is what the project wants here, in words such as `>= 0.85`."""
        spread = value if isinstance(value, Spread) else Spread(value, value, value, 1)
        self.rows.append({"name": name, "unit": unit, "aim": aim, **asdict(spread)})

    def print(self, *, as_json: bool = False) -> None:
        """The whole report on stdout."""
        if as_json:
            print(json.dumps({"question": self.question, **surroundings(), "rows": self.rows}))
            return
        table = Table("", "median", "10 % - 90 %", "unit", "aim", "samples", title=self.question)
        for row in self.rows:
            table.add_row(
                row["name"],
                _digits(row["median"]),
                f"{_digits(row['low'])} - {_digits(row['high'])}",
                row["unit"],
                row["aim"],
                str(row["count"]),
            )
        # Into a file a row is one line, however long: it is looked for by its name.
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(table)
        facts = surroundings()
        console.print(f"{facts['machine']}; commit {facts['commit']}")


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def surroundings() -> dict[str, str]:
    """`machine` (processor, cores, memory, kernel, Python) and `commit` (with + when dirty)."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory_bytes / 2**30:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return (name + ("+" if git("status", "--porcelain", "-uno") else "")) if name else "unknown"
