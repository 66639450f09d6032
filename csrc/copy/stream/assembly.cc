#include "copy/stream/assembly.h"

#include <algorithm>
#include <cstring>

namespace hpkv::stream {
namespace {

// Bytes of page 0 of the layout, and where its block has them.
struct Place {
  std::uint64_t device;
  std::uint64_t block;
  std::uint64_t bytes;
};

// Ascending on the device.
std::vector<Place> places_of(const BlockLayout& layout, std::uint32_t layer) {
  std::vector<Place> places;
  layout.for_each_piece(layer, 0,
                        [&](const std::byte* device, std::uint64_t block, std::uint64_t bytes) {
                          places.push_back({reinterpret_cast<std::uint64_t>(device), block, bytes});
                        });
  std::ranges::sort(places, {}, &Place::device);
  return places;
}

// Calls visit(offset in the piece, place in the block, bytes) for a piece of a source at `device`.
template <typename Visit>
void cut(const std::vector<Place>& places, std::uint64_t device, std::uint64_t bytes,
         Visit&& visit) {
  auto place = std::prev(std::ranges::upper_bound(places, device, {}, &Place::device));
  for (std::uint64_t done = 0; done < bytes; ++place) {
    const std::uint64_t skipped = device + done - place->device;
    const std::uint64_t length = std::min(place->bytes - skipped, bytes - done);
    visit(done, place->block + skipped, length);
    done += length;
  }
}

}  // namespace

bool Assembly::Run::take(const Piece& next) {
  if (next.part != first.part || next.bytes != first.bytes) return false;
  const std::uint64_t from = next.from - first.from;  // modulo 2^64: a run may descend
  const std::uint64_t to = next.to - first.to;
  if (count == 1) {
    from_step = from;
    to_step = to;
  }
  if (from != count * from_step || to != count * to_step) return false;
  ++count;
  return true;
}

std::vector<Assembly::Piece> Assembly::pieces_of(const BlockLayout& layout,
                                                 const BlockSource& source, std::uint32_t layer) {
  const std::vector<Place> places = places_of(layout, layer);
  std::vector<Piece> pieces;
  const auto append = [&pieces](const Piece& next) {
    Piece* const last = pieces.empty() ? nullptr : &pieces.back();
    if (last != nullptr && last->part == next.part && last->from + last->bytes == next.from &&
        last->to + last->bytes == next.to) {
      last->bytes += next.bytes;
    } else {
      pieces.push_back(next);
    }
  };
  for (std::size_t part = 0; part < source.blocks_per_page(); ++part) {
    for (const Region& region : source.regions(layer, part)) {
      for (std::uint64_t i = 0; i < region.piece_count; ++i) {
        cut(places, region.base + i * region.piece_stride, region.piece_bytes,
            [&](std::uint64_t offset, std::uint64_t to, std::uint64_t bytes) {
              append({part, region.block_piece(i) + offset, to, bytes});
            });
      }
    }
  }
  return pieces;
}

Assembly::Assembly(const BlockLayout& layout, const BlockSource& source) {
  for (std::uint32_t layer = 0; layer < layout.layer_count(); ++layer) {
    begin_.push_back(runs_.size());
    for (const Piece& piece : pieces_of(layout, source, layer)) {
      const bool is_first = runs_.size() == begin_.back();
      if (is_first || !runs_.back().take(piece)) runs_.push_back({piece});
    }
  }
  begin_.push_back(runs_.size());
}

void Assembly::fill(std::uint32_t layer, std::span<const std::byte* const> parts,
                    std::byte* block) const {
  for (std::size_t i = begin_[layer]; i < begin_[layer + 1]; ++i) {
    const auto& [first, count, from_step, to_step] = runs_[i];
    // Summed up before the addresses are made: a step may be negative, modulo 2^64.
    for (std::uint64_t k = 0; k < count; ++k) {
      std::memcpy(block + (first.to + k * to_step),
                  parts[first.part] + (first.from + k * from_step), first.bytes);
    }
  }
}

}  // namespace hpkv::stream
