#include "index/shard.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/points.h"
#include "index/disk_shard.h"
#include "index/table.h"

namespace hpkv::index {

using shm::AtomicU64;
using shm::BlockState;
using shm::BlockWord;
using shm::Bucket;
using shm::EntryWord;
using shm::kBucketEntries;
using shm::ShardMark;
using shm::TableWord;

namespace {

constexpr int kLookupTries = 4;  // a table doubles rarely; this often in one lookup it does not

// Offsets of the descriptors that carry the mark of a shard, ascending.
std::vector<std::uint64_t> marked_descriptors(const View& view, std::size_t shard) {
  std::vector<std::uint64_t> marked;
  // Eight marks at a time: a byte of `other` is zero where the mark is ours.
  constexpr std::uint64_t kOnes = 0x0101010101010101U;
  const std::uint64_t pattern = kOnes * ShardMark::make(shard);
  view.for_each_run([&](const shm::Run& run) {
    const auto* words = reinterpret_cast<const AtomicU64*>(view.marks(run));
    for (std::uint64_t i = 0; i < run.geometry.block_count; i += 8) {
      const std::uint64_t other = words[i / 8].load(std::memory_order_relaxed) ^ pattern;
      if (((other - kOnes) & ~other & (kOnes * 0x80U)) == 0) continue;
      for (std::uint64_t j = i; j < std::min(i + 8, run.geometry.block_count); ++j) {
        if (((other >> (8 * (j - i))) & 0xFFU) == 0)
          marked.push_back(view.descriptor_offset(run, j));
      }
    }
    return true;
  });
  return marked;
}

// All indexed blocks of a shard, ascending by offset. Under its lock, so none comes or goes.
std::vector<IndexedRecord> blocks_of_shard(const View& view, std::size_t shard) {
  constexpr std::size_t kAhead = 16;  // descriptors lie pages apart: fetch some ahead
  const std::vector<std::uint64_t> marked = marked_descriptors(view, shard);
  std::vector<IndexedRecord> found;
  found.reserve(marked.size());
  for (std::size_t i = 0; i < marked.size(); ++i) {
    if (i + kAhead < marked.size()) __builtin_prefetch(view.at(marked[i + kAhead]));
    const Descriptor& block = view.descriptor(marked[i]);
    if (!shm::in_index(block.word.load(std::memory_order_acquire))) continue;
    const Key key = shm::load_key(block);
    if (shm::shard_of(key) == shard) found.push_back({marked[i], key});
  }
  return found;
}

}  // namespace

bool find_ready(const View& view, const Key& key, Found& out) noexcept {
  const shm::ShardRecord& shard = view.shard(shm::shard_of(key));
  const std::uint64_t tag = EntryWord::tag_of(key);
  for (int attempt = 0; attempt < kLookupTries; ++attempt) {
    // Acquire: partner of the release store that published the table's contents.
    const std::uint64_t table = shard.table.load(std::memory_order_acquire);
    bool moved = false;
    for (Bucket* bucket : buckets_of(view, table, key)) {
      for (const AtomicU64& slot : bucket->entries) {
        const std::uint64_t entry = slot.load(std::memory_order_acquire);
        if (EntryWord::tag(entry) != tag || entry == 0) continue;
        const std::uint64_t offset = EntryWord::record_offset(entry);
        if (!view.plausible_descriptor(offset)) continue;
        const Descriptor& block = view.descriptor(offset);
        const std::uint64_t word = block.word.load(std::memory_order_acquire);
        if (BlockWord::state(word) != BlockState::ready || shm::load_key(block) != key) continue;
        // Unchanged word: the key was that of a ready block. Unchanged entry and table: what we
        // read was a descriptor, because a place is put to another use only after its blocks have
        // left the index.
        if (block.word.load(std::memory_order_acquire) != word ||
            slot.load(std::memory_order_acquire) != entry) {
          moved = true;
          continue;
        }
        if (shard.table.load(std::memory_order_relaxed) != table) break;
        out = {offset, word};
        return true;
      }
    }
    if (!moved && shard.table.load(std::memory_order_acquire) == table) return false;
  }
  return false;
}

namespace {

// Where a key's entry seems to be: the first one that carries its tag.
struct Guess {
  std::uint64_t table = 0;
  const AtomicU64* slot = nullptr;
  std::uint64_t entry = 0;
};

Bucket& bucket_at(const View& view, std::uint64_t table, std::uint64_t number) noexcept {
  return view.table(table)[number];
}

void fetch_tables(const View& view, std::span<const Key> keys, std::span<Guess> guesses) noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Guess& guess = guesses[i];
    guess.table = view.shard(shm::shard_of(keys[i])).table.load(std::memory_order_acquire);
    const std::uint64_t first = shm::first_bucket(keys[i], TableWord::buckets(guess.table));
    __builtin_prefetch(&bucket_at(view, guess.table, first));
  }
}

// A prefetch of a wrong address does nothing.
void take_guess(const View& view, Guess& guess, bool second_line) noexcept {
  guess.entry = guess.slot->load(std::memory_order_acquire);
  const std::byte* descriptor = view.at(EntryWord::record_offset(guess.entry));
  __builtin_prefetch(descriptor);
  if (second_line) __builtin_prefetch(descriptor + sizeof(Bucket), 1);
}

