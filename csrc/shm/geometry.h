// Arithmetic of the pool: how large a segment is, how many segments a run takes, what a run holds.
// Pure functions of sizes, the same in every process.
#pragma once

#include <cstdint>

#include "shm/format.h"

namespace hpkv::shm {

[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

// About 1/16 of the pool, a power of two between 1 MiB and 64 MiB.
[[nodiscard]] std::uint64_t segment_bytes_for(std::uint64_t pool_bytes) noexcept;

// The class of a block: its exact size rounded up to whole pages.
[[nodiscard]] constexpr std::uint64_t stride_for(std::uint64_t block_bytes) noexcept {
  return round_up(block_bytes, kPageBytes);
}

// A block larger than this is refused.
[[nodiscard]] constexpr std::uint64_t block_bytes_max(std::uint64_t pool_bytes) noexcept {
  return pool_bytes / 8;
}

// What lies where in a run, as offsets from its start:
//
//   | descriptors (128 B each) | shard marks (1 B each) | to 4 KiB | payloads (stride each) | rest
//   |
struct RunGeometry {
  std::uint64_t block_count = 0;
  std::uint64_t marks_offset = 0;
  std::uint64_t payload_offset = 0;
  std::uint64_t stride = 0;
};

[[nodiscard]] RunGeometry run_geometry(std::uint64_t run_bytes, std::uint64_t stride) noexcept;

// Segments of one run of this class: the fewest that waste less than 1/16. In a small pool no run
// may be longer than a quarter of the segments (or what one block needs), and the least wasteful
// length below that is taken.
[[nodiscard]] std::uint64_t run_length_for(std::uint64_t stride, std::uint64_t segment_bytes,
                                           std::uint64_t segment_count) noexcept;

// Offsets of the arrays before segment 0, and the number of segments, of a pool of this size. All
// zero when the size is too small. `unit` is the page size of the file system.
struct HeadGeometry {
  std::uint64_t segment_bytes = 0;
  std::uint64_t segment_count = 0;
  std::uint64_t clients_offset = 0;
  std::uint64_t namespaces_offset = 0;
  std::uint64_t shards_offset = 0;
  std::uint64_t segments_offset = 0;
  std::uint64_t head_bytes = 0;
};

[[nodiscard]] HeadGeometry head_geometry(std::uint64_t pool_bytes, std::uint64_t unit) noexcept;

}  // namespace hpkv::shm
