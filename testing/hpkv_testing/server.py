"""One real SGLang server on the CPU, as a context manager.

A `Server` owns a guard process (see guard.py and guarded.py), which owns the server's process
group; whatever happens to this process, none of the server's outlives it. Not thread-safe as an
object, except for the calls it takes from `Client`. This module imports no sglang: the server
process does.

    new -> start() -> starting -> wait_ready() -> ready -> stop() or kill() -> gone
"""

from __future__ import annotations

import atexit
import http.client
import logging
import os
import random
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpkv_testing import guarded, platform
from hpkv_testing.client import Answer, Ask, Client
from hpkv_testing.guarded import Guarded
from hpkv_testing.logs import excerpt, last_line
from hpkv_testing.nursery import Nursery

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
QUICK_START = str(Path(__file__).with_name("quick_start"))
_POLL_S = 0.2
_PROGRESS_S = 10.0
# SGLang takes others between these and the kernel's own, which begin at 32768. A server takes its
# port at the end of its start, so the test processes of one run have ports of their own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_SERVER_PORTS = range(10_000 + _WORKER, 21_000, 8)
# Of data-parallel attention: its handshake, the process group, and its queues.
_DERIVED_PORTS = (0, 13, *range(233, 241))
_live: weakref.WeakSet[Server] = weakref.WeakSet()
_given_ports: set[int] = set()


