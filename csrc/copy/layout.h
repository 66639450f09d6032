// What a block is made of: which bytes of device memory lie where in the block.
//
// A region is one buffer's share of every block, described once by base, strides and sizes. The
// engine walks regions and never asks which model or pool they belong to.
//
//   device: base + page * page_stride + piece * piece_stride     (piece_bytes each)
//   block:  block_offset + piece * piece_bytes
//
// Invariants, checked by the constructor: the regions, in order of block offset, cover
// [0, block_bytes) exactly once, layers do not descend, and no two pieces of any pages and regions
// share a byte of device memory. Immutable afterwards, so any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hpkv {

struct Region {
  std::uint32_t layer = 0;
  std::uint64_t base = 0;         // device address of page 0
  std::uint64_t page_stride = 0;  // bytes from a page to the next
  std::uint64_t piece_count = 1;
  std::uint64_t piece_stride = 0;  // bytes from a piece to the next; any value when there is one
  std::uint64_t piece_bytes = 0;
  std::uint64_t block_offset = 0;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return piece_count * piece_bytes; }
  [[nodiscard]] std::byte* piece(std::uint64_t page, std::uint64_t index) const noexcept {
    return reinterpret_cast<std::byte*>(base + page * page_stride + index * piece_stride);
  }
};

class BlockLayout {
 public:
  // Throws Error{argument} that says which region breaks which rule.
  BlockLayout(std::uint64_t block_bytes, std::uint32_t layer_count, std::uint64_t page_count,
              std::vector<Region> regions);

  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] std::uint32_t layer_count() const noexcept { return layer_count_; }
  // Pages of the device pool: valid page indices are [0, page_count).
  [[nodiscard]] std::uint64_t page_count() const noexcept { return page_count_; }
  // In order of block offset.
  [[nodiscard]] std::span<const Region> regions() const noexcept { return regions_; }
  // Those of one layer.
  [[nodiscard]] std::span<const Region> regions(std::uint32_t layer) const noexcept;
  [[nodiscard]] std::uint64_t layer_bytes(std::uint32_t layer) const noexcept;

 private:
  void check_block_side() const;
  void check_device_side() const;

  std::uint64_t block_bytes_;
  std::uint32_t layer_count_;
  std::uint64_t page_count_;
  std::vector<Region> regions_;
  std::vector<std::size_t> layer_begin_;  // layer l owns regions_[layer_begin_[l], [l + 1])
};

}  // namespace hpkv
