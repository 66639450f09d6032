#include "copy/layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "copy/extents.h"

namespace hpkv {
namespace {

using extents::Clash;
using extents::Extent;
using extents::kBytesMax;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::argument, "block layout: " + what);
}

std::string name_of(std::size_t index, const Region& region) {
  return "region " + std::to_string(index) + " (layer " + std::to_string(region.layer) +
         ", block offset " + std::to_string(region.block_offset) + ")";
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
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    if (const auto rule = extents::broken_rule(regions_[i], {block_bytes, layer_count, page_count}))
      refuse(name_of(i, regions_[i]) + " " + *rule);
  }
  check_block_side();
  // Layers ascend in the block, so sorted by block offset the regions are sorted by layer.
  layer_begin_.resize(std::size_t{layer_count} + 1);
  for (std::uint32_t layer = 0; layer <= layer_count; ++layer) {
    const auto first = std::ranges::lower_bound(regions_, layer, {}, &Region::layer);
    layer_begin_[layer] = static_cast<std::size_t>(first - regions_.begin());
  }
  check_device_side();
  order_pieces();
}

void BlockLayout::check_block_side() const {
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    extents::append_in_block(regions_[i], i, extents);
  }
  extents::sort(extents);
  std::uint64_t covered = 0;
  std::uint32_t layer = 0;
  for (const Extent& extent : extents) {
    const Region& region = regions_[extent.owner];
    if (region.layer < layer) {
      refuse(name_of(extent.owner, region) + " has bytes behind those of a later layer");
    }
    if (extent.begin != covered) {
      refuse(name_of(extent.owner, region) +
             (extent.begin < covered ? " overlaps the bytes before offset "
                                     : " leaves a gap at offset ") +
             std::to_string(covered));
    }
    covered = extent.end;
    layer = region.layer;
  }
  if (covered != block_bytes_) {
    refuse("regions cover " + std::to_string(covered) + " of " + std::to_string(block_bytes_) +
           " bytes");
  }
}

void BlockLayout::check_device_side() {
  std::vector<Extent> all;
  for (std::uint32_t layer = 0; layer < layer_count_; ++layer) {
    std::vector<Extent> own;
    for (std::size_t i = layer_begin_[layer]; i < layer_begin_[layer + 1]; ++i) {
      extents::append_on_device(regions_[i], i, page_count_, own);
    }
    all.insert(all.end(), own.begin(), own.end());
    extents::sort(own);
    for (const Extent& extent : extents::joined(own)) {
      const std::uint64_t words[] = {layer, extent.begin, extent.end, extent.page_stride};
      device_fingerprint_ = crc32c(std::as_bytes(std::span(words)), device_fingerprint_);
    }
  }
  if (const auto clash = extents::find_overlap_of_pages(std::move(all), page_count_)) {
    const std::string first = name_of(clash->first, regions_[clash->first]);
    if (clash->first == clash->second) refuse(first + " has pieces that overlap in device memory");
    refuse(first + " and " + name_of(clash->second, regions_[clash->second]) +
           (clash->strides_differ ? " interleave in device memory with different page strides"
                                  : " overlap in device memory"));
  }
}

void BlockLayout::order_pieces() {
  const bool interleaved = std::ranges::any_of(regions_, [](const Region& region) {
    return region.piece_count > 1 && region.block_step() != region.piece_bytes;
  });
  if (!interleaved) return;
  layer_pieces_begin_.push_back(0);
  for (std::uint32_t layer = 0; layer < layer_count_; ++layer) {
    for (std::size_t i = layer_begin_[layer]; i < layer_begin_[layer + 1]; ++i) {
      for (std::uint64_t piece = 0; piece < regions_[i].piece_count; ++piece) {
        pieces_.push_back({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(piece)});
      }
    }
    const auto first = pieces_.begin() + static_cast<std::ptrdiff_t>(layer_pieces_begin_.back());
    std::sort(first, pieces_.end(), [this](const PieceIndex& a, const PieceIndex& b) {
      return regions_[a.region].block_piece(a.piece) < regions_[b.region].block_piece(b.piece);
    });
    layer_pieces_begin_.push_back(pieces_.size());
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
