// Blocks that a source puts together, against what each byte of each token is.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "copy/stream/assembly.h"
#include "tests/check.h"

namespace hpkv {
namespace {

using stream::Assembly;

constexpr std::uint32_t kLayers = 2;
constexpr std::uint64_t kTokens = 6;
constexpr std::uint64_t kBase = 1 << 20;

// A share of each token's bytes in each layer.
struct Column {
  std::uint64_t bytes;
  std::uint64_t at;  // behind those of the columns before it, on the device
};

// All columns of a token in one row, or each in a buffer of its own.
struct Device {
  std::uint64_t row;
  bool fused;

  [[nodiscard]] Region region(std::uint32_t layer, const Column& one) const {
    const std::uint64_t step = fused ? row : one.bytes;
    return {.layer = layer,
            .base = kBase + layer * 4096 + (fused ? one.at : one.at * kTokens * 3),
            .page_stride = kTokens * step,
            .piece_count = kTokens,
            .piece_stride = step,
            .piece_bytes = one.bytes};
  }
};

// Some of the columns, and how a block has them: token by token, or column by column.
struct Format {
  std::vector<Column> columns;
  bool by_token;

  [[nodiscard]] std::uint64_t row() const {
    std::uint64_t bytes = 0;
    for (const Column& one : columns) bytes += one.bytes;
    return bytes;
  }
  [[nodiscard]] std::uint64_t bytes() const { return kLayers * kTokens * row(); }

  [[nodiscard]] std::vector<Region> regions(const Device& device) const {
    std::vector<Region> out;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      std::uint64_t behind = 0;  // of a row
      for (const Column& one : columns) {
        Region region = device.region(layer, one);
        region.block_offset = layer * kTokens * row() + behind * (by_token ? 1 : kTokens);
        region.block_stride = by_token ? row() : one.bytes;
        behind += one.bytes;
        if (!out.empty() && continues(out.back(), region)) {
          out.back().piece_bytes += region.piece_bytes;
        } else {
          out.push_back(region);
        }
      }
    }
    return out;
  }

  [[nodiscard]] std::vector<std::byte> block() const {
    std::vector<std::byte> out(bytes());
    for (const Region& region : regions({.row = 0, .fused = false})) {
      for (std::uint64_t token = 0; token < kTokens; ++token) {
        for (std::uint64_t i = 0; i < region.piece_bytes; ++i) {
          // No two bytes near each other are equal.
          const std::uint64_t value = region.base + token * 29 + i * 7;
          out[region.block_piece(token) + i] = static_cast<std::byte>(value);
        }
      }
    }
    return out;
  }

 private:
  // Both in one row, one behind the other on either side: then a piece is of both.
  [[nodiscard]] bool continues(const Region& last, const Region& next) const {
    return by_token && last.layer == next.layer && last.piece_stride == next.piece_stride &&
           last.piece_stride > last.piece_bytes && last.base + last.piece_bytes == next.base;
  }
};

Format format_of(std::vector<Column> columns, std::mt19937_64& random) {
  if (random() % 2 == 0) std::ranges::shuffle(columns, random);
  return {std::move(columns), random() % 2 == 0};
}

// `columns` over `count` parts, each of which has one at least.
std::vector<Format> parts_of(std::vector<Column> columns, std::size_t count,
                             std::mt19937_64& random) {
  if (random() % 2 == 0) std::ranges::shuffle(columns, random);
  std::vector<std::vector<Column>> shares(count);
  for (std::size_t i = 0; i < columns.size(); ++i) {
    shares[i < count ? i : random() % count].push_back(columns[i]);
  }
  std::vector<Format> parts;
  for (std::vector<Column>& share : shares) parts.push_back(format_of(std::move(share), random));
  return parts;
}

void check_layers(const Assembly& assembly, const Format& own,
                  const std::vector<const std::byte*>& payloads) {
  const std::vector<std::byte> expected = own.block();
  std::vector<std::byte> block(own.bytes());
  for (std::uint32_t layer = kLayers; layer-- > 0;) {
    assembly.fill(layer, payloads, block.data());
    const auto begin = static_cast<std::ptrdiff_t>(layer * own.bytes() / kLayers);
    CHECK(std::all_of(block.begin(), block.begin() + begin,
                      [](std::byte one) { return one == std::byte{0}; }));
    CHECK(std::equal(block.begin() + begin, block.end(), expected.begin() + begin));
  }
}

}  // namespace

TEST(a_block_of_any_parts_is_the_layouts_own) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    std::mt19937_64 random(seed);
    Device device{.row = 0, .fused = random() % 2 == 0};
    std::vector<Column> columns;
    const std::size_t count = 1 + random() % 6;
    for (std::size_t i = 0; i < count; ++i) {
      // Few widths, so that steps go on by chance from one region to the next.
      columns.push_back({8 + random() % 3 * 4, device.row});
      device.row += columns.back().bytes;
    }
    const Format own = format_of(columns, random);
    const std::vector<Format> parts = parts_of(columns, 1 + random() % count, random);
    const BlockLayout layout(own.bytes(), kLayers, random() % 3 + 1, own.regions(device));
    std::uint64_t largest = 0;
    std::vector<std::vector<Region>> regions;
    std::vector<std::vector<std::byte>> blocks;
    std::vector<const std::byte*> payloads;
    for (const Format& part : parts) {
      largest = std::max(largest, part.bytes());
      regions.push_back(part.regions(device));
      blocks.push_back(part.block());
      payloads.push_back(blocks.back().data());
    }
    check_layers(Assembly(layout, BlockSource(layout, largest, regions)), own, payloads);
  }
}

}  // namespace hpkv

TEST_MAIN
