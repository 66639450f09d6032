// The bytes of the pool file, exactly. docs/formats/pool.md describes the same thing in words and
// pictures; the assertions below are what keeps the two, and two builds, in step: a change here
// changes kLayoutHash.
//
// Rules: offsets only, never pointers. Everything a process reads while another may write it is an
// atomic, and says which lock protects it, or which store publishes it. Padding is zero.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/key.h"
#include "shm/atomics.h"
#include "shm/disk_format.h"

namespace hpkv::shm {

static_assert(std::endian::native == std::endian::little, "the pool format is little-endian");
inline constexpr std::array<char, 8> kMagic = {'H', 'P', 'K', 'V', 'P', 'O', 'O', 'L'};
inline constexpr std::uint32_t kVersion = 2;

inline constexpr std::size_t kPageBytes = 4096;      // payloads and classes are multiples of it
inline constexpr std::size_t kClientCount = 128;     // client slots, and bits of a pin mask
inline constexpr std::size_t kNamespaceCount = 128;  // namespaces known at one time
inline constexpr std::size_t kShardCount = 128;      // seven bits of a shard mark
inline constexpr std::size_t kCounterCount = 16;     // statistics per client
inline constexpr std::size_t kBucketEntries = 8;     // one cache line
inline constexpr std::uint64_t kSegmentBytesMax = std::uint64_t{64} << 20U;
inline constexpr std::uint64_t kPoolBytesMin = std::uint64_t{16} << 20U;

// Statistics of a client, in this order. A dead or departed client's are added to the superblock's.
enum class Counter : std::size_t {
  hits,
  misses,
  stored,
  evictions,
  full,
  busy,
  lock_timeouts,
  takeovers,
  rebuilds,
  reaped,
  bad_checksums,
  spilled_bytes,
  loaded_bytes,
  demoted_bytes,
  promoted_bytes,
  disk_errors,
  count,
};
static_assert(static_cast<std::size_t>(Counter::count) <= kCounterCount);

// ---------------------------------------------------------------------------------------------------------------------
// Words. Each is one atomic, so a death never leaves half of one.

// A lock word: 0 is free.
//   31      30..23     22..0
//   waiter  slot + 1   generation of the slot (low bits)
struct LockWord {
  static constexpr std::uint32_t kWaiter = std::uint32_t{1} << 31U;
  static constexpr std::uint32_t kGenerationMask = (std::uint32_t{1} << 23U) - 1;

