// Gather and scatter of pages: the body that runs as a CUDA kernel and as a host loop.
//
//   gather    device pages -> blocks        scatter    blocks -> device pages
//
// A unit is one region of one page; the blocks of a grid take one after the other, or, where there
// are more blocks than units, several share one. The threads of a unit share its words: the widest
// accesses, up to 16 bytes, that every address of the unit is a multiple of; the bytes of a piece
// behind its last whole word are copied one by one. Pages come as indices, or as the index of each
// page's first token (`tokens_per_page` of them a page), in any memory that the executing side can
// read: what is there is read when the job runs, not when it is enqueued.
//
// Invariant: a page outside [0, page_count) is not touched, because nobody may have seen the
// indices on the host; a gather by rows says so in their place. Nor is a page without a block.
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "copy/layout.h"

#ifdef __CUDACC__
#define HPKV_ON_DEVICE __host__ __device__ inline
#else
#define HPKV_ON_DEVICE inline
#endif

namespace hpkv::stream {

// A Region as the kernel wants it: plain words, strides resolved.
struct PageRegion {
  std::uint64_t base;
  std::uint64_t page_stride;
  std::uint64_t piece_count;
  std::uint64_t piece_stride;
  std::uint64_t piece_bytes;
  std::uint64_t block_offset;
  std::uint64_t block_step;
};

// Pieces that lie end to end on both sides become one, so that their lengths need no alignment.
[[nodiscard]] inline PageRegion page_region(const Region& region) noexcept {
  const std::uint64_t step = region.block_step();
  const bool dense = region.piece_count == 1 ||
                     (region.piece_stride == region.piece_bytes && step == region.piece_bytes);
  if (dense) {
    return {region.base, region.page_stride, 1, 0, region.bytes(), region.block_offset, 0};
  }
  return {region.base,
          region.page_stride,
          region.piece_count,
          region.piece_stride,
          region.piece_bytes,
          region.block_offset,
          step};
}

struct PageJob {
  const PageRegion* regions = nullptr;    // readable by the executing side, as are the next two
  const std::int64_t* pages = nullptr;    // one per page of the job, or an array that rows go into
  const std::uint64_t* blocks = nullptr;  // address of each page's block; 0: not for this job
  // Which of `pages` each page of the job is; null: in order. A row becomes -1 where it is no page
  // of the pool: then nothing was copied, and whoever waits for the job can see that.
  std::int64_t* rows = nullptr;
  std::uint64_t region_count = 0;
  std::uint64_t count = 0;            // pages of the job
  std::uint64_t page_count = 0;       // of the device pool
  std::uint64_t tokens_per_page = 1;  // divides what `pages` holds
  bool to_block = false;              // gather
};

// One thread of the several that share a unit.
struct Lane {
  std::uint64_t index = 0;
  std::uint64_t count = 1;
};

struct alignas(16) Word16 {
  std::uint64_t halves[2];
};

template <typename Word>
HPKV_ON_DEVICE Word load_word(const std::byte* source) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Word*>(source);
#else
  Word word;
  std::memcpy(&word, source, sizeof(Word));
  return word;
#endif
}

template <typename Word>
HPKV_ON_DEVICE void store_word(std::byte* target, Word word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Word*>(target) = word;
#else
  std::memcpy(target, &word, sizeof(Word));
#endif
}

// The two sides of a unit.
struct Strip {
  std::byte* target;
  const std::byte* source;
  std::uint64_t target_step;
  std::uint64_t source_step;
  std::uint64_t piece_count;
  std::uint64_t piece_bytes;
};

// A word of a strip: which piece, and how many bytes into it.
struct Spot {
  std::uint64_t piece;
  std::uint64_t at;
};

template <typename Word>
HPKV_ON_DEVICE Spot spot_of(const Strip& strip, std::uint64_t words, std::uint64_t i) {
  // Most strips are one piece, and a division is dear on a GPU.
  const std::uint64_t piece = strip.piece_count == 1 ? 0 : i / words;
  return {piece, (i - piece * words) * sizeof(Word)};
}

// Words that a lane has under way: a read over the link takes microseconds, and a store might, for
// all the compiler knows, change what the next load is for.
constexpr std::uint64_t kUnderWay = 4;

template <typename Word>
HPKV_ON_DEVICE void copy_strip(const Strip& strip, Lane lane) {
  const std::uint64_t words = strip.piece_bytes / sizeof(Word);
  const std::uint64_t total = strip.piece_count * words;
  for (std::uint64_t first = lane.index; first < total; first += kUnderWay * lane.count) {
    Word held[kUnderWay]{};
    for (std::uint64_t k = 0; k < kUnderWay; ++k) {
      const std::uint64_t i = first + k * lane.count;
      if (i >= total) continue;
      const Spot spot = spot_of<Word>(strip, words, i);
      held[k] = load_word<Word>(strip.source + spot.piece * strip.source_step + spot.at);
    }
    for (std::uint64_t k = 0; k < kUnderWay; ++k) {
      const std::uint64_t i = first + k * lane.count;
      if (i >= total) continue;
      const Spot spot = spot_of<Word>(strip, words, i);
      store_word<Word>(strip.target + spot.piece * strip.target_step + spot.at, held[k]);
    }
  }
  const std::uint64_t whole = words * sizeof(Word);
  const std::uint64_t rest = strip.piece_bytes - whole;
  if (rest == 0) return;
  for (std::uint64_t i = lane.index; i < strip.piece_count * rest; i += lane.count) {
    const std::uint64_t piece = i / rest;
    const std::uint64_t at = whole + i - piece * rest;
    strip.target[piece * strip.target_step + at] = strip.source[piece * strip.source_step + at];
  }
}

