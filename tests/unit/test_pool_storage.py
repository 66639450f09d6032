"""The Python face of the disk tier: what it logs, and that it holds nobody."""

from __future__ import annotations

import logging
import threading

import pytest

from hpkv_sglang.pool.storage import Storage


class Core:
    """A store whose notices and drops the test decides on."""

    def __init__(self, *notices: str | None) -> None:
        self._notices = list(notices)
        self.dropping, self.may_drop = threading.Event(), threading.Event()
        self.dropped = threading.Event()
        self.drop_count = 0

    def wait_notice(self, _timeout_s: float) -> str | None:
        return self._notices.pop(0)

    def drop_namespace(self, _namespace: bytes) -> int:
        self.dropping.set()
        self.may_drop.wait(10)
        self.drop_count += 1
        self.dropped.set()
        return 1

    def close(self, _timeout_s: float) -> bool:
        return self.may_drop.is_set()


def test_each_notice_is_one_log_line_and_a_timeout_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="hpkv_sglang")
    storage = Storage(Core("disk tier: reading failed", "", "disk tier: reading works again", None))  # type: ignore[arg-type]
    storage._log.join(10)
    assert [record.getMessage() for record in caplog.records] == [
        "hpkv: disk tier: reading failed",
        "hpkv: disk tier: reading works again",
    ]


def test_dropping_a_namespace_does_not_hold_who_asks() -> None:
    """The scheduler asks, and files are removed."""
    core = Core(None)
    Storage(core).drop_namespace_soon(b"n" * 32)  # type: ignore[arg-type]
    assert not core.dropped.is_set()
    core.may_drop.set()
    assert core.dropped.wait(10)


def test_a_disk_that_hangs_gathers_neither_threads_nor_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = Core(None)
    storage = Storage(core)  # type: ignore[arg-type]
    threads = threading.active_count()
    storage.drop_namespace_soon(b"n" * 32)
    assert core.dropping.wait(10)
    for i in range(100):
        storage.drop_namespace_soon(bytes([i]) * 32)
    assert threading.active_count() <= threads
    assert "those of 636363636363 stay until they are evicted" in caplog.text
    assert not storage.close()
    core.may_drop.set()
    storage._drops.put(None, timeout=10)
    storage._drop.join(10)
    assert core.drop_count == 17, "the one it was at, and those that were queued"
    assert storage.close()