class ServerStartError(RuntimeError):
    """The server ended, or was not ready in time; the message holds the telling log lines."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server is started. Equal configurations make interchangeable servers.

    `flags` come after ours, so they win. `env` is added to an environment without any inherited
    SGLANG_* or HPKV_* name. `page_size=None` leaves the choice to SGLang (or to the plugin).
    An idle scheduler spins unless `idle_sleep`, which takes a core from all the others.
    `threads` is per rank; None shares the cores among the ranks. `new_python` is for claims about
    the start itself: never from a nursery.
    """

    model: Path
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    launcher: Literal["module", "serve"] = "module"
    new_python: bool = False
    tp_size: int = 1
    max_total_tokens: int = 2048
    page_size: int | None = 16
    dtype: str = "bfloat16"
    threads: int | None = None
    idle_sleep: bool = True
    start_timeout_s: float = 600.0

    def command(self, port: int) -> list[str]:
        """The command line of a server on this port."""
        module = [sys.executable, "-m", "sglang.launch_server"]
        serve = [str(Path(sys.executable).with_name("sglang")), "serve"]
        page = [] if self.page_size is None else ["--page-size", str(self.page_size)]
        return [
            *(module if self.launcher == "module" else serve),
            *("--model-path", str(self.model)),
            *("--host", HOST, "--port", str(port)),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--dtype", self.dtype),
            *("--tp-size", str(self.tp_size)),
            *("--max-total-tokens", str(self.max_total_tokens)),
            *page,
            *(["--sleep-on-idle"] if self.idle_sleep else []),
            "--enable-cache-report",
            *self.flags,
        ]

    def environment(self) -> dict[str, str]:
        """The whole environment of the server's processes."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SGLANG_", "SGL_", "HPKV_"))
            # A server imports some 6,000 modules: without their byte code each start compiles them.
            and name != "PYTHONDONTWRITEBYTECODE"
        }
        threads = self.threads or max(1, len(os.sched_getaffinity(0)) // self.tp_size)
        return {
            **inherited,
            "SGLANG_PLATFORM": platform.NAME,
            # /health then means "the warm-up request was answered" and sends no request of its own.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (QUICK_START, inherited.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(threads),
            # Waiting threads that spin hold back the very thread they wait for when servers share
            # the cores: a decode step was ten times slower.
            "OMP_WAIT_POLICY": "passive",
            **self._thread_binding(),
            **dict(self.env),
        }

    def _thread_binding(self) -> dict[str, str]:
        """SGLang wants a NUMA node per rank unless each rank is given its cores."""
        if self.tp_size == 1:
            return {}
        cpus = sorted(os.sched_getaffinity(0))
        ranks = [cpus[rank % len(cpus)] for rank in range(self.tp_size)]
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, ranks))}


@dataclass(eq=False)
class Server:
    """A server of this configuration; `with Server(config) as server` waits until it is ready.

    `log_path` defaults to a new file in the temporary folder, kept for reading after a failure. The
    server starts by its command line, or sooner from a `nursery`.
    """

    config: ServerConfig
    log_path: Path | None = None
    nursery: Nursery | None = None
    port: int = field(init=False, default=0)
    pid: int = field(init=False, default=0)
    _guard: Guarded | None = field(init=False, default=None, repr=False)

    def __enter__(self) -> Server:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Launch the processes and return at once. Start many, then `wait_ready` for each."""
        if self._guard is not None:
            raise RuntimeError("this server was started before: make a new one")
        if self.log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="hpkv-server-", suffix=".log")
            os.close(descriptor)
            self.log_path = Path(name)
        self.port = free_port()
        launch = guarded.launch if self.nursery is None else self.nursery.launch
        with self.log_path.open("ab") as log:
            self._guard = launch(
                self.config.command(self.port), self.config.environment(), log.fileno()
            )
        _live.add(self)
        self.pid = self._guard.pid
        if not self.pid:
            raise ServerStartError(f"the guard did not start: {excerpt(self.log_text())}")

    def wait_ready(self) -> None:
        """Block until the server serves. Raises ServerStartError, after killing it."""
        start = time.monotonic()
        next_report = start + _PROGRESS_S
        while not self._healthy():
            now = time.monotonic()
            if not self.alive:
                self._fail(f"ended with status {self._guard and self._guard.exit_code}")
            if now - start > self.config.start_timeout_s:
                self._fail(f"was not ready after {self.config.start_timeout_s:.0f} s")
            if now > next_report:
                next_report += _PROGRESS_S
                logger.info("not ready after %.0f s, last: %s", now - start, self.last_line())
            time.sleep(_POLL_S)

    @property
    def alive(self) -> bool:
        """Whether any process of the server may still run."""
        return self._guard is not None and not self._guard.wait(0)

    @property
    def client(self) -> Client:
        """For calls from other threads, or with another timeout."""
        return Client(HOST, self.port)

    def generate(self, ask: Ask | None = None, **fields: Any) -> Answer:
        """Ask and wait; see `Client.generate`."""
        return self.client.generate(ask, **fields)

    def generate_many(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them at once, answers in the order of `asks`."""
        return self.client.generate_many(asks)

    def abort(self, rid: str | None = None) -> None:
        """Abort the request with this id, or all requests."""
        self.client.abort(rid)

    def flush_cache(self, timeout_s: float = 10.0) -> None:
        """Empty the device tree; raises ServerError while requests keep running."""
        self.client.flush_cache(timeout_s)

    def kill(self) -> None:
        """SIGKILL to all processes of the server; returns when the last one is gone."""
        self._order(b"K")
        self._wait(None)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, as a service would be stopped; kills what is left after `timeout_s`.

        Returns the server's exit status (128 + n when ended by signal n).
        """
        self._order(b"T")
        if not self._wait(timeout_s):
            logger.warning("port %d: killed, it ignored SIGTERM for %.0f s", self.port, timeout_s)
            self.kill()
        assert self._guard is not None and self._guard.exit_code is not None
        return self._guard.exit_code

    def processes(self) -> dict[int, str]:
        """Pid and command line of each living process in the server's session."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if session == self.pid and words:  # a zombie has no command line
                found[int(entry.name)] = words
        return found

    def scheduler_pids(self) -> list[int]:
        """Pids of the scheduler processes, one per rank."""
        return [pid for pid, words in self.processes().items() if "sglang::scheduler" in words]

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path else ""

    def last_line(self) -> str:
        """The last log line, cut to a terminal's width."""
        return last_line(self.log_text())

    def _healthy(self) -> bool:
        try:
            return Client(HOST, self.port, timeout_s=10.0).request("GET", "/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet, or on its way down: `alive` tells which

    def _fail(self, what: str) -> None:
        self.kill()
        raise ServerStartError(
            f"the server {what}; log: {self.log_path}\n{excerpt(self.log_text())}"
        )

    def _order(self, order: bytes) -> None:
        if self._guard is not None:
            self._guard.order(order)

    def _wait(self, timeout_s: float | None) -> bool:
        if self._guard is not None and not self._guard.wait(timeout_s):
            return False
        _live.discard(self)
        return True


def start_all(servers: Sequence[Server]) -> None:
    """Start several side by side and wait for all; on an error none is left running."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
    except BaseException:
        for server in servers:
            server.kill()
        raise


def free_port() -> int:
    """A port that was free a moment ago, and so were those that SGLang derives from it.

    Below the ports that the kernel gives to connections, which would take a derived one meanwhile.
    """
    for port in random.SystemRandom().sample(_SERVER_PORTS, 500):
        if port in _given_ports:
            continue
        try:
            for derived in _DERIVED_PORTS:
                with socket.socket() as probe:
                    probe.bind((HOST, port + derived))
        except OSError:
            continue
        _given_ports.add(port)
        return port
    raise RuntimeError(f"no port is free in {_SERVER_PORTS}")


@atexit.register
def _kill_all() -> None:
    # The guards notice our end anyway; this waits for them, so that nothing is seen half dead.
    for server in list(_live):
        server.kill()
