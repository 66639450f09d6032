"""The copy engine of an NPU: the interface of `_core.CopyEngine`, over a device's streams.

    device pages  <-- streams, this package -->  staging blocks  <-- `_core.CopyEngine` -->  pool

The staging area is pinned host memory, a bounded number of blocks in the pool's own format. The
core's engine takes it for the device: reserving, checksums, publishing, verifying and blocks of
other formats are its work alone. Loads and spills have half of the area each, so that neither ever
waits for the other. Invariants: a staging block has one owner at a time; a page is not reported as
read before the device has read it; a load's pins and blocks are held until the device has them.

Whatever the device library raises is the end of the tiers on this rank, not of the server: it is
logged once, and from then on spills are dropped and loads fail.

Threads: every method may be called from any thread, except that `close` runs alone. Two threads per
direction, none of which ever runs while there is nothing to copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpkv_sglang._core import CopyEngine, KeyBatch, Lease, Pool, VerifyTicket
from hpkv_sglang.npu.lane import Lane
from hpkv_sglang.npu.loads import StagedLoads
from hpkv_sglang.npu.spills import StagedSpills
from hpkv_sglang.npu.staging import DeviceHealth, InjectedFaults, StagingSlots
from hpkv_sglang.npu.streams import DeviceStreams, PageIndices
from hpkv_sglang.npu.tickets import StagedLoad, StagedSpill
from hpkv_sglang.npu.transfer import exchange_fits, layers_of, transfer_for

if TYPE_CHECKING:
    from hpkv_sglang._core import BlockSource
    from hpkv_sglang.layout.base import PoolLayout

# By default, within the bounds of what is of use.
STAGING_BYTES = 256 << 20
STAGING_PAGES = (8, 1024)


class NpuEngine:
    """Copies blocks between the pages of `layout` and the pool. Close it before the pool, and
    before the device memory of its layout goes away."""

    def __init__(
        self,
        pool: Pool,
        namespace_index: int,
        layout: PoolLayout,
        device: DeviceStreams,
        *,
        staging_pages: int | None = None,
    ) -> None:
        """`staging_pages` blocks of pinned memory, at least 2; by default about 256 MiB of them.

        LayoutError when pages of the layout are not runs of bytes; ValueError unless blocks of the
        namespace have the layout's size.
        """
        block = layout.block
        count = _default_pages(block.block_bytes) if staging_pages is None else staging_pages
        if count < 2:
            raise ValueError(f"copy engine: {count} staging pages given; one per direction needed")
        layers = layers_of(layout)
        self._page_count = block.page_count
        self._staging = device.pinned(count, block.block_bytes)
        # Sources of blocks in other formats must be built over this one.
        self.staged_layout = layout.staged(self._staging.data_ptr(), count)
        self._inner = CopyEngine(pool, namespace_index, self.staged_layout.block)
        self._health = DeviceHealth()
        load_slots = StagingSlots(range((count + 1) // 2))
        spill_slots = StagingSlots(range(load_slots.count, count))
        direct = exchange_fits(device, self._staging, layers)
        loads, spills = (
            Lane(
                device=device,
                inner=self._inner,
                layers=layers,
                transfer=transfer_for(device, self._staging, layers, slots.count, direct=direct),
                slots=slots,
                health=self._health,
            )
            for slots in (load_slots, spill_slots)
        )
        self._spills = StagedSpills(spills, pool)
        self._loads = StagedLoads(loads)

    @property
    def poisoned(self) -> bool:
        """The device failed once: nothing is copied any more."""
        return self._health.poisoned

    def spill(
        self, keys: KeyBatch, pages: PageIndices, turn: int = 0, turns: int = 1
    ) -> StagedSpill:
        """Store the pages that are not there yet. Returns at once; drops and counts when full.

        The pages are read behind everything enqueued so far on the current and the forward stream.
        `turn` and `turns` as in the core's engine. ValueError for a page outside the layout,
        another number of pages than keys, or a turn outside `[0, turns)`.
        """
        if not 0 <= turn < turns:
            raise ValueError(f"copy engine: turn {turn} is not in [0, {turns})")
        self._check_pages(pages, len(keys))
        return self._spills.submit(keys, pages, turn, turns)

    def load(
        self, lease: Lease, pages: PageIndices, source: BlockSource | None = None
    ) -> StagedLoad:
        """The lease's blocks to `pages`; the ticket takes the lease over. Returns at once.

        The pages are written behind everything enqueued so far on the current and the forward
        stream. `source`, built over `staged_layout`, says how blocks of another format become
        pages. A bad block fails the ticket, and so does a lease that was released. ValueError as
        `spill`; then the pins are given back.
        """
        per_page = 1 if source is None else source.blocks_per_page
        try:
            self._check_pages(pages, lease.count / per_page if lease.count else len(pages))
        except ValueError:
            lease.release()
            raise
        return self._loads.submit(lease, pages, source)

    def verify(self, lease: Lease) -> VerifyTicket:
        """Check blocks not yet verified in this epoch; the ticket takes the lease over."""
        return self._inner.verify(lease)

    def _check_pages(self, pages: PageIndices, expected: float) -> None:
        if len(pages) != expected:
            raise ValueError(f"copy engine: {len(pages)} pages given for {expected} blocks")
        outside = pages[(pages < 0) | (pages >= self._page_count)]
        if len(outside):
            raise ValueError(f"copy engine: page {outside[0]} is not in [0, {self._page_count})")

    # ---- fault injection ----

    def set_delay(self, kind: str, layer: int, microseconds: int) -> None:
        """Fault injection, as in the core's engine, but per batch of pages:

        'spill', -1: before a batch is read (ends at once when the ticket is cancelled);
        'spill', layer: while a batch is being read, to its end;
        'load' and 'verify': in the core's engine, so before the layer is in the staging area.
        """
        staged = kind == "spill"
        self._inner.set_delay(kind, layer, min(0, microseconds) if staged else microseconds)
        if staged:
            self._spills.faults.delay_us[layer] = microseconds

    def fail_next(self, kind: str, count: int) -> None:
        """Fault injection: the next ``count`` tickets of that kind drop all, or fail."""
        ours = self._faults_of(kind)
        if ours is None:
            self._inner.fail_next(kind, count)
        else:
            ours.fail_next(count)

    def _faults_of(self, kind: str) -> InjectedFaults | None:
        return {"spill": self._spills.faults, "load": self._loads.faults}.get(kind)

    # ---- lifecycle ----

    def stats(self) -> dict[str, int]:
        """Those of the core's engine, completed by what never reached it; `device_errors`."""
        stats = self._inner.stats()
        counts = self._spills.counts
        stats["spill_present"] += counts.present
        stats["spill_dropped_queue"] += counts.dropped_queue
        stats["spill_dropped_cancelled"] += counts.dropped_cancelled
        stats["queued_pages"] += counts.queued
        stats["load_tickets"] = self._loads.ticket_count
        stats["load_failed"] = self._loads.failed_count
        stats["device_errors"] = self._health.error_count
        return stats

    def quiesce(self) -> None:
        """Until no copy is queued or running. Blocks."""
        self._spills.jobs.wait_idle()
        self._loads.jobs.wait_idle()
        self._inner.quiesce()

    def close(self) -> None:
        """Drop and fail what is not over, wait for copies in progress. Blocks. Idempotent."""
        self._loads.fail_all()
        self._spills.close()
        self._inner.close()
        self._loads.close()

    def check(self) -> list[str]:
        """Violated invariants, in words; call it while nothing is copied."""
        return [*self._spills.check(), *self._loads.check()]


def _default_pages(block_bytes: int) -> int:
    return min(max(STAGING_BYTES // block_bytes, STAGING_PAGES[0]), STAGING_PAGES[1])
