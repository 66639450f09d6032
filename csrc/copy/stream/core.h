// What both directions of a stream engine share: the pool, the layout and its tables, staging,
// health, counters.
//
// Threads: constant after construction, or safe by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy/engine.h"
#include "copy/stream/copy_stream.h"
#include "copy/stream/device.h"
#include "copy/stream/health.h"
#include "copy/stream/index_reader.h"
#include "copy/stream/part_regions.h"
#include "copy/stream/queue.h"
#include "copy/stream/registered_pool.h"
#include "copy/stream/staging.h"

namespace hpkv::stream {

enum class CopyPath : std::uint8_t { batch, kernel };

struct StreamOptions {
  EngineOptions queues;  // `threads`: of them, those that checksum and publish
  // Pinned memory; by default as many slots as fit, at least 2 and at most 16384.
  std::uint64_t staging_bytes = std::uint64_t{256} << 20;
  std::size_t staging_slots = 0;  // overrides it
  // Tables of loads that are read in place, of 4 KiB: one for up to 256 pages on their way, and
  // one more for each part of those of a source.
  std::size_t load_tables = 1024;
  // Pinned memory for the regions of sources, 56 bytes each.
  std::uint64_t part_region_bytes = std::uint64_t{1} << 20;
  // Page indices of spills by batches that come from the device in one piece: 64 KiB of pinned
  // memory.
  std::size_t index_rows = 8192;
  // The most that is registered of the pool in one call: large ones are reported to fail. 0 is for
  // a pool that is not registered.
  std::uint64_t registered_piece_bytes = std::uint64_t{1} << 30;
  std::chrono::milliseconds registered_look_every{1000};
  // By batches a spill's indices must be known on the host: those that only the device has are
  // fetched first, behind the stream that chooses them.
  CopyPath spill_path = CopyPath::kernel;
  CopyPath load_path = CopyPath::kernel;
};

// Counters only ever rise and are read one by one: relaxed everywhere.
struct Counters {
  std::atomic<std::uint64_t> spill_stored{0}, spill_present{0}, dropped_full{0}, dropped_busy{0},
      left_to_others{0}, dropped_off{0}, dropped_queue{0}, dropped_cancelled{0}, dropped_outside{0},
      spilled_bytes{0}, load_tickets{0}, load_failed{0}, loaded_blocks{0}, loaded_bytes{0},
      loaded_in_place{0}, verified_blocks{0}, bad_blocks{0};
};

inline void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

// The layout's regions where kernels read them, by layer.
class RegionTable {
 public:
  RegionTable(std::shared_ptr<Device> device, const BlockLayout& layout);
  ~RegionTable();
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;

  [[nodiscard]] const PageRegion* begin(std::uint32_t layer) const noexcept {
    return static_cast<const PageRegion*>(memory_) + begin_[layer];
  }
  // Of the layers [layer, end).
  [[nodiscard]] std::uint64_t count(std::uint32_t layer, std::uint32_t end) const noexcept {
    return begin_[end] - begin_[layer];
  }

 private:
  const std::shared_ptr<Device> device_;
  std::vector<std::uint64_t> begin_;
  void* memory_ = nullptr;
};

struct Core {
  // Throws Error when the namespace's blocks have another size than the layout's, or the device
  // refuses.
  Core(std::shared_ptr<Device> the_device, std::shared_ptr<Pool> the_pool,
       std::uint32_t the_namespace, BlockLayout the_layout, const StreamOptions& the_options);

  const std::shared_ptr<Device> device;
  const std::shared_ptr<Pool> pool;
  const std::uint32_t namespace_index;
  const BlockLayout layout;
  const StreamOptions options;
  const std::shared_ptr<Health> health = std::make_shared<Health>();
  Faults faults;
  Counters counters;
  Outstanding outstanding;
  std::vector<std::uint64_t> layer_offsets;  // of each layer's bytes in a block, and their end
  EventPool events;
  SlotLane load_slots;
  SlotLane spill_slots;
  Staging staging;
  TableArena load_tables;
  RegionTable regions;
  PartRegions part_regions;
  RegisteredPool registered;
  CopyStream to_device;
  GateMaker load_gates;
  CopyStream to_host;
  GateMaker spill_gates;
  IndexReader spill_indices;

  // Whether the bytes of a pinned block are what was stored, checking them if nobody did yet.
  [[nodiscard]] bool trusted(const BlockRef& ref);
};

}  // namespace hpkv::stream
