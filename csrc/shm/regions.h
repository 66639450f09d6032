// The disk tier's records in shared memory: who has which region of the store, and the arrays that
// their entries lie in. It knows no files; disk/catalog.h is its face.
//
// Invariants: a region's word changes by compare-and-swap only, its other fields by its owner only;
// an array of entries is given up only for a larger one, and only while no entry of it is in use.
// Threads: safe; index memory is taken under the layout lock, entries leave under their shard's.
#pragma once

#include <cstdint>
#include <optional>

#include "shm/allocator.h"

namespace hpkv::shm {

class Regions {
 public:
  Regions(Core& core, Segments& segments, Allocator& allocator) noexcept
      : core_(core), segments_(segments), allocator_(allocator) {}

  struct Store {
    std::array<std::uint64_t, 2> id{};
    std::uint32_t region_count = 0;
    std::uint64_t region_bytes = 0;
  };
  enum class Attached { yes, other_store, no_memory, no_lock };

  // Makes the records of this store, or finds them.
  [[nodiscard]] Attached attach(const Store& store) noexcept;

  [[nodiscard]] std::uint32_t self() const noexcept { return core_.slot + 1; }
  // Changes word and owner if both are as expected.
  [[nodiscard]] bool move(std::uint32_t region, RegionState from, RegionState to, bool ours_before,
                          bool ours_after) noexcept;
  [[nodiscard]] bool begin(std::uint32_t region, std::uint32_t file_generation,
                           std::uint64_t stride, std::uint32_t capacity) noexcept;
  // Takes every entry of a region out of the index. False: a lock was not free in time.
  [[nodiscard]] bool empty(std::uint32_t region) noexcept;

  // Gives a shard's table of disk entries its next size.
  void grow(std::size_t shard) noexcept;

 private:
  [[nodiscard]] bool await_shards() noexcept;
  // Memory for an array or a table while the index has less than these eighths of the pool; may end
  // the coldest run of blocks for it.
  [[nodiscard]] std::optional<std::uint64_t> take_memory(std::uint64_t bytes,
                                                         std::uint64_t eighths) noexcept;
  [[nodiscard]] bool index_may_grow(std::uint64_t eighths) const noexcept;

  Core& core_;
  Segments& segments_;
  Allocator& allocator_;
};

// Takes an entry out of the index if its word is still this one. False: its lock was not free in
// time.
[[nodiscard]] bool take_out_disk_entry(Core& core, std::uint64_t entry_offset,
                                       std::uint64_t word) noexcept;

// For the reaper, or a client that leaves: frees the client's entries in writing and makes its
// regions unowned. Repeatable. False: a lock was not free in time.
[[nodiscard]] bool return_regions(Core& core, std::uint32_t slot) noexcept;

// What a region becomes when its owner is no more.
[[nodiscard]] constexpr RegionState state_without_owner(RegionState state) noexcept {
  switch (state) {
    case RegionState::recovering:
      return RegionState::unknown;
    case RegionState::open:
    case RegionState::sealing:
      return RegionState::open;
    case RegionState::dropping:
      return RegionState::sealed;
    case RegionState::unknown:
    case RegionState::free:
    case RegionState::sealed:
      return state;
  }
  return RegionState::unknown;
}

}  // namespace hpkv::shm
