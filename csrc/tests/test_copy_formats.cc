// Random geometries: blocks whose pieces interleave, and pages made of several blocks of any
// format, compared with a plain loop over rows and columns.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "copy/engine.h"
#include "shm/transfer.h"
#include "tests/check.h"
#include "tests/copy_rig.h"
#include "tests/pool_rig.h"

namespace hpkv {

using test::block_of;
using test::Folder;
using test::random_keys;
using test::Server;

namespace {

constexpr std::uint64_t kPages = 8;
constexpr std::uint32_t kLayers = 3;

PoolOptions checking(const Folder& folder) {
  PoolOptions options = folder.options();
  options.verify_always = true;
  return options;
}

// ---- a plain model: rows of cells, one matrix per layer and page ----
//
// A page of a layer is `rows` rows of columns. A column lies somewhere on the device and somewhere
// in a block, each with its own distance from row to row.

struct Column {
  std::uint64_t bytes;          // of one row
  std::uint64_t device;         // offset of page 0, row 0
  std::uint64_t device_stride;  // row to row
  std::uint64_t page_stride;
  std::size_t part;
  std::uint64_t block;  // offset of row 0 in the part's block
  std::uint64_t block_stride;
};

struct Geometry {
  std::uint64_t rows = 0;
  std::vector<Column> columns[kLayers];
  std::uint64_t device_bytes = 0;
  std::vector<std::uint64_t> block_bytes;  // by part

  [[nodiscard]] Region region(std::uint32_t layer, const Column& column, std::uint64_t base) const {
    return {.layer = layer,
            .base = base + column.device,
            .page_stride = column.page_stride,
            .piece_count = rows,
            .piece_stride = column.device_stride,
            .piece_bytes = column.bytes,
            .block_offset = column.block,
            .block_stride = column.block_stride};
  }
  // Of one part, in no particular order.
  [[nodiscard]] std::vector<Region> regions(std::uint64_t base, std::size_t part,
                                            std::mt19937_64& random) const {
    std::vector<Region> out;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (const Column& column : columns[layer]) {
        if (column.part == part) out.push_back(region(layer, column, base));
      }
    }
    std::ranges::shuffle(out, random);
    return out;
  }
  // Calls visit(device offset, part, block offset) for every byte of a page.
  template <typename Visit>
  void each_byte(std::uint64_t page, Visit visit) const {
    for (const std::vector<Column>& layer : columns) {
      for (const Column& column : layer) {
        for (std::uint64_t row = 0; row < rows; ++row) {
          for (std::uint64_t i = 0; i < column.bytes; ++i) {
            visit(column.device + page * column.page_stride + row * column.device_stride + i,
                  column.part, column.block + row * column.block_stride + i);
          }
        }
      }
    }
  }
};

std::vector<std::size_t> shuffled(std::size_t count, std::mt19937_64& random) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::ranges::shuffle(order, random);
  return order;
}

// Columns of a layer side by side in a row of one buffer, or each in a buffer of its own.
void place_on_device(Geometry& geometry, std::vector<Column>& columns, std::mt19937_64& random) {
  const bool fused = random() % 2 == 0;
  std::uint64_t width = 0;
  for (const std::size_t i : shuffled(columns.size(), random)) {
    Column& column = columns[i];
    if (!fused) {
      column.device_stride = column.bytes + random() % 3 * 7;
      column.page_stride = geometry.rows * column.device_stride + random() % 2 * 11;
      column.device = geometry.device_bytes;
      geometry.device_bytes += kPages * column.page_stride;
    }
    if (fused) column.device = geometry.device_bytes + width;
    width += column.bytes + random() % 2 * 5;
  }
  if (!fused) return;
  for (Column& column : columns) {
    column.device_stride = width;
    column.page_stride = geometry.rows * width;
  }
  geometry.device_bytes += kPages * geometry.rows * width;
}

// The same in the block of a part, without gaps.
void place_in_block(Geometry& geometry, std::vector<Column>& columns, std::size_t part,
                    std::mt19937_64& random) {
  const bool fused = random() % 2 == 0;
  std::uint64_t& end = geometry.block_bytes[part];
  std::uint64_t width = 0;
  for (const std::size_t i : shuffled(columns.size(), random)) {
    Column& column = columns[i];
    if (column.part != part) continue;
    column.block = fused ? end + width : end;
    column.block_stride = column.bytes;
    if (!fused) end += geometry.rows * column.bytes;
    width += column.bytes;
  }
  if (!fused) return;
  for (Column& column : columns) {
    if (column.part == part) column.block_stride = width;
  }
  end += geometry.rows * width;
}

Geometry random_geometry(std::mt19937_64& random, std::size_t part_count) {
  Geometry geometry;
  geometry.rows = 1 + random() % 9;
  geometry.block_bytes.assign(part_count, 0);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<Column>& columns = geometry.columns[layer];
    columns.resize(1 + random() % 5);
    for (Column& column : columns) {
      column.bytes = random() % 4 == 0 ? 200 + random() % 300 : 1 + random() % 64;
      column.part = random() % part_count;
    }
    // Every part has something, so that no block is empty.
    if (layer == 0) {
      while (columns.size() < part_count) columns.push_back(columns.back());
      for (std::size_t part = 0; part < part_count; ++part) columns[part].part = part;
    }
    place_on_device(geometry, columns, random);
    for (std::size_t part = 0; part < part_count; ++part) {
      place_in_block(geometry, columns, part, random);
    }
  }
  return geometry;
}

