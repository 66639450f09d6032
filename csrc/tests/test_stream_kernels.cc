// Gather and scatter as host loops, by the body of the kernel: every byte of random geometry
// against the layout's own walk, and that no two threads of a grid write the same one.
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "copy/layout.h"
#include "copy/stream/kernels.h"
#include "tests/check.h"

namespace hpkv {

using stream::Grid;
using stream::grid_for;
using stream::Lane;
using stream::page_region;
using stream::PageJob;
using stream::PageRegion;

namespace {

constexpr std::uint64_t kPages = 6;

// Device memory, blocks and a layout between them; everything starts as random bytes.
struct Field {
  std::vector<std::byte> device;
  std::vector<std::byte> blocks;
  std::vector<Region> regions;
  std::uint64_t block_bytes = 0;
  std::uint64_t block_stride = 0;
  std::uint64_t block_start = 0;

  [[nodiscard]] std::uint64_t block(std::uint64_t index) const {
    return reinterpret_cast<std::uint64_t>(blocks.data()) + block_start + index * block_stride;
  }
};

struct Shape {
  std::uint64_t region_count;
  std::uint64_t piece_count;
  std::uint64_t piece_bytes;
  std::uint64_t piece_gap;  // between pieces on the device
  std::uint64_t page_gap;   // between pages
  std::uint64_t start;      // of the device memory, and of the blocks
  bool interleaved;         // pieces of the regions alternate in the block
};

void randomize(std::vector<std::byte>& bytes, std::mt19937_64& random) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

Field make_field(const Shape& shape, std::mt19937_64& random) {
  Field field;
  const std::uint64_t stride = shape.piece_bytes + shape.piece_gap;
  const std::uint64_t page = shape.piece_count * stride + shape.page_gap;
  field.device.resize(shape.region_count * kPages * page + 64);
  const std::uint64_t row = shape.piece_bytes * (shape.interleaved ? shape.region_count : 1);
  const std::uint64_t base = reinterpret_cast<std::uint64_t>(field.device.data()) + shape.start;
  const std::uint64_t region_bytes = shape.piece_count * shape.piece_bytes;
  for (std::uint64_t i = 0; i < shape.region_count; ++i) {
    field.regions.push_back(
        {.layer = 0,
         .base = base + i * kPages * page,
         .page_stride = page,
         .piece_count = shape.piece_count,
         .piece_stride = stride,
         .piece_bytes = shape.piece_bytes,
         .block_offset = i * (shape.interleaved ? shape.piece_bytes : region_bytes),
         .block_stride = row});
  }
  field.block_bytes = shape.region_count * region_bytes;
  field.block_stride = (field.block_bytes + 15) / 16 * 16 + 16;
  field.block_start = shape.start;
  field.blocks.resize(kPages * field.block_stride + 64);
  randomize(field.device, random);
  randomize(field.blocks, random);
  return field;
}

// The same by the layout's definition, one byte at a time.
void reference(Field& field, const std::vector<std::uint64_t>& pages, bool to_block) {
  for (std::uint64_t entry = 0; entry < pages.size(); ++entry) {
    for (const Region& region : field.regions) {
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        std::byte* const device = region.piece(pages[entry], piece);
        std::byte* const block =
            reinterpret_cast<std::byte*>(field.block(entry) + region.block_piece(piece));
        for (std::uint64_t i = 0; i < region.piece_bytes; ++i) {
          (to_block ? block[i] : device[i]) = to_block ? device[i] : block[i];
        }
      }
    }
  }
}

struct Tables {
  std::vector<PageRegion> regions;
  std::vector<std::int64_t> pages;
  std::vector<std::uint64_t> blocks;
  PageJob job;
};

void fill_tables(Tables& tables, const Field& field, const std::vector<std::uint64_t>& pages,
                 std::uint64_t tokens) {
  for (const Region& region : field.regions) tables.regions.push_back(page_region(region));
  for (std::uint64_t i = 0; i < pages.size(); ++i) {
    tables.pages.push_back(static_cast<std::int64_t>(pages[i] * tokens));
    tables.blocks.push_back(field.block(i));
  }
  tables.job = {.regions = tables.regions.data(),
                .pages = tables.pages.data(),
                .blocks = tables.blocks.data(),
                .region_count = tables.regions.size(),
                .count = pages.size(),
                .page_count = kPages,
                .tokens_per_page = tokens};
}

std::uint64_t units_of(const PageJob& job) { return job.count * job.region_count; }

// As a device does it: blocks and lanes in any order.
void run_in_lanes(const PageJob& job, Grid grid, std::uint64_t lanes) {
  for (std::uint64_t block = grid.blocks; block-- > 0;) {
    for (std::uint64_t lane = lanes; lane-- > 0;) {
      stream::copy_in_block(job, grid, block, {lane, lanes});
    }
  }
}

struct Launch {
  Grid grid;
  std::uint64_t lanes;
};

void check_shape(const Shape& shape, std::uint64_t tokens, std::uint64_t seed) {
  for (const bool to_block : {false, true}) {
    for (const auto& [grid, lanes] :
         {Launch{{1, 1}, 1}, Launch{{3, 1}, 7}, Launch{{2, 1}, 64}, Launch{{16, 4}, 5}}) {
      std::mt19937_64 random(seed);
      Field field = make_field(shape, random);
      const std::vector<std::uint64_t> pages = {4, 0, 5, 2};
      Tables tables;
      fill_tables(tables, field, pages, tokens);
      tables.job.to_block = to_block;
      const auto device = field.device;
      const auto blocks = field.blocks;
      reference(field, pages, to_block);
      const auto expected_device = field.device;
      const auto expected_blocks = field.blocks;
      // In place again: addresses are part of the job.
      std::memcpy(field.device.data(), device.data(), device.size());
      std::memcpy(field.blocks.data(), blocks.data(), blocks.size());
      run_in_lanes(tables.job, grid, lanes);
      CHECK(field.device == expected_device);
      CHECK(field.blocks == expected_blocks);
    }
  }
}

// How many bytes are not written by exactly one lane, or, where nothing belongs, by none. The side
// that is read holds ones; each lane of each block runs by itself over zeros.
std::size_t wrong_writes(Field& field, const std::vector<std::uint64_t>& pages, const PageJob& job,
                         const Launch& launch) {
  std::vector<std::byte>& written = job.to_block ? field.blocks : field.device;
  std::ranges::fill(job.to_block ? field.device : field.blocks, std::byte{1});
  std::ranges::fill(written, std::byte{0});
  std::vector<std::uint64_t> writers(written.size());
  for (std::uint64_t block = 0; block < launch.grid.blocks; ++block) {
    for (std::uint64_t lane = 0; lane < launch.lanes; ++lane) {
      stream::copy_in_block(job, launch.grid, block, {lane, launch.lanes});
      for (std::size_t i = 0; i < written.size(); ++i) {
        writers[i] += static_cast<std::uint64_t>(std::exchange(written[i], std::byte{0}));
      }
    }
  }
  reference(field, pages, job.to_block);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < written.size(); ++i) {
    wrong += writers[i] == static_cast<std::uint64_t>(written[i]) ? 0U : 1U;
  }
  return wrong;
}

}  // namespace

