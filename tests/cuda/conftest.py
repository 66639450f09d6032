"""Tests that only a GPU can answer: skipped, with the reason, where there is none.

`HPKV_GPU_REQUIRED=1` turns the skip into a failure: for machines that are there for these tests.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


def _missing() -> str | None:
    """Why nothing here can run; None where it can."""
    from hpkv_sglang._core import CUDA_RUNTIME

    if not CUDA_RUNTIME:
        return "no GPU tests: this build of hpkv_sglang has no CUDA engine (see docs/gpu.md)"
    import torch

    if not torch.cuda.is_available():
        return "no GPU tests: torch finds no CUDA device here (see docs/gpu.md)"
    return None


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    reason = _missing()
    if reason is None:
        return
    if os.environ.get("HPKV_GPU_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def directory() -> Iterator[str]:
    """An empty directory on tmpfs, where pools belong."""
    with tempfile.TemporaryDirectory(prefix="hpkv-test-", dir="/dev/shm") as path:
        yield path
