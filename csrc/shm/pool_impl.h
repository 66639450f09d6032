// The parts of one attachment, in order of construction. Private to pool*.cc and disk/catalog*.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "shm/allocator.h"
#include "shm/local_pins.h"
#include "shm/maintenance.h"
#include "shm/namespaces.h"
#include "shm/regions.h"

namespace hpkv {

class Pool::Impl {
 public:
  Impl(shm::PoolFile file, const PoolOptions& options);

  [[nodiscard]] std::uint64_t quota_bytes() const noexcept { return core.super().pool_bytes / 8; }
  // Whether the key is taken; a ready block is stamped as recent.
  [[nodiscard]] std::optional<ReserveStatus> taken(const index::ShardGuard& guard,
                                                   const Key& key) noexcept;
  [[nodiscard]] ReserveStatus enter(const Key& key, const shm::Place& place) noexcept;
  void grow(std::size_t shard) noexcept;
  void stamp(shm::Descriptor& block, std::uint64_t value) noexcept;
  // Whether the block is ours to fill, in the state and generation the reference says; otherwise
  // poisons.
  [[nodiscard]] bool owns(const BlockRef& ref) noexcept;
  void finish_write(const BlockRef& ref) noexcept;
  // `generation`: the one that the place is free with.
  void take_out_and_free(index::ShardGuard& guard, const index::Found& found,
                         std::uint32_t generation) noexcept;

  shm::Core core;
  shm::Segments segments;
  shm::Allocator allocator;
  shm::Regions regions;
  shm::Namespaces namespaces;
  shm::LocalPins pins;
  shm::Maintenance maintenance;
  std::atomic<std::uint64_t> writing_bytes{0};  // strides of blocks reserved and not yet published
  std::atomic<std::uint64_t> pin_count{0};      // pins held by leases
};

}  // namespace hpkv