// Three steps, each over all keys, so that the memory fetches of a step overlap: first buckets (one
// key in some needs its second), then those second buckets, then the descriptors they lead to.
void fetch_group(const View& view, std::span<const Key> keys, std::span<Guess> guesses,
                 bool second_line) noexcept {
  fetch_tables(view, keys, guesses);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Guess& guess = guesses[i];
    const auto [first, second] = buckets_of(view, guess.table, keys[i]);
    guess.slot = slot_with_tag(*first, EntryWord::tag_of(keys[i]));
    if (guess.slot != nullptr) {
      take_guess(view, guess, second_line);
    } else {
      __builtin_prefetch(second);
    }
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Guess& guess = guesses[i];
    if (guess.slot != nullptr) continue;
    const std::uint64_t second = shm::second_bucket(keys[i], TableWord::buckets(guess.table));
    guess.slot = slot_with_tag(bucket_at(view, guess.table, second), EntryWord::tag_of(keys[i]));
    if (guess.slot != nullptr) take_guess(view, guess, second_line);
  }
}

// The same proof as in find_ready, for the entry that was guessed.
bool guess_holds(const View& view, const Key& key, const Guess& guess) noexcept {
  const std::uint64_t offset = EntryWord::record_offset(guess.entry);
  if (guess.slot == nullptr || !view.plausible_descriptor(offset)) return false;
  const Descriptor& block = view.descriptor(offset);
  const std::uint64_t word = block.word.load(std::memory_order_acquire);
  return BlockWord::state(word) == BlockState::ready && shm::load_key(block) == key &&
         block.word.load(std::memory_order_acquire) == word &&
         guess.slot->load(std::memory_order_acquire) == guess.entry &&
         view.shard(shm::shard_of(key)).table.load(std::memory_order_relaxed) == guess.table;
}

}  // namespace

std::size_t leading_ready(const View& view, std::span<const Key> keys) noexcept {
  std::array<Guess, kGroup> guesses;
  fetch_group(view, keys, guesses, false);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Found found;
    // A wrong guess (a tag by chance, a change meanwhile) says nothing: look properly.
    if (!guess_holds(view, keys[i], guesses[i]) && !find_ready(view, keys[i], found)) return i;
  }
  return keys.size();
}

void prefetch_group(const View& view, std::span<const Key> keys) noexcept {
  std::array<Guess, kGroup> guesses;
  fetch_group(view, keys, guesses, true);
}

ShardGuard::ShardGuard(Core& core, std::size_t shard) noexcept
    : core_(core), record_(core.view.shard(shard)), shard_(shard) {
  shm::WaitBudget budget(shm::kEngineWaitNs);
  lock(budget, shm::TakeOver::yes);
}

ShardGuard::ShardGuard(Core& core, std::size_t shard, shm::WaitBudget& budget,
                       shm::TakeOver take_over) noexcept
    : core_(core), record_(core.view.shard(shard)), shard_(shard) {
  lock(budget, take_over);
}

void ShardGuard::lock(shm::WaitBudget& budget, shm::TakeOver take_over) noexcept {
  const shm::LockResult result = shm::acquire(core_, record_.lock, budget, take_over);
  if (result != shm::LockResult::acquired) {
    core_.count(shm::Counter::lock_timeouts);
    if (result == shm::LockResult::holder_died)
      core_.attention.store(true, std::memory_order_relaxed);
    return;
  }
  held_ = true;
  HPKV_POINT("shard.locked");
  const bool dirty = record_.dirty.load(std::memory_order_relaxed) != 0;
  const bool disk_dirty = record_.disk_dirty.load(std::memory_order_relaxed) != 0;
  if (!dirty && !disk_dirty) return;
  if (take_over == shm::TakeOver::no) {
    shm::release(record_.lock);
    held_ = false;
    core_.attention.store(true, std::memory_order_relaxed);
    return;
  }
  if (dirty) rebuild();
  if (disk_dirty) DiskShard(core_, shard_).rebuild();
}

ShardGuard::~ShardGuard() {
  if (held_) shm::release(record_.lock);
}

// Release on every store of a mutation: the next one must not become visible before it, or a death
// in between would show an order that never was.
void ShardGuard::set_dirty(std::uint32_t value) noexcept {
  record_.dirty.store(value, std::memory_order_release);
}

std::optional<Found> ShardGuard::find(const Key& key) const noexcept {
  const std::uint64_t table = record_.table.load(std::memory_order_relaxed);
  const std::uint64_t tag = EntryWord::tag_of(key);
  for (Bucket* bucket : buckets_of(core_.view, table, key)) {
    for (const AtomicU64& slot : bucket->entries) {
      const std::uint64_t entry = slot.load(std::memory_order_relaxed);
      if (entry == 0 || EntryWord::tag(entry) != tag) continue;
      const std::uint64_t offset = EntryWord::record_offset(entry);
      if (!core_.view.plausible_descriptor(offset)) {
        core_.poison("an index entry points outside the pool");
        return std::nullopt;
      }
      const Descriptor& block = core_.view.descriptor(offset);
      const std::uint64_t word = block.word.load(std::memory_order_acquire);
      if (shm::in_index(word) && shm::load_key(block) == key) return Found{offset, word};
    }
  }
  return std::nullopt;
}

