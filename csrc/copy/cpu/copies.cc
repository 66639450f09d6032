// What one unit of work does to bytes.
#include <thread>

#include "base/crc32c.h"
#include "copy/cpu/engine.h"
#include "shm/transfer.h"

namespace hpkv::cpu {
namespace {

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

void CpuEngine::drop(std::atomic<std::uint64_t>& reason, std::size_t pages) noexcept {
  add(reason, pages);
}

// ---- spill ----

void CpuEngine::run(const SpillUnit& unit) {
  SpillJob& job = *unit.job;
  const std::size_t pages = unit.end - unit.begin;
  SpillOutcome outcome = SpillOutcome::dropped;
  if (pages == 1) {
    outcome = spill_page(job, unit.begin);
  } else {
    drop(counters_.dropped_cancelled, pages);
  }
  if (outcome == SpillOutcome::present) job.any_present.store(true, std::memory_order_relaxed);
  // Stored pages carry stamps that let the tail of a prefix go before its head. Pages that were
  // there already were stamped one by one as they were met, so the run is stamped again as a whole.
  const bool last = job.unfinished.fetch_sub(pages, std::memory_order_acq_rel) == pages;
  if (last && job.any_present.load(std::memory_order_relaxed)) pool_->touch(job.keys);
  job.ticket->settle(outcome, pages);
}

SpillOutcome CpuEngine::spill_page(SpillJob& job, std::size_t index) {
  SpillTicket& ticket = *job.ticket;
  const auto delay = faults_.delay(CopyKind::spill, Faults::kEveryLayer);
  if (delay.count() != 0) ticket.sleep(delay);
  if (ticket.cancelled()) {
    drop(counters_.dropped_cancelled);
    return SpillOutcome::dropped;
  }
  BlockRef ref;
  switch (pool_->reserve(namespace_index_, job.keys[index], ref)) {
    case ReserveStatus::ok:
      break;
    case ReserveStatus::present:
      add(counters_.spill_present, 1);
      return SpillOutcome::present;
    case ReserveStatus::full:
      drop(counters_.dropped_full);
      return SpillOutcome::dropped;
    case ReserveStatus::busy:
      drop(counters_.dropped_busy);
      return SpillOutcome::dropped;
    case ReserveStatus::off:
      drop(counters_.dropped_off);
      return SpillOutcome::dropped;
  }
  std::uint32_t checksum = 0;
  bool whole = ticket.begin_read();
  if (whole) {
    checksum = copy_out(job.pages[index], pool_->payload(ref));
    whole = ticket.end_read();
  }
  if (!whole) {
    pool_->abandon(ref);
    drop(counters_.dropped_cancelled);
    return SpillOutcome::dropped;
  }
  pool_->publish(ref, checksum, job.stamp(index));
  add(counters_.spill_stored, 1);
  add(counters_.spilled_bytes, layout_.block_bytes());
  return SpillOutcome::stored;
}

std::uint32_t CpuEngine::copy_out(std::int64_t page, std::byte* payload) {
  std::uint32_t checksum = 0;
  for (std::uint32_t layer = 0; layer < layout_.layer_count(); ++layer) {
    // Served to its end, cancelled or not: it stands for a copy that is slow to read.
    const auto delay = faults_.delay(CopyKind::spill, static_cast<int>(layer));
    if (delay.count() != 0) std::this_thread::sleep_for(delay);
    for (const Region& region : layout_.regions(layer)) {
      std::byte* target = payload + region.block_offset;
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        checksum = copy_nt_crc32c_unfenced(target + piece * region.piece_bytes,
                                           region.piece(static_cast<std::uint64_t>(page), piece),
                                           region.piece_bytes, checksum);
      }
    }
  }
  nt_fence();
  return checksum;
}

// ---- load ----

bool CpuEngine::trusted(const BlockRef& ref) {
  // A block of another size has another identity, whatever its key says.
  if (ref.payload_bytes != layout_.block_bytes()) return false;
  if (pool_->verified(ref)) return true;
  const bool good = hpkv::verify(*pool_, ref);
  add(good ? counters_.verified_blocks : counters_.bad_blocks, 1);
  return good;
}

void CpuEngine::run(const LoadUnit& unit) {
  LoadJob& job = *unit.job;
  LoadTicket& ticket = *job.ticket;
  if (unit.chunk == 0) {
    auto delay = faults_.delay(CopyKind::load, static_cast<int>(unit.layer));
    delay += faults_.delay(CopyKind::load, Faults::kEveryLayer);
    if (delay.count() != 0) ticket.sleep(delay);
  }
  const std::size_t begin = unit.chunk * job.chunk_pages;
  const std::size_t end = std::min(begin + job.chunk_pages, job.pages.size());
  if (unit.layer == 0) {
    // All checks of a unit before its first copy, so a bad block costs no copies.
    for (std::size_t i = begin; i < end && !ticket.failed(); ++i) {
      if (!trusted(job.lease.refs()[i])) ticket.fail();
    }
  }
  if (!ticket.failed()) copy_in(unit, begin, end);
  if (ticket.finish_unit(unit.layer)) finish_load(job);
}

void CpuEngine::copy_in(const LoadUnit& unit, std::size_t begin, std::size_t end) {
  const std::span<const BlockRef> refs = unit.job->lease.refs();
  for (std::size_t i = begin; i < end; ++i) {
    const std::byte* payload = pool_->payload(refs[i]);
    const auto page = static_cast<std::uint64_t>(unit.job->pages[i]);
    for (const Region& region : layout_.regions(unit.layer)) {
      const std::byte* source = payload + region.block_offset;
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        copy_nt_unfenced(region.piece(page, piece), source + piece * region.piece_bytes,
                         region.piece_bytes);
      }
    }
  }
  nt_fence();
  add(counters_.loaded_bytes, (end - begin) * layout_.layer_bytes(unit.layer));
}

void CpuEngine::finish_load(LoadJob& job) {
  if (job.ticket->failed()) {
    add(counters_.load_failed, 1);
  } else {
    add(counters_.loaded_blocks, job.lease.count());
    pool_->count_loaded(job.lease.refs());
    pool_->touch(job.lease.keys());
  }
  job.lease.release();
  job.ticket->finish();
}

// ---- verify ----

void CpuEngine::run(const VerifyUnit& unit) {
  VerifyJob& job = *unit.job;
  VerifyTicket& ticket = *job.ticket;
  if (unit.index == 0) {
    const auto delay = faults_.delay(CopyKind::verify, Faults::kEveryLayer);
    if (delay.count() != 0) ticket.sleep(delay);
  }
  // Blocks behind a bad one cannot be promised any more.
  if (ticket.matters(unit.index) && !trusted(job.lease.refs()[unit.index])) {
    ticket.report_bad(unit.index);
  }
  if (ticket.finish_block()) {
    job.lease.release();
    ticket.finish();
  }
}

}  // namespace hpkv::cpu
