"""Servers in a fraction of the time: a process that has imported SGLang once and forks them.

Each process of a server imports 6,700 modules, which takes a core 15 seconds. Forked from here it
has them already:

    owner ---> nursery ---> guard ---> server ---> spawner ---> schedulers, detokenizer
               imports      guard.py               multiprocessing's forkserver

Between those imports and `python -m sglang.launch_server` lies no code of SGLang's or of the
plugin's, and a child of the server starts as one that was spawned does: from the spawner, which was
forked before the server's first line ran, with the main module prepared anew, the server's
environment, and its arguments pickled. What differs: the launcher too has imported the scheduler
before plugins load, children skip atexit, and what SGLang reads of the environment while it is
imported is the nursery's. A configuration that is about any of these says `new_python`.

Everything in this process is one thread; it must be, to fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any

from hpkv_testing import guard
from hpkv_testing.guarded import Guarded

MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
)
_MESSAGE_BYTES = 1 << 17


class Nursery:
    """The owner's end. It starts with the first server; `close` (or our end) ends it.

    SGLang is imported in `environment`; each server then gets its own. `OMP_NUM_THREADS` must be
    the same in all of them: OpenMP has read it by then.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: int) -> Guarded:
        """Start the server of a command line `python -m module ...`, its output into `log`, a file
        descriptor. Blocks until the nursery has imported SGLang."""
        if self._socket is None:
            self._socket = self._start()
        orders_end, orders = os.pipe()
        news, news_end = os.pipe()
        module, *arguments = command[command.index("-m") + 1 :]
        request = {"module": module, "arguments": arguments, "environment": dict(environment)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [orders_end, news_end, log])
        os.close(orders_end)
        os.close(news_end)
        return Guarded(orders, news)

    def close(self) -> None:
        """End the nursery. Servers live on until their owners end them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = self._process = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpkv_testing.nursery", str(theirs.fileno())],
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours


def main(descriptor: int) -> None:
    """Fork a guard and a server for every request, until the owner closes the socket."""
    import setproctitle

    for module in MODULES:
        importlib.import_module(module)
    setproctitle.getproctitle()  # it looks for the title's place while the environment is in place
    _let_spawned_processes_be_forked()
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        raise RuntimeError(f"a process of {len(threads)} threads is not safe to fork")
    gc.collect()
    gc.freeze()  # so that no collection of a child's copies these pages
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
            if not message:
                return
            if os.fork() == 0:
                break
            for one in descriptors:
                os.close(one)
            _reap()
    os.setsid()
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
        os.close(one)
    exit_code = guard.fork_guarded()
    if exit_code is not None:
        os._exit(exit_code)
    _become_server(**json.loads(message))


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _become_server(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    _take_environment(environment)
    _fork_spawner()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork_spawner() -> None:
    """Stand in for `ForkServer.ensure_running`, which would start a new Python."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    parent = os.getpid()
    resource_tracker.ensure_running()
    # An abstract address: nothing of it is left in a folder.
    address = f"\0hpkv-spawner-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_end, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        guard.die_with_parent(parent)
        os.close(alive)
        forkserver.main(listener.detach(), alive_end, [])
    listener.close()
    os.close(alive_end)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive
    server._forkserver_pid = pid


def _let_spawned_processes_be_forked() -> None:
    set_method, preparation, prepare = (
        multiprocessing.set_start_method,
        spawn.get_preparation_data,
        spawn.prepare,
    )

    def set_start_method(method: str | None, force: bool = False) -> None:
        set_method("forkserver" if method == "spawn" else method, force)

    def with_environment(name: str) -> dict[str, Any]:
        return {**preparation(name), "environment": dict(os.environ)}

    def prepare_with_environment(data: dict[str, Any]) -> None:
        _take_environment(data["environment"])
        prepare(data)

    multiprocessing.set_start_method = set_start_method
    spawn.get_preparation_data = with_environment
    spawn.prepare = prepare_with_environment


def _take_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]))
