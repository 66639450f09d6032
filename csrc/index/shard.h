// One shard of the index: a two-choice hash table of single-word entries. A key has two buckets of
// eight entries; it is put into the first while that has room to spare, else into the emptier, and
// never moves until the table doubles. So removal is one store, and a lookup reads two cache lines
// of the table at most.
//
// The table is derived: entries = the blocks that are `writing` or `ready` and whose key belongs
// here. A dirty flag is set before the first store of a mutation and cleared after its last, so
// whoever takes the lock over from the dead knows whether to rebuild it from the descriptors.
//
// A shard has a second table for blocks on disk (disk_shard.h), under the same lock.
//
// Threads: find_ready() takes no lock. Everything else needs the shard's lock (ShardGuard).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "shm/lock.h"

namespace hpkv::index {

using shm::Core;
using shm::Descriptor;
using shm::View;

struct Found {
  std::uint64_t descriptor_offset = 0;
  std::uint64_t word = 0;  // BlockWord at that moment
};

// Lock-free. A hit was ready, with this key, at one moment during the call.
[[nodiscard]] bool find_ready(const View& view, const Key& key, Found& out) noexcept;

// Keys that are looked at together: enough to hide memory latency, few enough that a miss at the
// front wastes little.
inline constexpr std::size_t kGroup = 64;

// Length of the leading run of ready blocks among at most kGroup keys. Lock-free.
[[nodiscard]] std::size_t leading_ready(const View& view, std::span<const Key> keys) noexcept;
// Fetches what a locked look at at most kGroup keys will touch.
void prefetch_group(const View& view, std::span<const Key> keys) noexcept;

// Holds one shard's lock, and leaves the shard clean: a dirty shard (either table) is rebuilt on
// entry, unless the caller may not (then the guard is empty and the maintenance thread is called).
class ShardGuard {
 public:
  ShardGuard(Core& core, std::size_t shard, shm::WaitBudget& budget,
             shm::TakeOver take_over) noexcept;
  // Waits as an engine thread may, and takes over from the dead.
  ShardGuard(Core& core, std::size_t shard) noexcept;
  ~ShardGuard();
  ShardGuard(const ShardGuard&) = delete;
  ShardGuard& operator=(const ShardGuard&) = delete;

  [[nodiscard]] explicit operator bool() const noexcept { return held_; }

  // The indexed block of this key (writing or ready).
  [[nodiscard]] std::optional<Found> find(const Key& key) const noexcept;
  // Enters a claimed block of ours under its key and makes it `writing`. False when both buckets
  // are full.
  [[nodiscard]] bool enter(const Key& key, std::uint64_t descriptor_offset) noexcept;
  // Takes an indexed block out; its state becomes `after`, before the last store to it: nobody else
  // may be able to claim it then. Pins are the caller's to have checked.
  void take_out(const Found& block, std::uint64_t after) noexcept;

  [[nodiscard]] bool wants_growth() const noexcept;
  [[nodiscard]] std::uint64_t buckets() const noexcept;
  // Moves the shard into a zeroed table of twice the buckets; false when it is no longer wanted.
  [[nodiscard]] bool grow_into(std::uint64_t table_offset, std::uint64_t bucket_count) noexcept;

  // Makes the table hold exactly the indexed blocks of this shard, as their descriptors say.
  void rebuild() noexcept;

 private:
  void lock(shm::WaitBudget& budget, shm::TakeOver take_over) noexcept;
  void set_dirty(std::uint32_t value) noexcept;

  Core& core_;
  shm::ShardRecord& record_;
  std::size_t shard_;
  bool held_ = false;
};

}  // namespace hpkv::index
