#include "copy/extents.h"

#include <algorithm>

namespace hpkv::extents {
namespace {

constexpr std::uint64_t kAddressMax = std::uint64_t{1} << 63;
// Pieces are kept one by one while they are checked: far more than any block in use has.
constexpr std::uint64_t kPiecesMax = std::uint64_t{1} << 24;

void append(std::uint64_t begin, std::uint64_t step, const Region& region, const Extent& like,
            std::vector<Extent>& out) {
  const bool dense = region.piece_count == 1 || step == region.piece_bytes;
  const std::uint64_t count = dense ? 1 : region.piece_count;
  const std::uint64_t bytes = dense ? region.bytes() : region.piece_bytes;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t at = begin + i * step;
    out.push_back({at, at + bytes, like.page_stride, like.owner});
  }
}

// Extents with one page stride: repeated without end they meet exactly when they meet modulo the
// stride.
std::optional<Clash> overlap_modulo(std::span<const Extent> extents) {
  const std::uint64_t stride = extents.front().page_stride;
  std::vector<Extent> folded;
  for (const Extent& extent : extents) {
    if (extent.page_stride != stride) return Clash{extents.front().owner, extent.owner, true};
    const std::uint64_t bytes = extent.end - extent.begin;
    if (bytes > stride) return Clash{extent.owner, extent.owner};
    const std::uint64_t at = extent.begin % stride;
    folded.push_back({at, at + bytes, stride, extent.owner});
  }
  sort(folded);
  if (const auto clash = find_overlap(folded)) return clash;
  if (folded.back().end > stride + folded.front().begin) {
    return Clash{folded.back().owner, folded.front().owner};
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> broken_rule(const Region& region, const Frame& frame) {
  if (region.layer >= frame.layer_count) return "names a layer that does not exist";
  if (region.piece_bytes == 0 || region.piece_count == 0 ||
      region.piece_bytes > frame.block_bytes || region.piece_count > kPiecesMax) {
    return "has " + std::to_string(region.piece_count) + " pieces of " +
           std::to_string(region.piece_bytes) + " bytes";
  }
  if (region.base == 0 || region.base > kAddressMax) return "has no device address";
  if (region.page_stride > kBytesMax / frame.page_count ||
      region.piece_stride > kBytesMax / region.piece_count ||
      region.block_step() > kBytesMax / region.piece_count) {
    return "has strides larger than any memory";
  }
  if (region.block_offset > frame.block_bytes ||
      region.block_piece(region.piece_count - 1) + region.piece_bytes > frame.block_bytes) {
    return "reaches past the end of the block";
  }
  return std::nullopt;
}

void append_in_block(const Region& region, std::size_t owner, std::vector<Extent>& out) {
  append(region.block_offset, region.block_step(), region, {.owner = owner}, out);
}

void append_on_device(const Region& region, std::size_t owner, std::uint64_t page_count,
                      std::vector<Extent>& out) {
  const std::uint64_t stride = page_count == 1 ? 0 : region.page_stride;
  append(region.base, region.piece_stride, region, {.page_stride = stride, .owner = owner}, out);
}

void sort(std::vector<Extent>& extents) { std::ranges::sort(extents, {}, &Extent::begin); }

std::vector<Extent> joined(std::span<const Extent> sorted) {
  std::vector<Extent> out;
  for (const Extent& extent : sorted) {
    if (!out.empty() && out.back().end == extent.begin &&
        out.back().page_stride == extent.page_stride) {
      out.back().end = extent.end;
    } else {
      out.push_back({extent.begin, extent.end, extent.page_stride, 0});
    }
  }
  return out;
}

std::optional<Clash> find_overlap(std::span<const Extent> sorted) {
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].begin < sorted[i - 1].end) return Clash{sorted[i - 1].owner, sorted[i].owner};
  }
  return std::nullopt;
}

std::optional<Clash> find_overlap_of_pages(std::vector<Extent> extents, std::uint64_t page_count) {
  sort(extents);
  if (page_count == 1) return find_overlap(extents);
  // Groups whose reaches over all pages do not meet need no look at each other: a buffer, or one
  // piece's row of pages.
  for (std::size_t start = 0; start < extents.size();) {
    std::size_t stop = start;
    std::uint64_t reach = 0;
    do {
      const Extent& extent = extents[stop++];
      reach = std::max(reach, extent.end + (page_count - 1) * extent.page_stride);
    } while (stop < extents.size() && extents[stop].begin < reach);
    const std::span<const Extent> group(extents.data() + start, stop - start);
    if (const auto clash = overlap_modulo(group)) return clash;
    start = stop;
  }
  return std::nullopt;
}

}  // namespace hpkv::extents
