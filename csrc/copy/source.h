// How blocks written in another format, or by another tensor-parallel size, become pages of a
// layout: which bytes of which block go where on the device.
//
//   block i of a load belongs to page i / blocks_per_page(), part i % blocks_per_page()
//
// A region of a part reads as a region of a layout does (layout.h), with offsets into that part's
// block. Parts may leave bytes of their block out, and name them in any order.
//
// Invariants, checked by the constructor: every region stays inside its block; over all parts
// together, the device bytes of each layer are exactly those of the layout's layer, each once.
// Immutable afterwards, so any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/layout.h"

namespace hpkv {

class BlockSource {
 public:
  // Throws Error{argument} that says which region breaks which rule. The layout may go afterwards.
  BlockSource(const BlockLayout& layout, std::uint64_t block_bytes,
              std::vector<std::vector<Region>> parts);

  // Exact bytes of each block that is read.
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] std::size_t blocks_per_page() const noexcept { return part_count_; }
  [[nodiscard]] std::span<const Region> regions(std::uint32_t layer,
                                                std::size_t part) const noexcept {
    const std::size_t* begin = &begin_[layer * part_count_ + part];
    return std::span<const Region>(regions_).subspan(begin[0], begin[1] - begin[0]);
  }
  // Whether it fills the pages of this layout.
  [[nodiscard]] bool fits(const BlockLayout& layout) const noexcept {
    return page_count_ == layout.page_count() && device_fingerprint_ == layout.device_fingerprint();
  }

 private:
  std::uint64_t block_bytes_;
  std::size_t part_count_;
  std::uint64_t page_count_;
  std::uint32_t device_fingerprint_;
  std::vector<Region> regions_;     // by layer, then part
  std::vector<std::size_t> begin_;  // regions(layer, part) is [begin_[i], begin_[i + 1]),
                                    // i = layer * part_count_ + part
};

}  // namespace hpkv
