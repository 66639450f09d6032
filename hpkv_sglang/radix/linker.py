"""The tiers of one rank: settings, pool, namespace, layout, copy engine, and what is in flight.

SGLang constructs it in the scheduler process, after the model and its KV pool exist. Everything it
needs is ready when `__init__` returns, or `__init__` raises one `HpkvError` that says what to do.
Afterwards no method raises: trouble on one rank is a miss or a failed load, so that all ranks of a
group keep taking the same steps. Scheduler thread only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from hpkv_sglang._core import CorePoolError, KeyScope, Lease, Pool
from hpkv_sglang.config import CrossTp, Settings
from hpkv_sglang.copy.engines import Copier, copier_for
from hpkv_sglang.copy.interface import Engine, VerifyTicket
from hpkv_sglang.copy.self_test import page_round_trip
from hpkv_sglang.errors import HpkvError
from hpkv_sglang.layout.detect import detect_layout
from hpkv_sglang.pool import open_pool
from hpkv_sglang.pool.storage import Storage
from hpkv_sglang.radix.fence import SpillFence
from hpkv_sglang.radix.hooked import verify_hooks
from hpkv_sglang.radix.identity import RankIdentity, view_of
from hpkv_sglang.radix.loads import LayerLoads, QueuedLoad
from hpkv_sglang.radix.lookup import PageLookup, Tail, fastest_hasher
from hpkv_sglang.radix.promotions import Promotions
from hpkv_sglang.radix.runs import Run
from hpkv_sglang.radix.sources import Source, Sources
from hpkv_sglang.radix.worth import LoadEconomy

logger = logging.getLogger(__name__)


class HpkvLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """SGLang's transport interface; the tree drives it through `HpkvLinkerWrapper`."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        verify_hooks()
        self.settings = Settings.from_dict(extra_config or {})
        self.page_size: int = params.page_size
        self.forward_stream = stream_of_forwards(server_args, forward_stream)
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.layout = detect_layout(device_pool, self.page_size)
        self.computes_on_host = self.layout.tensors[0].pages.device.type == "cpu"
        self.pools = {PoolName.KV: device_pool}
        own_only = self.settings.cross_tp is CrossTp.OFF
        self.identity = RankIdentity.of_server(server_args, params, self.layout, own_only=own_only)
        self.pool = open_pool(self.settings)
        self.lookup_pages = PageLookup(self.page_size, fastest_hasher())
        self.fence = SpillFence()
        self.economy = LoadEconomy(self.page_size, self.layout.block.block_bytes)
        self.loads = LayerLoads(self.layout.block.layer_count, self.economy.note_load)
        self.layer_done_counter = self.loads
        self.suspended: str | None = None
        self._off: str | None = None
        self.failed_load_count = 0
        self._reopen_version: str | None = None
        self._enter_namespace()
        self.self_test_failure = self._self_test()
        self.storage = Storage.open(self.settings, self.pool, self.layout.block.block_bytes)
        self.promotions = (
            None
            if self.storage is None
            else Promotions(
                self.storage.store, self.pool, self.settings.promote_policy, self.economy
            )
        )
        self._log_start()

    # ---- identity ----

    def _enter_namespace(self) -> None:
        """Keys and blocks from here on belong to the current identity."""
        namespace = self.identity.namespace
        self.namespace_index = self.pool.add_namespace(
            namespace.id, namespace.descriptor, self.layout.block.block_bytes
        )
        self.scope = KeyScope(self.identity.scope_mask)
        copier = self._make_copier(self.pool, self.namespace_index)
        self.engine: Engine = copier.engine
        self.engine_is_broken = copier.is_broken
        self.pages_of = copier.pages_of
        self.together = copier.together
        self.room = copier.room
        self.sources = Sources(
            self.pool,
            Source(namespace_id=namespace.id, scopes=(self.scope,)),
            self.identity,
            copier.landing,
            foreign=self.settings.cross_tp is CrossTp.ON,
        )

    def _make_copier(self, pool: Pool, namespace_index: int) -> Copier:
        return copier_for(pool, namespace_index, self.layout, self.forward_stream)

    def _self_test(self) -> str | None:
        """Why blocks of this layout cannot be trusted; None when a page came back as it was."""
        directory = str(Path(self.pool.path).parent)
        try:
            return page_round_trip(directory, self.layout, self._make_copier)
        except (CorePoolError, OSError) as error:
            logger.warning("hpkv: no place for the page self-test, it is left out: %s", error)
            return None

    def switch_off(self, reason: str) -> None:
        """For good: the tiers answer nothing and take nothing until the server is restarted."""
        self._off = reason
        self.suspended = reason
        logger.error(
            "hpkv: the tiers are off: %s. The server goes on without them; please report the "
            "versions of sglang and hpkv-sglang together with the layout (%s).",
            reason,
            self.layout.name,
        )

    def _log_start(self) -> None:
        stats = self.pool.stats()
        warm = next(
            (n for id_, _, _, n in self.pool.namespaces() if id_ == self.identity.namespace.id), 0
        )
        logger.info(
            "hpkv: pool %s (%s, %.1f GiB), namespace %s, layout %s, %d B per block, page size %d, "
            "%d blocks already warm, %d clients",
            self.pool.path,
            "adopted" if self.pool.adopted else "created",
            self.pool.pool_bytes / 2**30,
            self.identity.namespace.id.hex()[:12],
            self.layout.name,
            self.layout.block.block_bytes,
            self.page_size,
            warm,
            stats["clients"],
        )

    # ---- lookup ----

    def tail_of(self, req: Any, key: Any, first_page: int) -> Tail:
        """The full pages of `key` from `first_page` on."""
        pages = self.lookup_pages.pages(req, key, self.scope)
        return Tail(pages, first_page, len(key) // self.page_size)

    def verify(self, lease: Lease) -> VerifyTicket:
        return self.engine.verify(lease)

    # ---- load ----

    def loadable_pages(self, run: Run) -> int:
        """Leading pages of `run` that are verified, and there at once beside what is queued."""
        verified = 0 if self.engine_is_broken() else run.verified_pages
        return min(verified, self.loads.fit(run, self.room)) if verified else 0

    def queue_load(self, rid: str, run: Run | None, pages: int, slots: torch.Tensor) -> None:
        """Queue a load of the first `pages` pages of `run` into `slots` (int64)."""
        if run is not None and run.pages < pages:
            run.release()
            run = None
        if run is not None:
            run.keep(pages)
        self.loads.queue(QueuedLoad(rid, run, self.pages_of(slots, self.page_size)))

    def start_layer_wise_loading(self) -> int:
        self.fence.settle()
        return self.loads.start(self.engine, self.together)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return all(self.loads.finish(counter_index).values())

    def cancel_queued_load(self, rid: str) -> bool:
        return self.loads.cancel_queued(rid)

    # ---- spill ----

    def spill(self, hashes: list[str], slots: torch.Tensor) -> None:
        """Copy the pages in `slots` to the pool, those that are not there yet. Returns at once."""
        if self.suspended or self.engine_is_broken():
            return
        turn = self.identity.turn
        self.fence.note_spill(
            self.engine.spill(
                self.scope.keys(hashes),
                self.pages_of(slots, self.page_size),
                turn.index,
                turn.count,
            )
        )

    # ---- weights ----

    def suspend(self, reason: str) -> None:
        """No lookup, load or spill from here on. Blocks until no copy is in flight.

        A version armed earlier is forgotten: whoever suspends arms the version to come back with.
        """
        self.suspended = reason
        self._reopen_version = None
        self._quiesce()

    def reopen_on_reset(self, weight_version: str) -> None:
        self._reopen_version = weight_version

    def _quiesce(self) -> None:
        """No copy is queued or running afterwards; slow spills are given up, not waited for."""
        self.fence.drain()
        self.engine.quiesce()

    # ---- lifecycle ----

    def drop_namespace(self) -> None:
        """Drop this server's blocks: those in the pool now, those on disk soon."""
        self._drop(self.identity.namespace.id)

    def _drop(self, namespace: bytes) -> None:
        if self.storage is not None:
            self.storage.drop_namespace_soon(namespace)
        self.pool.drop_namespace(namespace)

    def reset(self) -> None:
        """Quiesce; the tree is empty afterwards. The pool keeps its blocks."""
        self.loads.reset()
        self._quiesce()
        if self._reopen_version is not None:
            left = self.identity, self.namespace_index
            self.identity = self.identity.with_weights(self._reopen_version)
            self._reopen_version = None
            self.engine.close()
            self._leave(*left)
            self._reenter()
            self.suspended = self._off

    def _leave(self, identity: RankIdentity, namespace_index: int) -> None:
        """Blocks of private weights are for nobody once they are replaced; others may come back."""
        namespace = identity.namespace.id
        if namespace == self.identity.namespace.id:
            return
        if identity.weights_are_private:
            self._drop(namespace)
        self.pool.leave_namespace(namespace_index)

    def _reenter(self) -> None:
        """Copies under the new identity, or, where this rank cannot have them, none on any rank.

        The ranks agree on the least that one promises, so this one goes through all the steps.
        """
        self.engine_is_broken = lambda: True
        try:
            self._enter_namespace()
        except (CorePoolError, HpkvError, RuntimeError) as error:  # torch's are the last kind
            logger.error("hpkv: the tiers stay off after the update of the weights: %s", error)

    def close(self) -> None:
        self.loads.reset()
        self.engine.close()
        if self.promotions is not None:
            self.promotions.clear()
        if self.storage is None or self.storage.close():
            self.pool.close()

    # ---- parts of the interface that `HpkvLinkerWrapper` goes past ----

    def record_offload_ready(self) -> list[Any]:
        return []

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        raise NotImplementedError("the tree looks up through find()")

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        raise NotImplementedError("the tree loads through queue_load()")

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        raise NotImplementedError("the tree stores through spill()")

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        raise NotImplementedError("spills leave nothing to complete")


def stream_of_forwards(server_args: Any, stream: Any) -> Any:
    """`stream`, or None where SGLang runs forward passes on the scheduler's own.

    It does so without overlap, which it may have switched off itself while it resolved the
    arguments.
    """
    return None if view_of(server_args).disable_overlap_schedule else stream
