#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "copy/layout.h"
#include "copy/source.h"
#include "tests/check.h"

namespace hpkv {
namespace {

constexpr std::uint64_t kBase = 1 << 20;

Region region_at(std::uint32_t layer, std::uint64_t base, std::uint64_t offset) {
  return Region{.layer = layer,
                .base = base,
                .page_stride = 256,
                .piece_count = 2,
                .piece_stride = 128,
                .piece_bytes = 96,
                .block_offset = offset};
}

}  // namespace

TEST(a_valid_layout_is_ordered_by_layer) {
  const BlockLayout layout(
      576, 2, 4,
      {region_at(1, kBase + 8192, 384), region_at(0, kBase, 0), region_at(0, kBase + 4096, 192)});
  CHECK(layout.regions(0).size() == 2);
  CHECK(layout.regions(1).size() == 1);
  CHECK(layout.layer_bytes(0) == 384);
  CHECK(layout.layer_bytes(1) == 192);
  CHECK(layout.regions(0)[1].block_offset == 192);
}

TEST(a_layer_may_own_nothing) {
  const BlockLayout layout(192, 3, 4, {region_at(2, kBase, 0)});
  CHECK(layout.regions(0).empty());
  CHECK(layout.layer_bytes(1) == 0);
  CHECK(layout.layer_bytes(2) == 192);
}

TEST(a_block_must_be_covered_exactly_once) {
  CHECK_THROWS(BlockLayout(200, 1, 4, {region_at(0, kBase, 0)}));  // a tail left out
  CHECK_THROWS(BlockLayout(150, 1, 4, {region_at(0, kBase, 0)}));  // past the end
  CHECK_THROWS(BlockLayout(192, 1, 4, {}));                        // nothing
  CHECK_THROWS(BlockLayout(400, 1, 4, {region_at(0, kBase, 0), region_at(0, kBase + 4096, 208)}));
  CHECK_THROWS(BlockLayout(376, 1, 4, {region_at(0, kBase, 0), region_at(0, kBase + 4096, 184)}));
  CHECK_THROWS(BlockLayout(384, 1, 4, {region_at(0, kBase, 0), region_at(0, kBase + 4096, 0)}));
}

TEST(layers_exist_and_do_not_descend) {
  CHECK_THROWS(BlockLayout(192, 1, 4, {region_at(1, kBase, 0)}));
  CHECK_THROWS(BlockLayout(384, 2, 4, {region_at(1, kBase, 0), region_at(0, kBase + 4096, 192)}));
  CHECK_THROWS(BlockLayout(192, 0, 4, {region_at(0, kBase, 0)}));
}

TEST(device_memory_is_not_shared) {
  // The second buffer starts inside the last page of the first.
  CHECK_THROWS(BlockLayout(384, 1, 4, {region_at(0, kBase, 0), region_at(0, kBase + 900, 192)}));
  // Pages closer to each other than they are long.
  Region crowded = region_at(0, kBase, 0);
  crowded.page_stride = 200;
  CHECK_THROWS(BlockLayout(192, 1, 4, {crowded}));
  Region overlapping = region_at(0, kBase, 0);
  overlapping.piece_stride = 95;
  CHECK_THROWS(BlockLayout(192, 1, 4, {overlapping}));
}

TEST(numbers_that_overflow_are_refused) {
  Region far = region_at(0, kBase, 0);
  far.page_stride = std::uint64_t{1} << 62;
  CHECK_THROWS(BlockLayout(192, 1, 4, {far}));
  Region many = region_at(0, kBase, 0);
  many.piece_count = std::uint64_t{1} << 60;
  CHECK_THROWS(BlockLayout(192, 1, 4, {many}));
  Region empty = region_at(0, kBase, 0);
  empty.piece_bytes = 0;
  CHECK_THROWS(BlockLayout(192, 1, 4, {empty}));
  Region nowhere = region_at(0, 0, 0);
  CHECK_THROWS(BlockLayout(192, 1, 4, {nowhere}));
  CHECK_THROWS(BlockLayout(192, 1, 0, {region_at(0, kBase, 0)}));
}

namespace {

// Two columns of 32 and 64 bytes in rows of 96: half of the bytes of `rows` rows.
Region column(std::uint32_t layer, std::uint64_t base, std::uint64_t offset, std::uint64_t bytes) {
  return Region{.layer = layer,
                .base = base,
                .page_stride = 3 * 96,
                .piece_count = 3,
                .piece_stride = 96,
                .piece_bytes = bytes,
                .block_offset = offset,
                .block_stride = 96};
}

}  // namespace

TEST(pieces_may_interleave_in_the_block_and_on_the_device) {
  const BlockLayout layout(576, 2, 4,
                           {column(1, kBase + 4096, 288, 64), column(0, kBase, 0, 32),
                            column(0, kBase + 32, 32, 64), column(1, kBase + 4160, 352, 32)});
  CHECK(layout.layer_bytes(0) == 288 && layout.layer_bytes(1) == 288);
  // In block order, without gaps: what the checksum goes by.
  std::uint64_t end = 0;
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    layout.for_each_piece(
        layer, 1, [&](const std::byte* device, std::uint64_t offset, std::uint64_t bytes) {
          CHECK(offset == end);
          CHECK(device == reinterpret_cast<const std::byte*>(kBase + layer * 4096 + 288 +
                                                             (offset - layer * 288)));
          end += bytes;
        });
  }
  CHECK(end == 576);
}