bool ShardGuard::enter(const Key& key, std::uint64_t descriptor_offset) noexcept {
  const std::uint64_t table = record_.table.load(std::memory_order_relaxed);
  AtomicU64* entry = empty_entry(core_.view, table, key);
  if (entry == nullptr) return false;
  Descriptor& block = core_.view.descriptor(descriptor_offset);
  const std::uint32_t generation =
      BlockWord::generation(block.word.load(std::memory_order_relaxed));
  const std::uint32_t count = record_.entries.load(std::memory_order_relaxed);
  if (HPKV_BUG("counter_before_state")) {
    record_.entries.store(count + 1, std::memory_order_release);
    HPKV_POINT("enter.bug_counted");
  }
  HPKV_POINT("enter.before_dirty");
  set_dirty(1);
  HPKV_POINT("enter.dirty");
  for (std::size_t i = 0; i < key.words.size(); ++i) {
    block.key[i].store(key.words[i], std::memory_order_release);
    HPKV_POINT("enter.key");
  }
  core_.view.mark(block).store(ShardMark::make(shard_), std::memory_order_release);
  HPKV_POINT("enter.mark");
  block.word.store(BlockWord::make(BlockState::writing, core_.slot, generation),
                   std::memory_order_release);
  HPKV_POINT("enter.writing");
  entry->store(EntryWord::make(key, descriptor_offset), std::memory_order_release);
  HPKV_POINT("enter.entry");
  record_.entries.store(count + 1, std::memory_order_release);
  HPKV_POINT("enter.counted");
  set_dirty(0);
  HPKV_POINT("enter.clean");
  return true;
}

void ShardGuard::take_out(const Found& found, std::uint64_t after) noexcept {
  Descriptor& block = core_.view.descriptor(found.descriptor_offset);
  const std::uint64_t table = record_.table.load(std::memory_order_relaxed);
  AtomicU64* entry = entry_of(core_.view, table, shm::load_key(block), found.descriptor_offset);
  if (entry == nullptr) {
    core_.poison("a block that is in the index has no entry");
    return;
  }
  HPKV_POINT("take_out.before_dirty");
  set_dirty(1);
  HPKV_POINT("take_out.dirty");
  entry->store(0, std::memory_order_release);
  HPKV_POINT("take_out.entry");
  block.stamp.store(0, std::memory_order_release);
  HPKV_POINT("take_out.stamp");
  block.word.store(after, std::memory_order_release);
  HPKV_POINT("take_out.state");
  core_.view.mark(block).store(0, std::memory_order_release);
  HPKV_POINT("take_out.mark");
  record_.entries.fetch_sub(1, std::memory_order_release);
  HPKV_POINT("take_out.counted");
  set_dirty(0);
  HPKV_POINT("take_out.clean");
}

std::uint64_t ShardGuard::buckets() const noexcept {
  return TableWord::buckets(record_.table.load(std::memory_order_relaxed));
}

bool ShardGuard::wants_growth() const noexcept {
  // Three quarters full. Two choices of eight entries overflow long after that, so growth comes in
  // time.
  return record_.entries.load(std::memory_order_relaxed) >= buckets() * kBucketEntries * 3 / 4;
}

bool ShardGuard::grow_into(std::uint64_t table_offset, std::uint64_t bucket_count) noexcept {
  const std::uint64_t old_table = record_.table.load(std::memory_order_relaxed);
  if (bucket_count <= TableWord::buckets(old_table)) return false;
  const std::uint64_t new_table =
      TableWord::make(table_offset, static_cast<unsigned>(std::countr_zero(bucket_count)));
  const auto key_at = [this](std::uint64_t offset) {
    return shm::load_key(core_.view.descriptor(offset));
  };
  if (!copy_table(core_.view, old_table, new_table, key_at)) return false;
  HPKV_POINT("grow.before_switch");
  // Release: partner of the acquire in find_ready; the entries above come first. The old table is
  // never written again, so a reader that still has it sees blocks it must check, not other data.
  record_.table.store(new_table, std::memory_order_release);
  HPKV_POINT("grow.switched");
  return true;
}

void ShardGuard::rebuild() noexcept {
  const std::uint64_t table = record_.table.load(std::memory_order_relaxed);
  const std::vector<IndexedRecord> blocks = blocks_of_shard(core_.view, shard_);
  if (!fit_table(core_.view, table, blocks)) {
    core_.poison("a rebuilt shard does not fit its table");
    return;
  }
  HPKV_POINT("rebuild.before_count");
  record_.entries.store(static_cast<std::uint32_t>(blocks.size()), std::memory_order_release);
  core_.count(shm::Counter::rebuilds);
  set_dirty(0);
  HPKV_POINT("rebuild.done");
}

}  // namespace hpkv::index
