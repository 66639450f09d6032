// Blocks of another format or another tensor-parallel size, as real pools have them: what becomes
// of tokens and heads, and what is refused.
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "copy/engine.h"
#include "tests/check.h"
#include "tests/copy_rig.h"
#include "tests/pool_rig.h"

namespace hpkv {

using test::block_of;
using test::Folder;
using test::random_keys;
using test::Server;

namespace {

using Parts = std::vector<std::vector<Region>>;

constexpr std::uint64_t kPages = 8;
constexpr std::uint32_t kLayers = 3;

PoolOptions checking(const Folder& folder) {
  PoolOptions options = folder.options();
  options.verify_always = true;
  return options;
}

// ---- fused rows and split buffers, as MLA has them on two kinds of device ----

constexpr std::uint64_t kTokens = 5;  // a page
constexpr std::uint64_t kNope = 320;
constexpr std::uint64_t kRope = 24;
constexpr std::uint64_t kRow = kNope + kRope;
constexpr std::uint64_t kRowsBytes = kPages * kTokens * kRow;  // of a layer on the device
constexpr std::uint64_t kMlaBytes = kLayers * kTokens * kRow;  // of a block

// Both parts of a layer: device [pages, tokens, row] or [pages, tokens, nope] + [pages, tokens,
// rope]; in the block likewise.
std::vector<Region> mla_regions(std::uint64_t base, bool fused_device, bool fused_block) {
  std::vector<Region> regions;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const bool rope : {false, true}) {
      const std::uint64_t bytes = rope ? kRope : kNope;
      const std::uint64_t behind = rope ? kNope : 0;  // of a row
      const std::uint64_t row = fused_device ? kRow : bytes;
      regions.push_back(
          {.layer = layer,
           .base = base + layer * kRowsBytes + (fused_device ? behind : behind * kPages * kTokens),
           .page_stride = kTokens * row,
           .piece_count = kTokens,
           .piece_stride = row,
           .piece_bytes = bytes,
           .block_offset = layer * kTokens * kRow + (fused_block ? behind : behind * kTokens),
           .block_stride = fused_block ? kRow : bytes});
    }
  }
  return regions;
}

Server::MakeLayout mla_layout(bool fused_device, bool fused_block) {
  return [=](std::uint64_t base) {
    return BlockLayout(kMlaBytes, kLayers, kPages, mla_regions(base, fused_device, fused_block));
  };
}

// One byte of a token, whatever the device.
std::byte mla_byte(const Server& server, bool fused, std::uint64_t layer, std::uint64_t slot,
                   std::uint64_t i) {
  const std::uint64_t start = layer * kRowsBytes;
  if (fused) return server.device[start + slot * kRow + i];
  if (i < kNope) return server.device[start + slot * kNope + i];
  return server.device[start + kPages * kTokens * kNope + slot * kRope + i - kNope];
}

