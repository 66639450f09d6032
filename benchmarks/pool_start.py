"""How long does a server wait for its pool, and does the pool's size matter?

Creating a pool, attaching to it while another client is there, and leaving it, for two sizes a
factor of 16 apart. The pool is empty when created; the attachment is measured on one with blocks.

    python benchmarks/pool_start.py [--json] [--rounds N] [--gib N]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from report import Report, Spread

from hpkv_sglang._core import Pool

GIB = 1 << 30
MIB = 1 << 20


def measure(pool_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call."""
    samples: dict[str, list[float]] = {"create": [], "attach": [], "close": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hpkv-bench-") as folder:
            begin = time.perf_counter()
            first = Pool.open(folder, pool_bytes=pool_bytes)
            samples["create"].append((time.perf_counter() - begin) * 1e3)
            index = first.add_namespace(b"\1" * 32, b"", MIB)
            for _ in range(32):
                first.put(index, os.urandom(32), b"\0" * MIB)
            begin = time.perf_counter()
            second = Pool.open(folder)
            samples["attach"].append((time.perf_counter() - begin) * 1e3)
            begin = time.perf_counter()
            second.close()
            samples["close"].append((time.perf_counter() - begin) * 1e3)
            first.close()
            # Unmapping takes as long as there is memory: not in the next round's time.
            del first, second
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gib", type=int, default=8)
    arguments = parser.parse_args()
    report = Report("How long does a server wait for its pool?")
    aims = {"create": "< 200", "attach": "< 50"}
    for pool_bytes in (arguments.gib * GIB // 16, arguments.gib * GIB):
        for name, samples in measure(pool_bytes, arguments.rounds).items():
            row = f"{name}, {pool_bytes / GIB:g} GiB"
            report.add(row, Spread.of(samples), "ms", aim=aims.get(name, ""))
    report.print(as_json=arguments.json)


if __name__ == "__main__":
    main()
