#include "shm/check.h"

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>

#include "index/shard.h"
#include "shm/check_disk.h"

namespace hpkv::shm {
namespace {

// One walk over the pool. Findings are gathered, never thrown: the first one is rarely the
// interesting one.
class Checker {
 public:
  explicit Checker(Core& core) : core_(core), view_(core.view) {}

  std::vector<std::string> run() {
    check_superblock();
    check_segments();
    for (std::size_t shard = 0; shard < kShardCount; ++shard) check_shard(shard);
    view_.for_each_run([&](const Run& found) {
      for (std::uint64_t i = 0; i < found.geometry.block_count; ++i) check_block(found, i);
      return true;
    });
    check_locks();
    check_disk(core_, findings_);
    return std::move(findings_);
  }

 private:
  void report(const std::string& what) {
    constexpr std::size_t kMost = 100;  // a broken pool has one cause and many symptoms
    if (findings_.size() < kMost) findings_.push_back(what);
  }

  void check_superblock() {
    const Superblock& super = view_.superblock();
    if (super.magic != kMagic) report("superblock: wrong magic");
    if (super.layout_hash != layout_hash()) report("superblock: wrong layout hash");
    if (super.pool_bytes != core_.file.mapping->bytes())
      report("superblock: pool_bytes is not the size of the file");
    if (super.poisoned.load() != 0) report("poisoned: " + std::string(super.poison_reason.data()));
    if (super.index_cursor.load() > super.segment_bytes)
      report("superblock: index cursor past its segment");
  }

  void check_segments() {
    const std::uint64_t count = view_.superblock().segment_count;
    const std::uint64_t segment_bytes = view_.superblock().segment_bytes;
    for (std::uint64_t i = 0; i < count;) {
      const std::uint64_t word = view_.segment(i).word.load(std::memory_order_acquire);
      const std::string name = "segment " + std::to_string(i) + ": ";
      const SegmentKind kind = SegmentWord::kind(word);
      const std::uint64_t length = SegmentWord::run_length(word);
      if (kind > SegmentKind::reserving) report(name + "unknown kind");
      if (kind != SegmentKind::free && (length == 0 || length > count - i))
        report(name + "run past the end");
      const std::uint64_t step = View::run_step(word, count - i);
      if (kind == SegmentKind::blocks) {
        Run run;
        if (!view_.block_run(i, run) && unchanged(i, word))
          report(name + "run without a sound geometry");
        for (std::uint64_t j = i; j < i + step; ++j) {
          if (view_.segment(j).backed_bytes.load() < segment_bytes)
            report(name + "block run not backed whole");
        }
      }
      for (std::uint64_t j = i + 1; j < i + step; ++j) {
        if (SegmentWord::kind(view_.segment(j).word.load(std::memory_order_acquire)) !=
                SegmentKind::free &&
            unchanged(i, word)) {
          report(name + "covers a segment that is the head of another run");
        }
      }
      i += step;
    }
  }

  bool unchanged(std::uint64_t segment, std::uint64_t word) const {
    return view_.segment(segment).word.load(std::memory_order_acquire) == word;
  }

  // Run and number of a descriptor, by the segment its place names.
  bool is_descriptor(std::uint64_t offset) const {
    if (!view_.plausible_descriptor(offset)) return false;
    const std::uint64_t head = view_.descriptor(offset).segment.load(std::memory_order_relaxed);
    Run run;
    if (head >= view_.superblock().segment_count || !view_.block_run(head, run)) return false;
    return offset >= run.offset &&
           (offset - run.offset) / sizeof(Descriptor) < run.geometry.block_count;
  }

  void check_shard(std::size_t shard) {
    WaitBudget budget(kEngineWaitNs);
    const index::ShardGuard guard(core_, shard, budget, TakeOver::yes);
    if (!guard) return;
    const ShardRecord& record = view_.shard(shard);
    const std::uint64_t table = record.table.load(std::memory_order_acquire);
    const std::string name = "shard " + std::to_string(shard) + ": ";
    std::map<std::array<std::uint64_t, 4>, std::uint64_t> keys;
    std::uint32_t entries = 0;
    for (std::uint64_t bucket = 0; bucket < TableWord::buckets(table); ++bucket) {
      for (const AtomicU64& slot : view_.table(table)[bucket].entries) {
        const std::uint64_t entry = slot.load(std::memory_order_relaxed);
        if (entry == 0) continue;
        ++entries;
        check_entry(name, shard, table, bucket, entry, keys);
      }
    }
    if (entries != record.entries.load(std::memory_order_relaxed)) {
      report(name + "counter says " + std::to_string(record.entries.load()) +
             " entries, the table holds " + std::to_string(entries));
    }
  }

  void check_entry(const std::string& shard_name, std::size_t shard, std::uint64_t table,
                   std::uint64_t bucket, std::uint64_t entry,
                   std::map<std::array<std::uint64_t, 4>, std::uint64_t>& keys) {
    const std::uint64_t offset = EntryWord::record_offset(entry);
    const std::string name = shard_name + "entry for block at " + std::to_string(offset) + ": ";
    if (!is_descriptor(offset)) return report(name + "no descriptor lies there");
    const Descriptor& block = view_.descriptor(offset);
    if (!in_index(block.word.load(std::memory_order_acquire)))
      return report(name + "block is neither writing nor ready");
    const Key key = load_key(block);
    const std::uint64_t buckets = TableWord::buckets(table);
    if (shard_of(key) != shard) report(name + "key belongs to another shard");
    if (EntryWord::tag_of(key) != EntryWord::tag(entry)) report(name + "tag is not the key's");
    if (bucket != first_bucket(key, buckets) && bucket != second_bucket(key, buckets))
      report(name + "in a bucket that is not the key's");
    if (view_.mark(block).load() != ShardMark::make(shard))
      report(name + "shard mark is not the key's");
    if (!keys.emplace(key.words, offset).second) report(name + "key is in the index twice");
  }

