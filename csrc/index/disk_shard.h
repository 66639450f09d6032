// The second table of a shard: the blocks of its keys that are on disk. Built like the first one
// (shard.h), over disk entries instead of descriptors, under the same lock, with a dirty flag and a
// counter of its own. A table has no memory until the shard's first block goes to disk.
//
// The table is derived: entries = the disk entries that are `writing` or `ready` and whose key
// belongs here. At most one a key.
//
// Threads: find_on_disk() and the group calls take no lock. A DiskShard is used under its shard's
// lock only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "shm/core.h"

namespace hpkv::index {

struct DiskFound {
  std::uint64_t entry_offset = 0;
  std::uint64_t word = 0;  // DiskWord at that moment
};

// Lock-free. A hit was ready, with this key, at one moment during the call.
[[nodiscard]] bool find_on_disk(const shm::View& view, const Key& key, DiskFound& out) noexcept;
// Fetches what find_on_disk() of at most kGroup keys will touch.
void prefetch_disk_group(const shm::View& view, std::span<const Key> keys) noexcept;
// Length of the leading run of keys that are ready in the pool or on disk. Lock-free.
[[nodiscard]] std::size_t leading_anywhere(const shm::View& view,
                                           std::span<const Key> keys) noexcept;

class DiskShard {
 public:
  DiskShard(shm::Core& core, std::size_t shard) noexcept
      : core_(core), record_(core.view.shard(shard)), shard_(shard) {}

  [[nodiscard]] std::optional<DiskFound> find(const Key& key) const noexcept;
  // Enters a free entry under its key and makes it `writing`, ours. False: no table, or both
  // buckets are full.
  [[nodiscard]] bool enter(const Key& key, std::uint64_t entry_offset,
                           std::uint32_t namespace_index) noexcept;
  // Takes an entry out of the index; it is free afterwards.
  void take_out(const DiskFound& found) noexcept;

  [[nodiscard]] bool wants_growth() const noexcept;
  // Moves the shard into a zeroed table; false when it has as large a one already.
  [[nodiscard]] bool grow_into(std::uint64_t table_offset, std::uint64_t bucket_count) noexcept;
  void rebuild() noexcept;

 private:
  void set_dirty(std::uint32_t value) noexcept;

  shm::Core& core_;
  shm::ShardRecord& record_;
  std::size_t shard_;
};

// Buckets of the next table of a shard: twice what it has, or the first ones.
[[nodiscard]] std::uint64_t next_disk_buckets(const shm::View& view, std::size_t shard) noexcept;

}  // namespace hpkv::index
