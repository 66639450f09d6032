"""Processes that share a pool and a store die at calls of the file system: nothing that was written
is lost, nothing wrong is served, and the store stays within its size.

`kill -9` loses no completed write (what a power loss may take is tested in C++), so every block
that is in the index when everybody dies is served by whoever comes next, with the same pool or a
new one.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import STORE_CLIENT, Client, Died, build_client, require_sound

pytestmark = pytest.mark.slow

ROUNDS = 20
DEATHS = {"write": 60, "sync": 4, "read": 60, "reserve": 4, "any": 400}  # call: the latest one
STORE_BYTES = 12 << 20  # of 24 MB of distinct blocks: regions are evicted all the time
KEYS = 400
STEPS = 250


@pytest.fixture(scope="module", autouse=True)
def store_client_program() -> Path:
    return build_client(STORE_CLIENT)


@pytest.fixture
def store_folder() -> Iterator[Path]:
    """A directory on a disk, not in memory."""
    path = Path(tempfile.mkdtemp(prefix="crash-rig-store-"))
    try:
        yield path / "store"
    finally:
        shutil.rmtree(path)


def opened(folder: Path, store_folder: Path, *, background: bool) -> Client:
    client = Client(folder, program=STORE_CLIENT)
    line = f"open {folder} {store_folder} {STORE_BYTES} {KEYS} {int(background)}"
    assert client.ask(line) == "open"
    return client


def open_at_once(folders: list[Path], store_folder: Path) -> list[str]:
    """What processes are answered that open the store in the same moment, each over its pool."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(folder, program=STORE_CLIENT)) for folder in folders]
        for client in clients:
            assert client.ask("nothing").startswith("error unknown")  # it runs
        for client in clients:
            client.send(f"open {client.directory} {store_folder} {STORE_BYTES} {KEYS} 1")
        answers = [client.receive() for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            if answer == "open":
                assert client.ask(f"work {clients.index(client)} {STEPS}") == "done"
                require_sound(client, "opened at once")
        require_within_size(store_folder, "opened at once")
        return answers


@pytest.mark.parametrize("round_number", range(3))
def test_processes_of_one_pool_that_open_a_store_at_once_all_get_it(
    folder: Path, store_folder: Path, round_number: int
) -> None:
    assert open_at_once([folder] * 4, store_folder) == ["open"] * 4


@pytest.mark.parametrize("round_number", range(2))
def test_of_processes_with_pools_of_their_own_exactly_one_gets_the_store(
    folder: Path, store_folder: Path, round_number: int
) -> None:
    folders = [folder / str(i) for i in range(4)]
    folder.mkdir(mode=0o700, exist_ok=True)
    answers = open_at_once(folders, store_folder)
    assert answers.count("open") == 1
    assert all(str(store_folder) in answer for answer in answers if answer != "open"), answers


def numbers(answer: str) -> set[int]:
    assert "WRONG" not in answer and "error" not in answer, answer
    return {int(n) for n in answer.split()}


def require_within_size(store_folder: Path, when: str) -> None:
    used = sum(p.stat().st_blocks * 512 for p in store_folder.rglob("*") if p.is_file())
    assert used <= STORE_BYTES, f"{when}: {used} bytes on disk"


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_a_death_at_any_file_call_loses_nothing_and_serves_nothing_wrong(
    folder: Path, store_folder: Path, round_number: int
) -> None:
    choice = random.Random(round_number)
    with opened(folder, store_folder, background=False) as survivor:
        with opened(folder, store_folder, background=True) as victim:
            call = list(DEATHS)[round_number % len(DEATHS)]
            number = choice.randrange(1, DEATHS[call] + 1)
            assert victim.ask(f"die {call} {number}") == "armed"
            victim.send(f"work {round_number} {STEPS * 100}")
            assert survivor.ask(f"work {1000 + round_number} {STEPS}") == "done"
            with pytest.raises(Died):
                victim.receive()
            victim.wait_death()
        when = f"a victim died before its file call {call} {number}"
        require_sound(survivor, when)
        for _ in range(3):
            survivor.ask("maintain")
        if choice.random() < 0.5:
            assert survivor.ask(f"work {2000 + round_number} {STEPS}") == "done", when
            when += ", the others went on"
        require_sound(survivor, when)
        require_within_size(store_folder, when)
        complete = numbers(survivor.ask("on_disk"))
        assert len(complete) > 20, when
        survivor.kill()
    if choice.random() < 0.5:
        shutil.rmtree(folder)  # a reboot
        when += ", then the machine was restarted"
    with opened(folder, store_folder, background=False) as heir:
        assert heir.ask("recover") == "done"
        heir.ask("maintain")
        heir.ask("clear_pool")
        # Nothing is demoted while it serves, so nothing leaves the disk.
        lost = complete - numbers(heir.ask("serve"))
        assert not lost, f"{when}: {sorted(lost)} are lost"
        require_sound(heir, when)
        assert heir.ask(f"work {3000 + round_number} {STEPS}") == "done", when
        require_within_size(store_folder, when)
