// The bytes that regions occupy, as half-open intervals: how layouts and sources are checked.
// Internal to csrc/copy. Pure functions; start-up only, so they may allocate and sort.
//
// A piece of a region occupies one interval of the block, and on the device one interval per page,
// page_stride apart. Pieces that follow each other without a gap are one extent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "copy/layout.h"

namespace hpkv::extents {

// Sizes and counts stay below this, so sums and products of two of them cannot overflow.
inline constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 48;

struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t page_stride = 0;  // on the device; 0 in the block, or when there is one page
  std::size_t owner = 0;          // index of the region

  friend bool operator==(const Extent&, const Extent&) = default;
};

// What every region must fit into.
struct Frame {
  std::uint64_t block_bytes;
  std::uint32_t layer_count;
  std::uint64_t page_count;
};

// The rule that a region breaks by itself, or nothing. The functions below expect none broken.
[[nodiscard]] std::optional<std::string> broken_rule(const Region& region, const Frame& frame);

// Appends what a region occupies in the block, respectively on the device for page 0.
void append_in_block(const Region& region, std::size_t owner, std::vector<Extent>& out);
void append_on_device(const Region& region, std::size_t owner, std::uint64_t page_count,
                      std::vector<Extent>& out);

void sort(std::vector<Extent>& extents);
// Sorted extents with those that touch joined, when they have one page stride; owners are 0.
[[nodiscard]] std::vector<Extent> joined(std::span<const Extent> sorted);

// Two regions (or one, twice) that meet, and how.
struct Clash {
  std::size_t first;
  std::size_t second;
  bool strides_differ = false;  // they interleave with different page strides: not decided
};

// Whether sorted extents meet.
[[nodiscard]] std::optional<Clash> find_overlap(std::span<const Extent> sorted);
// Whether device extents, repeated for every page, meet. None is missed; refused besides are some
// odd lattices: those that would meet if there were more pages, and those of two strides that
// interleave.
[[nodiscard]] std::optional<Clash> find_overlap_of_pages(std::vector<Extent> extents,
                                                         std::uint64_t page_count);

}  // namespace hpkv::extents
