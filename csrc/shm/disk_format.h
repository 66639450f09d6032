// What the pool keeps in shared memory about the disk tier: one record a region of the store, one
// entry a block in it. Part of the pool's format (format.h, docs/formats/pool.md); the files are
// described in docs/formats/store.md.
//
// Rules: as in format.h. The record array is made once; a region's array of entries only ever gives
// way to a larger one, and the memory of both is never used for anything else, so whoever reads an
// old place reads an entry, and its word tells whether it is the one that was meant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "shm/atomics.h"

namespace hpkv::shm {

// The states of a region of the store; docs/formats/pool.md draws the moves.
enum class RegionState : std::uint8_t {
  unknown = 0,     // nobody has looked at its file yet
  recovering = 1,  // its owner rebuilds its entries from the file
  free = 2,        // its file, if there is one, holds nothing that counts
  open = 3,        // its owner appends; without an owner it waits for one
  sealing = 4,     // its owner writes the summary
  sealed = 5,      // complete, with a summary
  dropping = 6,    // its owner takes its blocks out of the index
};

// A region's word: generation << 32 | (owner slot + 1) << 8 | state. The owner is 0 when nobody has
// it. The generation rises with every change, so a compare-and-swap on the word is exact.
struct RegionWord {
  [[nodiscard]] static constexpr std::uint64_t make(RegionState state, std::uint32_t owner,
                                                    std::uint32_t generation) noexcept {
    return (std::uint64_t{generation} << 32U) | (std::uint64_t{owner} << 8U) |
           static_cast<std::uint64_t>(state);
  }
  [[nodiscard]] static constexpr RegionState state(std::uint64_t word) noexcept {
    return static_cast<RegionState>(word & 0xFFU);
  }
  // Owner slot + 1, or 0.
  [[nodiscard]] static constexpr std::uint32_t owner(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>((word >> 8U) & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t generation(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 32U);
  }
};

enum class DiskState : std::uint8_t {
  free = 0,
  writing = 1,  // owned by a client, its key is taken
  ready = 2,    // the bytes are in the file
};

// A disk entry's word: generation << 32 | owner slot << 8 | state. The owner is 0 unless writing.
// The generation rises when the entry is taken.
struct DiskWord {
  [[nodiscard]] static constexpr std::uint64_t make(DiskState state, std::uint32_t slot,
                                                    std::uint32_t generation) noexcept {
    return (std::uint64_t{generation} << 32U) | (std::uint64_t{slot} << 8U) |
           static_cast<std::uint64_t>(state);
  }
  [[nodiscard]] static constexpr DiskState state(std::uint64_t word) noexcept {
    return static_cast<DiskState>(word & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t slot(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>((word >> 8U) & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t generation(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 32U);
  }
};

// Recency of a disk entry: the top bit says that it was touched since it was written.
struct DiskStamp {
  static constexpr std::uint64_t kTouched = std::uint64_t{1} << 63U;
};

struct alignas(64) RegionRecord {
  AtomicU64 word;             // RegionWord; compare-and-swap only
  AtomicU64 stride;           // this and the next four: the owner, or the last one
  AtomicU64 sequence;         // order of sealing; 0: never sealed
  AtomicU32 file_generation;  // of the file's present contents
  AtomicU32 capacity;         // records the file holds at this stride
  AtomicU32 used;             // number of the next record; only rises under one file generation
  AtomicU32 live;  // entries writing or ready; a death may leave it too high, never too low
  // Stored in this order and read in the other, so a capacity never goes with a smaller array.
  AtomicU64 entries_offset;    // in the pool file
  AtomicU32 entries_capacity;  // entries that the array has room for
  std::array<std::byte, 12> reserved0;
};

// Entry i of a region's array is record i of its file. `writing` and `ready` are in the disk table
// of the key's shard.
struct alignas(64) DiskEntry {
  AtomicU64 word;                // DiskWord
  std::array<AtomicU64, 4> key;  // owner only, before `writing`; valid while writing and ready
  AtomicU64 stamp;               // DiskStamp; recency, for carrying over
  AtomicU32 checksum;            // CRC32C of the payload; owner, before ready
  AtomicU32 namespace_index;     // owner, before `writing`
  AtomicU32 region;              // this and the next: the same for as long as the array lives
  AtomicU32 number;
};

static_assert(sizeof(RegionRecord) == 64);
static_assert(offsetof(RegionRecord, stride) == 8);
static_assert(offsetof(RegionRecord, sequence) == 16);
static_assert(offsetof(RegionRecord, file_generation) == 24);
static_assert(offsetof(RegionRecord, capacity) == 28);
static_assert(offsetof(RegionRecord, used) == 32);
static_assert(offsetof(RegionRecord, live) == 36);
static_assert(offsetof(RegionRecord, entries_offset) == 40);
static_assert(offsetof(RegionRecord, entries_capacity) == 48);

static_assert(sizeof(DiskEntry) == 64);
static_assert(offsetof(DiskEntry, key) == 8);
static_assert(offsetof(DiskEntry, stamp) == 40);
static_assert(offsetof(DiskEntry, checksum) == 48);
static_assert(offsetof(DiskEntry, namespace_index) == 52);
static_assert(offsetof(DiskEntry, region) == 56);
static_assert(offsetof(DiskEntry, number) == 60);

}  // namespace hpkv::shm
