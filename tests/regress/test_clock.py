"""A clock that jumps changes nothing: the time of day is written down for people and never read.

Deadlines, ages and intervals are of the monotonic clock, which does not jump. So the test is of the
sources: who asks for the time of day, and what becomes of it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCK = re.compile(
    r"CLOCK_REALTIME|system_clock|gettimeofday|std::time\(|(?<!f)unix_time_ns\("
)
# Stamps of a new file, and a word that two stores made in one second do not share.
ALLOWED = {
    "csrc/shm/superblock.cc": 1,
    "csrc/disk/directory.cc": 4,
    "csrc/disk/region_files.cc": 3,
}


def sources(folder: str, *suffixes: str) -> list[Path]:
    paths = (path for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return sorted(path for path in paths if "tests" not in path.relative_to(ROOT).parts)


def test_only_stamps_are_made_of_the_time_of_day() -> None:
    found = {
        str(path.relative_to(ROOT)): len(WALL_CLOCK.findall(path.read_text(encoding="utf-8")))
        for path in sources("csrc", ".cc", ".h", ".cu")
    }
    assert {path: count for path, count in found.items() if count} == ALLOWED


def test_no_stamp_is_read_back() -> None:
    for path in sources("csrc", ".cc", ".h", ".cu"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "_unix_ns" not in line:
                continue
            written = re.search(r"_unix_ns = (unix_time_ns|static_cast)", line)
            described = "// for display" in line or "offsetof(" in line
            nonce = "std::to_string(header_.created_unix_ns ^" in line
            assert written or described or nonce, f"{path}: {line.strip()}"


def test_python_asks_for_no_time_of_day() -> None:
    for path in sources("hpkv_sglang", ".py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\btime\.time\(|\bdatetime\b|\btime_ns\(", text), path
