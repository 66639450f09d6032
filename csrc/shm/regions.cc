#include "shm/regions.h"

#include <algorithm>

#include "base/points.h"
#include "index/disk_shard.h"

namespace hpkv::shm {
namespace {

// Eighths of the pool that the whole index may take before the next array of entries is refused,
// and before the next table is: what was given an array must be found too.
constexpr std::uint64_t kArrayEighths = 2;
constexpr std::uint64_t kTableEighths = 3;

}  // namespace

bool Regions::index_may_grow(std::uint64_t eighths) const noexcept {
  const std::uint64_t count = core_.super().segment_count;
  std::uint64_t used = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t word = core_.view.segment(i).word.load(std::memory_order_relaxed);
    if (SegmentWord::kind(word) == SegmentKind::index) ++used;
  }
  return used < std::max<std::uint64_t>(2, count * eighths / 8);
}

std::optional<std::uint64_t> Regions::take_memory(std::uint64_t bytes,
                                                  std::uint64_t eighths) noexcept {
  if (bytes > core_.super().segment_bytes) return std::nullopt;
  const std::uint64_t cursor = core_.super().index_cursor.load(std::memory_order_relaxed);
  if (cursor + bytes > core_.super().segment_bytes && !index_may_grow(eighths)) return std::nullopt;
  if (const auto memory = segments_.take_index_memory(bytes)) return memory;
  // In a pool that is full no segment is free: the coldest blocks give way.
  if (!allocator_.free_segment()) return std::nullopt;
  return segments_.take_index_memory(bytes);
}

Regions::Attached Regions::attach(const Store& store) noexcept {
  Superblock& super = core_.super();
  if (core_.view.regions() == 0) {
    const auto memory = take_memory(store.region_count * sizeof(RegionRecord), kArrayEighths);
    if (!memory) return Attached::no_memory;
    const LockGuard layout(core_, super.layout_lock, kOperatorWaitNs);
    if (!layout) return Attached::no_lock;
    if (core_.view.regions() == 0) {
      super.store_id[0].store(store.id[0], std::memory_order_relaxed);
      super.store_id[1].store(store.id[1], std::memory_order_relaxed);
      super.region_bytes.store(store.region_bytes, std::memory_order_relaxed);
      super.region_count.store(store.region_count, std::memory_order_relaxed);
      HPKV_POINT("attach_store.before_offset");
      // Release: partner of the acquire in View::regions().
      super.regions_offset.store(*memory, std::memory_order_release);
      HPKV_POINT("attach_store.attached");
    }
  }
  const bool same = super.store_id[0].load(std::memory_order_relaxed) == store.id[0] &&
                    super.store_id[1].load(std::memory_order_relaxed) == store.id[1] &&
                    super.region_bytes.load(std::memory_order_relaxed) == store.region_bytes &&
                    super.region_count.load(std::memory_order_relaxed) == store.region_count;
  return same ? Attached::yes : Attached::other_store;
}

bool Regions::move(std::uint32_t region, RegionState from, RegionState to, bool ours_before,
                   bool ours_after) noexcept {
  AtomicU64& word = core_.view.region(region).word;
  std::uint64_t now = word.load(std::memory_order_acquire);
  if (RegionWord::state(now) != from || RegionWord::owner(now) != (ours_before ? self() : 0))
    return false;
  HPKV_POINT("region.before_move");
  const bool moved = word.compare_exchange_strong(
      now, RegionWord::make(to, ours_after ? self() : 0, RegionWord::generation(now) + 1),
      std::memory_order_acq_rel);
  HPKV_POINT("region.moved");
  return moved;
}