TEST(interleaved_pieces_must_cover_the_block_exactly_once_too) {
  const Region first = column(0, kBase, 0, 32);
  CHECK_THROWS(BlockLayout(288, 1, 4, {first}));                                 // holes
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, column(0, kBase + 32, 32, 63)}));  // a byte a row
  CHECK_THROWS(BlockLayout(289, 1, 4, {first, column(0, kBase + 32, 32, 65)}));  // twice
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, column(0, kBase + 32, 31, 64)}));
  Region dense = column(0, kBase + 32, 32, 64);
  dense.block_stride = 0;
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, dense}));
  Region crowded = column(0, kBase + 32, 32, 64);
  crowded.block_stride = 48;
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, crowded}));
  Region far = column(0, kBase + 32, 32, 64);
  far.block_stride = std::uint64_t{1} << 63;
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, far}));
}

TEST(layers_do_not_interleave_in_the_block) {
  CHECK_THROWS(BlockLayout(288, 2, 4, {column(0, kBase, 0, 32), column(1, kBase + 4096, 32, 64)}));
}

TEST(interleaved_pieces_share_no_device_byte) {
  const Region first = column(0, kBase, 0, 32);
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, column(0, kBase + 31, 32, 64)}));
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, column(0, kBase + 33, 32, 64)}));  // next row
  // The last row of the last page.
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, column(0, kBase + 11 * 96 + 31, 32, 64)}));
  // With another stride from page to page.
  Region other = column(0, kBase + 32, 32, 64);
  other.page_stride = 4 * 96;
  CHECK_THROWS(BlockLayout(288, 1, 4, {first, other}));
  const BlockLayout one_page(288, 1, 1, {first, other});
  CHECK(one_page.layer_bytes(0) == 288);
}

TEST(a_source_fills_exactly_the_bytes_of_each_layer) {
  const BlockLayout layout(
      576, 2, 4,
      {region_at(0, kBase, 0), region_at(0, kBase + 4096, 192), region_at(1, kBase + 8192, 384)});
  const auto at = [](std::uint32_t layer, std::uint64_t base, std::uint64_t offset) {
    return region_at(layer, base, offset);
  };
  const Region a = at(0, kBase, 700);
  const Region b = at(0, kBase + 4096, 0);
  const Region c = at(1, kBase + 8192, 100);
  const BlockSource whole(layout, 1000, {{c, a}, {b}});
  CHECK(whole.blocks_per_page() == 2 && whole.block_bytes() == 1000 && whole.fits(layout));
  CHECK(whole.regions(0, 0).size() == 1 && whole.regions(0, 0)[0].block_offset == 700);
  CHECK(whole.regions(0, 1).size() == 1 && whole.regions(1, 1).empty());
  CHECK_THROWS(BlockSource(layout, 1000, {{a}, {c}}));        // b is missing
  CHECK_THROWS(BlockSource(layout, 1000, {{a, b, c}, {b}}));  // b twice
  CHECK_THROWS(BlockSource(layout, 1000, {{a, b}, {a, c}}));
  CHECK_THROWS(BlockSource(layout, 1000, {}));
  CHECK_THROWS(BlockSource(layout, 891, {{a, b, c}}));  // a ends at 892
  static_cast<void>(BlockSource(layout, 892, {{a, b, c}}));
  CHECK_THROWS(BlockSource(layout, 0, {{a, b, c}}));
  // As many bytes, but one of them beside the layout's.
  CHECK_THROWS(BlockSource(layout, 1000, {{a, at(0, kBase + 4097, 0), c}}));
  // The right bytes under a layer that does not own them.
  CHECK_THROWS(BlockSource(layout, 1000, {{at(1, kBase, 0), b, at(0, kBase + 8192, 100)}}));
  CHECK_THROWS(BlockSource(layout, 1000, {{a, b, at(2, kBase + 8192, 100)}}));
  Region other_pages = b;
  other_pages.page_stride = 512;
  CHECK_THROWS(BlockSource(layout, 1000, {{a, other_pages, c}}));
}