// Whether page `to` of one holds the tokens of page `from` of the other.
bool mla_pages_equal(const Server& one, bool one_fused, std::int64_t from, const Server& other,
                     bool other_fused, std::int64_t to) {
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint64_t token = 0; token < kTokens; ++token) {
      for (std::uint64_t i = 0; i < kRow; ++i) {
        if (mla_byte(one, one_fused, layer, static_cast<std::uint64_t>(from) * kTokens + token,
                     i) != mla_byte(other, other_fused, layer,
                                    static_cast<std::uint64_t>(to) * kTokens + token, i)) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

TEST(fused_rows_are_read_from_split_blocks_and_split_buffers_from_fused_ones) {
  for (const bool fused_writer : {false, true}) {
    const Folder folder;
    const std::shared_ptr<Pool> pool = Pool::open(checking(folder));
    Server writer(pool, 1, mla_layout(fused_writer, fused_writer));
    Server reader(pool, 2, mla_layout(!fused_writer, !fused_writer));
    writer.fill(1);
    reader.fill(2);
    const auto keys = random_keys(3);
    const std::vector<std::int64_t> from = {0, 2, 7};
    const std::vector<std::int64_t> to = {7, 0, 5};
    writer.engine->spill(keys, from, {})->wait();
    const auto source = std::make_shared<BlockSource>(
        reader.layout, kMlaBytes, Parts{mla_regions(reader.base(), !fused_writer, fused_writer)});
    CHECK(reader.engine->load(reader.lease(keys), to, {}, source)->wait());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      CHECK(mla_pages_equal(writer, fused_writer, from[i], reader, !fused_writer, to[i]));
    }
  }
}

TEST(split_buffers_may_store_fused_rows_bit_for_bit) {
  const Folder folder;
  const std::shared_ptr<Pool> pool = Pool::open(checking(folder));
  Server fused(pool, 1, mla_layout(true, true));
  Server split(pool, 2, mla_layout(false, true));
  fused.fill(1);
  // The split server gets the fused one's tokens, and stores them as fused rows.
  const auto keys = random_keys(2);
  fused.engine->spill(keys, {0, 7}, {})->wait();
  CHECK(split.engine->load(split.lease(keys), {7, 3}, {})->wait());
  CHECK(mla_pages_equal(fused, true, 0, split, false, 7));
  const auto again = random_keys(2, 99);
  split.engine->spill(again, {7, 3}, {})->wait();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CHECK(block_of(pool, keys[i]) == block_of(pool, again[i]));
  }
}

namespace {

// ---- heads under tensor parallelism: K and V of every layer, [pages * tokens, heads, dim] ----

constexpr std::uint64_t kDim = 48;  // bytes of one head of one token
constexpr std::uint64_t kWide = 4;  // heads of a server without tensor parallelism
constexpr std::uint64_t kHalf = 2;  // heads of one of two ranks
constexpr std::uint64_t kTwo = 2;   // K and V

std::uint64_t heads_block_bytes(std::uint64_t heads) {
  return kLayers * kTwo * kTokens * heads * kDim;
}

// `count` heads from `first` on, of a device with `device_heads`; in the block they are
// `block_first` and on, of `block_heads`.
struct HeadRange {
  std::uint64_t device_heads;
  std::uint64_t first;
  std::uint64_t block_heads;
  std::uint64_t block_first;
  std::uint64_t count;
};

std::vector<Region> head_regions(std::uint64_t base, const HeadRange& range) {
  std::vector<Region> regions;
  for (std::uint64_t buffer = 0; buffer < kLayers * kTwo; ++buffer) {
    const std::uint64_t row = range.device_heads * kDim;
    const std::uint64_t block_row = range.block_heads * kDim;
    regions.push_back({.layer = static_cast<std::uint32_t>(buffer / kTwo),
                       .base = base + buffer * kPages * kTokens * row + range.first * kDim,
                       .page_stride = kTokens * row,
                       .piece_count = kTokens,
                       .piece_stride = row,
                       .piece_bytes = range.count * kDim,
                       .block_offset = buffer * kTokens * block_row + range.block_first * kDim,
                       .block_stride = block_row});
  }
  return regions;
}

Server::MakeLayout heads_layout(std::uint64_t heads) {
  return [=](std::uint64_t base) {
    return BlockLayout(heads_block_bytes(heads), kLayers, kPages,
                       head_regions(base, {heads, 0, heads, 0, heads}));
  };
}

// Heads from `first` on, of one page.
struct HeadsOf {
  const std::vector<std::byte>& device;
  std::uint64_t heads;
  std::uint64_t first;
  std::int64_t page;

