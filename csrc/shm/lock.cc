#include "shm/lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/points.h"

namespace hpkv::shm {
namespace {

constexpr int kSpins = 64;
// A holder that dies between giving the word back and waking us wakes nobody: no wait is longer
// than this.
constexpr std::int64_t kSliceNs = 500 * kMicrosecond;

void pause_briefly() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(AtomicU32& word, std::uint32_t expected, std::int64_t timeout_ns) noexcept {
  const timespec timeout{timeout_ns / kSecond, timeout_ns % kSecond};
  // Not the private kind: waiters are in other processes. Every outcome (woken, changed, timeout,
  // signal) is handled by looking at the word again.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

bool try_take(AtomicU32& lock, std::uint32_t mine) noexcept {
  std::uint32_t free = 0;
  // Acquire: partner of the release in release(); what the last holder wrote is visible.
  return lock.compare_exchange_strong(free, mine, std::memory_order_acquire,
                                      std::memory_order_relaxed);
}

}  // namespace

LockResult acquire(Core& core, AtomicU32& lock, WaitBudget& budget, TakeOver take_over) noexcept {
  const std::uint32_t generation = HPKV_BUG("lock_without_generation") ? 0 : core.generation;
  const std::uint32_t mine = LockWord::make(core.slot, generation);
  for (int spin = 0; spin < kSpins; ++spin) {
    if (lock.load(std::memory_order_relaxed) == 0 && try_take(lock, mine))
      return LockResult::acquired;
    pause_briefly();
  }
  // Once we have slept, others may sleep too and our wake-up took their waiter bit away: keep it
  // set.
  std::uint32_t waiter = 0;
  for (;;) {
    std::uint32_t word = lock.load(std::memory_order_relaxed);
    if (word == 0) {
      if (try_take(lock, mine | waiter)) return LockResult::acquired;
      continue;
    }
    const std::uint32_t holder = LockWord::slot(word);
    if (core.client_gone(holder, LockWord::generation(word))) {
      if (take_over == TakeOver::no) return LockResult::holder_died;
      HPKV_POINT("lock.before_takeover");
      if (lock.compare_exchange_strong(word, mine | (word & LockWord::kWaiter),
                                       std::memory_order_acquire, std::memory_order_relaxed)) {
        HPKV_POINT("lock.taken_over");
        core.count(Counter::takeovers);
        return LockResult::acquired;
      }
      continue;
    }
    const std::int64_t left = budget.left_ns();
    if (left <= 0) return LockResult::timeout;
    if ((word & LockWord::kWaiter) == 0 &&
        !lock.compare_exchange_strong(word, word | LockWord::kWaiter, std::memory_order_relaxed)) {
      continue;
    }
    futex_wait(lock, word | LockWord::kWaiter, std::min(left, kSliceNs));
    waiter = LockWord::kWaiter;
  }
}

void release(AtomicU32& lock) noexcept {
  // Release: partner of the acquire in try_take and in the take-over.
  const std::uint32_t word = lock.exchange(0, std::memory_order_release);
  HPKV_POINT("lock.released");
  if ((word & LockWord::kWaiter) != 0)
    ::syscall(SYS_futex, &lock, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hpkv::shm
