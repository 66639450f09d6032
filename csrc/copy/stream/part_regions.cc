#include "copy/stream/part_regions.h"

#include <new>
#include <utility>

#include "copy/stream/staging.h"

namespace hpkv::stream {

PartRegions::Table::Table(const BlockSource& source, std::uint32_t layer_count, PageRegion* at)
    : part_count_(source.blocks_per_page()), at_(at), begin_{0} {
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
    for (std::size_t part = 0; part < part_count_; ++part) {
      for (const Region& region : source.regions(layer, part)) {
        ::new (at++) PageRegion(page_region(region));
      }
      begin_.push_back(static_cast<std::size_t>(at - at_));
    }
  }
}

std::size_t PartRegions::Table::count(const BlockSource& source, std::uint32_t layer_count) {
  std::size_t count = 0;
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
    for (std::size_t part = 0; part < source.blocks_per_page(); ++part) {
      count += source.regions(layer, part).size();
    }
  }
  return count;
}

RegionSpan PartRegions::Table::of(std::uint32_t layer, std::size_t part) const noexcept {
  const std::size_t i = layer * part_count_ + part;
  return {at_ + begin_[i], begin_[i + 1] - begin_[i]};
}

PartRegions::PartRegions(std::shared_ptr<Device> device, std::uint32_t layer_count,
                         std::uint64_t bytes)
    : device_(std::move(device)),
      layer_count_(layer_count),
      capacity_(bytes / sizeof(PageRegion)),
      memory_(pinned(*device_, capacity_ * sizeof(PageRegion))) {}

PartRegions::~PartRegions() { device_->free_pinned(memory_); }

const PartRegions::Table* PartRegions::of(const std::shared_ptr<const BlockSource>& source) {
  const std::lock_guard lock(mutex_);
  const auto [known, is_new] = tables_.try_emplace(source);
  if (is_new) {
    const std::size_t count = Table::count(*source, layer_count_);
    if (count <= capacity_ - used_) {
      known->second.emplace(*source, layer_count_, reinterpret_cast<PageRegion*>(memory_) + used_);
      used_ += count;
    }
  }
  return known->second ? &*known->second : nullptr;
}

}  // namespace hpkv::stream
