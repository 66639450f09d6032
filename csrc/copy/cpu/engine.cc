// Submission, the worker loop, and the end of an engine. What a unit does is in copies.cc.
#include "copy/cpu/engine.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace hpkv {

std::unique_ptr<CopyEngine> make_cpu_engine(std::shared_ptr<Pool> pool,
                                            std::uint32_t namespace_index, BlockLayout layout,
                                            const EngineOptions& options) {
  return std::make_unique<cpu::CpuEngine>(std::move(pool), namespace_index, std::move(layout),
                                          options);
}

}  // namespace hpkv

namespace hpkv::cpu {
namespace {

constexpr std::uint32_t kThreadsMax = 64;
// Bytes of one unit of a load: large against the cost of claiming it, small against a layer.
constexpr std::size_t kUnitBytes = 512 * 1024;

}  // namespace

CpuEngine::CpuEngine(std::shared_ptr<Pool> pool, std::uint32_t namespace_index, BlockLayout layout,
                     const EngineOptions& options)
    : pool_(std::move(pool)),
      namespace_index_(namespace_index),
      layout_(std::move(layout)),
      options_(options),
      owner_(::getpid()),
      faults_(layout_.layer_count()) {
  const std::uint64_t stored = pool_->block_bytes(namespace_index);
  if (stored != layout_.block_bytes()) {
    throw Error(ErrorKind::argument, "copy engine: blocks of the namespace have " +
                                         std::to_string(stored) + " bytes, the layout " +
                                         std::to_string(layout_.block_bytes()));
  }
  if (options.threads == 0 || options.threads > kThreadsMax) {
    throw Error(ErrorKind::argument, "copy engine: " + std::to_string(options.threads) +
                                         " threads asked for; valid: 1 to " +
                                         std::to_string(kThreadsMax));
  }
  running_.resize(options.threads);
  spill_threads_ = options.threads > 1 ? options.threads - 1 : 1;
  threads_.reserve(options.threads);
  try {
    for (std::size_t i = 0; i < options.threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (...) {
    close();
    throw;
  }
}

CpuEngine::~CpuEngine() { close(); }

void CpuEngine::check_pages(std::span<const std::int64_t> pages, std::size_t expected,
                            DeviceEvent after) const {
  if (after.handle != nullptr) {
    throw Error(ErrorKind::argument, "copy engine: the CPU has no device events");
  }
  if (pages.size() != expected) {
    throw Error(ErrorKind::argument, "copy engine: " + std::to_string(pages.size()) +
                                         " pages given, " + std::to_string(expected) + " expected");
  }
  for (const std::int64_t page : pages) {
    // As unsigned, a negative index is a very large one.
    if (static_cast<std::uint64_t>(page) >= layout_.page_count()) {
      throw Error(ErrorKind::argument, "copy engine: page " + std::to_string(page) +
                                           " is not in [0, " +
                                           std::to_string(layout_.page_count()) + ")");
    }
  }
}

std::shared_ptr<SpillTicket> CpuEngine::spill(std::vector<Key> keys,
                                              std::vector<std::int64_t> pages, DeviceEvent after,
                                              Turn turn) {
  check_pages(pages, keys.size(), after);
  if (turn.index < 0 || turn.index >= turn.count) {
    throw Error(ErrorKind::argument, "copy engine: turn " + std::to_string(turn.index) +
                                         " is not in [0, " + std::to_string(turn.count) + ")");
  }
  const std::uint64_t stamp = pool_->take_stamps(pages.size());
  const auto job = std::make_shared<SpillJob>(std::move(keys), std::move(pages), stamp, turn);
  const std::size_t count = job->pages.size();
  if (count == 0) return job->ticket;
  if (faults_.take_failure(CopyKind::spill)) job->ticket->cancel();
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && queues_.spill_pages + count <= options_.spill_pages_max) {
      queues_.spills.push_back(job);
      queues_.spill_pages += count;
      work_.notify_all();
      return job->ticket;
    }
  }
  drop(counters_.dropped_queue, count);
  job->ticket->settle(SpillOutcome::dropped, count);
  return job->ticket;
}

std::size_t CpuEngine::chunk_pages(std::size_t page_count) const noexcept {
  const std::size_t layer_bytes =
      std::max<std::size_t>(1, layout_.block_bytes() / layout_.layer_count());
  // Every thread gets a part of each layer, however few pages there are.
  const std::size_t shared = (page_count + options_.threads - 1) / options_.threads;
  return std::clamp<std::size_t>(kUnitBytes / layer_bytes, 1, std::max<std::size_t>(1, shared));
}

std::shared_ptr<LoadTicket> CpuEngine::load(Lease lease, std::vector<std::int64_t> pages,
                                            DeviceEvent after,
                                            std::shared_ptr<const BlockSource> source) {
  if (source && !source->fits(layout_)) {
    throw Error(ErrorKind::argument, "copy engine: the source was made for another layout");
  }
  const std::size_t per_page = source ? source->blocks_per_page() : 1;
  if (lease.count() % per_page != 0) {
    throw Error(ErrorKind::argument, "copy engine: " + std::to_string(lease.count()) +
                                         " blocks are no whole pages of " +
                                         std::to_string(per_page) + " blocks");
  }
  const bool lost = lease.count() == 0 && !pages.empty();
  check_pages(pages, lost ? pages.size() : lease.count() / per_page, after);
  counters_.load_tickets.fetch_add(1, std::memory_order_relaxed);
  if (!lost) {
    const std::size_t count = pages.size();
    const auto job =
        std::make_shared<LoadJob>(layout_.layer_count(), std::move(lease), std::move(pages),
                                  chunk_pages(count), std::move(source));
    if (count == 0) return job->ticket;
    if (faults_.take_failure(CopyKind::load)) job->ticket->fail();
    const std::lock_guard lock(mutex_);
    if (!stopping_ && queues_.loads.size() < options_.load_tickets_max) {
      queues_.loads.push_back(job);
      work_.notify_all();
      return job->ticket;
    }
  }
  counters_.load_failed.fetch_add(1, std::memory_order_relaxed);
  auto failed = std::make_shared<LoadTicket>(layout_.layer_count(), 0);
  failed->fail();
  return failed;
}

std::shared_ptr<VerifyTicket> CpuEngine::verify(Lease lease) {
  const auto job = std::make_shared<VerifyJob>(std::move(lease));
  if (job->lease.count() == 0) return job->ticket;
  if (faults_.take_failure(CopyKind::verify)) job->ticket->report_bad(0);
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && queues_.verifies.size() < options_.verify_tickets_max) {
      queues_.verifies.push_back(job);
      work_.notify_all();
      return job->ticket;
    }
  }
  job->lease.release();
  job->ticket->report_bad(0);
  job->ticket->finish();
  return job->ticket;
}

