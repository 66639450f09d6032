"""Attaching to a disk tier from outside, and reading all of it with a progress bar.

A store belongs to one pool at a time. Where a pool with a disk tier is in place it is opened
through that; otherwise (after a reboot) through a small pool of the command's own, which is removed
again: the next server then finds the store as if it had been rebooted once more. Threading: as the
store itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hpkv_sglang._core import Pool, Store
from hpkv_sglang.config import environment_value
from hpkv_sglang.errors import ConfigError, PoolError
from hpkv_sglang.pool import translated
from hpkv_sglang.pool.storage import open_store

__all__ = ["attached_store", "default_storage", "verify_store"]

# The index of a store without a pool: 64 B a block and a little, whatever the blocks' size.
_INDEX_POOL_BYTES = 256 << 20


def default_storage() -> str:
    """Where a server started without a path would keep blocks (environment).

    Raises ConfigError when the environment names no directory.
    """
    directory: str | None = environment_value("storage_directory")
    if directory is None:
        raise ConfigError.build(
            "choosing a disk tier",
            "directory",
            None,
            "Give --storage-path DIR, or set HPKV_KV_STORAGE_PATH.",
        )
    return directory


@contextmanager
def attached_store(pool_directory: str, storage: str) -> Iterator[Store]:
    """The store in `storage` with its index complete. May read every region's summary first.

    Raises PoolError when there is none, it is somebody else's, or a live pool elsewhere uses it.
    """
    if not Path(storage, "store.hpkv").exists():
        raise PoolError(
            "missing",
            f"opening a disk tier: {storage}: there is none here. Give --storage-path the "
            "directory that a server's --hpkv-storage-path names.",
        )
    with ExitStack() as stack:
        pool = _pool_with_a_store(pool_directory)
        if pool is None:
            own = mkdtemp(prefix=f"hpkv-cli-{os.getpid()}-", dir="/dev/shm")
            stack.callback(shutil.rmtree, own)
            pool = _open_pool(own, create=True)
        stack.callback(pool.close)
        store = open_store(pool, storage, None, 0, background=False)
        stack.callback(store.close, 1.0)
        store.recover()
        yield store


def _pool_with_a_store(directory: str) -> Pool | None:
    """The pool there, if it has a disk tier: a pool without one would be bound to this store."""
    if not Path(directory, "pool.hpkv").exists():
        return None
    pool = _open_pool(directory, create=False)
    if pool.stats()["disk_regions"]:
        return pool
    pool.close()
    return None


def _open_pool(directory: str, *, create: bool) -> Pool:
    with translated():
        return Pool.open(directory, create=create, pool_bytes=_INDEX_POOL_BYTES if create else None)


def verify_store(store: Store, *, fix: bool, show_progress: bool) -> dict[str, Any]:
    """Read every block and compare its checksum; with `fix`, drop the bad ones. Long.

    Returns counts: blocks, bytes, bad, stale, io_errors, total_blocks, and whether it is complete.
    """
    if not show_progress:
        return store.verify(lambda _blocks, _total, _bytes: True, fix=fix)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # On stderr, so that --json leaves clean output.
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("reading", total=None)

        def advance(blocks: int, total: int, bytes_read: int) -> bool:
            expected = round(bytes_read * total / blocks) if blocks else None
            progress.update(task, completed=bytes_read, total=expected)
            return True

        return store.verify(advance, fix=fix)
