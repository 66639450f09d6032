// Typed access to the mapped pool file. A View owns nothing and is cheap to copy; it is valid while
// the mapping is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/format.h"
#include "shm/geometry.h"

namespace hpkv::shm {

// A run as one process saw it. It may end at any time unless the layout lock is held, or one of its
// blocks is owned, pinned, or its shard's lock is held while it is in the index.
struct Run {
  std::uint64_t segment = 0;  // index of the head
  std::uint64_t word = 0;     // SegmentWord of the head
  std::uint64_t offset = 0;   // of the run in the file
  RunGeometry geometry;
};

class View {
 public:
  View() = default;
  explicit View(std::byte* base) noexcept : base_(base) {}

  [[nodiscard]] std::byte* at(std::uint64_t offset) const noexcept { return base_ + offset; }
  [[nodiscard]] Superblock& superblock() const noexcept { return *as<Superblock>(0); }
  [[nodiscard]] ClientRecord& client(std::size_t slot) const noexcept {
    return as<ClientRecord>(superblock().clients_offset)[slot];
  }
  [[nodiscard]] NamespaceRecord& name_space(std::size_t index) const noexcept {
    return as<NamespaceRecord>(superblock().namespaces_offset)[index];
  }
  [[nodiscard]] ShardRecord& shard(std::size_t index) const noexcept {
    return as<ShardRecord>(superblock().shards_offset)[index];
  }
  [[nodiscard]] SegmentRecord& segment(std::uint64_t index) const noexcept {
    return as<SegmentRecord>(superblock().segments_offset)[index];
  }
  [[nodiscard]] Descriptor& descriptor(std::uint64_t offset) const noexcept {
    return *as<Descriptor>(offset);
  }
  // Before a store is attached there are none: regions() is 0.
  [[nodiscard]] std::uint32_t regions() const noexcept {
    // Acquire: partner of the release store that ends Regions::attach; the other fields come first.
    return superblock().regions_offset.load(std::memory_order_acquire) == 0
               ? 0
               : superblock().region_count.load(std::memory_order_relaxed);
  }
  [[nodiscard]] RegionRecord& region(std::uint64_t index) const noexcept {
    return as<RegionRecord>(superblock().regions_offset.load(std::memory_order_relaxed))[index];
  }
  [[nodiscard]] DiskEntry& disk_entry(std::uint64_t offset) const noexcept {
    return *as<DiskEntry>(offset);
  }
  [[nodiscard]] bool plausible_disk_entry(std::uint64_t offset) const noexcept {
    return offset % sizeof(DiskEntry) == 0 && offset >= superblock().head_bytes &&
           offset + sizeof(DiskEntry) <= superblock().pool_bytes;
  }
  // Calls visit(offset, entry) for every entry of a region that may be in use. An entry that comes
  // or goes meanwhile may be missed, unless its shard's lock is held.
  template <typename Visit>
  void for_each_disk_entry(std::uint64_t region_index, Visit&& visit) const {
    const RegionRecord& record = region(region_index);
    // The capacity before the array: see RegionRecord.
    const std::uint32_t capacity = record.entries_capacity.load(std::memory_order_acquire);
    const std::uint32_t used = record.used.load(std::memory_order_acquire);
    const std::uint64_t offset = record.entries_offset.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < (used < capacity ? used : capacity); ++i) {
      visit(offset + i * sizeof(DiskEntry), disk_entry(offset + i * sizeof(DiskEntry)));
    }
  }
  [[nodiscard]] Bucket* table(std::uint64_t table_word) const noexcept {
    return as<Bucket>(TableWord::offset(table_word));
  }
  [[nodiscard]] std::uint64_t segment_offset(std::uint64_t index) const noexcept {
    return superblock().head_bytes + index * superblock().segment_bytes;
  }

  // Whether a descriptor may lie there at all: a damaged index must not send anybody out of the
  // mapping.
  [[nodiscard]] bool plausible_descriptor(std::uint64_t offset) const noexcept {
    return offset % sizeof(Descriptor) == 0 && offset >= superblock().head_bytes &&
           offset + sizeof(Descriptor) <= superblock().pool_bytes;
  }

  // The run whose head is this segment, if its word says `blocks` and its geometry is sound.
  [[nodiscard]] bool block_run(std::uint64_t segment_index, Run& out) const noexcept;

  // Calls visit(run) for every run of blocks; visit returns false to stop.
  template <typename Visit>
  void for_each_run(Visit&& visit) const {
    const std::uint64_t count = superblock().segment_count;
    for (std::uint64_t i = 0; i < count;) {
      const std::uint64_t word = segment(i).word.load(std::memory_order_acquire);
      Run run;
      if (SegmentWord::kind(word) == SegmentKind::blocks && block_run(i, run) && !visit(run))
        return;
      i += run_step(word, count - i);
    }
  }

  // Segments to step over from a head with this word.
  [[nodiscard]] static std::uint64_t run_step(std::uint64_t word, std::uint64_t left) noexcept {
    const std::uint64_t length = SegmentWord::run_length(word);
    return SegmentWord::kind(word) == SegmentKind::free || length == 0 || length > left ? 1
                                                                                        : length;
  }

  [[nodiscard]] std::uint64_t descriptor_offset(const Run& run,
                                                std::uint64_t block) const noexcept {
    return run.offset + block * sizeof(Descriptor);
  }
  [[nodiscard]] AtomicU8* marks(const Run& run) const noexcept {
    return as<AtomicU8>(run.offset + run.geometry.marks_offset);
  }
  [[nodiscard]] std::uint64_t payload_offset(const Run& run, std::uint64_t block) const noexcept {
    return run.offset + run.geometry.payload_offset + block * run.geometry.stride;
  }
  // Mark of a block that cannot go away.
  [[nodiscard]] AtomicU8& mark(const Descriptor& block) const noexcept {
    return *as<AtomicU8>(block.mark_offset.load(std::memory_order_relaxed));
  }

 private:
  template <typename T>
  [[nodiscard]] T* as(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::byte* base_ = nullptr;
};

[[nodiscard]] inline Key load_key(const Descriptor& descriptor) noexcept {
  // Acquire, so that the word of the block is read after the key when a reader checks it again: the
  // key of a block is only stored (release) after its word has left `ready`.
  Key key;
  for (std::size_t i = 0; i < key.words.size(); ++i) {
    key.words[i] = descriptor.key[i].load(std::memory_order_acquire);
  }
  return key;
}

[[nodiscard]] inline Key load_key(const DiskEntry& entry) noexcept {
  // Acquire: as above.
  Key key;
  for (std::size_t i = 0; i < key.words.size(); ++i) {
    key.words[i] = entry.key[i].load(std::memory_order_acquire);
  }
  return key;
}

[[nodiscard]] inline bool on_disk(std::uint64_t disk_word) noexcept {
  return DiskWord::state(disk_word) != DiskState::free;
}

[[nodiscard]] inline bool in_index(std::uint64_t block_word) noexcept {
  const BlockState state = BlockWord::state(block_word);
  return state == BlockState::writing || state == BlockState::ready;
}

[[nodiscard]] inline bool any_pin(const Descriptor& descriptor) noexcept {
  for (const AtomicU64& bits : descriptor.pins) {
    if (bits.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

// Free, or condemned and let go by everybody: may be claimed under the layout lock.
[[nodiscard]] inline bool free_to_claim(const Descriptor& block, std::uint64_t word) noexcept {
  const BlockState state = BlockWord::state(word);
  return state == BlockState::free || (state == BlockState::draining && !any_pin(block));
}

}  // namespace hpkv::shm
