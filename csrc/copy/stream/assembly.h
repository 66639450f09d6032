// How the blocks of a source become one block of the layout's own format: what fills a slot, so
// that the device scatters it as it does any other.
//
// The bytes that go to one place on the device, of whatever page, have one place in a block of the
// layout and one in a part of the source. Found once, kept as runs: pieces that are as far apart as
// the two before them, on both sides.
//
// Immutable afterwards, so any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/layout.h"
#include "copy/source.h"

namespace hpkv::stream {

class Assembly {
 public:
  // The source fits the layout. Sorts all pieces of a block, so it is for once a source.
  Assembly(const BlockLayout& layout, const BlockSource& source);

  // Writes a layer of the block at `block`, from `parts`: the payload of each part's block.
  void fill(std::uint32_t layer, std::span<const std::byte* const> parts, std::byte* block) const;

 private:
  // Bytes that lie together on both sides: in a part's block, and in the layout's.
  struct Piece {
    std::size_t part;
    std::uint64_t from;
    std::uint64_t to;
    std::uint64_t bytes;
  };
  struct Run {
    Piece first;
    std::uint64_t count = 1;
    std::uint64_t from_step = 0;
    std::uint64_t to_step = 0;

    // Whether the piece is the next one of the run, which then has it.
    [[nodiscard]] bool take(const Piece& next);
  };

  [[nodiscard]] static std::vector<Piece> pieces_of(const BlockLayout& layout,
                                                    const BlockSource& source, std::uint32_t layer);

  std::vector<Run> runs_;           // by layer
  std::vector<std::size_t> begin_;  // layer l owns runs_[begin_[l], begin_[l + 1])
};

}  // namespace hpkv::stream