TEST(a_source_that_breaks_a_rule_names_the_region) {
  const BlockLayout layout(192, 1, 4, {region_at(0, kBase, 0)});
  std::string message;
  try {
    const BlockSource source(layout, 192, {{region_at(0, kBase, 0)}, {region_at(0, kBase, 0)}});
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::argument);
    message = error.what();
  }
  CHECK(message.find("region 0 of part 1") != std::string::npos);
  CHECK(message.find("region 0 of part 0") != std::string::npos);
}

// The rule by which one region is accepted, against every byte written out.
TEST(device_rule_agrees_with_enumeration_of_every_byte) {
  std::mt19937_64 random(7);
  std::size_t accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::uint64_t pages = 1 + random() % 4;
    Region region{.layer = 0,
                  .base = kBase,
                  .page_stride = random() % 40,
                  .piece_count = 1 + random() % 4,
                  .piece_stride = random() % 40,
                  .piece_bytes = 1 + random() % 8,
                  .block_offset = 0};
    std::map<std::byte*, int> owners;
    bool disjoint = true;
    for (std::uint64_t page = 0; page < pages; ++page) {
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        for (std::uint64_t i = 0; i < region.piece_bytes; ++i) {
          disjoint &= ++owners[region.piece(page, piece) + i] == 1;
        }
      }
    }
    bool valid = true;
    try {
      BlockLayout(region.bytes(), 1, pages, {region});
    } catch (const Error&) {
      valid = false;
    }
    // Accepting implies disjoint. Some odd lattices are disjoint and refused all the same.
    CHECK(!valid || disjoint);
    accepted += valid ? 1 : 0;
  }
  CHECK(accepted > 400);
}

// Two regions in one address range, likewise.
TEST(device_rule_for_two_regions_agrees_with_enumeration_of_every_byte) {
  std::mt19937_64 random(8);
  std::size_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::uint64_t pages = 1 + random() % 4;
    const std::uint64_t page_stride = random() % 40;
    std::vector<Region> regions;
    std::uint64_t offset = 0;
    std::map<std::byte*, int> owners;
    bool disjoint = true;
    for (int i = 0; i < 2; ++i) {
      const Region region{.layer = 0,
                          .base = kBase + random() % 60,
                          .page_stride = page_stride + (random() % 8 == 0 ? 1 : 0),
                          .piece_count = 1 + random() % 3,
                          .piece_stride = random() % 20,
                          .piece_bytes = 1 + random() % 5,
                          .block_offset = offset};
      offset += region.bytes();
      regions.push_back(region);
      for (std::uint64_t page = 0; page < pages; ++page) {
        for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
          for (std::uint64_t at = 0; at < region.piece_bytes; ++at) {
            disjoint &= ++owners[region.piece(page, piece) + at] == 1;
          }
        }
      }
    }
    bool valid = true;
    try {
      BlockLayout(offset, 1, pages, regions);
    } catch (const Error&) {
      valid = false;
    }
    CHECK(!valid || disjoint);
    accepted += valid ? 1 : 0;
  }
  CHECK(accepted > 2000);
}

}  // namespace hpkv

TEST_MAIN
