// What the threads of the disk tier share: pool, index, files, and what is known about the disk's
// health. Held by reference count, so a thread that is stuck in the disk keeps all it touches.
//
// Threads: safe; set up before the first thread starts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "disk/admission.h"
#include "disk/breaker.h"
#include "disk/region_store.h"

namespace hpkv::disk {

struct Tier {
  Tier(std::shared_ptr<Pool> pool_, std::shared_ptr<Catalog> catalog_,
       std::shared_ptr<RegionStore> store_, const Breaker::Clock& clock,
       std::optional<std::uint32_t> min_uses)
      : pool(std::move(pool_)),
        catalog(std::move(catalog_)),
        store(std::move(store_)),
        notices(std::make_shared<Notices>()),
        admission(store->info().storage_bytes, min_uses),
        reading("reading", notices, clock),
        writing("writing", notices, clock),
        keeping("keeping the store in order", notices, clock, 10 * kSecond),
        recovering("finding out what the store holds", notices, clock, 10 * kSecond) {}

  const std::shared_ptr<Pool> pool;
  const std::shared_ptr<Catalog> catalog;
  const std::shared_ptr<RegionStore> store;
  const std::shared_ptr<Notices> notices;
  Admission admission;
  Breaker reading;
  Breaker writing;
  // For their log lines only: they stop nobody, and syncs and large regions may take seconds.
  Breaker keeping;
  Breaker recovering;

  std::atomic<bool> short_of_room{false};       // the last block that needed a place found none
  std::atomic<std::int64_t> damage_said_ns{0};  // when the log last told of damaged blocks

  // Fault injection: every read or write of blocks is late by so much.
  std::atomic<std::int64_t> read_delay_ns{0};
  std::atomic<std::int64_t> write_delay_ns{0};

  std::atomic<std::uint64_t> promote_tickets{0};
  std::atomic<std::uint64_t> promotions_refused{0};  // tickets answered at once with nothing
  std::atomic<std::uint64_t> promoted_blocks{0};
  std::atomic<std::uint64_t> promoted_bytes{0};
  std::atomic<std::uint64_t> promotions_cut{0};  // tickets that ended before their last key
  std::atomic<std::uint64_t> demoted_blocks{0};
  std::atomic<std::uint64_t> demoted_bytes{0};
  std::atomic<std::uint64_t> demotions_refused{0};  // blocks
};

// Blocks that go in one request: what a large transfer takes, and few enough to be pinned at once.
[[nodiscard]] constexpr std::size_t batch_blocks(std::uint64_t stride) noexcept {
  constexpr std::uint64_t kTransferBytes = std::uint64_t{8} << 20U;
  constexpr std::uint64_t kMost = 256;
  const std::uint64_t fit = kTransferBytes / (stride + 4096);  // a record has a header
  return static_cast<std::size_t>(fit < 1 ? 1 : fit > kMost ? kMost : fit);
}

void sleep_ns(std::int64_t ns) noexcept;

}  // namespace hpkv::disk
