// The hash table that a shard's two tables are made of: buckets of eight single-word entries, two
// buckets a key. An entry leads to a record whose key is the truth; the table only knows where.
//
// Threads: reading a table needs no lock when what is found is checked; writing needs the shard's.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "shm/view.h"

namespace hpkv::index {

inline constexpr std::size_t kSpareEntries = 2;

inline std::array<shm::Bucket*, 2> buckets_of(const shm::View& view, std::uint64_t table,
                                              const Key& key) noexcept {
  shm::Bucket* first = view.table(table);
  const std::uint64_t count = shm::TableWord::buckets(table);
  return {first + shm::first_bucket(key, count), first + shm::second_bucket(key, count)};
}

inline std::size_t free_entries(const shm::Bucket& bucket) noexcept {
  return static_cast<std::size_t>(std::count_if(
      bucket.entries.begin(), bucket.entries.end(),
      [](const shm::AtomicU64& e) { return e.load(std::memory_order_relaxed) == 0; }));
}

// Where the key would be put: the first bucket while it has room to spare, so that most lookups
// read one; then the roomier. Null: both are full.
inline shm::AtomicU64* empty_entry(const shm::View& view, std::uint64_t table,
                                   const Key& key) noexcept {
  const auto [a, b] = buckets_of(view, table, key);
  const std::size_t left = free_entries(*a);
  shm::Bucket* roomier = left <= kSpareEntries && free_entries(*b) > left ? b : a;
  for (shm::AtomicU64& entry : roomier->entries) {
    if (entry.load(std::memory_order_relaxed) == 0) return &entry;
  }
  return nullptr;
}

inline shm::AtomicU64* entry_of(const shm::View& view, std::uint64_t table, const Key& key,
                                std::uint64_t record_offset) noexcept {
  const std::uint64_t wanted = shm::EntryWord::make(key, record_offset);
  for (shm::Bucket* bucket : buckets_of(view, table, key)) {
    for (shm::AtomicU64& entry : bucket->entries) {
      if (entry.load(std::memory_order_relaxed) == wanted) return &entry;
    }
  }
  return nullptr;
}

inline const shm::AtomicU64* slot_with_tag(const shm::Bucket& bucket, std::uint64_t tag) noexcept {
  for (const shm::AtomicU64& slot : bucket.entries) {
    const std::uint64_t entry = slot.load(std::memory_order_relaxed);
    if (shm::EntryWord::tag(entry) == tag && entry != 0) return &slot;
  }
  return nullptr;
}

struct IndexedRecord {
  std::uint64_t offset = 0;
  Key key;
};

// Makes a table hold exactly these records (ascending by offset). First what should not be there
// goes, then what is missing comes: a record that stays is visible throughout. False: one does not
// fit.
[[nodiscard]] bool fit_table(const shm::View& view, std::uint64_t table,
                             const std::vector<IndexedRecord>& records) noexcept;

// Enters what `old_table` holds into the zeroed `new_table`. False: one does not fit.
template <typename KeyAt>
[[nodiscard]] bool copy_table(const shm::View& view, std::uint64_t old_table,
                              std::uint64_t new_table, KeyAt&& key_at) noexcept {
  const shm::Bucket* old_buckets = view.table(old_table);
  for (std::uint64_t i = 0; i < shm::TableWord::buckets(old_table); ++i) {
    for (const shm::AtomicU64& slot : old_buckets[i].entries) {
      const std::uint64_t entry = slot.load(std::memory_order_relaxed);
      if (entry == 0) continue;
      shm::AtomicU64* place =
          empty_entry(view, new_table, key_at(shm::EntryWord::record_offset(entry)));
      if (place == nullptr) return false;
      place->store(entry, std::memory_order_relaxed);
    }
  }
  return true;
}

}  // namespace hpkv::index
