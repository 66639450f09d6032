#include "copy/stream/engine.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "copy/stream/loads.h"
#include "copy/stream/spills.h"
#include "copy/stream/verifies.h"

namespace hpkv::stream {
namespace {

constexpr std::uint32_t kThreadsMax = 64;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::argument, "copy engine: " + what);
}

void check_turn(Turn turn) {
  if (turn.index >= 0 && turn.index < turn.count) return;
  refuse("turn " + std::to_string(turn.index) + " is not in [0, " + std::to_string(turn.count) +
         ")");
}

void check_resident(const DevicePages& pages, std::size_t expected) {
  if (pages.count != expected) {
    refuse(std::to_string(pages.count) + " pages given, " + std::to_string(expected) + " expected");
  }
  if (pages.page_size == 0) refuse("a page of 0 tokens");
  if (pages.count != 0 && (pages.first_slots == nullptr ||
                           reinterpret_cast<std::uintptr_t>(pages.first_slots) % 8 != 0)) {
    refuse("the page indices have no address of an int64");
  }
}

StreamOptions checked(const StreamOptions& options) {
  if (options.queues.threads == 0 || options.queues.threads > kThreadsMax) {
    refuse(std::to_string(options.queues.threads) + " threads asked for; valid: 1 to " +
           std::to_string(kThreadsMax));
  }
  return options;
}

}  // namespace

// In order of need: the last ones end first.
struct StreamEngine::Parts {
  Core core;
  Loads loads{core};
  Spills spills{core};
  Verifies verifies{core};

  Parts(std::shared_ptr<Device> device, std::shared_ptr<Pool> pool, std::uint32_t namespace_index,
        BlockLayout layout, const StreamOptions& options)
      : core(std::move(device), std::move(pool), namespace_index, std::move(layout), options) {}
};

StreamEngine::StreamEngine(std::shared_ptr<Device> device, std::shared_ptr<Pool> pool,
                           std::uint32_t namespace_index, BlockLayout layout,
                           const StreamOptions& options)
    : owner_(::getpid()),
      parts_(std::make_unique<Parts>(std::move(device), std::move(pool), namespace_index,
                                     std::move(layout), checked(options))) {}

StreamEngine::~StreamEngine() {
  close();
  // Forked: threads, locks and the device are the parent's. Forget them.
  if (::getpid() != owner_) static_cast<void>(parts_.release());
}

Core& StreamEngine::core() const noexcept { return parts_->core; }

void StreamEngine::check_pages(std::span<const std::int64_t> pages, std::size_t expected) const {
  if (pages.size() != expected) {
    refuse(std::to_string(pages.size()) + " pages given, " + std::to_string(expected) +
           " expected");
  }
  const std::uint64_t count = core().layout.page_count();
  for (const std::int64_t page : pages) {
    // As unsigned, a negative index is a very large one.
    if (static_cast<std::uint64_t>(page) >= count) {
      refuse("page " + std::to_string(page) + " is not in [0, " + std::to_string(count) + ")");
    }
  }
}

std::shared_ptr<SpillTicket> StreamEngine::spill(std::vector<Key> keys,
                                                 std::vector<std::int64_t> pages, DeviceEvent after,
                                                 Turn turn) {
  check_pages(pages, keys.size());
  check_turn(turn);
  const auto spill = parts_->spills.submit({std::move(keys), std::move(pages), {}, turn}, after);
  return {spill, &spill->ticket};
}

std::shared_ptr<StreamSpill> StreamEngine::spill_resident(std::vector<Key> keys, DevicePages pages,
                                                          const After& after, Turn turn) {
  check_resident(pages, keys.size());
  check_turn(turn);
  return parts_->spills.submit({std::move(keys), {}, pages, turn}, after);
}

std::shared_ptr<LoadTicket> StreamEngine::load(Lease lease, std::vector<std::int64_t> pages,
                                               DeviceEvent after,
                                               std::shared_ptr<const BlockSource> source) {
  const auto load = load_on_streams(std::move(lease), std::move(pages), after, std::move(source));
  return {load, &load->ticket};
}

