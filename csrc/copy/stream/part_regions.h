// The regions of sources where kernels read them, so that the parts of a page are read where they
// lie in the pool and nobody puts them together first.
//
// The memory is pinned when the engine is made, because pinning waits for the device. A source
// that does not fit any more is none of ours: its blocks are put together in slots (assembly.h).
//
// Invariant: what is written for a source stays, as does the source, until the end: the device may
// be reading it. There are few, one for each namespace that fits. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "copy/source.h"
#include "copy/stream/device.h"

namespace hpkv::stream {

// Some regions, for a job.
struct RegionSpan {
  const PageRegion* begin = nullptr;
  std::uint64_t count = 0;
};

class PartRegions {
 public:
  class Table {
   public:
    Table(const BlockSource& source, std::uint32_t layer_count, PageRegion* at);

    [[nodiscard]] static std::size_t count(const BlockSource& source, std::uint32_t layer_count);
    [[nodiscard]] RegionSpan of(std::uint32_t layer, std::size_t part) const noexcept;

   private:
    const std::size_t part_count_;
    const PageRegion* at_;
    std::vector<std::size_t> begin_;  // of(layer, part) is [begin_[i], begin_[i + 1])
  };

  // Throws Error{system} when the device pins no more.
  PartRegions(std::shared_ptr<Device> device, std::uint32_t layer_count, std::uint64_t bytes);
  ~PartRegions();
  PartRegions(const PartRegions&) = delete;
  PartRegions& operator=(const PartRegions&) = delete;

  // Those of a source, which are written when it is first asked for; null when they do not fit.
  [[nodiscard]] const Table* of(const std::shared_ptr<const BlockSource>& source);

 private:
  const std::shared_ptr<Device> device_;
  const std::uint32_t layer_count_;
  const std::size_t capacity_;  // regions
  std::byte* const memory_;
  std::mutex mutex_;
  std::size_t used_ = 0;                                                             // mutex_
  std::map<std::shared_ptr<const BlockSource>, std::optional<const Table>> tables_;  // mutex_
};

}  // namespace hpkv::stream
