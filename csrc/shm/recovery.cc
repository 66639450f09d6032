#include "shm/recovery.h"

#include "base/points.h"
#include "shm/regions.h"

namespace hpkv::shm {

void fold_client_counters(const View& view, std::uint32_t slot) noexcept {
  for (std::size_t i = 0; i < kCounterCount; ++i) {
    // exchange, so that a repeated reaping adds nothing twice.
    const std::uint64_t n = view.client(slot).counters[i].exchange(0, std::memory_order_relaxed);
    if (n != 0) view.superblock().totals[i].fetch_add(n, std::memory_order_relaxed);
  }
}

void leave_namespaces(const View& view, std::uint32_t slot) noexcept {
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  for (std::size_t i = 0; i < kNamespaceCount; ++i) {
    view.name_space(i).users[slot / 64].fetch_and(~bit, std::memory_order_relaxed);
  }
}

void Recovery::round() noexcept {
  bool any_dead = false;
  for (std::uint32_t slot = 0; slot < kClientCount; ++slot) {
    if (slot == core_.slot) continue;
    std::uint64_t word = core_.view.client(slot).word.load(std::memory_order_acquire);
    if (ClientWord::state(word) == ClientState::free) continue;
    if (core_.file.liveness->held_by_other(slot)) continue;
    // Read again: the slot may have been left, or taken, around the probe.
    if (core_.view.client(slot).word.load(std::memory_order_acquire) != word) continue;
    any_dead = true;
    notice(slot, word);
    if (!quarantine_over(slot, word)) continue;
    static_cast<void>(
        reap(slot, ClientWord::make(ClientState::dead, ClientWord::generation(word))));
  }
  if (any_dead || core_.attention.exchange(false, std::memory_order_relaxed))
    recover_dirty_shards();
}

void Recovery::notice(std::uint32_t slot, std::uint64_t word) noexcept {
  if (ClientWord::state(word) == ClientState::live) {
    const std::uint64_t dead = ClientWord::make(ClientState::dead, ClientWord::generation(word));
    // What it was writing may hit any block: nothing counts as verified any more. First, because
    // whoever says that it is dead may be stopped right after.
    core_.super().epoch.fetch_add(1, std::memory_order_acq_rel);
    HPKV_POINT("notice.before_state");
    if (core_.view.client(slot).word.compare_exchange_strong(word, dead,
                                                             std::memory_order_acq_rel)) {
      core_.count(Counter::reaped);
      HPKV_POINT("notice.dead");
    }
  }
  Seen& seen = seen_[slot];
  const std::uint32_t generation = ClientWord::generation(word);
  if (seen.since_ns == 0 || seen.generation != generation) {
    seen = {generation, now_ns()};
    recover_locks(slot);
  }
}

bool Recovery::quarantine_over(std::uint32_t slot, std::uint64_t word) const noexcept {
  if (HPKV_BUG("reclaim_at_once")) return true;
  const Seen& seen = seen_[slot];
  return seen.generation == ClientWord::generation(word) &&
         now_ns() - seen.since_ns >= core_.options.quarantine_ns;
}

// Taking a lock and giving it back is all there is to recovering it: a dirty shard is rebuilt on
// the way.
void Recovery::recover_locks(std::uint32_t slot) noexcept {
  for (std::size_t i = 0; i < kShardCount; ++i) {
    const std::uint32_t word = core_.view.shard(i).lock.load(std::memory_order_acquire);
    if (word != 0 && LockWord::slot(word) == slot) {
      const index::ShardGuard guard(core_, i);
    }
  }
  for (AtomicU32* lock : {&core_.super().layout_lock, &core_.super().reap_lock}) {
    const std::uint32_t word = lock->load(std::memory_order_acquire);
    if (word != 0 && LockWord::slot(word) == slot)
      const LockGuard guard(core_, *lock, kEngineWaitNs);
  }
}

// Those that a scheduler thread met and left.
void Recovery::recover_dirty_shards() noexcept {
  for (std::size_t i = 0; i < kShardCount; ++i) {
    const ShardRecord& shard = core_.view.shard(i);
    if (shard.dirty.load(std::memory_order_relaxed) == 0 &&
        shard.disk_dirty.load(std::memory_order_relaxed) == 0)
      continue;
    const index::ShardGuard guard(core_, i);
  }
}

bool Recovery::reap(std::uint32_t slot, std::uint64_t word) noexcept {
  const LockGuard reaper(core_, core_.super().reap_lock, kEngineWaitNs);
  if (!reaper) return false;
  ClientRecord& client = core_.view.client(slot);
  if (client.word.load(std::memory_order_acquire) != word ||
      core_.file.liveness->held_by_other(slot))
    return false;
  recover_locks(slot);
  HPKV_POINT("reap.locks");
  for (std::size_t i = 0; i < kShardCount; ++i) {
    const std::uint32_t lock = core_.view.shard(i).lock.load(std::memory_order_acquire);
    if (lock != 0 && LockWord::slot(lock) == slot) return false;  // next round
  }
  if (!return_blocks(slot) || !return_regions(core_, slot)) return false;
  HPKV_POINT("reap.blocks");
  leave_namespaces(core_.view, slot);
  fold_client_counters(core_.view, slot);
  HPKV_POINT("reap.before_free");
  client.word.store(ClientWord::make(ClientState::free, ClientWord::generation(word)),
                    std::memory_order_release);
  HPKV_POINT("reap.freed");
  return true;
}

bool Recovery::return_blocks(std::uint32_t slot) noexcept {
  const View& view = core_.view;
  for (std::uint64_t i = 0; i < core_.super().segment_count; ++i) {
    const LockGuard layout(core_, core_.super().layout_lock, kEngineWaitNs);
    if (!layout) return false;
    AtomicU64& word = view.segment(i).word;
    const std::uint64_t seen = word.load(std::memory_order_acquire);
    if (SegmentWord::kind(seen) == SegmentKind::reserving && SegmentWord::slot(seen) == slot) {
      word.store(
          SegmentWord::make(SegmentKind::free, 0, 0, static_cast<std::uint32_t>(seen >> 32U)),
          std::memory_order_release);
      HPKV_POINT("reap.segment");
    }
    Run run;
    if (view.block_run(i, run) && !reap_run(run, slot)) return false;
  }
  return true;
}

// Under the layout lock, so the run cannot end while we write into its descriptors.
bool Recovery::reap_run(const Run& run, std::uint32_t slot) noexcept {
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
    const std::uint64_t offset = core_.view.descriptor_offset(run, i);
    Descriptor& block = core_.view.descriptor(offset);
    if ((block.pins[slot / 64].load(std::memory_order_relaxed) & bit) != 0) {
      block.pins[slot / 64].fetch_and(~bit, std::memory_order_acq_rel);
      HPKV_POINT("reap.pin");
    }
    const std::uint64_t word = block.word.load(std::memory_order_acquire);
    const BlockState state = BlockWord::state(word);
    const bool owned = state == BlockState::claimed || state == BlockState::writing;
    if (owned && BlockWord::slot(word) == slot && !free_block(offset, word)) return false;
  }
  return true;
}

bool Recovery::free_block(std::uint64_t descriptor_offset, std::uint64_t word) noexcept {
  Descriptor& block = core_.view.descriptor(descriptor_offset);
  const std::uint64_t free = BlockWord::make(BlockState::free, 0, BlockWord::generation(word) + 1);
  if (BlockWord::state(word) == BlockState::claimed) {
    block.word.store(free, std::memory_order_release);
    HPKV_POINT("reap.claimed");
    return true;
  }
  const Key key = load_key(block);
  index::ShardGuard guard(core_, shard_of(key));
  if (!guard) return false;
  const auto found = guard.find(key);
  if (!found || found->descriptor_offset != descriptor_offset) {
    core_.poison("a dead client's block is not in the index");
    return false;
  }
  guard.take_out(*found, free);
  return true;
}

}  // namespace hpkv::shm
