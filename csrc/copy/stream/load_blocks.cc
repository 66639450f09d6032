#include "copy/stream/load_blocks.h"

#include <algorithm>

namespace hpkv::stream {
namespace {

// How the device can read pages of this source in place; null when it cannot.
const PartRegions::Table* regions_of(Core& core, const std::shared_ptr<const BlockSource>& source,
                                     bool by_kernel) {
  if (source == nullptr || !by_kernel) return nullptr;
  // A chunk needs a table for each part, and one for pages that are staged.
  if (source->blocks_per_page() + 1 > core.load_tables.lane.count()) return nullptr;
  return core.part_regions.of(source);
}

}  // namespace

LoadBlocks blocks_in_place(Core& core, std::span<const BlockRef> refs,
                           const std::shared_ptr<const BlockSource>& source, bool by_kernel) {
  const std::size_t per_page = source != nullptr ? source->blocks_per_page() : 1;
  const std::size_t count = refs.size() / per_page;
  const PartRegions::Table* const regions = regions_of(core, source, by_kernel);
  const std::size_t columns = regions != nullptr ? per_page : 0;
  LoadBlocks blocks{BlockColumn(count), std::vector<BlockColumn>(columns, BlockColumn(count)),
                    regions};
  RegisteredPool::Lookup registered(core.registered, by_kernel ? Cover::adjacent : Cover::one);
  for (std::size_t page = 0; page < count; ++page) {
    const auto of_page = refs.subspan(page * per_page, per_page);
    const bool in_place = std::ranges::all_of(of_page, [&](const BlockRef& ref) {
      return registered.holds({core.pool->payload(ref), ref.payload_bytes});
    });
    if (!in_place) continue;
    if (source == nullptr) blocks.own[page] = core.pool->payload(of_page.front());
    for (std::size_t part = 0; part < columns; ++part) {
      blocks.parts[part][page] = core.pool->payload(of_page[part]);
    }
  }
  return blocks;
}

}  // namespace hpkv::stream
