// One request's blocks on their way from disk into the host pool, head to tail. The ticket holds
// the pins of what has come, so nothing of it is evicted before the request has taken its own.
//
// Invariant: refs are the leading keys, each pinned once by this ticket until release(); the bytes
// of their places are charged to the budget as long. Threads: safe; nothing here waits but wait().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/pool.h"

namespace hpkv::disk {

// What all waiting requests of one process have pinned together.
class PinBudget {
 public:
  // One block always fits, or a small share would stop every promotion.
  [[nodiscard]] bool take(std::uint64_t bytes, std::uint64_t limit) noexcept;
  void give(std::uint64_t bytes) noexcept { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t used() const noexcept {
    return used_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> used_{0};
};

class PromoteTicket {
 public:
  PromoteTicket(std::shared_ptr<Pool> pool, std::shared_ptr<PinBudget> budget,
                std::uint32_t namespace_index, std::vector<Key> keys);
  ~PromoteTicket() { release(); }
  PromoteTicket(const PromoteTicket&) = delete;
  PromoteTicket& operator=(const PromoteTicket&) = delete;

  // Nothing more will come.
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Leading blocks that are in the host pool and pinned by this ticket.
  [[nodiscard]] std::size_t count() const noexcept {
    return count_.load(std::memory_order_acquire);
  }
  // How many of them were read from disk for it.
  [[nodiscard]] std::size_t from_disk_count() const noexcept {
    return from_disk_.load(std::memory_order_acquire);
  }
  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout);
  // Nothing more comes; what came stays pinned.
  void cancel() noexcept { finish(); }
  // And the pins go.
  void release() noexcept;

  // ---- for the promoter ----
  [[nodiscard]] const std::vector<Key>& keys() const noexcept { return keys_; }
  [[nodiscard]] std::uint32_t namespace_index() const noexcept { return namespace_index_; }
  [[nodiscard]] PinBudget& budget() noexcept { return *budget_; }
  // Takes the next block over, pinned, its `charge` taken from the budget. When nobody waits any
  // more both are given back and the answer is false.
  [[nodiscard]] bool add(const BlockRef& pinned, std::uint64_t charge, bool from_disk) noexcept;
  void finish() noexcept;

 private:
  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<PinBudget> budget_;
  const std::uint32_t namespace_index_;
  const std::vector<Key> keys_;

  std::atomic<bool> done_{false};  // set under the mutex
  std::atomic<std::size_t> count_{0};
  std::atomic<std::size_t> from_disk_{0};
  std::mutex mutex_;  // the rest; held for a few instructions a block
  std::condition_variable changed_;
  std::vector<BlockRef> refs_;
  std::uint64_t charged_ = 0;
};

}  // namespace hpkv::disk
