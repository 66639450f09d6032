#include "index/table.h"

namespace hpkv::index {

using shm::AtomicU64;
using shm::EntryWord;

bool fit_table(const shm::View& view, std::uint64_t table,
               const std::vector<IndexedRecord>& records) noexcept {
  std::vector<bool> present(records.size(), false);
  shm::Bucket* buckets = view.table(table);
  for (std::uint64_t i = 0; i < shm::TableWord::buckets(table); ++i) {
    for (AtomicU64& slot : buckets[i].entries) {
      const std::uint64_t entry = slot.load(std::memory_order_relaxed);
      if (entry == 0) continue;
      const std::uint64_t offset = EntryWord::record_offset(entry);
      const auto place = std::ranges::lower_bound(records, offset, {}, &IndexedRecord::offset);
      const auto number = static_cast<std::size_t>(place - records.begin());
      const bool known = place != records.end() && place->offset == offset;
      if (known && !present[number] && &slot == entry_of(view, table, place->key, offset)) {
        present[number] = true;
      } else {
        slot.store(0, std::memory_order_release);
      }
    }
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (present[i]) continue;
    AtomicU64* place = empty_entry(view, table, records[i].key);
    if (place == nullptr) return false;
    place->store(EntryWord::make(records[i].key, records[i].offset), std::memory_order_release);
  }
  return true;
}

}  // namespace hpkv::index
