// How often this process has each block pinned. In the pool there is one bit per client and block;
// the counts behind it are private, so they die with the process and cannot be wrong for others.
//
// Invariant: the client's bit of a block is set exactly while its count here is not zero.
// Threads: safe. The stripe's mutex makes "count, then bit" one step for the threads of this
// process. It is held for a few instructions and never while anything waits.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "shm/view.h"

namespace hpkv::shm {

class LocalPins {
 public:
  LocalPins(View view, std::uint32_t slot, std::uint64_t pool_bytes);
  ~LocalPins();
  LocalPins(const LocalPins&) = delete;
  LocalPins& operator=(const LocalPins&) = delete;

  // The block must not go away meanwhile: its shard's lock is held, or we own it or have it pinned.
  void pin(std::uint64_t descriptor_offset) noexcept;
  // False when it was not pinned: our bug.
  [[nodiscard]] bool unpin(std::uint64_t descriptor_offset) noexcept;
  [[nodiscard]] bool pinned(std::uint64_t descriptor_offset) noexcept;

 private:
  static constexpr std::size_t kStripes = 64;

  [[nodiscard]] std::mutex& stripe(std::uint64_t descriptor_offset) noexcept {
    return stripes_[descriptor_offset / sizeof(Descriptor) % kStripes];
  }
  [[nodiscard]] std::uint32_t& count(std::uint64_t descriptor_offset) noexcept {
    return counts_[descriptor_offset / sizeof(Descriptor)];
  }

  View view_;
  std::uint32_t slot_;
  std::uint64_t bytes_;
  // One count per 128 bytes of the pool, in memory that is only touched where descriptors are.
  std::uint32_t* counts_ = nullptr;
  std::array<std::mutex, kStripes> stripes_;
};

}  // namespace hpkv::shm
