"""The files of this repository, what a rule finds in them, and the list of allowed exceptions.

Owns: `tracked_files`, `Finding`, and `allowed.txt` (read by `allowances`, applied by `verdict`).
Invariant: the list of exceptions only shrinks. An entry names a rule, a place and the value
measured there; a larger value fails, and so does a smaller one or none, until the entry is lowered
or removed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("allowed.txt")


class Finding(NamedTuple):
    """`rule` is broken at `place` (path, or path:name); `value` is the measured size, else 0."""

    rule: str
    place: str
    value: int
    text: str


def tracked_files(*suffixes: str, under: str = "") -> list[str]:
    """Paths relative to the root, tracked or new (not ignored), that end in one of `suffixes`."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", under or "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = sorted(set(listing.split("\0")) - {""})
    return [p for p in paths if (not suffixes or p.endswith(suffixes)) and (ROOT / p).is_file()]


def source_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def allowed_exceptions(*suffixes: str) -> dict[tuple[str, str], int]:
    """The entries of allowed.txt whose file ends in one of `suffixes` (all, without any)."""
    entries = allowances(ALLOWED.read_text(encoding="utf-8"))
    if not suffixes:
        return entries
    return {e: v for e, v in entries.items() if e[1].split(":")[0].endswith(suffixes)}


def allowances(text: str) -> dict[tuple[str, str], int]:
    """(rule, place) -> value, of lines `rule place value  # reason`. ValueError on another line."""
    entries: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        content, _, reason = line.partition("#")
        if not content.strip():
            continue
        rule, place, value = content.split()
        if not reason.strip():
            raise ValueError(f"allowed.txt: an exception needs its reason after a '#': {line!r}")
        entries[rule, place] = int(value)
    return entries


def verdict(
    rules: Iterable[str], findings: Iterable[Finding], allowed: dict[tuple[str, str], int]
) -> list[str]:
    """What is wrong, in words: findings that are not allowed, and entries no longer needed."""
    problems = []
    unused = {entry for entry in allowed if entry[0] in set(rules)}
    for finding in findings:
        entry = (finding.rule, finding.place)
        unused.discard(entry)
        if entry not in allowed:
            problems.append(f"{finding.place}: {finding.text}")
        elif finding.value > allowed[entry]:
            problems.append(f"{finding.place}: {finding.text}; allowed.txt says {allowed[entry]}")
        elif finding.value < allowed[entry]:
            problems.append(f"{finding.place}: better than allowed, lower it to {finding.value}")
    problems += [f"{place}: remove its entry for {rule}, it is fine" for rule, place in unused]
    return problems
