// Jobs of the CPU engine (one per ticket) and the queues that hand out their units.
//
//   queue    spill: one page            load: (layer, chunk of pages)      verify: one block
//   order    loads, then verifications, then spills; each first come, first served; pages of a
//            spill from head to tail, or in turns
//   gate     a load's later layers wait until its first layer has landed, because the first one
//            is where unverified blocks are checked
//
// Invariant: a job is in a queue exactly while it has unclaimed units; spill_pages counts those of
// spills.
// Threads: not locked here; the engine guards every call by its mutex. Fields of a job other than
// its claim counter and its turns are constant after submission, or atomic.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/key.h"
#include "copy/engine.h"
#include "copy/source.h"
#include "copy/ticket.h"
#include "shm/lease.h"

namespace hpkv::cpu {

// The order of the pages of a spill: 0, 1, 2, ... or, in turns, own ones first.
//   7 pages, turn 1 of 3:   1 4 | 2 5 | 0 3 6
class TurnOrder {
 public:
  TurnOrder(Turn turn, std::size_t page_count)
      : page_count_(page_count), step_(static_cast<std::size_t>(turn.count)) {
    // Turns that have no page are passed over: those behind the last page.
    const auto own = static_cast<std::size_t>(turn.index);
    turn_ = own < page_count ? own : 0;
    next_ = turn_;
  }

  // At most page_count times.
  [[nodiscard]] std::size_t take() noexcept {
    const std::size_t taken = next_;
    if (step_ < page_count_ - taken) {
      next_ += step_;
    } else {
      turn_ = turn_ + 1 < std::min(step_, page_count_) ? turn_ + 1 : 0;
      next_ = turn_;
    }
    return taken;
  }

 private:
  std::size_t page_count_;
  std::size_t step_;
  std::size_t turn_ = 0;
  std::size_t next_ = 0;
};

struct SpillJob {
  std::shared_ptr<SpillTicket> ticket;
  std::vector<Key> keys;
  std::vector<std::int64_t> pages;
  std::uint64_t first_stamp;            // recency of the deepest page; the head's is the largest
  std::atomic<std::size_t> unfinished;  // pages whose work is not over
  std::atomic<bool> any_present{false};
  const bool shared;        // in turns: other ranks store pages of it too
  std::size_t claimed = 0;  // engine mutex
  TurnOrder order;          // engine mutex

  SpillJob(std::vector<Key> the_keys, std::vector<std::int64_t> the_pages,
           std::uint64_t the_first_stamp, Turn turn)
      : ticket(std::make_shared<SpillTicket>(the_pages.size())),
        keys(std::move(the_keys)),
        pages(std::move(the_pages)),
        first_stamp(the_first_stamp),
        unfinished(pages.size()),
        shared(turn.count > 1),
        order(turn, pages.size()) {}

  [[nodiscard]] std::uint64_t stamp(std::size_t index) const noexcept {
    return first_stamp + pages.size() - 1 - index;
  }
};

struct LoadJob {
  std::shared_ptr<LoadTicket> ticket;
  Lease lease;
  std::vector<std::int64_t> pages;
  std::size_t chunk_pages;                    // pages per unit
  std::size_t chunk_count;                    // units per layer
  std::shared_ptr<const BlockSource> source;  // null: blocks of the layout
  std::size_t claimed = 0;                    // units; engine mutex

  LoadJob(std::uint32_t layer_count, Lease the_lease, std::vector<std::int64_t> the_pages,
          std::size_t the_chunk_pages, std::shared_ptr<const BlockSource> the_source)
      : lease(std::move(the_lease)),
        pages(std::move(the_pages)),
        chunk_pages(the_chunk_pages),
        chunk_count((pages.size() + chunk_pages - 1) / chunk_pages),
        source(std::move(the_source)) {
    ticket = std::make_shared<LoadTicket>(layer_count, chunk_count);
  }

  [[nodiscard]] std::size_t blocks_per_page() const noexcept {
    return source ? source->blocks_per_page() : 1;
  }

  [[nodiscard]] std::size_t unit_count() const noexcept {
    return chunk_count * ticket->layer_count();
  }
};

struct VerifyJob {
  std::shared_ptr<VerifyTicket> ticket;
  Lease lease;
  std::size_t claimed = 0;  // blocks; engine mutex

  explicit VerifyJob(Lease the_lease)
      : ticket(std::make_shared<VerifyTicket>(the_lease.count())), lease(std::move(the_lease)) {}
};

// The page at `index`; or, with another number of pages than one, all that is left of a cancelled
// job.
struct SpillUnit {
  std::shared_ptr<SpillJob> job;
  std::size_t index;
  std::size_t pages;
};

struct LoadUnit {
  std::shared_ptr<LoadJob> job;
  std::uint32_t layer;
  std::size_t chunk;
};

struct VerifyUnit {
  std::shared_ptr<VerifyJob> job;
  std::size_t index;
};

using Unit = std::variant<SpillUnit, LoadUnit, VerifyUnit>;

class JobQueues {
 public:
  std::deque<std::shared_ptr<SpillJob>> spills;
  std::deque<std::shared_ptr<LoadJob>> loads;
  std::deque<std::shared_ptr<VerifyJob>> verifies;
  std::size_t spill_pages = 0;  // unclaimed ones

  [[nodiscard]] bool empty() const noexcept {
    return spills.empty() && loads.empty() && verifies.empty();
  }

  // The next unit that may run now; nothing when all that is left waits for a gate, or is a spill
  // and `spill_allowed` is false.
  [[nodiscard]] std::optional<Unit> claim(bool spill_allowed) {
    if (auto unit = claim_load()) return unit;
    if (auto unit = claim_verify()) return unit;
    return spill_allowed ? claim_spill() : std::nullopt;
  }

 private:
  [[nodiscard]] std::optional<Unit> claim_load() {
    for (auto it = loads.begin(); it != loads.end(); ++it) {
      const std::shared_ptr<LoadJob> job = *it;
      const bool first_layer = job->claimed < job->chunk_count;
      if (!first_layer && !job->ticket->layer_done(0)) continue;
      const std::size_t unit = job->claimed++;
      if (job->claimed == job->unit_count()) loads.erase(it);
      return LoadUnit{job, static_cast<std::uint32_t>(unit / job->chunk_count),
                      unit % job->chunk_count};
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<Unit> claim_verify() {
    if (verifies.empty()) return std::nullopt;
    const std::shared_ptr<VerifyJob> job = verifies.front();
    const std::size_t index = job->claimed++;
    if (job->claimed == job->lease.count()) verifies.pop_front();
    return VerifyUnit{job, index};
  }

  [[nodiscard]] std::optional<Unit> claim_spill() {
    if (spills.empty()) return std::nullopt;
    const std::shared_ptr<SpillJob> job = spills.front();
    const std::size_t pages = job->ticket->cancelled() ? job->pages.size() - job->claimed : 1;
    job->claimed += pages;
    spill_pages -= pages;
    if (job->claimed == job->pages.size()) spills.pop_front();
    return SpillUnit{job, job->order.take(), pages};
  }
};

}  // namespace hpkv::cpu
