"""The tree with the tiers behind it.

Everything the tiers add to SGLang's `UnifiedRadixCache` goes through these few overrides; what
they do is written in `wrapper`, `waiting`, `fence` and `recompute`. No method here raises because
of a tier.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from hpkv_sglang.config import WritePolicy
from hpkv_sglang.radix.linker import HpkvLinker
from hpkv_sglang.radix.wrapper import HpkvLinkerWrapper

logger = logging.getLogger(__name__)

# Inserts of a node before the tree offers it for storing. A node that was never offered is stored
# when it is evicted, under every policy.
_OFFER_AFTER_HITS = {
    WritePolicy.WRITE_THROUGH: 1,
    WritePolicy.WRITE_THROUGH_SELECTIVE: 2,
    WritePolicy.WRITE_BACK: 1 << 30,
}


class HpkvRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """SGLang's unified radix tree; evicted prefixes go to the host pool and come back."""

    linker: HpkvLinkerWrapper | None

    def init_cache_linker(self, cache_linker: HpkvLinker) -> None:
        self.linker = HpkvLinkerWrapper(self, cache_linker)
        # After the wrapper, whose base class sets 1.
        self.write_through_threshold = _OFFER_AFTER_HITS[cache_linker.settings.write_policy]
        self.failed_load_reqs: tuple[Any, ...] = ()

    @property
    def tiers(self) -> HpkvLinker:
        assert self.linker is not None, "the linker is attached right after construction"
        return self.linker.tiers

    # ---- once per scheduling step ----

    def check_hicache_events(self) -> None:
        if self.linker is not None:
            self.linker.tick()

    # ---- waiting: the skip path of SGLang's scheduler ----

    def is_backuped(self, node_id: Any) -> bool:
        """True: the scheduler then calls `prefetch_from_storage` for every request it enqueues."""
        return True

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self.linker is not None:
            self.linker.wait_for_tiers(request)

    def check_prefetch_progress(self, request: Any) -> bool:
        """False skips this request in this step, and no other."""
        return self.linker is None or not self.linker.waiting.is_waiting(request)

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        """(tokens that came from disk for this request, None): `storage` in SGLang's report."""
        if self.linker is None:
            return 0, None
        return self.linker.pages_from_disk(request.rid) * self.page_size, None

    def has_pending_cache_operations(self) -> bool:
        return self.linker is not None and self.linker.pending

    def clear_storage_backend(self) -> bool:
        """Drop this server's blocks from the shared tiers (SGLang's admin endpoint)."""
        self.tiers.drop_namespace()
        return True

    def release_aborted_request(self, request: Any) -> None:
        if self.linker is not None:
            self.linker.waiting.drop(request)
        super().release_aborted_request(request)

    # ---- eviction ----

    def _evict_device_leaf(self, node_id: Any, tracker: Any) -> Any:
        """Store what is not stored yet, then let the slots go; the fence protects the copy."""
        if self.linker is not None and not self.tiers.suspended:
            self.linker.spill_node(node_id)
            self.tiers.fence.note_freed()
        return super()._evict_device_leaf(node_id, tracker)

    # ---- loads ----

    def finish_external_linker_loads(self, reqs: list[Any]) -> list[Any]:
        """Failed loads are remembered for `recompute`, not answered with an error."""
        if self.linker is None:
            return []
        rids = set(self.linker.finish_loads())
        if rids:
            self.failed_load_reqs = tuple(req for req in reqs if req.rid in rids)
            for req in self.failed_load_reqs:
                req.hpkv_skipped_insert = req.skip_radix_cache_insert
                req.skip_radix_cache_insert = True
                req.hpkv_recompute = True  # not from the tiers again
        return []

    # ---- pauses and weights ----

    def let_go(self) -> None:
        """Give back what is pinned for requests in the queue."""
        if self.linker is not None:
            self.linker.let_go()

    def suspend(self, reason: str) -> None:
        """Close the tiers: no lookup, no spill, until `reset` finds a `reopen` to honour.

        Blocks until no copy is in flight: what follows may unmap the device memory.
        """
        if self.linker is not None:
            self.linker.suspend(reason)

    def reopen(self, weight_version: str) -> None:
        """The weights are `weight_version` now; the tiers open again at the next `reset`."""
        if self.linker is not None:
            self.tiers.reopen_on_reset(weight_version)
