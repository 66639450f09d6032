"""Where the blocks of a page may come from: this server's own namespace, or one that fits.

Owns: `Source` (keys of a page's blocks, and how their bytes become the page) and `Sources`, which
watches the pool for namespaces of servers with another tensor-parallel size or device.

A namespace is recognised by the words in its descriptor; it is looked for at most once a second,
and only while a prompt has a tail that the own namespace lacks. Scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from hpkv_sglang._core import BlockSource, KeyBatch, KeyScope, Pool
from hpkv_sglang.layout.base import PoolLayout
from hpkv_sglang.layout.columns import join
from hpkv_sglang.namespace import Namespace, scope_mask
from hpkv_sglang.portable import ForeignBlocks, source_of
from hpkv_sglang.radix.identity import RankIdentity

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One namespace that has blocks for us. `block` None: our own, whose blocks are our pages."""

    namespace_id: bytes
    scopes: tuple[KeyScope, ...]
    block: BlockSource | None = None

    @property
    def blocks_per_page(self) -> int:
        return len(self.scopes)

    def keys(self, hashes: list[str]) -> KeyBatch:
        """Keys of the blocks of these pages, page by page."""
        if len(self.scopes) == 1:
            return self.scopes[0].keys(hashes)
        by_scope = [
            np.frombuffer(bytes(scope.keys(hashes)), np.uint8).reshape(-1, _KEY_BYTES)
            for scope in self.scopes
        ]
        return KeyBatch.from_bytes(np.stack(by_scope, axis=1).tobytes())


class Sources:
    """The sources of one rank under one namespace."""

    def __init__(
        self, pool: Pool, own: Source, identity: RankIdentity, layout: PoolLayout, *, foreign: bool
    ) -> None:
        self.own = own
        self._pool = pool
        self._identity = identity
        self._layout = layout
        self._foreign: list[Source] = []
        self._known = {identity.namespace.id}
        self._refresh_at = 0.0 if foreign else float("inf")

    def foreign(self) -> list[Source]:
        """Other namespaces whose blocks fit, as far as they are known by now."""
        now = time.monotonic()
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_S
            for namespace_id in self._pool.known_namespaces():
                if namespace_id not in self._known:
                    self._consider(namespace_id)
                    break  # one at a time: a description with many regions takes milliseconds
        return self._foreign

    def index_of(self, source: Source) -> int | None:
        """The pool's number for a source now; it may change while nothing of it is stored.

        Takes no lock: registering for good would, and the scheduler must not wait for one.
        """
        found = self._pool.describe(source.namespace_id)
        return None if found is None else found[0]

    def _consider(self, namespace_id: bytes) -> None:
        found = self._pool.describe(namespace_id)
        if found is None:
            return
        self._known.add(namespace_id)
        _, descriptor, block_bytes = found
        theirs = Namespace.unpack(namespace_id, descriptor).words()
        try:
            blocks = source_of(self._identity.namespace.words(), self._identity.heads, theirs)
            if blocks is not None:
                self._foreign.append(self._source(namespace_id, block_bytes, blocks))
                logger.info(
                    "hpkv: namespace %s fits: %s %s",
                    *(namespace_id.hex()[:12], theirs["layout"], theirs["parallel"]),
                )
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Words of another program or version may be anything.
            logger.warning("hpkv: blocks of namespace %s not used: %r", namespace_id.hex(), error)

    def _source(self, namespace_id: bytes, block_bytes: int, blocks: ForeignBlocks) -> Source:
        layout = self._layout
        return Source(
            namespace_id=namespace_id,
            scopes=tuple(
                KeyScope(scope_mask(namespace_id, shard.name, blocks.block_format))
                for shard in blocks.shards
            ),
            block=BlockSource(
                layout.block,
                block_bytes=block_bytes,
                parts=[
                    join(
                        layout.devices,
                        layout.columns if shard.columns is None else shard.columns,
                        layout.page_size,
                    )
                    for shard in blocks.shards
                ],
            ),
        )