  [[nodiscard]] static constexpr std::uint32_t make(std::uint32_t slot,
                                                    std::uint32_t generation) noexcept {
    return ((slot + 1) << 23U) | (generation & kGenerationMask);
  }
  [[nodiscard]] static constexpr std::uint32_t slot(std::uint32_t word) noexcept {
    return ((word & ~kWaiter) >> 23U) - 1;
  }
  [[nodiscard]] static constexpr std::uint32_t generation(std::uint32_t word) noexcept {
    return word & kGenerationMask;
  }
};

enum class ClientState : std::uint8_t {
  free = 0,
  live = 1,  // or dead and not yet noticed: the OFD lock on its byte is the truth
  dead = 2,  // noticed; its pins, blocks and locks wait for the reaper
};

// A client's word: generation << 32 | state. The generation rises when a client takes the slot.
struct ClientWord {
  [[nodiscard]] static constexpr std::uint64_t make(ClientState state,
                                                    std::uint32_t generation) noexcept {
    return (std::uint64_t{generation} << 32U) | static_cast<std::uint64_t>(state);
  }
  [[nodiscard]] static constexpr ClientState state(std::uint64_t word) noexcept {
    return static_cast<ClientState>(word & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t generation(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 32U);
  }
};

// The states of a block; docs/formats/pool.md draws the moves. `writing` and `ready` are in the
// index, the others not.
enum class BlockState : std::uint8_t {
  free = 0,
  claimed = 1,   // owned by a client, without a key yet
  writing = 2,   // owned by a client, its key is taken
  ready = 3,     // visible
  draining = 4,  // out of the index; free once nobody has it pinned
};

// A block's word: generation << 32 | owner slot << 8 | state. The owner is 0 unless claimed or
// writing.
struct BlockWord {
  [[nodiscard]] static constexpr std::uint64_t make(BlockState state, std::uint32_t slot,
                                                    std::uint32_t generation) noexcept {
    return (std::uint64_t{generation} << 32U) | (std::uint64_t{slot} << 8U) |
           static_cast<std::uint64_t>(state);
  }
  [[nodiscard]] static constexpr BlockState state(std::uint64_t word) noexcept {
    return static_cast<BlockState>(word & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t slot(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>((word >> 8U) & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t generation(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 32U);
  }
};

enum class SegmentKind : std::uint8_t {
  free = 0,
  index = 1,      // hash tables
  blocks = 2,     // head of a run of blocks
  reserving = 3,  // a client is reserving its memory; head of the run to be
};

// A segment's word: generation << 32 | run length << 16 | owner slot << 8 | kind. Only the head of
// a run has a word that is not zero: the run covers the following length - 1 segments, whose words
// are zero. One store makes or ends a run.
struct SegmentWord {
  static constexpr std::uint64_t kRunLengthMax = 0xFFFF;

  [[nodiscard]] static constexpr std::uint64_t make(SegmentKind kind, std::uint32_t slot,
                                                    std::uint64_t run_length,
                                                    std::uint32_t generation) noexcept {
    return (std::uint64_t{generation} << 32U) | (run_length << 16U) | (std::uint64_t{slot} << 8U) |
           static_cast<std::uint64_t>(kind);
  }
  [[nodiscard]] static constexpr SegmentKind kind(std::uint64_t word) noexcept {
    return static_cast<SegmentKind>(word & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint32_t slot(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>((word >> 8U) & 0xFFU);
  }
  [[nodiscard]] static constexpr std::uint64_t run_length(std::uint64_t word) noexcept {
    return (word >> 16U) & 0xFFFFU;
  }
};

// An index entry: tag << 40 | offset / 64 of its record (a descriptor, or a disk entry). 0 is
// empty.
struct EntryWord {
  static constexpr unsigned kOffsetBits = 40;
  static constexpr std::uint64_t kOffsetUnit = 64;

  [[nodiscard]] static constexpr std::uint64_t tag_of(const Key& key) noexcept {
    return key.words[0] >> kOffsetBits;
  }
  [[nodiscard]] static constexpr std::uint64_t make(const Key& key,
                                                    std::uint64_t record_offset) noexcept {
    return (tag_of(key) << kOffsetBits) | (record_offset / kOffsetUnit);
  }
  [[nodiscard]] static constexpr std::uint64_t tag(std::uint64_t entry) noexcept {
    return entry >> kOffsetBits;
  }
  [[nodiscard]] static constexpr std::uint64_t record_offset(std::uint64_t entry) noexcept {
    return (entry & ((std::uint64_t{1} << kOffsetBits) - 1)) * kOffsetUnit;
  }
};

// A shard's hash table: file offset / 64 << 8 | log2(buckets).
struct TableWord {
  [[nodiscard]] static constexpr std::uint64_t make(std::uint64_t offset,
                                                    unsigned log2_buckets) noexcept {
    return ((offset / 64) << 8U) | log2_buckets;
  }
  [[nodiscard]] static constexpr std::uint64_t offset(std::uint64_t word) noexcept {
    return (word >> 8U) * 64;
  }
  [[nodiscard]] static constexpr std::uint64_t buckets(std::uint64_t word) noexcept {
    return std::uint64_t{1} << (word & 0x3FU);
  }
};

// A block's shard mark: one byte beside its descriptor, so that a rebuild finds the blocks of a
// shard by reading one byte a block. 0 unless the block is in the index, or about to enter or leave
// it.
struct ShardMark {
  [[nodiscard]] static constexpr std::uint8_t make(std::size_t shard) noexcept {
    return static_cast<std::uint8_t>(0x80U | shard);
  }
};
static_assert(kShardCount == 128);

// Which shard and which two buckets a key belongs to. Keys are hashes, so their bits are used as
// they are.
[[nodiscard]] constexpr std::size_t shard_of(const Key& key) noexcept {
  return key.words[0] % kShardCount;
}
[[nodiscard]] constexpr std::uint64_t first_bucket(const Key& key, std::uint64_t buckets) noexcept {
  return key.words[1] & (buckets - 1);
}
[[nodiscard]] constexpr std::uint64_t second_bucket(const Key& key,
                                                    std::uint64_t buckets) noexcept {
  return key.words[2] & (buckets - 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Records.

struct alignas(64) Superblock {
  // Written once before the file gets its name, covered by `checksum`.
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t superblock_bytes;
  std::uint64_t layout_hash;
  std::uint64_t pool_bytes;     // size of the file
  std::uint64_t segment_bytes;  // a power of two
  std::uint64_t segment_count;
  std::uint64_t head_bytes;      // offset of segment 0
  std::uint64_t clients_offset;  // of the arrays below, in file order
  std::uint64_t namespaces_offset;
  std::uint64_t shards_offset;
  std::uint64_t segments_offset;
  std::uint64_t created_unix_ns;  // for display
  std::array<std::byte, 16> uuid;
  std::uint32_t checksum;  // CRC32C of the bytes before it
  std::uint32_t reserved0;

  // The layout lock: segment table, namespace table, index memory, and every claim of a free block.
  alignas(64) AtomicU32 layout_lock;
  AtomicU32 reap_lock;      // one reaper at a time
  AtomicU64 index_segment;  // segment that index memory is taken from, layout lock
  AtomicU64 index_cursor;   // next free byte in it, layout lock
  // The disk tier's store: stored once under the layout lock, regions_offset last (release).
  AtomicU64 regions_offset;  // of the region records; 0: no store was ever attached
  AtomicU64 region_bytes;    // size of a region's file
  std::array<AtomicU64, 2> store_id;
  AtomicU32 region_count;
  AtomicU32 reserved1;

  // Read by everybody, written rarely, no lock: single stores or increments.
  alignas(64) AtomicU32 epoch;  // rises when a client died, or the first client adopts the pool
  AtomicU32 poisoned;           // 1: a broken invariant was met; poison_reason says which
  std::array<char, 120> poison_reason;

  alignas(64) AtomicU64 stamp_clock;  // last stamp handed out; fetch_add

  alignas(64) std::array<AtomicU64, kCounterCount> totals;  // of departed clients; reap lock or the
                                                            // departing client
};

struct alignas(64) ClientRecord {
  AtomicU64 word;  // ClientWord; only the holder of the slot's OFD lock, or the reaper, stores it
  AtomicU32 pid;   // for display: of the client's PID namespace
  AtomicU32 reserved0;
  AtomicU64 start_ticks;                          // for display
  std::array<char, 40> command;                   // for display, written before `word` says live
  std::array<AtomicU64, kCounterCount> counters;  // written by the client only, relaxed: statistics
  std::array<std::byte, 64> reserved1;
};

enum class NamespaceState : std::uint32_t { free = 0, known = 1 };

struct alignas(64) NamespaceRecord {
  AtomicU32 state;  // NamespaceState; published last
  std::uint32_t text_bytes;
  std::uint64_t block_bytes;  // this and the rest: layout lock, never changed while known
  std::array<std::byte, 32> id;
  std::array<AtomicU64, kClientCount / 64> users;  // bit of each client that registered it
  std::array<std::byte, 960> text;
};

struct alignas(64) ShardRecord {
  AtomicU32 lock;
  AtomicU32
      dirty;  // set before the first store of a mutation, cleared after its last; under the lock
  AtomicU32 entries;     // entries in the table, under the lock
  AtomicU32 disk_dirty;  // the same two for the table of blocks on disk
  AtomicU32 disk_entries;
  std::array<std::byte, 44> reserved0;
  // Own line: lookups read it without the lock. TableWord, stored (release) when the table is
  // complete.
  alignas(64) AtomicU64 table;
  AtomicU64 disk_table;  // 0 until the first block on disk
};

struct alignas(32) SegmentRecord {
  AtomicU64
      word;  // SegmentWord; layout lock, or its owner while `reserving`; release publishes the run
  AtomicU64 stride;  // bytes of a block of this run, a multiple of 4 KiB; stored before the word
  AtomicU64 backed_bytes;  // leading bytes of this segment that are reserved by now; only grows
  AtomicU64 reserved0;
};

// Line 0 is what a lookup reads, line 1 is what pins and operators write.
struct alignas(128) Descriptor {
  AtomicU64 word;                // BlockWord
  std::array<AtomicU64, 4> key;  // owner only, before `writing`; valid while writing and ready
  AtomicU64 stamp;               // 0 unless ready; larger is more recent
  AtomicU32 checksum;            // CRC32C of payload_bytes bytes; owner, before ready
  AtomicU32 verified_epoch;      // epoch in which the bytes were known to match
  AtomicU64 payload_bytes;       // exact; owner, before ready

  std::array<AtomicU64, kClientCount / 64> pins;  // bit of each client that has it pinned
  AtomicU32 namespace_index;                      // owner, before ready
  // Where the block's place is: stored when the run is made, constant while it lasts.
  AtomicU32 segment;         // head of the run
  AtomicU64 payload_offset;  // in the file
  AtomicU64 mark_offset;     // of its shard mark, in the file
  AtomicU32 uses;  // times it was loaded since it was claimed; for the disk tier's admission
  std::array<std::byte, 20> reserved1;
};

struct alignas(64) Bucket {
  std::array<AtomicU64, kBucketEntries> entries;  // EntryWord; shard lock; lookups read without it
};

// ---------------------------------------------------------------------------------------------------------------------
// Layout test: compiling is passing.

static_assert(sizeof(Superblock) <= kPageBytes);
static_assert(offsetof(Superblock, version) == 8);
static_assert(offsetof(Superblock, layout_hash) == 16);
static_assert(offsetof(Superblock, pool_bytes) == 24);
static_assert(offsetof(Superblock, segment_bytes) == 32);
static_assert(offsetof(Superblock, segment_count) == 40);
static_assert(offsetof(Superblock, head_bytes) == 48);
static_assert(offsetof(Superblock, clients_offset) == 56);
static_assert(offsetof(Superblock, namespaces_offset) == 64);
static_assert(offsetof(Superblock, shards_offset) == 72);
static_assert(offsetof(Superblock, segments_offset) == 80);
static_assert(offsetof(Superblock, created_unix_ns) == 88);
static_assert(offsetof(Superblock, uuid) == 96);
static_assert(offsetof(Superblock, checksum) == 112);
static_assert(offsetof(Superblock, layout_lock) == 128);
static_assert(offsetof(Superblock, reap_lock) == 132);
static_assert(offsetof(Superblock, index_segment) == 136);
static_assert(offsetof(Superblock, index_cursor) == 144);
static_assert(offsetof(Superblock, regions_offset) == 152);
static_assert(offsetof(Superblock, region_bytes) == 160);
static_assert(offsetof(Superblock, store_id) == 168);
static_assert(offsetof(Superblock, region_count) == 184);
static_assert(offsetof(Superblock, epoch) == 192);
static_assert(offsetof(Superblock, poisoned) == 196);
static_assert(offsetof(Superblock, poison_reason) == 200);
static_assert(offsetof(Superblock, stamp_clock) == 320);
static_assert(offsetof(Superblock, totals) == 384);
static_assert(sizeof(Superblock) == 512);

static_assert(sizeof(ClientRecord) == 256);
static_assert(offsetof(ClientRecord, pid) == 8);
static_assert(offsetof(ClientRecord, start_ticks) == 16);
static_assert(offsetof(ClientRecord, command) == 24);
static_assert(offsetof(ClientRecord, counters) == 64);

static_assert(sizeof(NamespaceRecord) == 1024);
static_assert(offsetof(NamespaceRecord, text_bytes) == 4);
static_assert(offsetof(NamespaceRecord, block_bytes) == 8);
static_assert(offsetof(NamespaceRecord, id) == 16);
static_assert(offsetof(NamespaceRecord, users) == 48);
static_assert(offsetof(NamespaceRecord, text) == 64);

static_assert(sizeof(ShardRecord) == 128);
static_assert(offsetof(ShardRecord, dirty) == 4);
static_assert(offsetof(ShardRecord, entries) == 8);
static_assert(offsetof(ShardRecord, disk_dirty) == 12);
static_assert(offsetof(ShardRecord, disk_entries) == 16);
static_assert(offsetof(ShardRecord, table) == 64);
static_assert(offsetof(ShardRecord, disk_table) == 72);

static_assert(sizeof(SegmentRecord) == 32);
static_assert(offsetof(SegmentRecord, stride) == 8);
static_assert(offsetof(SegmentRecord, backed_bytes) == 16);

static_assert(sizeof(Descriptor) == 128);
static_assert(offsetof(Descriptor, key) == 8);
static_assert(offsetof(Descriptor, stamp) == 40);
static_assert(offsetof(Descriptor, checksum) == 48);
static_assert(offsetof(Descriptor, verified_epoch) == 52);
static_assert(offsetof(Descriptor, payload_bytes) == 56);
static_assert(offsetof(Descriptor, pins) == 64);
static_assert(offsetof(Descriptor, namespace_index) == 80);
static_assert(offsetof(Descriptor, segment) == 84);
static_assert(offsetof(Descriptor, payload_offset) == 88);
static_assert(offsetof(Descriptor, mark_offset) == 96);
static_assert(offsetof(Descriptor, uses) == 104);

static_assert(sizeof(Bucket) == 64);

// FNV-1a over everything two builds must agree on beyond the version number.
[[nodiscard]] constexpr std::uint64_t layout_hash() noexcept {
  constexpr std::array<std::uint64_t, 16> facts = {kVersion,
                                                   kPageBytes,
                                                   kClientCount,
                                                   kNamespaceCount,
                                                   kShardCount,
                                                   kCounterCount,
                                                   kBucketEntries,
                                                   sizeof(Superblock),
                                                   sizeof(ClientRecord),
                                                   sizeof(NamespaceRecord),
                                                   sizeof(ShardRecord),
                                                   sizeof(SegmentRecord),
                                                   sizeof(Descriptor),
                                                   sizeof(RegionRecord),
                                                   sizeof(DiskEntry),
                                                   EntryWord::kOffsetBits};
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const std::uint64_t fact : facts) {
    hash = (hash ^ fact) * 0x100000001B3U;
  }
  return hash;
}

}  // namespace hpkv::shm
