// What a block is made of: which bytes of device memory lie where in the block.
//
// A region is one buffer's share of every block, described once by base, strides and sizes. The
// engine walks regions and never asks which model or pool they belong to.
//
//   device: base + page * page_stride + piece * piece_stride     (piece_bytes each)
//   block:  block_offset + piece * block_stride                      (block_stride 0: piece_bytes)
//
// Pieces of one region may interleave with those of another, in the block and on the device: parts
// of a row, heads of a token, tiles of a matrix.
//
// Invariants, checked by the constructor: the pieces cover [0, block_bytes) exactly once; those of
// a layer lie in one contiguous range of the block, and these ranges ascend; no two pieces of any
// pages and regions share a byte of device memory. Immutable afterwards, so any thread may read it.
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
  std::uint64_t block_stride = 0;  // bytes from a piece to the next in the block; 0: piece_bytes

  [[nodiscard]] std::uint64_t bytes() const noexcept { return piece_count * piece_bytes; }
  [[nodiscard]] std::byte* piece(std::uint64_t page, std::uint64_t index) const noexcept {
    return reinterpret_cast<std::byte*>(base + page * page_stride + index * piece_stride);
  }
  [[nodiscard]] std::uint64_t block_step() const noexcept {
    return block_stride == 0 ? piece_bytes : block_stride;
  }
  // Where a piece lies in the block.
  [[nodiscard]] std::uint64_t block_piece(std::uint64_t index) const noexcept {
    return block_offset + index * block_step();
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
  // Calls visit(device address, block offset, bytes) for the pieces of a page's layer, by ascending
  // block offset and without gaps: in the order in which the block's checksum is computed.
  template <typename Visit>
  void for_each_piece(std::uint32_t layer, std::uint64_t page, Visit&& visit) const;
  // Equal for layouts whose pages are the same bytes of device memory, layer by layer.
  [[nodiscard]] std::uint32_t device_fingerprint() const noexcept { return device_fingerprint_; }

 private:
  struct PieceIndex {
    std::uint32_t region;
    std::uint32_t piece;
  };

  void check_block_side() const;
  void check_device_side();
  void order_pieces();

  std::uint64_t block_bytes_;
  std::uint32_t layer_count_;
  std::uint64_t page_count_;
  std::vector<Region> regions_;
  std::vector<std::size_t> layer_begin_;  // layer l owns regions_[layer_begin_[l], [l + 1])
  // Every piece in order of block offset, when regions interleave there; otherwise empty, because
  // walking the regions is that order. 8 bytes a piece.
  std::vector<PieceIndex> pieces_;
  std::vector<std::size_t> layer_pieces_begin_;  // as layer_begin_
  std::uint32_t device_fingerprint_ = 0;
};

template <typename Visit>
void BlockLayout::for_each_piece(std::uint32_t layer, std::uint64_t page, Visit&& visit) const {
  if (pieces_.empty()) {
    for (const Region& region : regions(layer)) {
      for (std::uint64_t i = 0; i < region.piece_count; ++i) {
        visit(region.piece(page, i), region.block_piece(i), region.piece_bytes);
      }
    }
    return;
  }
  for (std::size_t i = layer_pieces_begin_[layer]; i < layer_pieces_begin_[layer + 1]; ++i) {
    const PieceIndex at = pieces_[i];
    const Region& region = regions_[at.region];
    visit(region.piece(page, at.piece), region.block_piece(at.piece), region.piece_bytes);
  }
}

}  // namespace hpkv
