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
        self.may_drop, self.dropped = threading.Event(), threading.Event()

    def wait_notice(self, _timeout_s: float) -> str | None:
        return self._notices.pop(0)

    def drop_namespace(self, _namespace: bytes) -> int:
        self.may_drop.wait(10)
        self.dropped.set()
        return 1


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
