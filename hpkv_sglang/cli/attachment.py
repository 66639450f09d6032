"""Attaching to a pool from outside: never creating one, always letting go.

A pool may be live (servers are attached) or cold (nobody is); a command is one more client of it
and does not care which. Threading: as the pool itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpkv_sglang._core import Pool
from hpkv_sglang.config import default_pool_directory, environment_value
from hpkv_sglang.pool import translated

__all__ = ["attached", "default_directory"]


def default_directory() -> str:
    """Where a server started without a path would put the pool (environment, else default).

    Raises ConfigError when the environment is malformed.
    """
    return environment_value("pool_directory") or default_pool_directory()


@contextmanager
def attached(directory: str, *, read_only: bool) -> Iterator[Pool]:
    """The pool in `directory` while the block runs. May block while a server is creating it.

    Raises PoolError when there is none, it is somebody else's, or the file is not a pool.
    """
    with translated():
        pool = Pool.open(directory, create=False, read_only=read_only)
    try:
        yield pool
    finally:
        pool.close()
