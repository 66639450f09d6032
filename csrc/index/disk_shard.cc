#include "index/disk_shard.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "base/points.h"
#include "index/shard.h"
#include "index/table.h"

namespace hpkv::index {

using shm::AtomicU64;
using shm::Bucket;
using shm::DiskEntry;
using shm::DiskState;
using shm::DiskWord;
using shm::EntryWord;
using shm::TableWord;

namespace {

constexpr std::uint64_t kFirstBuckets = 2;
constexpr int kLookupTries = 4;

}  // namespace

bool find_on_disk(const shm::View& view, const Key& key, DiskFound& out) noexcept {
  const shm::ShardRecord& shard = view.shard(shm::shard_of(key));
  const std::uint64_t tag = EntryWord::tag_of(key);
  for (int attempt = 0; attempt < kLookupTries; ++attempt) {
    // Acquire: partner of the release store that published the table's contents.
    const std::uint64_t table = shard.disk_table.load(std::memory_order_acquire);
    if (table == 0) return false;
    bool moved = false;
    for (Bucket* bucket : buckets_of(view, table, key)) {
      for (const AtomicU64& slot : bucket->entries) {
        const std::uint64_t found = slot.load(std::memory_order_acquire);
        if (EntryWord::tag(found) != tag || found == 0) continue;
        const std::uint64_t offset = EntryWord::record_offset(found);
        if (!view.plausible_disk_entry(offset)) continue;
        const DiskEntry& entry = view.disk_entry(offset);
        const std::uint64_t word = entry.word.load(std::memory_order_acquire);
        if (DiskWord::state(word) != DiskState::ready || shm::load_key(entry) != key) continue;
        // An entry's memory is never anything else, so an unchanged word is proof enough.
        if (entry.word.load(std::memory_order_acquire) != word) {
          moved = true;
          continue;
        }
        out = {offset, word};
        return true;
      }
    }
    if (!moved && shard.disk_table.load(std::memory_order_acquire) == table) return false;
  }
  return false;
}

// Two steps, each over all keys, so that the memory fetches of a step overlap: first buckets, then
// the entries they lead to, or the second buckets of keys that are not there.
void prefetch_disk_group(const shm::View& view, std::span<const Key> keys) noexcept {
  std::array<std::uint64_t, kGroup> tables{};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    tables[i] = view.shard(shm::shard_of(keys[i])).disk_table.load(std::memory_order_acquire);
    if (tables[i] != 0) __builtin_prefetch(buckets_of(view, tables[i], keys[i])[0]);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (tables[i] == 0) continue;
    const auto [first, second] = buckets_of(view, tables[i], keys[i]);
    const AtomicU64* slot = slot_with_tag(*first, EntryWord::tag_of(keys[i]));
    if (slot == nullptr) {
      __builtin_prefetch(second);
    } else {
      // A prefetch of a wrong address does nothing.
      __builtin_prefetch(view.at(EntryWord::record_offset(slot->load(std::memory_order_relaxed))));
    }
  }
}

std::size_t leading_anywhere(const shm::View& view, std::span<const Key> keys) noexcept {
  bool in_pool = true;  // whether the run has been in the pool so far: then look there first
  for (std::size_t start = 0; start < keys.size(); start += kGroup) {
    const auto group = keys.subspan(start, std::min(kGroup, keys.size() - start));
    std::size_t i = in_pool ? leading_ready(view, group) : 0;
    if (i == group.size()) continue;
    in_pool = false;
    prefetch_disk_group(view, group.subspan(i));
    for (; i < group.size(); ++i) {
      DiskFound on_disk;
      Found ready;
      if (!find_on_disk(view, group[i], on_disk) && !find_ready(view, group[i], ready))
        return start + i;
    }
  }
  return keys.size();
}

// Release on every store of a mutation, as in ShardGuard.
void DiskShard::set_dirty(std::uint32_t value) noexcept {
  record_.disk_dirty.store(value, std::memory_order_release);
}

std::optional<DiskFound> DiskShard::find(const Key& key) const noexcept {
  const std::uint64_t table = record_.disk_table.load(std::memory_order_relaxed);
  if (table == 0) return std::nullopt;
  const std::uint64_t tag = EntryWord::tag_of(key);
  for (Bucket* bucket : buckets_of(core_.view, table, key)) {
    for (const AtomicU64& slot : bucket->entries) {
      const std::uint64_t found = slot.load(std::memory_order_relaxed);
      if (found == 0 || EntryWord::tag(found) != tag) continue;
      const std::uint64_t offset = EntryWord::record_offset(found);
      if (!core_.view.plausible_disk_entry(offset)) {
        core_.poison("an entry of the disk index points outside the pool");
        return std::nullopt;
      }
      const DiskEntry& entry = core_.view.disk_entry(offset);
      const std::uint64_t word = entry.word.load(std::memory_order_acquire);
      if (shm::on_disk(word) && shm::load_key(entry) == key) return DiskFound{offset, word};
    }
  }
  return std::nullopt;
}