// What one lane does of unit `unit` of a job; units are [0, count * region_count).
HPKV_ON_DEVICE void copy_unit(const PageJob& job, std::uint64_t unit, Lane lane) {
  const std::uint64_t entry = unit / job.region_count;
  const PageRegion& region = job.regions[unit - entry * job.region_count];
  // Units of a page that is none see its row before or after it is marked, and return either way.
  const std::int64_t row = job.rows != nullptr ? job.rows[entry] : static_cast<std::int64_t>(entry);
  if (row < 0) return;
  const std::int64_t first = job.pages[row];
  // As unsigned, a negative index is a very large one.
  const std::uint64_t page = static_cast<std::uint64_t>(first) / job.tokens_per_page;
  if (first < 0 || page >= job.page_count) {
    if (job.rows != nullptr) job.rows[entry] = -1;
    return;
  }
  if (job.blocks[entry] == 0) return;
  std::byte* const on_device =
      reinterpret_cast<std::byte*>(region.base + page * region.page_stride);
  std::byte* const in_block = reinterpret_cast<std::byte*>(job.blocks[entry] + region.block_offset);
  Strip strip{on_device,         in_block,           region.piece_stride,
              region.block_step, region.piece_count, region.piece_bytes};
  if (job.to_block) {
    strip.target = in_block;
    strip.source = on_device;
    strip.target_step = region.block_step;
    strip.source_step = region.piece_stride;
  }
  const std::uint64_t bits = reinterpret_cast<std::uint64_t>(on_device) |
                             reinterpret_cast<std::uint64_t>(in_block) | region.piece_stride |
                             region.block_step;
  if (bits % 16 == 0) {
    copy_strip<Word16>(strip, lane);
  } else if (bits % 8 == 0) {
    copy_strip<std::uint64_t>(strip, lane);
  } else if (bits % 4 == 0) {
    copy_strip<std::uint32_t>(strip, lane);
  } else if (bits % 2 == 0) {
    copy_strip<std::uint16_t>(strip, lane);
  } else {
    copy_strip<std::uint8_t>(strip, lane);
  }
}

// The blocks that run a job, and how many of them share a unit.
struct Grid {
  std::uint64_t blocks;
  std::uint64_t parts;
};

// The kernel is for small pieces and device-resident indices, beside a forward pass that wants the
// SMs, so it takes no more than saturate a PCIe link: a block of 256 threads keeps 16 KiB in flight
// (four accesses of 16 bytes each), at 3 us latency 16 blocks are some 85 GB/s. That is arithmetic,
// nobody has measured it. Where units are fewer, blocks share them: a page of latent rows is one.
constexpr std::uint64_t kGridBlocksMax = 16;

// `units` is not 0.
[[nodiscard]] HPKV_ON_DEVICE Grid grid_for(std::uint64_t units) noexcept {
  const std::uint64_t parts = units < kGridBlocksMax ? kGridBlocksMax / units : 1;
  const std::uint64_t blocks = units * parts;
  return {blocks < kGridBlocksMax ? blocks : kGridBlocksMax, parts};
}

// What one thread of a block does: `lane` is which of the block's. Blocks behind the grid's have
// nothing to do.
HPKV_ON_DEVICE void copy_in_block(const PageJob& job, Grid grid, std::uint64_t block, Lane lane) {
  const std::uint64_t shares = job.count * job.region_count * grid.parts;
  for (std::uint64_t share = block; share < shares; share += grid.blocks) {
    const std::uint64_t unit = share / grid.parts;
    const std::uint64_t part = share - unit * grid.parts;
    copy_unit(job, unit, {part * lane.count + lane.index, grid.parts * lane.count});
  }
}

// What one launch runs, by value: the arguments of a kernel are 4 KiB at most.
constexpr std::size_t kJobsMax = 32;

struct PageJobs {
  PageJob job[kJobsMax];
  std::uint64_t count = 0;
};
static_assert(sizeof(PageJobs) <= 4096);

// The same of a launch, whose blocks are kGridBlocksMax: one job after the other, each of a unit at
// least and by a grid of its own. No job waits for the one before it.
HPKV_ON_DEVICE void copy_all_in_block(const PageJobs& jobs, std::uint64_t block, Lane lane) {
  for (std::uint64_t i = 0; i < jobs.count; ++i) {
    const PageJob& job = jobs.job[i];
    copy_in_block(job, grid_for(job.count * job.region_count), block, lane);
  }
}

// The whole job on the calling thread.
inline void run_on_host(const PageJob& job) {
  for (std::uint64_t unit = 0; unit < job.count * job.region_count; ++unit)
    copy_unit(job, unit, {});
}

}  // namespace hpkv::stream
