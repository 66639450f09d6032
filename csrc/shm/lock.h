// A lock that survives the death of its holder: one word in the pool (format.h, LockWord) and a
// futex with bounded waits. No robust mutex: those name their holder by thread id, and thread ids
// are not unique across the PID namespaces that share a pool.
//
// Invariants: the word of a live client is only changed by that client (but for the waiter bit). A
// lock is taken over
//   only from a client whose OFD lock is gone, by a compare-and-swap on the exact word that was
//   judged: had the slot been given to somebody else meanwhile, its generation would differ.
// Threads: not recursive. At most one shard lock is held at a time; the layout lock is taken before
// it, never after.
#pragma once

#include <cstdint>

#include "shm/core.h"

namespace hpkv::shm {

enum class LockResult {
  acquired,
  timeout,
  holder_died,  // and this caller may not take over
};

enum class TakeOver : bool { no, yes };

// How long a call may wait for locks, in all: the clock starts at the first lock that is not free.
class WaitBudget {
 public:
  explicit WaitBudget(std::int64_t wait_ns) noexcept : wait_ns_(wait_ns) {}

  [[nodiscard]] std::int64_t left_ns() noexcept {
    if (deadline_ns_ == 0) deadline_ns_ = now_ns() + wait_ns_;
    return deadline_ns_ - now_ns();
  }

 private:
  std::int64_t wait_ns_;
  std::int64_t deadline_ns_ = 0;
};

[[nodiscard]] LockResult acquire(Core& core, AtomicU32& lock, WaitBudget& budget,
                                 TakeOver take_over) noexcept;
void release(AtomicU32& lock) noexcept;

// Holds a lock of the superblock (layout, reap) for a scope. Nothing guarded by these needs a
// rebuild: their mutations are single stores.
class LockGuard {
 public:
  LockGuard(Core& core, AtomicU32& lock, WaitBudget& budget) noexcept : lock_(&lock) {
    if (acquire(core, lock, budget, TakeOver::yes) == LockResult::acquired) return;
    lock_ = nullptr;
    core.count(Counter::lock_timeouts);
  }
  LockGuard(Core& core, AtomicU32& lock, std::int64_t wait_ns) noexcept
      : LockGuard(core, lock, WaitBudget(wait_ns)) {}
  ~LockGuard() {
    if (lock_ != nullptr) release(*lock_);
  }
  LockGuard(const LockGuard&) = delete;
  LockGuard& operator=(const LockGuard&) = delete;

  [[nodiscard]] explicit operator bool() const noexcept { return lock_ != nullptr; }

 private:
  LockGuard(Core& core, AtomicU32& lock, WaitBudget&& budget) noexcept
      : LockGuard(core, lock, budget) {}

  AtomicU32* lock_;
};

}  // namespace hpkv::shm