bool DiskShard::enter(const Key& key, std::uint64_t entry_offset,
                      std::uint32_t namespace_index) noexcept {
  const std::uint64_t table = record_.disk_table.load(std::memory_order_relaxed);
  AtomicU64* slot = table == 0 ? nullptr : empty_entry(core_.view, table, key);
  if (slot == nullptr) return false;
  DiskEntry& entry = core_.view.disk_entry(entry_offset);
  const std::uint32_t generation =
      DiskWord::generation(entry.word.load(std::memory_order_relaxed)) + 1;
  if (HPKV_BUG("disk_counter_before_dirty"))
    record_.disk_entries.fetch_add(1, std::memory_order_release);
  HPKV_POINT("disk_enter.before_dirty");
  set_dirty(1);
  HPKV_POINT("disk_enter.dirty");
  for (std::size_t i = 0; i < key.words.size(); ++i)
    entry.key[i].store(key.words[i], std::memory_order_release);
  entry.namespace_index.store(namespace_index, std::memory_order_release);
  entry.checksum.store(0, std::memory_order_release);
  entry.stamp.store(0, std::memory_order_release);
  core_.view.region(entry.region.load(std::memory_order_relaxed))
      .live.fetch_add(1, std::memory_order_release);
  HPKV_POINT("disk_enter.live");
  entry.word.store(DiskWord::make(DiskState::writing, core_.slot, generation),
                   std::memory_order_release);
  HPKV_POINT("disk_enter.writing");
  slot->store(EntryWord::make(key, entry_offset), std::memory_order_release);
  HPKV_POINT("disk_enter.entry");
  record_.disk_entries.fetch_add(1, std::memory_order_release);
  HPKV_POINT("disk_enter.counted");
  set_dirty(0);
  HPKV_POINT("disk_enter.clean");
  return true;
}

void DiskShard::take_out(const DiskFound& found) noexcept {
  DiskEntry& entry = core_.view.disk_entry(found.entry_offset);
  const std::uint64_t table = record_.disk_table.load(std::memory_order_relaxed);
  AtomicU64* slot =
      table == 0 ? nullptr : entry_of(core_.view, table, shm::load_key(entry), found.entry_offset);
  if (slot == nullptr) {
    core_.poison("a block that is in the disk index has no entry in its table");
    return;
  }
  HPKV_POINT("disk_take_out.before_dirty");
  set_dirty(1);
  HPKV_POINT("disk_take_out.dirty");
  slot->store(0, std::memory_order_release);
  HPKV_POINT("disk_take_out.entry");
  entry.word.store(DiskWord::make(DiskState::free, 0, DiskWord::generation(found.word)),
                   std::memory_order_release);
  HPKV_POINT("disk_take_out.state");
  core_.view.region(entry.region.load(std::memory_order_relaxed))
      .live.fetch_sub(1, std::memory_order_release);
  record_.disk_entries.fetch_sub(1, std::memory_order_release);
  HPKV_POINT("disk_take_out.counted");
  set_dirty(0);
  HPKV_POINT("disk_take_out.clean");
}

bool DiskShard::wants_growth() const noexcept {
  const std::uint64_t table = record_.disk_table.load(std::memory_order_relaxed);
  if (table == 0) return true;
  return record_.disk_entries.load(std::memory_order_relaxed) >=
         TableWord::buckets(table) * shm::kBucketEntries * 3 / 4;
}

std::uint64_t next_disk_buckets(const shm::View& view, std::size_t shard) noexcept {
  const std::uint64_t table = view.shard(shard).disk_table.load(std::memory_order_acquire);
  return table == 0 ? kFirstBuckets : 2 * TableWord::buckets(table);
}

bool DiskShard::grow_into(std::uint64_t table_offset, std::uint64_t bucket_count) noexcept {
  const std::uint64_t old_table = record_.disk_table.load(std::memory_order_relaxed);
  if (old_table != 0 && bucket_count <= TableWord::buckets(old_table)) return false;
  const std::uint64_t new_table =
      TableWord::make(table_offset, static_cast<unsigned>(std::countr_zero(bucket_count)));
  const auto key_at = [this](std::uint64_t offset) {
    return shm::load_key(core_.view.disk_entry(offset));
  };
  if (old_table != 0 && !copy_table(core_.view, old_table, new_table, key_at)) return false;
  HPKV_POINT("disk_grow.before_switch");
  // Release: partner of the acquire in find_on_disk. The old table is never written again.
  record_.disk_table.store(new_table, std::memory_order_release);
  HPKV_POINT("disk_grow.switched");
  return true;
}

// Reads every entry of the store: rare (a death inside a mutation), and bounded by the index's
// size.
void DiskShard::rebuild() noexcept {
  const shm::View& view = core_.view;
  std::vector<IndexedRecord> records;
  for (std::uint32_t region = 0; region < view.regions(); ++region) {
    view.for_each_disk_entry(region, [&](std::uint64_t offset, const DiskEntry& entry) {
      if (!shm::on_disk(entry.word.load(std::memory_order_acquire))) return;
      const Key key = shm::load_key(entry);
      if (shm::shard_of(key) == shard_) records.push_back({offset, key});
    });
  }
  std::ranges::sort(records, {}, &IndexedRecord::offset);
  const std::uint64_t table = record_.disk_table.load(std::memory_order_relaxed);
  if (table == 0 ? !records.empty() : !fit_table(view, table, records)) {
    core_.poison("a rebuilt disk index does not fit its table");
    return;
  }
  HPKV_POINT("disk_rebuild.before_count");
  record_.disk_entries.store(static_cast<std::uint32_t>(records.size()), std::memory_order_release);
  core_.count(shm::Counter::rebuilds);
  set_dirty(0);
  HPKV_POINT("disk_rebuild.done");
}

}  // namespace hpkv::index
