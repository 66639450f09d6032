"""What the tree asks of the tiers: match a prompt, load its tail, spill a node.

Per request, in this order (scheduler thread; every rank of a group takes the same steps):

    match        pin the run of verified blocks behind the device prefix; the ranks agree on the
                 shortest; SGLang is promised that many tokens and no more
    load_back    slots are allocated on every rank or on none; the pins go to the queued load
    start        with its batch, before the forward
    finish       after the forward: the ranks agree which requests have all their bytes

A pin is a lease of one scheduling step: `tick` lets go of those that no match renewed, because
SGLang never says that a waiting request lost interest. Spills leave no trace here: they take no
lock, and whether a block is stored is the index's business (see `fence`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.unified_cache.components import (
    ExternalLinkerLoadPhase,
    LinkerTransferPhase,
)
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    ExternalCacheHitMarker,
    UnifiedCacheLinkerWrapper,
)

from hpkv_sglang.radix.linker import HpkvLinker
from hpkv_sglang.radix.lookup import Tail
from hpkv_sglang.radix.promotions import Promotions, Wanted
from hpkv_sglang.radix.runs import Run, find_run
from hpkv_sglang.radix.waiting import VERIFY_DEADLINE_S, Ticket, WaitingRequests

logger = logging.getLogger(__name__)


class _Promise(NamedTuple):
    tail: Tail  # every full page behind the device prefix
    run: Run  # the leading pages that the host pool has; may be empty
    tick: int


class HpkvLinkerWrapper(UnifiedCacheLinkerWrapper):  # type: ignore[misc]
    """Drives one `HpkvLinker` on behalf of one tree."""

    inflight_load_rids: list[str]
    inflight_load_index: int

    def __init__(self, cache: Any, cache_linker: HpkvLinker) -> None:
        super().__init__(cache, cache_linker)
        self.tiers = cache_linker
        self.group_size = _group_size(cache)
        self.waiting = WaitingRequests(self._agree_min)
        self.promotions = cache_linker.promotions
        self._promises: dict[str, _Promise] = {}
        self._tick = 0
        # Every rank or none: a rank whose tiers are off takes part in no agreement.
        failure = cache_linker.self_test_failure
        if not self._agree_min([int(failure is None)])[0]:
            cache_linker.switch_off(f"the page self-test failed: {failure or 'on another rank'}")

    # ---- agreement between ranks ----

    def _agree_min(self, values: list[int]) -> list[int]:
        if self.group_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        self.cache._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
        agreed: list[int] = tensor.tolist()
        return agreed

    # ---- once per scheduling step ----

    def tick(self) -> None:
        """Let stale pins go and settle who still waits. Costs nothing when idle."""
        self._tick += 1
        if self._promises:
            stale = [rid for rid, p in self._promises.items() if p.tick < self._tick - 1]
            for rid in stale:
                self._drop_promise(rid)
        for handle in self.waiting.step() if self.waiting else ():
            if self.promotions is not None:
                self.promotions.settle(handle.rid)
        if self.promotions is not None:
            self.promotions.release_old()

    def _drop_promise(self, rid: str) -> None:
        self.hit_markers.pop(rid, None)
        promise = self._promises.pop(rid, None)
        if promise is not None:
            promise.run.release()

    # ---- match ----

    def match(self, key: Any, req: Any, result: Any) -> Any:
        """`result` with the verified, pinned tail added as a host hit."""
        self._drop_promise(req.rid)
        page = self.cache.page_size
        device_pages = result.device_prefix_len // page
        tail_pages = len(key) // page - device_pages
        # The leader of a beam search samples before a failed load could be taken out of its batch.
        in_beam = getattr(req, "beam_group", None) is not None
        if (
            tail_pages <= 0
            or self.tiers.suspended
            or in_beam
            or getattr(req, "hpkv_recompute", False)
        ):
            if self.promotions is not None:
                self.promotions.release_settled(req.rid)
            return result
        tail = self.tiers.tail_of(req, key, device_pages)
        run = find_run(self.tiers.pool, self.tiers.sources, tail)
        worth = self.tiers.economy.pages_worth_loading(self.tiers.loadable_pages(run))
        hit_pages = self._agree_min([worth])[0]
        self._promises[req.rid] = _Promise(tail, run, self._tick)
        if hit_pages == 0:
            if self.promotions is not None:
                self.promotions.release_settled(req.rid)
            return result
        self.hit_markers[req.rid] = ExternalCacheHitMarker(
            tail_hashes=tail.hashes(hit_pages),
            device_hit_len=result.device_prefix_len,
        )
        return result._replace(
            last_host_node=result.best_match_node, host_hit_length=hit_pages * page
        )

    def wait_for_tiers(self, handle: Any) -> None:
        """Called when a request enters the queue, right after its first match.

        Blocks that were found but not yet verified in this epoch are checked in the background,
        those that only the disk has are read. With several ranks every request is registered, since
        a rank cannot know whether another one has something to do.
        """
        promise = self._promises.get(handle.rid)
        work = [] if promise is None else self._start_work(handle.rid, promise)
        # Whoever started something is settled by the list, even if that is at the next step.
        if work or self.group_size > 1:
            tickets = tuple(ticket for ticket, deadline_s in work if deadline_s > 0)
            latest_s = max((deadline_s for _, deadline_s in work), default=0.0)
            self.waiting.add(handle, tickets, latest_s)

    def _start_work(self, rid: str, promise: _Promise) -> list[tuple[Ticket, float]]:
        """What is to be done before the request is admitted, and how long it may wait for each."""
        work: list[tuple[Ticket, float]] = []
        run = promise.run
        if self.promotions is not None:
            promotion = self.promotions.start(rid, self._wanted(promise, self.promotions))
            if promotion is not None:
                deadline_s = self.promotions.deadline_s(len(promise.tail) - run.pages)
                work.append((promotion, deadline_s))
        if run.verified_pages < run.pages:
            # The tickets take the pins over; SGLang matches again before it admits the request.
            work += [(self.tiers.verify(part.lease), VERIFY_DEADLINE_S) for part in run.parts]
            self._drop_promise(rid)
        return work

    def _wanted(self, promise: _Promise, promotions: Promotions) -> Iterator[Wanted]:
        """What the disk might have behind the run, our own namespace first."""
        tail, found = promise.tail, promise.run.pages
        if found == len(tail):
            return
        own = self.tiers.namespace_index
        if promise.run.is_own:
            yield Wanted(own, 1, tail.own_keys(), present=found)
        else:
            yield Wanted(own, 1, tail.own_keys(found))
        sources = self.tiers.sources
        for source in sources.foreign():
            per_page = source.blocks_per_page
            if promotions.reach(tail.first_keys(source, found)) == per_page:
                index = sources.index_of(source)
                if index is not None:
                    yield Wanted(index, per_page, tail.keys(source, found))

    def pages_from_disk(self, rid: str) -> int:
        """How many of the request's pages were read from disk for it; told once."""
        return 0 if self.promotions is None else self.promotions.take_from_disk(rid)

    # ---- load ----

    def load_back(self, req: Any) -> tuple[int, Any]:
        """Allocate slots on every rank or on none, and queue the load into them."""
        marker = self.hit_markers.pop(req.rid, None)
        promise = self._promises.pop(req.rid, None)
        if marker is None:
            return 0, req.last_node
        full = self._components[0]
        transfer = full.build_external_linker_transfer(
            LinkerTransferPhase.LOAD, None, marker.tail_hashes
        )
        prefix_len = marker.device_hit_len + len(marker.tail_hashes) * self.cache.page_size
        if not self._agree_min([int(transfer is not None)])[0]:
            if transfer is not None:
                self._update_load(
                    ExternalLinkerLoadPhase.ABORT, req, [(full, transfer)], prefix_len
                )
            if promise is not None:
                promise.run.release()
            return 0, req.last_node
        slots = transfer.device_indices
        run = None if promise is None else promise.run
        self.tiers.queue_load(req.rid, run, len(marker.tail_hashes), slots)
        if self.promotions is not None:
            self.promotions.release_settled(req.rid)  # the run holds what they brought
        self._update_load(ExternalLinkerLoadPhase.PREPARE, req, [(full, transfer)], prefix_len)
        self.private_load_indices[req.rid] = slots
        self.inflight_load_rids.append(req.rid)
        return len(slots), req.last_node

    def finish_loads(self) -> list[str]:
        """Requests of the batch that just ran whose bytes did not land on every rank."""
        rids, self.inflight_load_rids = self.inflight_load_rids, []
        if not rids:
            return []
        index, self.inflight_load_index = self.inflight_load_index, -1
        landed = self.tiers.loads.finish(index)
        agreed = self._agree_min([int(landed.get(rid, False)) for rid in rids])
        for rid in rids:
            self.private_load_indices.pop(rid, None)
        failed = [rid for rid, ok in zip(rids, agreed, strict=True) if not ok]
        if failed:
            self.tiers.failed_load_count += len(failed)
            logger.warning("hpkv: %d loads failed, recomputing %s", len(failed), failed)
        return failed

    # ---- spill ----

    def offload_nodes(self, node_ids: Sequence[Any]) -> None:
        """Store what the write policy says; the tree is told at once, the copies run behind it."""
        core = self.cache.tree_core
        for node_id in node_ids:
            if core.build_external_linker_offload_transfers(node_id) is None:
                continue
            self.spill_node(node_id)
            core.mark_external_linker_offload_pending(node_id)
            core.finish_external_linker_offload([node_id], node_id, True)

    def spill_node(self, node_id: Any) -> None:
        """Submit a node's pages; those that are stored already are only marked as recent."""
        core = self.cache.tree_core
        hashes = core.get_hash_values(node_id)
        slots = core.get_component_device_value(node_id, self._components[0].component_type)
        if hashes and slots is not None:
            self.tiers.spill(list(hashes), slots)

    # ---- lifecycle ----

    @property
    def pending(self) -> bool:
        """Whether a flush would pull something away. Who waits for blocks is no reason against it:
        such a request is in SGLang's queue, and a flush while generation is paused keeps those.
        """
        return bool(self.tiers.loads.pending)

    def suspend(self, reason: str) -> None:
        """See `HpkvLinker.suspend`."""
        self.tiers.suspend(reason)
        self.let_go()

    def let_go(self) -> None:
        """Give back what is pinned for requests in the queue: they match again before they run.

        Who waits for the disk stops waiting at the next step, which may be long from now.
        """
        for rid in list(self._promises):
            self._drop_promise(rid)
        if self.promotions is not None:
            self.promotions.clear()

    def reset(self) -> None:
        self.let_go()
        self.waiting.clear()
        super().reset()

    def release_request(self, rid: str) -> None:
        self._drop_promise(rid)
        if self.promotions is not None:
            self.promotions.forget(rid)
        super().release_request(rid)


def _group_size(cache: Any) -> int:
    """How many ranks schedule in lockstep with this one."""
    groups = [g for g in (cache.attn_cp_group, cache.attn_tp_group) if g is not None]
    sizes = [int(torch.distributed.get_world_size(group=group)) for group in groups]
    return max(*sizes, int(cache.tp_world_size), 1)
