#include "copy/source.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "copy/extents.h"

namespace hpkv {
namespace {

using extents::Extent;

using Parts = std::vector<std::vector<Region>>;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::argument, "block source: " + what);
}

// A region and where the caller wrote it.
struct Placed {
  std::size_t part;
  std::size_t index;
  const Region* region;

  [[nodiscard]] std::string name() const {
    return "region " + std::to_string(index) + " of part " + std::to_string(part) + " (layer " +
           std::to_string(region->layer) + ", block offset " +
           std::to_string(region->block_offset) + ")";
  }
};

// By layer, then part.
std::vector<Placed> placed(const Parts& parts) {
  std::vector<Placed> out;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    for (std::size_t i = 0; i < parts[part].size(); ++i) out.push_back({part, i, &parts[part][i]});
  }
  std::ranges::stable_sort(out, {}, [](const Placed& one) { return one.region->layer; });
  return out;
}

// Of page 0; the layout itself guarantees that its pages do not meet.
std::vector<Extent> wanted_bytes(const BlockLayout& layout, std::uint32_t layer) {
  std::vector<Extent> out;
  for (const Region& region : layout.regions(layer)) {
    extents::append_on_device(region, 0, layout.page_count(), out);
  }
  extents::sort(out);
  return extents::joined(out);
}

void check_layer(const BlockLayout& layout, std::uint32_t layer, std::span<const Placed> regions) {
  std::vector<Extent> given;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    extents::append_on_device(*regions[i].region, i, layout.page_count(), given);
  }
  extents::sort(given);
  if (const auto clash = extents::find_overlap(given)) {
    refuse(regions[clash->second].name() + " writes device bytes that " +
           regions[clash->first].name() + " writes too");
  }
  const std::vector<Extent> wanted = wanted_bytes(layout, layer);
  std::uint64_t bytes = 0;
  auto target = wanted.begin();
  for (const Extent& extent : given) {
    while (target != wanted.end() && target->end <= extent.begin) ++target;
    const bool inside = target != wanted.end() && target->begin <= extent.begin &&
                        extent.end <= target->end && target->page_stride == extent.page_stride;
    if (!inside) {
      refuse(regions[extent.owner].name() + " writes device bytes that are not the layout's");
    }
    bytes += extent.end - extent.begin;
  }
  // Disjoint and inside, so as many are all of them.
  if (bytes != layout.layer_bytes(layer)) {
    refuse("the parts fill " + std::to_string(bytes) + " of " +
           std::to_string(layout.layer_bytes(layer)) + " device bytes of layer " +
           std::to_string(layer));
  }
}

}  // namespace

BlockSource::BlockSource(const BlockLayout& layout, std::uint64_t block_bytes, Parts parts)
    : block_bytes_(block_bytes),
      part_count_(parts.size()),
      page_count_(layout.page_count()),
      device_fingerprint_(layout.device_fingerprint()) {
  if (block_bytes == 0 || block_bytes > extents::kBytesMax) {
    refuse("block_bytes is " + std::to_string(block_bytes));
  }
  if (parts.empty()) refuse("it has no parts");
  const std::vector<Placed> all = placed(parts);
  for (const Placed& one : all) {
    const auto rule =
        extents::broken_rule(*one.region, {block_bytes, layout.layer_count(), layout.page_count()});
    if (rule) refuse(one.name() + " " + *rule);
  }
  std::size_t next = 0;
  for (std::uint32_t layer = 0; layer < layout.layer_count(); ++layer) {
    const std::size_t first = next;
    for (std::size_t part = 0; part < parts.size(); ++part) {
      begin_.push_back(next);
      while (next < all.size() && all[next].region->layer == layer && all[next].part == part) {
        regions_.push_back(*all[next++].region);
      }
    }
    check_layer(layout, layer, std::span(all).subspan(first, next - first));
  }
  begin_.push_back(next);
}

}  // namespace hpkv