  [[nodiscard]] std::byte at(std::uint64_t buffer, std::uint64_t token, std::uint64_t head,
                             std::uint64_t i) const {
    const std::uint64_t slot = static_cast<std::uint64_t>(page) * kTokens + token;
    return device[((buffer * kPages * kTokens + slot) * heads + first + head) * kDim + i];
  }
};

bool heads_equal(const HeadsOf& one, const HeadsOf& other, std::uint64_t count) {
  for (std::uint64_t buffer = 0; buffer < kLayers * kTwo; ++buffer) {
    for (std::uint64_t token = 0; token < kTokens; ++token) {
      for (std::uint64_t head = 0; head < count; ++head) {
        for (std::uint64_t i = 0; i < kDim; ++i) {
          if (one.at(buffer, token, head, i) != other.at(buffer, token, head, i)) return false;
        }
      }
    }
  }
  return true;
}

const std::vector<std::int64_t> kFrom = {0, 3, 7};
const std::vector<std::int64_t> kTo = {7, 0, 4};

// A wide server, the blocks of two ranks of a narrow one in its pool, and how it reads them.
struct TwoRanks {
  Folder folder;
  std::shared_ptr<Pool> pool = Pool::open(checking(folder));
  Server ranks[2] = {{pool, 1, heads_layout(kHalf)}, {pool, 1, heads_layout(kHalf)}};
  Server wide{pool, 2, heads_layout(kWide)};
  std::shared_ptr<const BlockSource> source;
  std::vector<Key> keys = random_keys(2 * kFrom.size());  // by page, then rank

  TwoRanks() {
    wide.fill(3);
    Parts parts;
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      ranks[rank].fill(rank + 1);
      for (std::size_t i = 0; i < kFrom.size(); ++i) {
        ranks[rank].engine->spill({keys[2 * i + rank]}, {kFrom[i]}, {})->wait();
      }
      parts.push_back(head_regions(wide.base(), {kWide, rank * kHalf, kHalf, 0, kHalf}));
    }
    source = std::make_shared<BlockSource>(wide.layout, heads_block_bytes(kHalf), parts);
  }
};

}  // namespace

TEST(a_rank_reads_its_heads_from_a_wide_block) {
  const Folder folder;
  const std::shared_ptr<Pool> pool = Pool::open(checking(folder));
  Server wide(pool, 1, heads_layout(kWide));
  wide.fill(1);
  const auto keys = random_keys(kFrom.size());
  wide.engine->spill(keys, kFrom, {})->wait();
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    Server narrow(pool, 2, heads_layout(kHalf));
    narrow.fill(2);
    const auto source = std::make_shared<BlockSource>(
        narrow.layout, heads_block_bytes(kWide),
        Parts{head_regions(narrow.base(), {kHalf, 0, kWide, rank * kHalf, kHalf})});
    CHECK(narrow.engine->load(narrow.lease(keys), kTo, {}, source)->wait());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      CHECK(heads_equal({wide.device, kWide, rank * kHalf, kFrom[i]},
                        {narrow.device, kHalf, 0, kTo[i]}, kHalf));
    }
  }
}

TEST(a_wide_page_is_assembled_from_the_blocks_of_two_ranks_and_nothing_else_is_written) {
  TwoRanks rig;
  const auto before = rig.wide.device;
  CHECK(rig.wide.engine->load(rig.wide.lease(rig.keys), kTo, {}, rig.source)->wait());
  for (std::size_t i = 0; i < kFrom.size(); ++i) {
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      CHECK(heads_equal({rig.ranks[rank].device, kHalf, 0, kFrom[i]},
                        {rig.wide.device, kWide, rank * kHalf, kTo[i]}, kHalf));
    }
  }
  for (const std::int64_t page : {1, 2, 3, 5, 6}) {
    CHECK(heads_equal({before, kWide, 0, page}, {rig.wide.device, kWide, 0, page}, kWide));
  }
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(two_sources_of_one_engine_are_kept_apart) {
  TwoRanks rig;
  // The same two blocks a page, the second rank's first.
  Parts parts;
  std::vector<Key> keys = rig.keys;
  for (const std::uint64_t rank : {1, 0}) {
    parts.push_back(head_regions(rig.wide.base(), {kWide, rank * kHalf, kHalf, 0, kHalf}));
  }
  for (std::size_t i = 0; i < keys.size(); i += 2) std::swap(keys[i], keys[i + 1]);
  const auto swapped =
      std::make_shared<BlockSource>(rig.wide.layout, heads_block_bytes(kHalf), parts);
  for (int round = 0; round < 4; ++round) {
    rig.wide.fill(3);
    CHECK(rig.wide.engine
              ->load(rig.wide.lease(round % 2 == 0 ? rig.keys : keys), kTo, {},
                     round % 2 == 0 ? rig.source : swapped)
              ->wait());
    for (std::size_t i = 0; i < kFrom.size(); ++i) {
      for (std::uint64_t rank = 0; rank < 2; ++rank) {
        CHECK(heads_equal({rig.ranks[rank].device, kHalf, 0, kFrom[i]},
                          {rig.wide.device, kWide, rank * kHalf, kTo[i]}, kHalf));
      }
    }
  }
}

