"""The disk tier: Python's face of the store below the host pool.

Owns: how a server's settings become an open store, and what it says in the log. The work is done
by the core's threads: cold blocks are demoted to files, blocks that a waiting request needs are
promoted back; the index of both is the pool's shared memory.

Threading: `store.lookup` and `store.promote` are for the scheduler thread and never touch the file
system. The rest may block. Two daemon threads: one waits (without the GIL) for what there is to
log, one removes files for the scheduler thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Self

from hpkv_sglang._core import Pool, Store
from hpkv_sglang.config import Settings
from hpkv_sglang.pool import translated

__all__ = ["Storage", "open_store"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
_NOTICE_WAIT_S = 3600.0
# Identities whose files are still to be removed: more only pile up while the disk hangs.
_DROPS_MAX = 16


def open_store(
    pool: Pool, directory: str, storage_bytes: int | None, block_bytes: int, *, background: bool
) -> Store:
    """Attach to the store in `directory`, creating it when there is none. May block on the disk.

    `block_bytes` sizes the regions of a new store. Without `background` no thread demotes,
    recovers or tidies: for commands that only look. Raises PoolError; its message names the remedy.
    """
    with translated():
        return Store.open(
            pool,
            directory,
            storage_bytes=storage_bytes,
            block_bytes=block_bytes,
            background=background,
        )


class Storage:
    """The open store of one process, the thread that logs its notices, and the one that drops."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._log = threading.Thread(target=self._log_notices, name="hpkv-store-log", daemon=True)
        self._log.start()
        self._drops: queue.Queue[bytes | None] = queue.Queue(_DROPS_MAX)
        self._drop = threading.Thread(target=self._drop_all, name="hpkv-store-drop", daemon=True)
        self._drop.start()

    @classmethod
    def open(cls, settings: Settings, pool: Pool, block_bytes: int) -> Self | None:
        """The disk tier the settings ask for; None when they ask for none. Raises PoolError."""
        if settings.storage_directory is None:
            return None
        store = open_store(
            pool, settings.storage_directory, settings.storage_bytes, block_bytes, background=True
        )
        logger.info(
            "hpkv: disk tier %s, %.1f GiB in %d regions, %s I/O",
            store.path,
            store.storage_bytes / 2**30,
            store.region_count,
            "direct" if store.direct_io else "buffered",
        )
        return cls(store)

    def _log_notices(self) -> None:
        while (notice := self.store.wait_notice(_NOTICE_WAIT_S)) is not None:
            if notice:
                logger.warning("hpkv: %s", notice)

    def drop_namespace_soon(self, namespace: bytes) -> None:
        """Drop its blocks on disk, in a thread: files are removed. Returns at once."""
        try:
            self._drops.put_nowait(namespace)
        except queue.Full:
            logger.warning(
                "hpkv: the disk is behind with removing blocks of older weights: those of %s stay "
                "until they are evicted. Nobody asks for them any more.",
                namespace.hex()[:12],
            )

    def _drop_all(self) -> None:
        while (namespace := self._drops.get()) is not None:
            self.store.drop_namespace(namespace)

    def close(self) -> bool:
        """End the threads. False when one hangs in the disk: the pool must then stay open."""
        with contextlib.suppress(queue.Full):  # then it hangs, and ends with the process
            self._drops.put_nowait(None)
        return self.store.close(CLOSE_TIMEOUT_S)
