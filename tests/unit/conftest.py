"""Fixtures of more than one file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def directory() -> Iterator[str]:
    """An empty directory on tmpfs, where pools belong."""
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as path:
        yield path