TEST(a_flipped_byte_in_any_block_of_a_page_fails_the_load) {
  for (std::size_t bad = 0; bad < 2 * kFrom.size(); ++bad) {
    TwoRanks rig;
    test::flip_byte_of(rig.pool, rig.keys[bad], 17 * bad);
    const auto before = rig.wide.device;
    const auto load = rig.wide.engine->load(rig.wide.lease(rig.keys), kTo, {}, rig.source);
    CHECK(!load->wait());
    CHECK(rig.wide.engine->stats().bad_blocks == 1);
    CHECK(rig.pool->lookup(rig.keys) == bad);  // condemned, and none of the others
    // Nothing of the page that has the bad block was copied.
    const std::int64_t page = kTo[bad / 2];
    CHECK(heads_equal({before, kWide, 0, page}, {rig.wide.device, kWide, 0, page}, kWide));
    CHECK(rig.pool->stats().pinned == 0);
  }
}

TEST(a_block_of_another_size_fails_the_load_wherever_it_stands_but_can_be_verified) {
  for (std::size_t odd = 0; odd < 2 * kFrom.size(); ++odd) {
    TwoRanks rig;
    auto keys = rig.keys;
    keys[odd] = random_keys(1, 77)[0];
    rig.wide.engine->spill({keys[odd]}, {0}, {})->wait();
    CHECK(!rig.wide.engine->load(rig.wide.lease(keys), kTo, {}, rig.source)->wait());
    const auto verify = rig.wide.engine->verify(rig.wide.lease(keys));
    verify->wait();
    CHECK(verify->good() == keys.size());
    CHECK(rig.pool->lookup(keys) == keys.size());  // nothing was condemned
    CHECK(rig.pool->stats().pinned == 0);
  }
}

TEST(blocks_of_the_layouts_own_size_are_refused_when_a_source_says_otherwise) {
  TwoRanks rig;
  const auto keys = random_keys(2, 88);
  rig.wide.engine->spill(keys, {0, 1}, {})->wait();
  CHECK(!rig.wide.engine->load(rig.wide.lease(keys), {2}, {}, rig.source)->wait());
  CHECK(rig.wide.engine->load(rig.wide.lease(keys), {2, 3}, {})->wait());
}

TEST(the_number_of_blocks_is_pages_times_blocks_per_page) {
  TwoRanks rig;
  auto& engine = *rig.wide.engine;
  CHECK_THROWS(engine.load(rig.wide.lease(rig.keys), {0, 1}, {}, rig.source));
  CHECK_THROWS(engine.load(rig.wide.lease(rig.keys), {0, 1, 2, 3, 4, 5}, {}, rig.source));
  const std::vector<Key> five(rig.keys.begin(), rig.keys.end() - 1);
  CHECK_THROWS(engine.load(rig.wide.lease(five), {0, 1}, {}, rig.source));
  CHECK_THROWS(engine.load(rig.wide.lease(rig.keys), {0, 1, 8}, {}, rig.source));
  CHECK(engine.load(Lease(), {}, {}, rig.source)->wait());
  CHECK(!engine.load(Lease(), {1}, {}, rig.source)->wait());
  CHECK(rig.pool->stats().pinned == 0);
}

TEST(a_source_of_another_layout_is_refused) {
  TwoRanks rig;
  const Server other(rig.pool, 2, heads_layout(kWide));
  CHECK(!rig.source->fits(other.layout));
  CHECK_THROWS(other.engine->load(other.lease(rig.keys), kTo, {}, rig.source));
  CHECK(rig.pool->stats().pinned == 0);
}

}  // namespace hpkv

TEST_MAIN