std::size_t StreamEngine::page_count(const Lease& lease, const BlockSource* source) const {
  if (source != nullptr && !source->fits(core().layout)) {
    refuse("the source was made for another layout");
  }
  const std::size_t per_page = source != nullptr ? source->blocks_per_page() : 1;
  if (lease.count() % per_page != 0) {
    refuse(std::to_string(lease.count()) + " blocks are no whole pages of " +
           std::to_string(per_page) + " blocks");
  }
  return lease.count() / per_page;
}

std::shared_ptr<StreamLoad> StreamEngine::load_on_streams(
    Lease lease, std::vector<std::int64_t> pages, const After& after,
    std::shared_ptr<const BlockSource> source) {
  const std::size_t expected = page_count(lease, source.get());
  check_pages(pages, expected == 0 ? pages.size() : expected);
  return parts_->loads.submit({std::move(lease), std::move(pages), {}, std::move(source)}, after);
}

std::shared_ptr<StreamLoad> StreamEngine::load_resident(Lease lease, DevicePages pages,
                                                        const After& after,
                                                        std::shared_ptr<const BlockSource> source) {
  const std::size_t expected = page_count(lease, source.get());
  check_resident(pages, expected == 0 ? pages.count : expected);
  return parts_->loads.submit({std::move(lease), {}, pages, std::move(source)}, after);
}

std::shared_ptr<VerifyTicket> StreamEngine::verify(Lease lease) {
  return parts_->verifies.submit(std::move(lease));
}

StagingShare StreamEngine::load_room() { return parts_->loads.room(); }

std::size_t StreamEngine::fit(const Lease& lease, const std::shared_ptr<const BlockSource>& source,
                              StagingShare& room) {
  static_cast<void>(page_count(lease, source.get()));
  return stream::fit(blocks_in_place(core(), lease.refs(), source, true), 0, true, room);
}

void StreamEngine::hold_loads() { parts_->loads.hold(); }
void StreamEngine::release_loads() { parts_->loads.release(); }

Faults& StreamEngine::faults() noexcept { return core().faults; }
bool StreamEngine::poisoned() const noexcept { return core().health->poisoned(); }
std::uint64_t StreamEngine::error_count() const noexcept { return core().health->error_count(); }
std::string StreamEngine::notice() const { return core().registered.notice(); }
std::string StreamEngine::first_error() const { return core().health->first_error(); }

EngineStats StreamEngine::stats() const {
  const auto read = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  const Counters& counters = core().counters;
  EngineStats stats;
  stats.spill_stored = read(counters.spill_stored);
  stats.spill_present = read(counters.spill_present);
  stats.spill_dropped_full = read(counters.dropped_full);
  stats.spill_dropped_busy = read(counters.dropped_busy);
  stats.spill_left_to_others = read(counters.left_to_others);
  stats.spill_dropped_off = read(counters.dropped_off);
  stats.spill_dropped_queue = read(counters.dropped_queue);
  stats.spill_dropped_cancelled = read(counters.dropped_cancelled);
  stats.spill_dropped_outside = read(counters.dropped_outside);
  stats.spilled_bytes = read(counters.spilled_bytes);
  stats.load_tickets = read(counters.load_tickets);
  stats.load_failed = read(counters.load_failed);
  stats.loaded_blocks = read(counters.loaded_blocks);
  stats.loaded_in_place = read(counters.loaded_in_place);
  stats.loaded_bytes = read(counters.loaded_bytes);
  stats.verified_blocks = read(counters.verified_blocks);
  stats.bad_blocks = read(counters.bad_blocks);
  stats.queued_pages = parts_->spills.queued_pages();
  return stats;
}

void StreamEngine::quiesce() { core().outstanding.wait_idle(); }

void StreamEngine::close() {
  if (::getpid() != owner_) return;
  parts_->loads.stop();
  parts_->spills.stop();
  parts_->verifies.stop();
  core().load_slots.close();
  core().load_tables.lane.close();
  core().spill_slots.close();
  parts_->loads.join();
  parts_->spills.join();
  parts_->verifies.join();
  core().registered.stop();
  core().registered.release();
}

std::vector<std::string> StreamEngine::check() {
  std::vector<std::string> findings;
  if (!core().load_slots.whole()) findings.emplace_back("slots of loads are missing");
  if (!core().load_tables.lane.whole()) findings.emplace_back("tables of loads are missing");
  if (!core().spill_slots.whole()) findings.emplace_back("slots of spills are missing");
  return findings;
}

}  // namespace hpkv::stream
