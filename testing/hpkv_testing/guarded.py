"""The owner's end of a guarded server: its orders go down one pipe, its news come up another."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hpkv_testing import guard

_GUARD_DIED = 128 + 9


class Guarded:
    """A server's guard, wherever it was forked; `pid` is the server's, 0 if there is none.

    Dropping the object closes the pipe of orders, which kills the server.
    """

    def __init__(
        self, orders: int, news: int, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.exit_code: int | None = None
        self._process = process  # the guard, when it is our own child
        self._orders = open(orders, "wb", buffering=0)  # noqa: SIM115
        self._news = open(news, "rb", buffering=0)  # noqa: SIM115
        self.pid = int(self._news.readline() or 0)

    def order(self, order: bytes) -> None:
        """See guard.py. Nothing happens when the guard is gone, and with it the server."""
        try:
            self._orders.write(order)
        except (BrokenPipeError, ValueError):
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Whether every process of the server has ended, waiting for it at most that long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.exit_code is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._news], [], [], left)[0]:
                return False
            self.exit_code = int(self._news.readline() or _GUARD_DIED)
            self._orders.close()
            self._news.close()
            if self._process is not None:
                self._process.wait()
        return True


def launch(command: Sequence[str], environment: Mapping[str, str], log: int) -> Guarded:
    """Run a command under a guard, its output into `log`, a file descriptor."""
    orders_end, orders = os.pipe()
    news, news_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, *command],
        stdin=orders_end,
        stdout=news_end,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    os.close(orders_end)
    os.close(news_end)
    return Guarded(orders, news, process)
