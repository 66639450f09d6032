"""A process that is stopped at any point never stops the others: they miss or drop, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import Client, key, require_all_readable, require_sound
from test_pool_kill import AT_WORK, KEPT, KEPT_ON_DISK, store_kept

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", AT_WORK)
def test_stopped_at_work_leaves_the_others_serving(folder: Path, point: str) -> None:
    with Client(folder) as survivor, Client(folder) as victim:
        survivor.open()
        index = store_kept(survivor)
        victim.open()
        victim.ask(f"arm {point} 1 stop")
        victim.send("workload 1 9000 5000 4096 716800")
        victim.wait_stop()

        # One shard of 128 may be held: at most that part of the keys is a miss now.
        hits = require_all_readable(survivor, index, KEPT, f"stopped at {point}")
        in_one_shard = max(sum(int(k[:2], 16) % 128 == shard for k in KEPT) for shard in range(128))
        assert hits >= len(KEPT) - in_one_shard, f"stopped at {point}"
        found = survivor.ask("find " + " ".join(KEPT_ON_DISK)).split()
        assert set(found) == {"hit"}, f"stopped at {point}"
        for n in range(200, 260):
            assert survivor.ask(f"put {index} {key(n)}") in ("stored", "busy", "full")
        survivor.ask("maintain")
        assert survivor.stats()["poisoned"] == 0

        victim.resume()
        assert victim.receive() == "done", f"stopped at {point}, then resumed"
        require_sound(survivor, f"stopped at {point}, then resumed")
        assert require_all_readable(survivor, index, KEPT, "at the end") == len(KEPT)
