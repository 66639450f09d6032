"""Containers and devices: equal thread ids in two PID namespaces, reads that outlive a process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Client, Died, bury, key, require_all_readable, require_sound

pytestmark = pytest.mark.slow

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")
# The first process of a PID namespace cannot stop or kill itself, so the client is the second.
SECOND = ("sh", "-c", 'exec 3<&0; "$0" <&3 & wait')
DIRECT_BYTES = 1 << 20


@pytest.fixture
def own_pid_namespace() -> tuple[str, ...]:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0:
        return (*UNSHARE, *SECOND)
    mapped = ("unshare", "--user", "--map-root-user", *UNSHARE[1:])
    if subprocess.run([*mapped, "true"], capture_output=True, check=False).returncode == 0:
        return (*mapped, *SECOND)
    message = "NOT TESTED: PID namespaces are not permitted on this machine (unshare --pid)"
    warnings.warn(message, stacklevel=1)
    pytest.skip(message)


def test_equal_thread_ids_in_two_pid_namespaces_are_two_clients(
    folder: Path, own_pid_namespace: tuple[str, ...]
) -> None:
    with Client(folder, own_pid_namespace) as holder, Client(folder, own_pid_namespace) as waiter:
        holder.open()
        index = int(holder.ask("ns 1 8192"))
        waiter.open()
        assert holder.ask("tid") == waiter.ask("tid") == "2"

        # Alive, though stopped in the lock: nobody else goes in, whatever its thread id says.
        holder.ask("arm enter.dirty 1 stop")
        holder.send(f"put {index} {key(0, shard=3)}")
        stopped = pid_of(holder)
        wait_stopped(stopped)
        assert waiter.ask(f"put {index} {key(1, shard=3)}") == "busy"
        os.kill(stopped, signal.SIGCONT)
        assert holder.receive() == "stored"

        # Dead in the lock: the next one takes over, though its own thread id is the holder's.
        holder.ask("arm enter.entry 1 kill")
        holder.send(f"put {index} {key(2, shard=3)}")
        with pytest.raises(Died):
            holder.receive()
        holder.process.wait()
        assert waiter.ask(f"put {index} {key(1, shard=3)}") == "stored"
        bury(waiter)
        require_sound(waiter, "after the take-over")
        keys = [key(0, shard=3), key(1, shard=3)]
        assert require_all_readable(waiter, index, keys, "after the take-over") == 2


def pid_of(client: Client) -> int:
    """The client behind `unshare` and `sh`, as a pid of our namespace."""
    pid = client.process.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def wait_stopped(pid: int) -> None:
    """Until another process' child has stopped: nobody tells us, so the state is read again."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


@pytest.fixture
def direct_file() -> Iterator[Path]:
    """A file that O_DIRECT may read, full of bytes that no block has."""
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".direct-") as file:
        file.write(b"\xee" * DIRECT_BYTES)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"NOT TESTED: no O_DIRECT on this file system: {error}")
        yield Path(file.name)


def test_a_direct_read_in_flight_at_death_never_lands_in_a_block_of_the_living(
    folder: Path, direct_file: Path
) -> None:
    with Client(folder) as survivor:
        survivor.open(quarantine_ms=1000)
        index = int(survivor.ask(f"ns 1 {DIRECT_BYTES}"))
        for round_number in range(4):
            with Client(folder) as reader:
                reader.open()
                reader.ask(f"ns 1 {DIRECT_BYTES}")
                assert reader.ask(f"reserve {index} {key(900 + round_number)}") == "ok"
                reader.send(f"direct_read {direct_file}")
                assert reader.receive() == "reading"
                reader.kill()
            survivor.ask("maintain")
            keys = [key(100 * round_number + n) for n in range(20)]
            for k in keys:
                assert survivor.ask(f"put {index} {k}") in ("stored", "present")
            require_all_readable(survivor, index, keys, f"round {round_number}")
            require_sound(survivor, f"round {round_number}")
