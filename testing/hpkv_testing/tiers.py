"""Where the blocks of a pool are, seen from outside: waiting until they are in the pool or on disk,
emptying the host pool.

A caller is one more client of the pool for the length of a call. Blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpkv_sglang.cli.attachment import attached

_POLL_S = 0.2


def wait_until_stored(pool: Path, at_least: int, timeout_s: float = 60.0) -> None:
    """Return once the host pool has so many blocks. Raises TimeoutError, as the next one."""
    _wait(pool, timeout_s, lambda now: now["blocks"] >= at_least and now["writing"] == 0)


def wait_until_on_disk(pool: Path, timeout_s: float = 60.0, at_least: int = 0) -> None:
    """Return once every block of the host pool is on disk too; an idle server writes them there.

    A spill that is still queued is not seen here: flush the server's cache before, or say how many
    blocks the disk will have `at_least`. Raises TimeoutError, which says how far it got.
    """
    _wait(
        pool,
        timeout_s,
        lambda now: (
            now["blocks"] > 0
            and now["writing"] == now["disk_pending_blocks"] == 0
            and now["disk_blocks"] >= at_least
        ),
    )


def _wait(pool: Path, timeout_s: float, ready: Callable[[dict[str, int]], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with attached(str(pool), read_only=True) as core:
            stats = core.stats()
        if ready(stats):
            return
        if time.monotonic() > deadline:
            names = ("blocks", "writing", "disk_blocks", "disk_pending_blocks")
            counts = {name: stats[name] for name in names}
            raise TimeoutError(f"not so after {timeout_s:.0f} s: {counts}")
        time.sleep(_POLL_S)


def empty_host_pool(pool: Path) -> None:
    """Drop every unpinned block of the host pool; the disk keeps its own."""
    with attached(str(pool), read_only=False) as core:
        core.clear()