void CpuEngine::work(std::size_t worker) {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::optional<Unit> unit = queues_.claim(running_spills_ < spill_threads_);
    if (!unit) {
      if (queues_.empty() && running_count_ == 0) {
        idle_.notify_all();
        if (stopping_) return;
      }
      work_.wait(lock);
      continue;
    }
    const bool is_spill = std::holds_alternative<SpillUnit>(*unit);
    running_[worker] = unit;
    ++running_count_;
    if (is_spill) ++running_spills_;
    lock.unlock();
    std::visit([this](const auto& claimed) { run(claimed); }, *unit);
    lock.lock();
    running_[worker].reset();
    --running_count_;
    if (is_spill) --running_spills_;
    // A first layer may have opened the gate of its load, a spill made room for another; and the
    // last one to finish while stopping must not leave the others asleep.
    if (!queues_.empty() || stopping_) work_.notify_all();
    // This may be the last owner of the job: free it without the lock.
    lock.unlock();
    unit.reset();
    lock.lock();
  }
}

void CpuEngine::stop(const Unit& unit) {
  if (const auto* spill = std::get_if<SpillUnit>(&unit)) spill->job->ticket->cancel();
  if (const auto* load = std::get_if<LoadUnit>(&unit)) load->job->ticket->fail();
  if (const auto* verify = std::get_if<VerifyUnit>(&unit)) verify->job->ticket->report_bad(0);
}

void CpuEngine::quiesce() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return queues_.empty() && running_count_ == 0; });
}

void CpuEngine::close() {
  if (::getpid() != owner_) {
    // Forked: the threads are the parent's. Forget them without a lock, which may be held by one
    // of them for ever.
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& job : queues_.spills) job->ticket->cancel();
    for (const auto& job : queues_.loads) job->ticket->fail();
    for (const auto& job : queues_.verifies) job->ticket->report_bad(0);
    for (const auto& unit : running_) {
      if (unit) stop(*unit);
    }
    work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

EngineStats CpuEngine::stats() const {
  const auto read = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  EngineStats stats;
  stats.spill_stored = read(counters_.spill_stored);
  stats.spill_present = read(counters_.spill_present);
  stats.spill_dropped_full = read(counters_.dropped_full);
  stats.spill_dropped_busy = read(counters_.dropped_busy);
  stats.spill_left_to_others = read(counters_.left_to_others);
  stats.spill_dropped_off = read(counters_.dropped_off);
  stats.spill_dropped_queue = read(counters_.dropped_queue);
  stats.spill_dropped_cancelled = read(counters_.dropped_cancelled);
  stats.spilled_bytes = read(counters_.spilled_bytes);
  stats.load_tickets = read(counters_.load_tickets);
  stats.load_failed = read(counters_.load_failed);
  stats.loaded_blocks = read(counters_.loaded_blocks);
  stats.loaded_bytes = read(counters_.loaded_bytes);
  stats.verified_blocks = read(counters_.verified_blocks);
  stats.bad_blocks = read(counters_.bad_blocks);
  const std::lock_guard lock(mutex_);
  stats.queued_pages = queues_.spill_pages;
  return stats;
}

}  // namespace hpkv::cpu
