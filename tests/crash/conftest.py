"""The rig for the tests here: the client is built once, each test gets its own pool directory."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def client_program() -> Path:
    import rig

    return rig.build_client()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for one pool, in memory where the machine has a tmpfs for it."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="crash-rig-", dir=base))
    try:
        yield path / "pool"
    finally:
        shutil.rmtree(path)