TEST(random_geometry_is_copied_bit_for_bit_and_nothing_else_is_written) {
  std::mt19937_64 random(2026);
  for (std::uint64_t round = 0; round < 400; ++round) {
    const bool aligned = random() % 2 == 0;
    const std::uint64_t unit = aligned ? std::uint64_t{1} << (random() % 5) : 1;
    const Shape shape{.region_count = 1 + random() % 3,
                      .piece_count = 1 + random() % 9,
                      .piece_bytes = aligned ? unit * (1 + random() % 20) : 1 + random() % 200,
                      .piece_gap = random() % 3 == 0 ? 0 : unit * (random() % 40),
                      .page_gap = unit * (random() % 40),
                      .start = unit * (random() % 3) % 33,
                      .interleaved = random() % 2 == 0};
    check_shape(shape, 1 + random() % 64, round);
  }
}

TEST(every_page_size_of_rows_of_576_elements) {
  for (const std::uint64_t tokens : {1U, 16U, 32U, 64U, 128U}) {
    for (const std::uint64_t element_bytes : {1U, 2U}) {
      for (const std::uint64_t gap : {0U, 64U}) {
        check_shape({.region_count = 2,
                     .piece_count = tokens,
                     .piece_bytes = 576 * element_bytes,
                     .piece_gap = gap,
                     .page_gap = 0,
                     .start = 0,
                     .interleaved = gap != 0},
                    tokens, tokens);
      }
    }
  }
}

TEST(pieces_with_a_tail_are_copied_whole) {
  for (std::uint64_t bytes = 1; bytes < 50; ++bytes) {
    for (std::uint64_t start = 0; start < 17; ++start) {
      // Strides stay multiples of 16, so the accesses are as wide as the start allows.
      check_shape({.region_count = 1,
                   .piece_count = 3,
                   .piece_bytes = bytes,
                   .piece_gap = (16 - bytes % 16) % 16,
                   .page_gap = 16,
                   .start = start,
                   .interleaved = false},
                  16, bytes);
    }
  }
}

TEST(every_byte_is_written_by_one_thread_of_the_grid) {
  const Shape rows{.region_count = 1,  // one page of them is one unit of one piece
                   .piece_count = 2,
                   .piece_bytes = 1152,
                   .piece_gap = 0,
                   .page_gap = 0,
                   .start = 0,
                   .interleaved = false};
  const Shape tails{.region_count = 2,
                    .piece_count = 5,
                    .piece_bytes = 37,
                    .piece_gap = 11,
                    .page_gap = 16,
                    .start = 0,
                    .interleaved = true};
  std::mt19937_64 random(7);
  for (const Shape& shape : {rows, tails}) {
    for (const std::vector<std::uint64_t>& pages : {std::vector<std::uint64_t>{3}, {4, 0, 5}}) {
      for (const bool to_block : {false, true}) {
        Field field = make_field(shape, random);
        Tables tables;
        fill_tables(tables, field, pages, 2);
        tables.job.to_block = to_block;
        const Grid own = grid_for(units_of(tables.job));
        CHECK(own.parts > 1);
        for (const Launch& launch : {Launch{own, 32}, Launch{{16, 1}, 32}, Launch{{5, 3}, 7}}) {
          CHECK(wrong_writes(field, pages, tables.job, launch) == 0);
        }
      }
    }
  }
}

