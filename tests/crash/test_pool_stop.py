"""A process that is stopped at any point never stops the others: they miss or drop, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import SMALL, Client, key, require_all_readable, require_sound
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


def test_a_place_is_nobodys_before_its_last_owner_has_let_go(folder: Path) -> None:
    """Free places are claimed without the lock of the shard that the last block was in."""
    with Client(folder) as survivor, Client(folder) as victim:
        survivor.open()
        index = int(survivor.ask(f"ns 1 {SMALL}"))
        victim.open()
        assert victim.ask(f"reserve {index} {key(0, shard=5)}") == "ok"
        victim.ask("arm take_out.state 1 stop")
        victim.send("abandon")
        victim.wait_stop()
        number = 1
        while survivor.stats()["evictions"] == 0:  # all that is free has been taken before
            for _ in range(200):
                number += 1
                survivor.ask(f"put {index} {key(number, shard=6 + number % 100)}")
        victim.resume()
        assert victim.receive() == "done"
        require_sound(survivor, "after the one that was stopped had let go")


def test_a_stopped_process_costs_who_drops_many_blocks_one_wait(folder: Path) -> None:
    with Client(folder) as survivor, Client(folder) as stopped:
        survivor.open()
        index = int(survivor.ask(f"ns 1 {SMALL}"))
        for number in range(60):
            assert survivor.ask(f"put {index} {key(number, shard=5 + number % 2)}") == "stored"
        stopped.open()
        stopped.ask("arm shard.locked 1 stop")
        stopped.send(f"put {index} {key(100, shard=5)}")
        stopped.wait_stop()
        before = survivor.stats()["lock_timeouts"]
        assert survivor.ask("clear") == "30", "those of the other shard"
        assert survivor.stats()["lock_timeouts"] == before + 1
        stopped.resume()
        assert stopped.receive() == "stored"
        assert survivor.ask("clear") == "31"
        require_sound(survivor, "after both")


def test_nothing_counts_as_verified_before_a_client_is_said_to_be_dead(folder: Path) -> None:
    """Whoever says so may be stopped right then, and nobody else says it again."""
    with Client(folder) as survivor, Client(folder) as noticer, Client(folder) as victim:
        for client in (survivor, noticer, victim):
            client.open()
        before = survivor.stats()["epoch"]
        victim.kill()
        noticer.ask("arm notice.before_state 1 stop")
        noticer.send("maintain")
        noticer.wait_stop()
        assert survivor.stats()["epoch"] > before
        noticer.resume()
        assert noticer.receive() == "done"
        require_sound(survivor, "after both")
