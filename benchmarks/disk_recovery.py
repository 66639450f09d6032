"""How long until a store is found again after a reboot, with its summaries and without?

A store of blocks of 64 KiB is written (headers and summaries; the payloads are holes, recovery does
not read them), then opened by a new pool and recovered by two threads; then every summary is wiped
and another pool does it again, by the headers of the records. The page cache holds none of it: the
files are written past it where the file system takes that.

    python benchmarks/disk_recovery.py [--json] [--directory DIR] [--rounds N]

`--directory` chooses the disk (default: the system's temporary folder).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Report, Spread

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "cpp-plain"
AIMS = {100_000: ("< 0.5", "< 2")}


def program() -> Path:
    """Builds what writes and recovers the store."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
    for command in (
        [cmake, "-S", str(REPOSITORY), "-B", str(BUILD), "-G", "Ninja", "-DHPKV_TESTS=ON"],
        [cmake, "--build", str(BUILD), "-j1", "--target", "bench_recovery"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "csrc" / "tests" / "bench_recovery"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    executable = program()
    report = Report("How long until a store is found again after a reboot?")
    for blocks in (1_000, 10_000, 100_000):
        samples: tuple[list[float], list[float]] = ([], [])
        for _ in range(arguments.rounds):
            with TemporaryDirectory(dir=arguments.directory, prefix="hpkv-bench-") as folder:
                done = subprocess.run(
                    [executable, folder, str(blocks)], check=True, capture_output=True, text=True
                )
            for seconds, column in zip(done.stdout.split(), samples, strict=True):
                column.append(float(seconds))
        aims = AIMS.get(blocks, ("", ""))
        for name, column, aim in zip(("summaries", "headers alone"), samples, aims, strict=True):
            report.add(f"{blocks:,} blocks, {name}", Spread.of(column), "s", aim=aim)
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
