"""The guard of a test server: whatever ends first, no process is left. Starts no server."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpkv_testing import guard

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


class Guarded:
    """A guard around FAMILY; `pids` are the command and its three descendants."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ready = folder / "ready"
        os.mkfifo(ready)
        family = [sys.executable, "-I", "-S", "-c", FAMILY, str(ready), *arguments]
        self.guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *family],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.guard.stdin is not None
        assert self.guard.stdout is not None
        self.orders = self.guard.stdin
        with self.guard.stdout as stdout:
            command = int(stdout.readline())
        self.pids = [command, *map(int, ready.read_text().split())]

    def living(self) -> list[int]:
        return [pid for pid in self.pids if not _is_gone(pid)]


@pytest.fixture(params=["eof", "K", "T"])
def order(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def test_when_the_guard_is_gone_so_is_every_descendant(tmp_path: Path, order: str) -> None:
    guarded = Guarded(tmp_path)
    assert len(guarded.living()) == 4
    if order != "eof":
        guarded.orders.write(order.encode())
        guarded.guard.wait(60)
    guarded.orders.close()
    status = guarded.guard.wait(60)
    assert guarded.living() == []
    assert status == 128 + (signal.SIGTERM if order == "T" else signal.SIGKILL)


def test_a_command_that_ends_by_itself_leaves_nobody(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "leave")
    assert guarded.guard.wait(60) == 0
    assert guarded.living() == []
    guarded.orders.close()


def test_a_killed_guard_takes_the_command_with_it(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    command = os.pidfd_open(guarded.pids[0])
    guarded.guard.kill()
    guarded.guard.wait(60)
    poller = select.poll()
    poller.register(command, select.POLLIN)
    try:
        assert poller.poll(60_000)
    finally:
        for pid in guarded.pids[1:]:  # SGLang's children see to this themselves
            os.kill(pid, signal.SIGKILL)


def test_a_command_that_can_not_run_ends_the_guard(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ended = subprocess.run(
        [sys.executable, "-I", "-S", guard.__file__, missing], capture_output=True, timeout=60
    )
    assert ended.returncode != 0
    assert missing in ended.stderr.decode()


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
