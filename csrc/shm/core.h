// What every part of one process's attachment needs: the mapping, who we are, the locks. Owned by
// Pool::Impl; the parts hold a reference to it.
//
// Threads: everything here is safe from any thread; fields are set before the first use and never
// changed.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "shm/pool_file.h"

namespace hpkv::shm {

// How long each kind of caller waits for a lock, in all.
inline constexpr std::int64_t kSchedulerWaitNs = kMillisecond;
inline constexpr std::int64_t kEngineWaitNs = 20 * kMillisecond;
inline constexpr std::int64_t kOperatorWaitNs = 200 * kMillisecond;

class Core {
 public:
  Core(PoolFile file, const PoolOptions& options);

  const PoolOptions options;
  const PoolFile file;
  const View view;
  const std::uint32_t slot;
  const std::uint32_t generation;

  [[nodiscard]] Superblock& super() const noexcept { return view.superblock(); }
  [[nodiscard]] ClientRecord& self() const noexcept { return view.client(slot); }
  [[nodiscard]] int fd() const noexcept { return file.liveness->fd(); }

  // Closed or forked: the mapping must not be touched. Checked first by every entry.
  [[nodiscard]] bool detached() const noexcept {
    return closed_.load(std::memory_order_relaxed) || file.liveness->forked();
  }
  [[nodiscard]] bool off() const noexcept {
    return detached() || super().poisoned.load(std::memory_order_relaxed) != 0;
  }
  void set_closed() noexcept { closed_.store(true, std::memory_order_relaxed); }

  // A broken invariant of our own: from now on everybody answers "miss". The first reason is kept.
  void poison(const char* reason) noexcept;

  void count(Counter counter, std::uint64_t n = 1) noexcept {
    self().counters[static_cast<std::size_t>(counter)].fetch_add(n, std::memory_order_relaxed);
  }

  // Hands out `n` stamps and returns the first; later stamps are larger.
  [[nodiscard]] std::uint64_t take_stamps(std::uint64_t n) noexcept {
    return super().stamp_clock.fetch_add(n, std::memory_order_relaxed) + 1;
  }

  // Whether the client that had this slot in this generation (low bits) is gone. Not for the own
  // slot.
  [[nodiscard]] bool client_gone(std::uint32_t other,
                                 std::uint32_t other_generation) const noexcept;

  // Set by scheduler-safe calls that met work they must not do (a dead lock holder): the
  // maintenance thread looks soon.
  std::atomic<bool> attention{false};

 private:
  std::atomic<bool> closed_{false};
};

}  // namespace hpkv::shm
