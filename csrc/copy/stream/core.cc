#include "copy/stream/core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "shm/transfer.h"

namespace hpkv::stream {
namespace {

constexpr std::size_t kSlotsMax = 16384;

struct Split {
  std::size_t loads;
  std::size_t spills;
};

// Spills also hold reserved blocks, of which a client may have an eighth of the pool: half of that.
Split slots_for(const StreamOptions& options, std::uint64_t block_bytes, std::uint64_t pool_bytes) {
  const std::size_t by_bytes =
      std::min<std::size_t>(options.staging_bytes / Staging::slot_bytes(block_bytes), kSlotsMax);
  const std::size_t count =
      std::max<std::size_t>(options.staging_slots != 0 ? options.staging_slots : by_bytes, 2);
  const std::size_t quota = std::max<std::size_t>(pool_bytes / 16 / block_bytes, 1);
  return {(count + 1) / 2, std::min(count / 2, quota)};
}

SlotLane lane_of(const Core& core, bool loads) {
  const Split split =
      slots_for(core.options, core.layout.block_bytes(), core.pool->info().pool_bytes);
  return loads ? SlotLane(0, split.loads) : SlotLane(static_cast<Slot>(split.loads), split.spills);
}

BlockLayout checked(const Pool& pool, std::uint32_t namespace_index, BlockLayout layout) {
  const std::uint64_t stored = pool.block_bytes(namespace_index);
  if (stored != layout.block_bytes()) {
    throw Error(ErrorKind::argument, "copy engine: blocks of the namespace have " +
                                         std::to_string(stored) + " bytes, the layout " +
                                         std::to_string(layout.block_bytes()));
  }
  return layout;
}

std::vector<std::uint64_t> offsets_of(const BlockLayout& layout) {
  std::vector<std::uint64_t> offsets{0};
  for (std::uint32_t layer = 0; layer < layout.layer_count(); ++layer) {
    offsets.push_back(offsets.back() + layout.layer_bytes(layer));
  }
  return offsets;
}

}  // namespace

RegionTable::RegionTable(std::shared_ptr<Device> device, const BlockLayout& layout)
    : device_(std::move(device)) {
  std::vector<PageRegion> regions;
  for (std::uint32_t layer = 0; layer < layout.layer_count(); ++layer) {
    begin_.push_back(regions.size());
    for (const Region& region : layout.regions(layer)) regions.push_back(page_region(region));
  }
  begin_.push_back(regions.size());
  const Status status = device_->upload(std::as_bytes(std::span(regions)), memory_);
  if (!status.ok()) throw Error(ErrorKind::system, "copy engine: " + status.text());
}

RegionTable::~RegionTable() { device_->free_uploaded(memory_); }

Core::Core(std::shared_ptr<Device> the_device, std::shared_ptr<Pool> the_pool,
           std::uint32_t the_namespace, BlockLayout the_layout, const StreamOptions& the_options)
    : device(std::move(the_device)),
      pool(std::move(the_pool)),
      namespace_index(the_namespace),
      layout(checked(*pool, the_namespace, std::move(the_layout))),
      options(the_options),
      faults(layout.layer_count()),
      layer_offsets(offsets_of(layout)),
      events(device, health),
      load_slots(lane_of(*this, true)),
      spill_slots(lane_of(*this, false)),
      staging(device, layout.block_bytes(), load_slots.count() + spill_slots.count()),
      load_tables(device, std::max<std::size_t>(options.load_tables, 1)),
      regions(device, layout),
      part_regions(device, layout.layer_count(), options.part_region_bytes),
      registered(device, pool, options.registered_piece_bytes, options.registered_look_every),
      to_device(device, health, events, true),
      load_gates(device, health, events),
      to_host(device, health, events, false),
      spill_gates(device, health, events),
      spill_indices(device, health, events, options.index_rows) {}

bool Core::trusted(const BlockRef& ref) {
  if (pool->verified(ref)) return true;
  const bool good = hpkv::verify(*pool, ref);
  add(good ? counters.verified_blocks : counters.bad_blocks, 1);
  return good;
}

}  // namespace hpkv::stream
