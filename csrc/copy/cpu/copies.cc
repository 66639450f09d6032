// What one unit of work does to bytes.
#include <algorithm>
#include <cstring>
#include <thread>

#include "base/crc32c.h"
#include "copy/cpu/engine.h"
#include "shm/transfer.h"

namespace hpkv::cpu {
namespace {

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

// Below this a plain copy wins: a non-temporal one mostly copies the ends of pieces that are no
// whole cache lines, and fills the lines that pieces share in several goes. Measured on one core of
// the build machine, 128 MiB, GB/s plain and non-temporal: 32-byte pieces 6.2 and 4.2, 128 bytes
// 6.5 and 4.5, 256 bytes 6.6 and 6.9, 1024 bytes 4.1 and 8.9.
constexpr std::uint64_t kSmallPiece = 256;

// What regions take from a block, into a page. Unfenced.
void copy_regions(std::span<const Region> regions, std::uint64_t page, const std::byte* payload) {
  for (const Region& region : regions) {
    const std::byte* source = payload + region.block_offset;
    const std::uint64_t step = region.block_step();
    const bool small = region.piece_bytes < kSmallPiece;
    for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
      std::byte* target = region.piece(page, piece);
      if (small) {
        std::memcpy(target, source + piece * step, region.piece_bytes);
      } else {
        copy_nt_unfenced(target, source + piece * step, region.piece_bytes);
      }
    }
  }
}

}  // namespace

void CpuEngine::drop(std::atomic<std::uint64_t>& reason, std::size_t pages) noexcept {
  add(reason, pages);
}

// ---- spill ----

void CpuEngine::run(const SpillUnit& unit) {
  SpillJob& job = *unit.job;
  SpillOutcome outcome = SpillOutcome::dropped;
  if (unit.pages == 1) {
    outcome = spill_page(job, unit.index);
  } else {
    drop(counters_.dropped_cancelled, unit.pages);
  }
  if (outcome == SpillOutcome::present) job.any_present.store(true, std::memory_order_relaxed);
  // Stored pages carry stamps that let the tail of a prefix go before its head. Pages that were
  // there already were stamped one by one as they were met, so the run is stamped again as a whole.
  // In turns always: pages of other ranks carry the stamps of those, and the last rank to get here
  // finds every page of the others in place.
  const bool last = job.unfinished.fetch_sub(unit.pages, std::memory_order_acq_rel) == unit.pages;
  if (last && (job.shared || job.any_present.load(std::memory_order_relaxed))) {
    pool_->touch(job.keys);
  }
  job.ticket->settle(outcome, unit.pages);
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
      return busy_page(job, index);
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

SpillOutcome CpuEngine::busy_page(const SpillJob& job, std::size_t index) {
  if (!job.shared) {
    drop(counters_.dropped_busy);
    return SpillOutcome::dropped;
  }
  // Its writer may have published it since.
  if (pool_->lookup({&job.keys[index], 1}) == 1) {
    add(counters_.spill_present, 1);
    return SpillOutcome::present;
  }
  drop(counters_.left_to_others);
  return SpillOutcome::dropped;
}

std::uint32_t CpuEngine::copy_out(std::int64_t page, std::byte* payload) {
  std::uint32_t checksum = 0;
  for (std::uint32_t layer = 0; layer < layout_.layer_count(); ++layer) {
    // Served to its end, cancelled or not: it stands for a copy that is slow to read.
    const auto delay = faults_.delay(CopyKind::spill, static_cast<int>(layer));
    if (delay.count() != 0) std::this_thread::sleep_for(delay);
    layout_.for_each_piece(layer, static_cast<std::uint64_t>(page),
                           [&](const std::byte* source, std::uint64_t offset, std::uint64_t bytes) {
                             checksum =
                                 copy_nt_crc32c_unfenced(payload + offset, source, bytes, checksum);
                           });
  }
  nt_fence();
  return checksum;
}

// ---- load ----

bool CpuEngine::trusted(const BlockRef& ref) {
  if (pool_->verified(ref)) return true;
  const bool good = hpkv::verify(*pool_, ref);
  add(good ? counters_.verified_blocks : counters_.bad_blocks, 1);
  return good;
}

bool CpuEngine::trusted_pages(const LoadJob& job, std::size_t begin, std::size_t end) {
  const std::size_t per_page = job.blocks_per_page();
  const std::uint64_t bytes = job.source ? job.source->block_bytes() : layout_.block_bytes();
  for (const BlockRef& ref : job.lease.refs().subspan(begin * per_page, (end - begin) * per_page)) {
    // A block of another size has another identity, whatever its key says.
    if (job.ticket->failed() || ref.payload_bytes != bytes || !trusted(ref)) return false;
  }
  return true;
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
    if (!trusted_pages(job, begin, end)) ticket.fail();
  }
  if (!ticket.failed()) copy_in(unit, begin, end);
  if (ticket.finish_unit(unit.layer)) finish_load(job);
}

void CpuEngine::copy_in(const LoadUnit& unit, std::size_t begin, std::size_t end) {
  const LoadJob& job = *unit.job;
  const std::size_t per_page = job.blocks_per_page();
  for (std::size_t i = begin; i < end; ++i) {
    const auto page = static_cast<std::uint64_t>(job.pages[i]);
    for (std::size_t part = 0; part < per_page; ++part) {
      const std::byte* payload = pool_->payload(job.lease.refs()[i * per_page + part]);
      copy_regions(job.source ? job.source->regions(unit.layer, part) : layout_.regions(unit.layer),
                   page, payload);
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
