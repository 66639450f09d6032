#include "shm/check_disk.h"

#include <map>

#include "index/disk_shard.h"
#include "index/shard.h"

namespace hpkv::shm {
namespace {

class DiskChecker {
 public:
  DiskChecker(Core& core, std::vector<std::string>& findings)
      : core_(core), view_(core.view), findings_(findings) {}

  void run() {
    const std::uint64_t pool_bytes = view_.superblock().pool_bytes;
    const std::uint64_t offset = view_.superblock().regions_offset.load(std::memory_order_acquire);
    if (offset > pool_bytes || view_.regions() * sizeof(RegionRecord) > pool_bytes - offset) {
      return report("store: the region records lie outside the pool");
    }
    for (std::uint32_t region = 0; region < view_.regions(); ++region) check_region(region);
    for (std::size_t shard = 0; shard < kShardCount; ++shard) check_table(shard);
  }

 private:
  void report(const std::string& what) {
    constexpr std::size_t kMost = 100;
    if (findings_.size() < kMost) findings_.push_back(what);
  }

  bool client_free(std::uint32_t slot) const {
    return slot >= kClientCount ||
           ClientWord::state(view_.client(slot).word.load(std::memory_order_acquire)) ==
               ClientState::free;
  }

  void check_region(std::uint32_t region) {
    const RegionRecord& record = view_.region(region);
    const std::uint64_t word = record.word.load(std::memory_order_acquire);
    const std::uint32_t room = record.entries_capacity.load(std::memory_order_acquire);
    const std::uint32_t capacity = record.capacity.load(std::memory_order_acquire);
    const std::uint32_t used = record.used.load(std::memory_order_acquire);
    const std::uint64_t offset = record.entries_offset.load(std::memory_order_acquire);
    const RegionState state = RegionWord::state(word);
    const std::uint32_t owner = RegionWord::owner(word);
    const bool nobody = owner != 0 && client_free(owner - 1);
    const std::string name = "region " + std::to_string(region) + ": ";
    if (offset > view_.superblock().pool_bytes ||
        room * sizeof(DiskEntry) > view_.superblock().pool_bytes - offset)
      return report(name + "its entries lie outside the pool");
    for (std::uint32_t i = 0; i < room; ++i) check_entry(region, i, offset + i * sizeof(DiskEntry));
    if (record.word.load(std::memory_order_acquire) != word) return;  // at work
    if (state > RegionState::dropping) return report(name + "unknown state");
    if (nobody)
      report(name + "owned by client slot " + std::to_string(owner - 1) + ", which is free");
    const bool needs_owner = state == RegionState::recovering || state == RegionState::sealing ||
                             state == RegionState::dropping;
    if (needs_owner && owner == 0) report(name + "in a state that needs an owner, without one");
    // An owner may be about to begin it.
    if (owner == 0 && (used > capacity || capacity > room))
      report(name + "more records than room for them");
  }

  void check_entry(std::uint32_t region, std::uint32_t number, std::uint64_t offset) {
    const DiskEntry& entry = view_.disk_entry(offset);
    const std::string name =
        "disk entry " + std::to_string(region) + "/" + std::to_string(number) + ": ";
    if (entry.region.load(std::memory_order_relaxed) != region ||
        entry.number.load(std::memory_order_relaxed) != number)
      report(name + "is not where it says");
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    if (DiskWord::state(word) > DiskState::ready) return report(name + "unknown state");
    if (!on_disk(word)) return;
    const Key key = load_key(entry);
    WaitBudget budget(kEngineWaitNs);
    const index::ShardGuard guard(core_, shard_of(key), budget, TakeOver::yes);
    // Under the lock it stays what it is, but for a writer that publishes it.
    if (!guard || entry.word.load(std::memory_order_acquire) != word) return;
    check_indexed(name, region, number, {offset, word});
  }

