"""Where the blocks of a pool are, seen from outside: waiting for the disk, emptying the host pool.

A caller is one more client of the pool for the length of a call. Blocks.
"""

from __future__ import annotations

import time
from pathlib import Path

from hpkv_sglang.cli.attachment import attached

_POLL_S = 0.2


def wait_until_on_disk(pool: Path, timeout_s: float = 60.0) -> None:
    """Return once every block of the host pool is on disk too; an idle server writes them there.

    Raises TimeoutError, which says how far it got.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with attached(str(pool), read_only=True) as core:
            stats = core.stats()
        if stats["blocks"] > 0 and stats["writing"] == stats["disk_pending_blocks"] == 0:
            return
        if time.monotonic() > deadline:
            counts = {key: stats[key] for key in ("blocks", "writing", "disk_pending_blocks")}
            raise TimeoutError(f"not on disk after {timeout_s:.0f} s: {counts}")
        time.sleep(_POLL_S)


def empty_host_pool(pool: Path) -> None:
    """Drop every unpinned block of the host pool; the disk keeps its own."""
    with attached(str(pool), read_only=False) as core:
        core.clear()