TEST(jobs_of_one_launch_copy_what_they_copy_alone) {
  const Shape shapes[] = {{.region_count = 1,
                           .piece_count = 1,
                           .piece_bytes = 40,
                           .piece_gap = 0,
                           .page_gap = 0,
                           .start = 0,
                           .interleaved = false},
                          {.region_count = 5,
                           .piece_count = 3,
                           .piece_bytes = 37,
                           .piece_gap = 11,
                           .page_gap = 16,
                           .start = 3,
                           .interleaved = true},
                          {.region_count = 2,
                           .piece_count = 7,
                           .piece_bytes = 64,
                           .piece_gap = 0,
                           .page_gap = 0,
                           .start = 0,
                           .interleaved = false}};
  for (const bool to_block : {false, true}) {
    std::mt19937_64 random(11);
    std::vector<Field> fields;
    for (const Shape& shape : shapes) fields.push_back(make_field(shape, random));
    std::vector<Tables> tables(fields.size());
    stream::PageJobs jobs;
    std::vector<Field> expected;
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const std::vector<std::uint64_t> pages =
          i == 0 ? std::vector<std::uint64_t>{3} : std::vector<std::uint64_t>{4, 0, 5};
      fill_tables(tables[i], fields[i], pages, 16);
      tables[i].job.to_block = to_block;
      jobs.job[jobs.count++] = tables[i].job;
      const Field before = fields[i];
      reference(fields[i], pages, to_block);
      expected.push_back(fields[i]);
      std::ranges::copy(before.device, fields[i].device.begin());
      std::ranges::copy(before.blocks, fields[i].blocks.begin());
    }
    for (std::uint64_t block = stream::kGridBlocksMax; block-- > 0;) {
      for (std::uint64_t lane = 32; lane-- > 0;) {
        stream::copy_all_in_block(jobs, block, {lane, 32});
      }
    }
    for (std::size_t i = 0; i < fields.size(); ++i) {
      CHECK(fields[i].device == expected[i].device && fields[i].blocks == expected[i].blocks);
    }
  }
}

TEST(a_grid_has_at_most_sixteen_blocks_and_leaves_none_idle_that_could_share_a_unit) {
  for (std::uint64_t units = 1; units < 100; ++units) {
    const Grid grid = grid_for(units);
    CHECK(grid.parts >= 1);
    CHECK(grid.blocks == std::min<std::uint64_t>(units * grid.parts, 16));
    CHECK(grid.parts == 1 || units * grid.parts <= 16);
    CHECK(units * (grid.parts + 1) > 16);
  }
}

TEST(a_page_outside_the_pool_is_left_alone) {
  std::mt19937_64 random(5);
  Field field = make_field({.region_count = 2,
                            .piece_count = 4,
                            .piece_bytes = 32,
                            .piece_gap = 0,
                            .page_gap = 0,
                            .start = 0,
                            .interleaved = false},
                           random);
  Tables tables;
  fill_tables(tables, field, {0, 1, 2}, 16);
  tables.pages = {-1, -16 * 1000, static_cast<std::int64_t>(16 * kPages)};
  tables.job.pages = tables.pages.data();
  const auto device = field.device;
  const auto blocks = field.blocks;
  for (const bool to_block : {false, true}) {
    tables.job.to_block = to_block;
    stream::run_on_host(tables.job);
    run_in_lanes(tables.job, grid_for(units_of(tables.job)), 7);
    CHECK(field.device == device && field.blocks == blocks);
  }
}

TEST(a_page_without_a_block_is_left_alone_and_the_others_are_copied) {
  std::mt19937_64 random(6);
  Field field = make_field({.region_count = 2,
                            .piece_count = 4,
                            .piece_bytes = 32,
                            .piece_gap = 0,
                            .page_gap = 0,
                            .start = 0,
                            .interleaved = false},
                           random);
  Field without = field;
  Tables tables;
  fill_tables(tables, field, {0, 1, 2}, 16);
  tables.blocks[1] = 0;
  stream::run_on_host(tables.job);
  const auto copied = field.device;
  run_in_lanes(tables.job, grid_for(units_of(tables.job)), 7);
  CHECK(field.device == copied);
  const auto unit = static_cast<std::ptrdiff_t>(field.regions[0].page_stride);
  for (std::size_t region = 0; region < 2; ++region) {
    const auto begin = static_cast<std::ptrdiff_t>(
        field.regions[region].base - reinterpret_cast<std::uint64_t>(field.device.data()));
    for (std::ptrdiff_t page = 0; page < 3; ++page) {
      const auto at = begin + page * unit;
      CHECK(std::equal(copied.begin() + at, copied.begin() + at + 128,
                       without.device.begin() + at) == (page == 1));
    }
  }
}

}  // namespace hpkv

TEST_MAIN
