#include "copy/layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace hpkv {
namespace {

// Sizes and counts stay far below this, so sums and products of two of them cannot overflow.
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 48;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::argument, "block layout: " + what);
}

[[noreturn]] void refuse(std::size_t index, const Region& region, const std::string& what) {
  refuse("region " + std::to_string(index) + " (layer " + std::to_string(region.layer) +
         ", block offset " + std::to_string(region.block_offset) + ") " + what);
}

// Bytes from `base` to the end of the last piece of the last page.
std::uint64_t extent(const Region& region, std::uint64_t page_count) {
  return (page_count - 1) * region.page_stride + (region.piece_count - 1) * region.piece_stride +
         region.piece_bytes;
}

// Pieces lie on a lattice of two strides. They are disjoint when one stride spans everything that
// the other one enumerates: pieces inside a page, or pages inside a piece row.
bool pieces_disjoint(const Region& region, std::uint64_t page_count) {
  const std::uint64_t pieces_span =
      (region.piece_count - 1) * region.piece_stride + region.piece_bytes;
  const std::uint64_t pages_span = (page_count - 1) * region.page_stride + region.piece_bytes;
  const bool pieces_apart = region.piece_count == 1 || region.piece_stride >= region.piece_bytes;
  const bool pages_apart = page_count == 1 || region.page_stride >= region.piece_bytes;
  if (!pieces_apart || !pages_apart) return false;
  const bool pages_outside = page_count == 1 || region.page_stride >= pieces_span;
  const bool pieces_outside = region.piece_count == 1 || region.piece_stride >= pages_span;
  return pages_outside || pieces_outside;
}

}  // namespace

BlockLayout::BlockLayout(std::uint64_t block_bytes, std::uint32_t layer_count,
                         std::uint64_t page_count, std::vector<Region> regions)
    : block_bytes_(block_bytes),
      layer_count_(layer_count),
      page_count_(page_count),
      regions_(std::move(regions)) {
  if (block_bytes == 0 || block_bytes > kBytesMax) {
    refuse("block_bytes is " + std::to_string(block_bytes));
  }
  if (layer_count == 0) refuse("layer_count is 0");
  if (page_count == 0 || page_count > kBytesMax) {
    refuse("page_count is " + std::to_string(page_count));
  }
  std::ranges::stable_sort(regions_, {}, &Region::block_offset);
  check_block_side();
  check_device_side();
  layer_begin_.resize(std::size_t{layer_count} + 1);
  for (std::uint32_t layer = 0; layer <= layer_count; ++layer) {
    const auto first = std::ranges::lower_bound(regions_, layer, {}, &Region::layer);
    layer_begin_[layer] = static_cast<std::size_t>(first - regions_.begin());
  }
}

void BlockLayout::check_block_side() const {
  std::uint64_t covered = 0;
  std::uint32_t layer = 0;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (region.layer >= layer_count_) refuse(i, region, "names a layer that does not exist");
    if (region.layer < layer) refuse(i, region, "comes after a region of a later layer");
    if (region.piece_bytes == 0 || region.piece_count == 0 || region.piece_bytes > block_bytes_ ||
        region.piece_count > block_bytes_ / region.piece_bytes) {
      refuse(i, region,
             "has " + std::to_string(region.piece_count) + " pieces of " +
                 std::to_string(region.piece_bytes) + " bytes");
    }
    if (region.block_offset != covered) {
      refuse(i, region,
             region.block_offset < covered ? "overlaps the one before it" : "leaves a gap");
    }
    covered += region.bytes();
    if (covered > block_bytes_) refuse(i, region, "reaches past the end of the block");
    layer = region.layer;
  }
  if (covered != block_bytes_) {
    refuse("regions cover " + std::to_string(covered) + " of " + std::to_string(block_bytes_) +
           " bytes");
  }
}

void BlockLayout::check_device_side() const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (region.base == 0) refuse(i, region, "has no device address");
    if (region.page_stride > kBytesMax / page_count_ ||
        region.piece_stride > kBytesMax / region.piece_count) {
      refuse(i, region, "has strides larger than any memory");
    }
    if (!pieces_disjoint(region, page_count_)) {
      refuse(i, region, "has pieces that overlap in device memory");
    }
    extents.emplace_back(region.base, region.base + extent(region, page_count_));
  }
  // Regions that interleave (several buffers inside one page row) would need a finer check; no
  // pool has them, so they are refused with the overlapping ones.
  std::ranges::sort(extents);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first < extents[i - 1].second) {
      refuse("the buffers at device addresses " + std::to_string(extents[i - 1].first) + " and " +
             std::to_string(extents[i].first) + " overlap");
    }
  }
}

std::span<const Region> BlockLayout::regions(std::uint32_t layer) const noexcept {
  return std::span<const Region>(regions_).subspan(layer_begin_[layer],
                                                   layer_begin_[layer + 1] - layer_begin_[layer]);
}

std::uint64_t BlockLayout::layer_bytes(std::uint32_t layer) const noexcept {
  std::uint64_t bytes = 0;
  for (const Region& region : regions(layer)) bytes += region.bytes();
  return bytes;
}

}  // namespace hpkv