  void check_block(const Run& run, std::uint64_t number) {
    const std::uint64_t offset = view_.descriptor_offset(run, number);
    const Descriptor& block = view_.descriptor(offset);
    const std::uint64_t word = block.word.load(std::memory_order_acquire);
    const std::uint64_t stamp = block.stamp.load(std::memory_order_acquire);
    const bool pinned = any_pin(block);
    const std::uint64_t pinned_by_owner =
        block.pins[BlockWord::slot(word) % kClientCount / 64].load(std::memory_order_acquire);
    if (block.word.load(std::memory_order_acquire) != word || !unchanged(run.segment, run.word))
      return;  // at work
    const std::string name = "block at " + std::to_string(offset) + ": ";
    const BlockState state = BlockWord::state(word);
    if (state > BlockState::draining) return report(name + "unknown state");
    if (block.payload_offset.load() != view_.payload_offset(run, number))
      report(name + "payload offset is not its place's");
    const bool owned = state == BlockState::claimed || state == BlockState::writing;
    if (owned) check_owner(name, BlockWord::slot(word), offset, word);
    if (stamp != 0 && state != BlockState::ready) report(name + "has a stamp and is not ready");
    const bool own_pin_only = state == BlockState::writing && pinned_by_owner != 0;
    if (pinned && (state == BlockState::free || state == BlockState::claimed ||
                   (state == BlockState::writing && !own_pin_only))) {
      report(name + "pinned though neither ready nor draining");
    }
    check_pins(name, block, offset);
    if (state == BlockState::writing || state == BlockState::ready) {
      if (block.payload_bytes.load() == 0 || block.payload_bytes.load() > run.geometry.stride)
        report(name + "payload does not fit its place");
      if (block.namespace_index.load() >= kNamespaceCount)
        report(name + "namespace index out of range");
      check_indexed(name, offset, word);
    }
  }

  void check_owner(const std::string& name, std::uint32_t owner, std::uint64_t offset,
                   std::uint64_t word) {
    const bool nobody =
        owner >= kClientCount ||
        ClientWord::state(view_.client(owner).word.load(std::memory_order_acquire)) ==
            ClientState::free;
    if (nobody && view_.descriptor(offset).word.load(std::memory_order_acquire) == word) {
      report(name + "owned by client slot " + std::to_string(owner) + ", which is free");
    }
  }

  void check_pins(const std::string& name, const Descriptor& block, std::uint64_t) {
    for (std::size_t i = 0; i < block.pins.size(); ++i) {
      for (std::uint64_t bits = block.pins[i].load(std::memory_order_acquire); bits != 0;
           bits &= bits - 1) {
        const std::size_t slot = i * 64 + static_cast<std::size_t>(std::countr_zero(bits));
        const std::uint64_t bit = bits & (~bits + 1);
        if (ClientWord::state(view_.client(slot).word.load(std::memory_order_acquire)) ==
                ClientState::free &&
            (block.pins[i].load(std::memory_order_acquire) & bit) != 0) {
          report(name + "pinned by client slot " + std::to_string(slot) + ", which is free");
        }
      }
    }
  }

  void check_indexed(const std::string& name, std::uint64_t offset, std::uint64_t word) {
    const Key key = load_key(view_.descriptor(offset));
    WaitBudget budget(kEngineWaitNs);
    const index::ShardGuard guard(core_, shard_of(key), budget, TakeOver::yes);
    if (!guard || view_.descriptor(offset).word.load(std::memory_order_acquire) != word) return;
    const auto found = guard.find(key);
    if (!found || found->descriptor_offset != offset) report(name + "not in the index");
  }

  void check_lock(const std::string& name, const AtomicU32& lock) {
    const std::uint32_t word = lock.load(std::memory_order_acquire);
    if (word == 0) return;
    const std::uint32_t slot = LockWord::slot(word);
    const bool impossible = slot >= kClientCount;
    const std::uint64_t client =
        impossible ? 0 : view_.client(slot).word.load(std::memory_order_acquire);
    const bool stale =
        ClientWord::state(client) == ClientState::free ||
        (ClientWord::generation(client) & LockWord::kGenerationMask) != LockWord::generation(word);
    if ((impossible || stale) && lock.load(std::memory_order_acquire) == word) {
      report(name + "held by slot " + std::to_string(slot) + " of a generation that is gone");
    }
  }

  void check_locks() {
    check_lock("layout lock: ", view_.superblock().layout_lock);
    check_lock("reap lock: ", view_.superblock().reap_lock);
    for (std::size_t i = 0; i < kShardCount; ++i) {
      check_lock("lock of shard " + std::to_string(i) + ": ", view_.shard(i).lock);
    }
  }

  Core& core_;
  View view_;
  std::vector<std::string> findings_;
};

}  // namespace

std::vector<std::string> check_pool(Core& core) { return Checker(core).run(); }

}  // namespace hpkv::shm