bool Regions::begin(std::uint32_t region, std::uint32_t file_generation, std::uint64_t stride,
                    std::uint32_t capacity) noexcept {
  if (!empty(region)) return false;
  RegionRecord& record = core_.view.region(region);
  const std::uint32_t room = record.entries_capacity.load(std::memory_order_relaxed);
  if (capacity > room) {
    const std::uint32_t wanted = std::max(capacity, 2 * room);
    const auto memory = take_memory(wanted * sizeof(DiskEntry), kArrayEighths);
    if (!memory) return false;
    for (std::uint32_t i = 0; i < wanted; ++i) {
      DiskEntry& entry = core_.view.disk_entry(*memory + i * sizeof(DiskEntry));
      entry.region.store(region, std::memory_order_relaxed);
      entry.number.store(i, std::memory_order_relaxed);
    }
    HPKV_POINT("begin_region.before_array");
    record.used.store(0, std::memory_order_release);
    record.entries_offset.store(*memory, std::memory_order_release);
    HPKV_POINT("begin_region.array");
    record.entries_capacity.store(wanted, std::memory_order_release);
  }
  record.used.store(0, std::memory_order_release);
  // Not while somebody is stopped between freeing an entry and counting it: then it stays too high.
  if (await_shards()) record.live.store(0, std::memory_order_release);
  record.sequence.store(0, std::memory_order_release);
  record.capacity.store(capacity, std::memory_order_release);
  record.stride.store(stride, std::memory_order_release);
  record.file_generation.store(file_generation, std::memory_order_release);
  HPKV_POINT("begin_region.begun");
  return true;
}

// Until whoever was taking an entry out, and had freed it already, has counted it too.
bool Regions::await_shards() noexcept {
  for (std::size_t shard = 0; shard < kShardCount; ++shard) {
    const index::ShardGuard guard(core_, shard);
    if (!guard) return false;
  }
  return true;
}

bool Regions::empty(std::uint32_t region) noexcept {
  bool all = true;
  core_.view.for_each_disk_entry(region, [&](std::uint64_t offset, const DiskEntry& entry) {
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    if (!all || !on_disk(word)) return;
    all = take_out_disk_entry(core_, offset, word) &&
          !on_disk(entry.word.load(std::memory_order_acquire));
  });
  return all;
}

void Regions::grow(std::size_t shard) noexcept {
  const std::uint64_t buckets = index::next_disk_buckets(core_.view, shard);
  const auto memory = take_memory(buckets * sizeof(Bucket), kTableEighths);
  if (!memory) return;
  const index::ShardGuard guard(core_, shard);
  if (guard) static_cast<void>(index::DiskShard(core_, shard).grow_into(*memory, buckets));
}

bool take_out_disk_entry(Core& core, std::uint64_t entry_offset, std::uint64_t word) noexcept {
  const DiskEntry& entry = core.view.disk_entry(entry_offset);
  const Key key = load_key(entry);
  const index::ShardGuard guard(core, shard_of(key));
  if (!guard) return false;
  // Under the lock it cannot leave; unchanged, it is the one that was meant and the key is its own.
  if (entry.word.load(std::memory_order_acquire) != word) return true;
  index::DiskShard(core, shard_of(key)).take_out({entry_offset, word});
  return true;
}

bool return_regions(Core& core, std::uint32_t slot) noexcept {
  for (std::uint32_t region = 0; region < core.view.regions(); ++region) {
    AtomicU64& word = core.view.region(region).word;
    std::uint64_t now = word.load(std::memory_order_acquire);
    const RegionState after = state_without_owner(RegionWord::state(now));
    // Only these can hold entries in writing.
    if (after == RegionState::open || after == RegionState::unknown) {
      bool all = true;
      core.view.for_each_disk_entry(region, [&](std::uint64_t offset, const DiskEntry& entry) {
        const std::uint64_t entry_word = entry.word.load(std::memory_order_acquire);
        if (all && DiskWord::state(entry_word) == DiskState::writing &&
            DiskWord::slot(entry_word) == slot) {
          all = take_out_disk_entry(core, offset, entry_word);
          HPKV_POINT("reap.disk_entry");
        }
      });
      if (!all) return false;
    }
    if (RegionWord::owner(now) != slot + 1 || HPKV_BUG("regions_of_the_dead_stay")) continue;
    static_cast<void>(word.compare_exchange_strong(
        now, RegionWord::make(after, 0, RegionWord::generation(now) + 1),
        std::memory_order_acq_rel));
    HPKV_POINT("reap.region");
  }
  return true;
}

}  // namespace hpkv::shm
