// Which host blocks are worth the wear of a write. One that was loaded back from the host pool at
// least once always is. Any other is paid for out of a credit: the size of the store to begin with,
// and a few times what the disk served since. So a store fills once, goes on filling while that
// pays, and prompts that nobody asks again stop being written (docs/decisions/004).
//
// Threads: safe; the credit may be overdrawn by what is written at one look.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>

namespace hpkv::disk {

class Admission {
 public:
  static constexpr std::int64_t kEarned = 4;  // bytes that may be written for a byte served

  // `min_uses`: a fixed rule in place of the credit; for tests.
  Admission(std::uint64_t storage_bytes, std::optional<std::uint32_t> min_uses)
      : most_(static_cast<std::int64_t>(
            std::min<std::uint64_t>(storage_bytes, std::numeric_limits<std::int64_t>::max() / 2))),
        fixed_(min_uses),
        credit_(most_) {}

  // How often a block must have been loaded back to be written now.
  [[nodiscard]] std::uint32_t min_uses() const noexcept {
    if (fixed_) return *fixed_;
    return credit_.load(std::memory_order_relaxed) > 0 ? 0 : 1;
  }
  // Blocks that were never loaded back were written. What could not be costs nothing.
  void wrote_unused(std::uint64_t bytes) noexcept {
    credit_.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  // Blocks came from disk for a request.
  void served(std::uint64_t bytes) noexcept {
    const std::int64_t earned = kEarned * static_cast<std::int64_t>(bytes);
    std::int64_t now = credit_.load(std::memory_order_relaxed);
    while (!credit_.compare_exchange_weak(now, std::min(now + earned, most_),
                                          std::memory_order_relaxed)) {
    }
  }

 private:
  const std::int64_t most_;
  const std::optional<std::uint32_t> fixed_;
  std::atomic<std::int64_t> credit_;
};

}  // namespace hpkv::disk
