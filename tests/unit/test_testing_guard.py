"""The guard of a test server: whatever ends first, no process is left. Starts no server."""

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from hpkv_testing.guarded import launch

# A server in small: a child in its group, one that left the group, and one that lost its parent.
FAMILY = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
near = subprocess.Popen(sleeper)
far = subprocess.Popen(sleeper, start_new_session=True)
quiet = "start_new_session=True, stdout=subprocess.DEVNULL"
code = f"import subprocess; print(subprocess.Popen({sleeper!r}, {quiet}).pid)"
orphan = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
line = f"{near.pid} {far.pid} {orphan.strip()}\\n"
with open(sys.argv[1], "w") as ready:
    ready.write(line)
time.sleep(0 if sys.argv[2:] == ["leave"] else 600)
"""


class Family:
    """A guard around FAMILY; `pids` are the command and its three descendants."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ready = folder / "ready"
        os.mkfifo(ready)
        command = [sys.executable, "-I", "-S", "-c", FAMILY, str(ready), *arguments]
        self.guarded = launch(command, os.environ, 2)
        self.pids = [self.guarded.pid, *map(int, ready.read_text().split())]

    def living(self) -> list[int]:
        return [pid for pid in self.pids if not _is_gone(pid)]


@pytest.mark.parametrize("order", ["K", "T"])
def test_when_there_is_an_exit_code_every_descendant_is_gone(tmp_path: Path, order: str) -> None:
    family = Family(tmp_path)
    assert len(family.living()) == 4
    assert not family.guarded.wait(0)
    family.guarded.order(order.encode())
    assert family.guarded.wait(60)
    assert family.living() == []
    signaled = signal.SIGTERM if order == "T" else signal.SIGKILL
    assert family.guarded.exit_code == 128 + signaled
    family.guarded.order(b"K")  # nobody is there to obey, and that is fine


def test_a_dropped_owner_takes_every_descendant_along(tmp_path: Path) -> None:
    family = Family(tmp_path)
    handles = [os.pidfd_open(pid) for pid in family.pids]
    del family.guarded
    assert all(_ended(handle) for handle in handles)


def test_a_command_that_ends_by_itself_leaves_nobody(tmp_path: Path) -> None:
    family = Family(tmp_path, "leave")
    assert family.guarded.wait(60)
    assert family.guarded.exit_code == 0
    assert family.living() == []


def test_a_killed_guard_takes_the_command_with_it(tmp_path: Path) -> None:
    family = Family(tmp_path)
    command = os.pidfd_open(family.pids[0])
    parent = int(Path(f"/proc/{family.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    try:
        assert _ended(command)
        assert family.guarded.wait(60) and family.guarded.exit_code == 128 + signal.SIGKILL
    finally:
        for pid in family.pids[1:]:  # SGLang's children see to this themselves
            os.kill(pid, signal.SIGKILL)


def test_a_command_that_can_not_run_ends_the_guard(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with (tmp_path / "log").open("wb") as log:
        guarded = launch([missing], os.environ, log.fileno())
    assert guarded.wait(60) and guarded.exit_code != 0
    assert missing in (tmp_path / "log").read_text()


def _ended(handle: int) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    ended = bool(poller.poll(60_000))
    os.close(handle)
    return ended


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
