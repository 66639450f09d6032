// What the parts of a region store share: pool, index, files, clock, and the count of what
// happened.
//
// Owns: all of it, for RegionStore::Impl. Threads: safe; Tally is atomics and one mutex for a text.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "disk/region_files.h"

namespace hpkv::disk {

struct Tally {
  std::atomic<std::uint64_t> read_blocks{0}, read_bytes{0}, written_blocks{0}, written_bytes{0};
  std::atomic<std::uint64_t> carried_blocks{0}, recovered_blocks{0};
  std::atomic<std::uint64_t> regions_sealed{0}, regions_evicted{0}, regions_removed{0};
  std::atomic<std::uint64_t> refused_blocks{0}, bad_blocks{0}, stale_reads{0};
  std::atomic<std::uint64_t> read_errors{0}, write_errors{0}, sync_errors{0}, space_errors{0};

  // A call of the disk failed: counts it as the kind that it is and keeps the words.
  void failed(std::atomic<std::uint64_t>& kind, std::string what, int code);
  void failed(std::atomic<std::uint64_t>& kind, std::string_view operation, std::uint32_t region,
              int code) {
    failed(kind, std::string(operation) + " region " + std::to_string(region), code);
  }
  [[nodiscard]] StoreCounters snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::string last_error_;
};

struct Context {
  Context(std::shared_ptr<Pool> pool_, std::shared_ptr<Catalog> catalog_,
          const RegionStoreOptions& options, std::shared_ptr<Files> files_)
      : pool(std::move(pool_)),
        catalog(std::move(catalog_)),
        shared_files(files_),
        clock(options.clock),
        directory(options, pool->info(), files_),
        files(std::move(files_), directory) {}

  const std::shared_ptr<Pool> pool;
  const std::shared_ptr<Catalog> catalog;
  const std::shared_ptr<Files> shared_files;
  const std::function<std::int64_t()> clock;
  StoreDirectory directory;
  RegionFiles files;
  Tally tally;
  std::atomic<bool> gives_back{false};  // the file system is short of space for others

  [[nodiscard]] const StoreHeader& header() const noexcept { return directory.header(); }
  [[nodiscard]] std::uint32_t region_count() const noexcept { return header().region_count; }

  // Whether the index has what every region holds. Once it has, that stays so.
  [[nodiscard]] bool recovered() const noexcept;
  // How much must stay free for others: below it the store gives back, and it grows only well
  // above.
  [[nodiscard]] std::uint64_t spare_bytes() const noexcept {
    return std::max(2 * header().region_bytes, std::uint64_t{64} << 20U);
  }
  [[nodiscard]] std::uint64_t grow_bytes() const noexcept {
    return spare_bytes() + header().region_bytes;
  }
  // Free bytes of the file system. 0, or -errno when it does not say: a disk that fails is no
  // reason to give blocks up, and none to take more of it.
  [[nodiscard]] int available_bytes(std::uint64_t& bytes);
  // Whether a region file may be made.
  [[nodiscard]] bool may_grow() {
    std::uint64_t bytes = 0;
    return available_bytes(bytes) == 0 && bytes >= grow_bytes();
  }
};

}  // namespace hpkv::disk
