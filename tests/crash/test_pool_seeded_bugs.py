"""The rig proves itself: each of its seeded bugs must make it fail, and the sound build must not.

Each scenario is run twice, with the bug switched on in every client and without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rig import Client, bury, key, require_all_readable, require_sound

pytestmark = pytest.mark.slow

SHARD = 9
QUARANTINE_MS = 60_000  # far longer than any of this takes: the dead are not reaped here


def clients(folder: Path, count: int, bug: str | None) -> list[Client]:
    out = [Client(folder) for _ in range(count)]
    for client in out:
        if bug is not None:
            assert client.ask(f"bug {bug}") == "on"
    return out


def killed_at(folder: Path, point: str, bug: str | None) -> None:
    """One client dies at `point` of a put; the other must find a sound pool at once."""
    survivor, victim = clients(folder, 2, bug)
    with survivor, victim:
        survivor.open(quarantine_ms=QUARANTINE_MS)
        index = int(survivor.ask("ns 1 8192"))
        victim.open()
        victim.ask("ns 1 8192")
        victim.ask(f"arm {point} 1 kill")
        victim.send(f"put {index} {key(0)}")
        victim.wait_death()
        survivor.ask("maintain")
        require_all_readable(survivor, index, [key(0)], "after the death")
        require_sound(survivor, "after the death")


def publish_before_checksum(folder: Path, bug: str | None) -> None:
    killed_at(folder, "publish.before_checksum", bug)


def touch_before_publish(folder: Path, bug: str | None) -> None:
    killed_at(folder, "publish.before_checksum", bug)


def counter_before_state(folder: Path, bug: str | None) -> None:
    killed_at(folder, "enter.before_dirty", bug)


def demote_killed_at(folder: Path, point: str, bug: str | None) -> None:
    """One client dies at `point` of a demotion; the other must find a sound index at once."""
    survivor, victim = clients(folder, 2, bug)
    with survivor, victim:
        survivor.open(quarantine_ms=QUARANTINE_MS)
        victim.open()
        for client in (survivor, victim):
            client.ask("ns 1 8192")
            client.ask("attach 8")
        assert victim.ask("region 1 50") == "open"
        victim.ask(f"arm {point} 1 kill")
        victim.send(f"demote 1 {key(0)}")
        victim.wait_death()
        survivor.ask("maintain")
        assert survivor.ask(f"find {key(0)}") != "WRONG", "wrong bytes were promised"
        require_sound(survivor, "after the death")


def disk_ready_before_checksum(folder: Path, bug: str | None) -> None:
    demote_killed_at(folder, "disk_publish.before_checksum", bug)


def disk_counter_before_dirty(folder: Path, bug: str | None) -> None:
    demote_killed_at(folder, "disk_enter.before_dirty", bug)


def regions_of_the_dead_stay(folder: Path, bug: str | None) -> None:
    survivor, victim = clients(folder, 2, bug)
    with survivor, victim:
        survivor.open()
        victim.open()
        survivor.ask("attach 8")
        victim.ask("attach 8")
        assert victim.ask("region 1 50") == "open"
        victim.kill()
        bury(survivor)
        require_sound(survivor, "after its owner was buried")


def reclaim_at_once(folder: Path, bug: str | None) -> None:
    """A device goes on writing into a dead client's block: nobody else may have it by then."""
    survivor, victim = clients(folder, 2, bug)
    with survivor, victim:
        survivor.open(quarantine_ms=QUARANTINE_MS)
        index = int(survivor.ask("ns 1 1000000"))
        victim.open()
        victim.ask("ns 1 1000000")
        assert victim.ask(f"reserve {index} {key(0)}") == "ok"
        assert victim.ask("device") == "device ready"
        victim.kill()
        survivor.ask("maintain")
        keys = [key(n) for n in range(1, 30)]
        for k in keys:
            assert survivor.ask(f"put {index} {k}") == "stored"
        victim.send("write")
        assert victim.receive() == "device wrote"
        require_all_readable(survivor, index, keys, "after the device wrote")
        require_sound(survivor, "after the device wrote")


def lock_without_generation(folder: Path, bug: str | None) -> None:
    """A lock judged dead may be taken over only while it still is that death's.

    The waiter is stopped between its verdict and the take-over; meanwhile the dead is buried, its
    slot given to a newcomer, and the newcomer is inside the same lock.
    """
    survivor, holder, waiter, newcomer = clients(folder, 4, bug)
    with survivor, holder, waiter, newcomer:
        survivor.open()
        index = int(survivor.ask("ns 1 8192"))
        assert holder.open() == "slot 1 adopted"
        waiter.open()
        holder.ask("arm enter.before_dirty 1 kill")
        holder.send(f"put {index} {key(0, SHARD)}")
        holder.wait_death()
        waiter.ask("arm lock.before_takeover 1 stop")
        waiter.send(f"put {index} {key(1, SHARD)}")
        waiter.wait_stop()
        bury(survivor)
        assert newcomer.open() == "slot 1 adopted"
        newcomer.ask("arm enter.dirty 1 stop")
        newcomer.send(f"put {index} {key(2, SHARD)}")
        newcomer.wait_stop()
        waiter.resume()
        answer = waiter.receive()
        newcomer.resume()
        newcomer.receive()
        require_sound(survivor, "after two were in one lock")
        assert answer == "busy", f"the waiter went into a lock that a live client held: {answer}"


SCENARIOS: list[Callable[[Path, str | None], None]] = [
    publish_before_checksum,
    reclaim_at_once,
    lock_without_generation,
    counter_before_state,
    touch_before_publish,
    disk_ready_before_checksum,
    disk_counter_before_dirty,
    regions_of_the_dead_stay,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_rig_passes_without_the_bug(folder: Path, scenario: Callable[..., None]) -> None:
    scenario(folder, None)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_rig_fails_with_the_bug(folder: Path, scenario: Callable[..., None]) -> None:
    with pytest.raises(
        AssertionError, match=r"check\(\) found|do not match|wrong bytes|live client"
    ):
        scenario(folder, scenario.__name__)