// The same device bytes in blocks of their own format: what a server stores by itself.
BlockLayout native_layout(const Geometry& geometry, std::uint64_t base) {
  std::vector<Region> regions;
  std::uint64_t offset = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const Column& column : geometry.columns[layer]) {
      Region region = geometry.region(layer, column, base);
      region.block_offset = offset;
      region.block_stride = 0;
      regions.push_back(region);
      offset += region.bytes();
    }
  }
  return BlockLayout(offset, kLayers, kPages, std::move(regions));
}

std::uint64_t fresh_seed() {
  const std::uint64_t seed = std::random_device{}();
  std::printf("        seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace

TEST(strided_blocks_hold_what_a_plain_loop_says_and_come_back) {
  std::mt19937_64 random(fresh_seed());
  const Folder folder;
  const std::shared_ptr<Pool> pool = Pool::open(checking(folder));
  for (int round = 0; round < 60; ++round) {
    const Geometry geometry = random_geometry(random, 1);
    CHECK(geometry.device_bytes <= Server::kDeviceBytes);
    Server server(pool, 1 + round, [&](std::uint64_t base) {
      return BlockLayout(geometry.block_bytes[0], kLayers, kPages,
                         geometry.regions(base, 0, random));
    });
    server.fill(random());
    const auto before = server.device;
    const auto keys = random_keys(3, random());
    const std::vector<std::int64_t> from = {0, 4, 7};
    const std::vector<std::int64_t> to = {7, 2, 0};
    const auto spill = server.engine->spill(keys, from, {});
    spill->wait();
    CHECK(spill->stored() == 3);
    server.fill(random());
    auto expected = server.device;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto block = block_of(pool, keys[i]);
      std::vector<std::uint64_t> moved;
      geometry.each_byte(static_cast<std::uint64_t>(from[i]),
                         [&](std::uint64_t at, std::size_t, std::uint64_t in_block) {
                           CHECK(block[in_block] == before[at]);
                           moved.push_back(at);
                         });
      std::size_t next = 0;
      geometry.each_byte(static_cast<std::uint64_t>(to[i]),
                         [&](std::uint64_t at, std::size_t, std::uint64_t) {
                           expected[at] = before[moved[next++]];
                         });
    }
    // The pool checks always: a load that succeeds proves the checksum, too.
    CHECK(server.engine->load(server.lease(keys), to, {})->wait());
    CHECK(server.device == expected);
  }
  test::require_sound(*pool);
}

TEST(blocks_of_any_format_and_number_fill_the_pages_as_a_plain_loop_does) {
  std::mt19937_64 random(fresh_seed());
  const Folder folder;
  const std::shared_ptr<Pool> pool = Pool::open(checking(folder));
  for (int round = 0; round < 60; ++round) {
    const std::size_t part_count = 1 + random() % 4;
    const Geometry geometry = random_geometry(random, part_count);
    CHECK(geometry.device_bytes <= Server::kDeviceBytes);
    Server server(pool, 1 + 2 * round,
                  [&](std::uint64_t base) { return native_layout(geometry, base); });
    // All parts have blocks of one size; some bytes at the end of most belong to nobody here.
    const std::uint64_t block_bytes = std::ranges::max(geometry.block_bytes) + random() % 3;
    std::vector<std::vector<Region>> parts;
    for (std::size_t part = 0; part < part_count; ++part) {
      parts.push_back(geometry.regions(server.base(), part, random));
    }
    const auto source = std::make_shared<BlockSource>(server.layout, block_bytes, parts);
    CHECK(source->blocks_per_page() == part_count && source->block_bytes() == block_bytes);
    const std::vector<std::int64_t> pages = {7, 0, 3};
    const auto keys = random_keys(pages.size() * part_count, random());
    const std::uint32_t writer =
        pool->add_namespace(test::identity(2 + 2 * round), {}, block_bytes);
    server.fill(random());
    auto expected = server.device;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::vector<std::byte> block(block_bytes);
      for (std::byte& byte : block) byte = static_cast<std::byte>(random());
      CHECK(put(*pool, writer, keys[i], block) == PutStatus::stored);
      geometry.each_byte(static_cast<std::uint64_t>(pages[i / part_count]),
                         [&](std::uint64_t at, std::size_t part, std::uint64_t in_block) {
                           if (part == i % part_count) expected[at] = block[in_block];
                         });
    }
    const auto load = server.engine->load(server.lease(keys), pages, {}, source);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) load->wait_layer(layer);
    CHECK(load->wait());
    CHECK(server.device == expected);
    CHECK(server.engine->stats().loaded_blocks == keys.size());
  }
  CHECK(pool->stats().pinned == 0);
  test::require_sound(*pool);
}

}  // namespace hpkv

TEST_MAIN
