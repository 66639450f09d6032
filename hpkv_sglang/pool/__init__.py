"""The host pool: Python's face of the shared memory that all servers of a node spill into.

Owns: how a server's settings become an attachment. Everything else is the core's: one file on
tmpfs, mapped by every process, no daemon; a block is found by a 256-bit key, pinned while it is
read, verified once an epoch, evicted coldest first.

Threading: an attachment may be used from any thread. `lookup`, `touch` and `pin` are for the
scheduler thread (they wait 1 ms at most, whatever other processes do); the rest may block. A
forked child must open its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hpkv_sglang._core import CorePoolError, KeyBatch, KeyScope, Lease, Pool, Store
from hpkv_sglang.config import Settings, VerifyPolicy
from hpkv_sglang.errors import PoolError

__all__ = ["KeyBatch", "KeyScope", "Lease", "Pool", "check_places", "open_pool", "translated"]

logger = logging.getLogger(__name__)


@contextmanager
def translated() -> Iterator[None]:
    """What the core raises about pools and stores, as the package's own PoolError."""
    try:
        yield
    except CorePoolError as error:
        kind, message = error.args
        raise PoolError(kind, message) from error


def open_pool(settings: Settings) -> Pool:
    """Attach to the node's pool, creating it when there is none. May block up to 10 s.

    A size that was not given adopts the pool's. Raises PoolError; its message names the remedy.
    """
    with translated():
        pool = Pool.open(
            settings.pool_directory,
            pool_bytes=settings.pool_bytes,
            verify_always=settings.verify is VerifyPolicy.ALWAYS,
        )
    if pool.notice:
        logger.warning("hpkv: %s", pool.notice)
    if not pool.in_memory:
        logger.warning(
            "hpkv: %s is not on tmpfs or hugetlbfs: the pool will be as slow as that disk. "
            "Choose a directory below /dev/shm (--hpkv-share-mem-path).",
            pool.path,
        )
    return pool


def check_places(settings: Settings) -> None:
    """Raise what opening pool and store would raise, as far as it shows before the model is loaded.

    Makes their directories, and the store's file LOCK; attaches to nothing. May block: on the disk,
    and up to 10 s while another process creates the pool. Raises PoolError; its message names the
    remedy.
    """
    with translated():
        Pool.check_place(settings.pool_directory, pool_bytes=settings.pool_bytes)
        if settings.storage_directory is not None:
            Store.check_place(settings.storage_directory, storage_bytes=settings.storage_bytes)
