// What the living do for the dead. A client is dead when the OFD lock on its byte is gone. At once:
// its death is noted, the epoch rises, its locks are taken over. After a quarantine of one second,
// because kernel I/O and device copies of a dead process still land for tens of milliseconds: its
// pins and unpublished blocks return, its regions of the store become nobody's, and then its slot
// is free.
//
// Threads: one caller at a time per process (the maintenance thread, or maintain() under its
// mutex). Between processes the reap lock lets one reap at a time; a reaper that dies is followed
// by another, every step can be repeated.
#pragma once

#include <array>
#include <cstdint>

#include "index/shard.h"

namespace hpkv::shm {

class Recovery {
 public:
  explicit Recovery(Core& core) noexcept : core_(core) {}

  // One round: notices deaths, recovers locks, reaps those whose quarantine is over. Bounded; takes
  // locks briefly.
  void round() noexcept;
  // Returns the pins and unpublished blocks of a client whose bytes no longer change: dead for long
  // enough, or leaving. False when a lock was not free in time; may be repeated.
  [[nodiscard]] bool return_blocks(std::uint32_t slot) noexcept;

 private:
  // When this process first saw the slot dead, in its own clock.
  struct Seen {
    std::uint32_t generation = 0;
    std::int64_t since_ns = 0;
  };

  void notice(std::uint32_t slot, std::uint64_t word) noexcept;
  void recover_locks(std::uint32_t slot) noexcept;
  void recover_dirty_shards() noexcept;
  [[nodiscard]] bool quarantine_over(std::uint32_t slot, std::uint64_t word) const noexcept;
  [[nodiscard]] bool reap(std::uint32_t slot, std::uint64_t word) noexcept;
  [[nodiscard]] bool reap_run(const Run& run, std::uint32_t slot) noexcept;
  [[nodiscard]] bool free_block(std::uint64_t descriptor_offset, std::uint64_t word) noexcept;

  Core& core_;
  std::array<Seen, kClientCount> seen_{};
};

// Adds a departing client's statistics to the pool's totals.
void fold_client_counters(const View& view, std::uint32_t slot) noexcept;
// Takes a client's bit out of every namespace's users.
void leave_namespaces(const View& view, std::uint32_t slot) noexcept;

}  // namespace hpkv::shm
