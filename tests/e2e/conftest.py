"""What the tests on a real server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import pool_directory


@pytest.fixture
def pool() -> Iterator[Path]:
    """Where a server's pool may be: the directory is not there yet."""
    with pool_directory() as folder:
        yield folder
