"""The crash rig: pool clients in their own processes that are killed or stopped at named points.

Owns: the test build of the client (`pool_client`, with points and seeded bugs compiled in), the
conversation with it (one line asked, one line answered), and what "sound" means afterwards.

A block's payload follows from its key, so a reader knows what it must be without being told. Waits
are for events only (an answer, a death, a stop); `TIMEOUT_S` turns a hang into a failure.

Threading: one thread; each client is its own process and its own process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp-plain"  # that of scripts/cpp_tests.sh: the library is compiled once
CLIENT = BUILD / "csrc" / "tests" / "pool_client"
STORE_CLIENT = BUILD / "csrc" / "tests" / "store_client"
TIMEOUT_S = 120.0
POOL_BYTES = 16 << 20
SMALL, LARGE = 4 << 10, 700 << 10


def build_client(program: Path = CLIENT) -> Path:
    """A client program, built (or brought up to date) with cmake.

    Blocks for up to minutes, also while scripts/cpp_tests.sh or another worker builds there.
    """
    # cmake and ninja come with the virtual environment that runs this.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}

    def cmake(*arguments: str) -> None:
        done = subprocess.run(
            ["cmake", *arguments], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    BUILD.parent.mkdir(exist_ok=True)
    with BUILD.with_name(BUILD.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BUILD / "build.ninja").exists():
            kind = "-DCMAKE_BUILD_TYPE=Release"
            cmake("-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DHPKV_TESTS=ON", kind)
        cmake("--build", str(BUILD), "--target", program.name)
    return program


def point_names() -> list[str]:
    """Every named point in the sources but those inside a seeded bug."""
    names: set[str] = set()
    core = ROOT / "csrc"
    sources = [*core.glob("shm/*.cc"), *core.glob("index/*.cc"), *core.glob("disk/catalog*.cc")]
    for source in sources:
        names.update(re.findall(r'HPKV_POINT\("([^"]+)"\)', source.read_text()))
    return sorted(name for name in names if ".bug_" not in name)


class Died(Exception):
    """The client ended before it answered."""


class Client:
    """One client process. Use as a context manager: it never outlives the block."""

    def __init__(self, directory: Path, prefix: Sequence[str] = (), program: Path = CLIENT) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*prefix, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise Died(line) from error

    def receive(self) -> str:
        """The next line. Raises Died when the client ends first, AssertionError on a hang."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
            assert ready, f"no answer in {TIMEOUT_S} s: the client hangs"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                raise Died("end of output")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.receive()

    def open(self, *, quarantine_ms: int = 0, pool_bytes: int | None = POOL_BYTES) -> str:
        size = "-" if pool_bytes is None else pool_bytes
        answer = self.ask(f"open {self.directory} {size} {quarantine_ms} 0")
        assert answer.startswith("slot "), answer
        return answer

    def workload(self, seed: int, steps: int, keys: int = 5000) -> str:
        return self.ask(f"workload {seed} {steps} {keys} {SMALL} {LARGE}")

    def stats(self) -> dict[str, int]:
        return {k: int(v) for k, v in (p.split("=") for p in self.ask("stats").split())}

    def wait_death(self) -> None:
        """Until the process is gone, its files (so its liveness lock) included."""
        self.process.wait(TIMEOUT_S)
        assert self.process.returncode == -signal.SIGKILL, self.process.returncode

    def wait_stop(self) -> None:
        """Until the process has stopped itself."""
        pid, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert pid == self.process.pid and os.WIFSTOPPED(status), status

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.wait_death()

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def key(number: int, shard: int | None = None) -> str:
    """A key of 64 hex digits: spread out, and in the given shard (of 128) when one is asked for."""
    import hashlib

    raw = bytearray(hashlib.sha256(b"rig %d" % number).digest())
    if shard is not None:
        raw[0] = (raw[0] & 0x80) | shard
    return raw.hex()


def require_sound(client: Client, when: str) -> None:
    findings = client.ask("check")
    assert findings == "0", f"{when}: check() found {findings}"


def require_all_readable(client: Client, index: int, keys: Sequence[str], when: str) -> int:
    """Reads every key; right bytes or a miss, and no block that fails its checksum.

    Returns how many were hits.
    """
    before = client.stats()["bad_checksums"]
    answers = client.ask(f"get {index} " + " ".join(keys)).split()
    assert "WRONG" not in answers, f"{when}: wrong bytes were served"
    bad = client.stats()["bad_checksums"] - before
    assert bad == 0, f"{when}: {bad} visible blocks do not match their checksums"
    return answers.count("hit")


def bury(survivor: Client) -> None:
    """Maintains until nothing of the dead is left (their quarantine is 0 in most tests)."""
    for _ in range(3):
        survivor.ask("maintain")
    stats = survivor.stats()
    assert stats["quarantined"] == 0, stats