  void check_indexed(const std::string& name, std::uint32_t region, std::uint32_t number,
                     const index::DiskFound& entry) {
    const Key key = load_key(view_.disk_entry(entry.entry_offset));
    const auto found = index::DiskShard(core_, shard_of(key)).find(key);
    if (!found || found->entry_offset != entry.entry_offset)
      report(name + "in use and not in the index");
    const RegionRecord& record = view_.region(region);
    if (number >= record.used.load(std::memory_order_acquire))
      report(name + "in use past the end of its region");
    if (view_.disk_entry(entry.entry_offset).namespace_index.load() >= kNamespaceCount)
      report(name + "namespace index out of range");
    if (DiskWord::state(entry.word) != DiskState::writing) return;
    const std::uint64_t region_word = record.word.load(std::memory_order_acquire);
    const RegionState state = RegionWord::state(region_word);
    if (view_.disk_entry(entry.entry_offset).word.load(std::memory_order_acquire) != entry.word)
      return;
    if (client_free(DiskWord::slot(entry.word)))
      report(name + "written by a client whose slot is free");
    if (state == RegionState::free || state == RegionState::sealed)
      report(name + "being written in a region that nobody writes");
  }

  void check_table(std::size_t shard) {
    WaitBudget budget(kEngineWaitNs);
    const index::ShardGuard guard(core_, shard, budget, TakeOver::yes);
    if (!guard) return;
    const ShardRecord& record = view_.shard(shard);
    const std::uint64_t table = record.disk_table.load(std::memory_order_acquire);
    const std::string name = "disk table of shard " + std::to_string(shard) + ": ";
    std::map<std::array<std::uint64_t, 4>, std::uint64_t> keys;
    std::uint32_t entries = 0;
    for (std::uint64_t i = 0; table != 0 && i < TableWord::buckets(table); ++i) {
      for (const AtomicU64& slot : view_.table(table)[i].entries) {
        const std::uint64_t entry = slot.load(std::memory_order_relaxed);
        if (entry == 0) continue;
        ++entries;
        check_slot(name, shard, i, entry, keys);
      }
    }
    if (entries != record.disk_entries.load(std::memory_order_relaxed)) {
      report(name + "counter says " + std::to_string(record.disk_entries.load()) +
             " entries, the table holds " + std::to_string(entries));
    }
  }

  // Whether a disk entry lies there: its own region and number must lead back to it.
  bool is_disk_entry(std::uint64_t offset) const {
    if (!view_.plausible_disk_entry(offset)) return false;
    const DiskEntry& entry = view_.disk_entry(offset);
    const std::uint32_t region = entry.region.load(std::memory_order_relaxed);
    const std::uint32_t number = entry.number.load(std::memory_order_relaxed);
    if (region >= view_.regions()) return false;
    const RegionRecord& record = view_.region(region);
    return number < record.entries_capacity.load(std::memory_order_acquire) &&
           record.entries_offset.load(std::memory_order_acquire) + number * sizeof(DiskEntry) ==
               offset;
  }

  void check_slot(const std::string& shard_name, std::size_t shard, std::uint64_t bucket,
                  std::uint64_t slot, std::map<std::array<std::uint64_t, 4>, std::uint64_t>& keys) {
    const std::uint64_t offset = EntryWord::record_offset(slot);
    const std::string name = shard_name + "entry at " + std::to_string(offset) + ": ";
    if (!is_disk_entry(offset)) return report(name + "no disk entry lies there");
    const DiskEntry& entry = view_.disk_entry(offset);
    if (!on_disk(entry.word.load(std::memory_order_acquire)))
      return report(name + "leads to a free entry");
    const Key key = load_key(entry);
    const std::uint64_t buckets = TableWord::buckets(view_.shard(shard).disk_table.load());
    if (shard_of(key) != shard) report(name + "key belongs to another shard");
    if (EntryWord::tag_of(key) != EntryWord::tag(slot)) report(name + "tag is not the key's");
    if (bucket != first_bucket(key, buckets) && bucket != second_bucket(key, buckets))
      report(name + "in a bucket that is not the key's");
    if (!keys.emplace(key.words, offset).second) report(name + "key is on disk twice");
  }

  Core& core_;
  const View view_;
  std::vector<std::string>& findings_;
};

}  // namespace

void check_disk(Core& core, std::vector<std::string>& findings) {
  if (core.view.regions() != 0) DiskChecker(core, findings).run();
}

}  // namespace hpkv::shm
