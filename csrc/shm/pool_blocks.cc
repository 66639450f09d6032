// Finding, pinning, filling and publishing blocks.
#include <algorithm>

#include "base/points.h"
#include "shm/pool_impl.h"

namespace hpkv {

using shm::BlockState;
using shm::BlockWord;
using shm::Counter;
using shm::Descriptor;
using shm::TakeOver;
using shm::WaitBudget;

using index::kGroup;
using index::prefetch_group;

std::size_t Pool::lookup(std::span<const Key> keys) const noexcept {
  if (impl_->core.off()) return 0;
  for (std::size_t start = 0; start < keys.size(); start += kGroup) {
    const auto group = keys.subspan(start, std::min(kGroup, keys.size() - start));
    const std::size_t run = index::leading_ready(impl_->core.view, group);
    if (run < group.size()) return start + run;
  }
  return keys.size();
}

// Stamps only rise. The block must not go away: its shard's lock is held, or it is pinned.
void Pool::Impl::stamp(Descriptor& block, std::uint64_t value) noexcept {
  std::uint64_t now = block.stamp.load(std::memory_order_relaxed);
  while (now < value && !block.stamp.compare_exchange_weak(now, value, std::memory_order_release)) {
  }
}

std::uint64_t Pool::take_stamps(std::uint64_t count) noexcept {
  return impl_->core.off() ? 1 : impl_->core.take_stamps(count);
}

std::size_t Pool::touch(std::span<const Key> keys) noexcept {
  shm::Core& core = impl_->core;
  if (core.off() || core.options.read_only || keys.empty()) return 0;
  const std::uint64_t first = core.take_stamps(keys.size());
  WaitBudget budget(shm::kSchedulerWaitNs);
  std::size_t present = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i % kGroup == 0)
      prefetch_group(core.view, keys.subspan(i, std::min(kGroup, keys.size() - i)));
    const index::ShardGuard guard(core, shm::shard_of(keys[i]), budget, TakeOver::no);
    if (!guard) continue;
    const auto found = guard.find(keys[i]);
    if (!found || BlockWord::state(found->word) != BlockState::ready) continue;
    Descriptor& block = core.view.descriptor(found->descriptor_offset);
    impl_->stamp(block, first + keys.size() - 1 - i);
    ++present;
  }
  return present;
}

std::size_t Pool::pin(std::span<const Key> keys, std::span<BlockRef> out) noexcept {
  shm::Core& core = impl_->core;
  if (core.off()) return 0;
  const std::size_t count = pin_quietly(keys, out);
  core.count(Counter::hits, count);
  core.count(Counter::misses, keys.size() - count);
  return count;
}

std::size_t Pool::pin_quietly(std::span<const Key> keys, std::span<BlockRef> out) noexcept {
  shm::Core& core = impl_->core;
  if (core.off()) return 0;
  WaitBudget budget(shm::kSchedulerWaitNs);
  std::size_t count = 0;
  for (; count < std::min(keys.size(), out.size()); ++count) {
    if (count % kGroup == 0)
      prefetch_group(core.view, keys.subspan(count, std::min(kGroup, keys.size() - count)));
    const index::ShardGuard guard(core, shm::shard_of(keys[count]), budget, TakeOver::no);
    if (!guard) break;
    const auto found = guard.find(keys[count]);
    if (!found || BlockWord::state(found->word) != BlockState::ready) break;
    // Under the lock of its shard, so nobody evicts it between the look and the pin.
    impl_->pins.pin(found->descriptor_offset);
    HPKV_POINT("pin.pinned");
    const Descriptor& block = core.view.descriptor(found->descriptor_offset);
    out[count] = {.offset = block.payload_offset.load(std::memory_order_relaxed),
                  .payload_bytes = block.payload_bytes.load(std::memory_order_relaxed),
                  .descriptor_offset = found->descriptor_offset,
                  .generation = BlockWord::generation(found->word)};
  }
  impl_->pin_count.fetch_add(count, std::memory_order_relaxed);
  return count;
}

void Pool::unpin(std::span<const BlockRef> refs) noexcept {
  if (impl_->core.detached()) return;
  for (const BlockRef& ref : refs) {
    HPKV_POINT("unpin.before");
    if (!impl_->pins.unpin(ref.descriptor_offset))
      impl_->core.poison("unpin of a block that was not pinned");
  }
  impl_->pin_count.fetch_sub(refs.size(), std::memory_order_relaxed);
}

std::vector<std::span<std::byte>> Pool::reserved() const {
  std::vector<std::span<std::byte>> ranges;
  if (off()) return ranges;
  const shm::View& view = impl_->core.view;
  for (std::uint64_t i = 0; i < view.superblock().segment_count; ++i) {
    // Acquire: partner of the release in Segments::back; these bytes may be touched.
    const std::uint64_t bytes = view.segment(i).backed_bytes.load(std::memory_order_acquire);
    if (bytes != 0) ranges.emplace_back(view.at(view.segment_offset(i)), bytes);
  }
  return ranges;
}

std::byte* Pool::payload(const BlockRef& ref) const noexcept {
  return impl_->core.view.at(ref.offset);
}

std::uint32_t Pool::checksum(const BlockRef& ref) const noexcept {
  if (impl_->core.detached()) return 0;
  return impl_->core.view.descriptor(ref.descriptor_offset)
      .checksum.load(std::memory_order_relaxed);
}

bool Pool::verified(const BlockRef& ref) const noexcept {
  const shm::Core& core = impl_->core;
  if (core.detached() || core.options.verify_always) return false;
  return core.view.descriptor(ref.descriptor_offset)
             .verified_epoch.load(std::memory_order_acquire) == epoch();
}

void Pool::mark_verified(const BlockRef& ref, std::uint32_t epoch) noexcept {
  if (impl_->core.detached()) return;
  impl_->core.view.descriptor(ref.descriptor_offset)
      .verified_epoch.store(epoch, std::memory_order_release);
}

void Pool::count_loaded(std::span<const BlockRef> refs) noexcept {
  shm::Core& core = impl_->core;
  if (core.detached()) return;
  std::uint64_t bytes = 0;
  for (const BlockRef& ref : refs) {
    core.view.descriptor(ref.descriptor_offset).uses.fetch_add(1, std::memory_order_relaxed);
    bytes += ref.payload_bytes;
  }
  core.count(Counter::loaded_bytes, bytes);
}

void Pool::count_disk(std::uint64_t demoted_bytes, std::uint64_t promoted_bytes,
                      std::uint64_t errors) noexcept {
  if (impl_->core.detached()) return;
  impl_->core.count(Counter::demoted_bytes, demoted_bytes);
  impl_->core.count(Counter::promoted_bytes, promoted_bytes);
  impl_->core.count(Counter::disk_errors, errors);
}

void Pool::condemn(const BlockRef& ref) noexcept {
  shm::Core& core = impl_->core;
  if (core.off()) return;
  const Key key = shm::load_key(core.view.descriptor(ref.descriptor_offset));
  index::ShardGuard guard(core, shm::shard_of(key));
  if (!guard) return;
  const auto found = guard.find(key);
  // Somebody else with a pin may have condemned it first.
  if (!found || found->descriptor_offset != ref.descriptor_offset) return;
  guard.take_out(*found, BlockWord::make(BlockState::draining, 0, ref.generation));
  core.count(Counter::bad_checksums);
}

std::optional<ReserveStatus> Pool::Impl::taken(const index::ShardGuard& guard,
                                               const Key& key) noexcept {
  const auto found = guard.find(key);
  if (!found) return std::nullopt;
  if (BlockWord::state(found->word) != BlockState::ready) return ReserveStatus::busy;
  Descriptor& block = core.view.descriptor(found->descriptor_offset);
  stamp(block, core.take_stamps(1));
  return ReserveStatus::present;
}

ReserveStatus Pool::reserve(std::uint32_t namespace_index, const Key& key, BlockRef& out) noexcept {
  Impl& impl = *impl_;
  shm::Core& core = impl.core;
  if (core.off() || core.options.read_only) return ReserveStatus::off;
  const std::uint64_t block_bytes = impl.namespaces.block_bytes(namespace_index);
  if (block_bytes == 0) return ReserveStatus::off;
  {
    const index::ShardGuard guard(core, shm::shard_of(key));
    const auto status = guard ? impl.taken(guard, key) : std::optional(ReserveStatus::busy);
    if (status == ReserveStatus::busy) core.count(Counter::busy);
    if (status) return *status;
  }
  const std::uint64_t stride = shm::stride_for(block_bytes);
  // Taken before the place, so that threads together stay below the quota; one block always fits.
  const std::uint64_t before = impl.writing_bytes.fetch_add(stride);
  ReserveStatus status = ReserveStatus::busy;
  if (before == 0 || before + stride <= impl.quota_bytes()) {
    const auto place = impl.allocator.claim(stride);
    status = ReserveStatus::full;
    if (place) {
      HPKV_POINT("reserve.claimed");
      Descriptor& block = core.view.descriptor(place->descriptor_offset);
      block.namespace_index.store(namespace_index, std::memory_order_relaxed);
      block.payload_bytes.store(block_bytes, std::memory_order_relaxed);
      block.checksum.store(0, std::memory_order_relaxed);
      block.uses.store(0, std::memory_order_relaxed);
      // The epoch before the first byte: a death while we write leaves the block unverified.
      block.verified_epoch.store(epoch(), std::memory_order_relaxed);
      out = {.offset = block.payload_offset.load(std::memory_order_relaxed),
             .payload_bytes = block_bytes,
             .descriptor_offset = place->descriptor_offset,
             .generation = place->generation};
      status = impl.enter(key, *place);
      if (status == ReserveStatus::ok) return status;
      impl.allocator.give_back(*place);
    }
  }
  impl.writing_bytes.fetch_sub(stride);
  if (status == ReserveStatus::full) core.count(Counter::full);
  if (status == ReserveStatus::busy) core.count(Counter::busy);
  return status;
}

ReserveStatus Pool::Impl::enter(const Key& key, const shm::Place& place) noexcept {
  const std::size_t shard = shm::shard_of(key);
  // As the table is, then after it grew. A key whose two buckets are one may need it more than
  // once.
  constexpr int kTries = 5;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    bool entered = false;
    bool crowded = false;
    {
      index::ShardGuard guard(core, shard);
      if (!guard) return ReserveStatus::busy;
      if (const auto status = taken(guard, key)) return *status;
      entered = guard.enter(key, place.descriptor_offset);
      crowded = guard.wants_growth();
    }
    // Outside the shard's lock, because memory for the table needs the layout lock.
    if (!entered || crowded) grow(shard);
    if (entered) return ReserveStatus::ok;
  }
  return ReserveStatus::full;
}

void Pool::Impl::grow(std::size_t shard) noexcept {
  const std::uint64_t table = core.view.shard(shard).table.load(std::memory_order_acquire);
  const std::uint64_t buckets = 2 * shm::TableWord::buckets(table);
  const auto memory = segments.take_index_memory(buckets * sizeof(shm::Bucket));
  if (!memory) return;
  index::ShardGuard guard(core, shard);
  // When another thread was quicker the memory is spent: rare, and small beside what the index
  // needs.
  if (guard) static_cast<void>(guard.grow_into(*memory, buckets));
}

bool Pool::Impl::owns(const BlockRef& ref) noexcept {
  const std::uint64_t word =
      core.view.descriptor(ref.descriptor_offset).word.load(std::memory_order_relaxed);
  if (word == BlockWord::make(BlockState::writing, core.slot, ref.generation)) return true;
  core.poison("publish or abandon of a block that its caller does not own");
  return false;
}

void Pool::Impl::finish_write(const BlockRef& ref) noexcept {
  writing_bytes.fetch_sub(shm::stride_for(ref.payload_bytes));
}

void Pool::publish(const BlockRef& ref, std::uint32_t crc32c, std::uint64_t stamp) noexcept {
  if (!publish_pinned(ref, crc32c, stamp)) return;
  impl_->pin_count.fetch_sub(1, std::memory_order_relaxed);
  static_cast<void>(impl_->pins.unpin(ref.descriptor_offset));
  HPKV_POINT("publish.unpinned");
}

bool Pool::publish_pinned(const BlockRef& ref, std::uint32_t crc32c, std::uint64_t stamp) noexcept {
  Impl& impl = *impl_;
  if (impl.core.detached() || !impl.owns(ref)) return false;
  Descriptor& block = impl.core.view.descriptor(ref.descriptor_offset);
  const std::uint64_t ready = BlockWord::make(BlockState::ready, 0, ref.generation);
  if (stamp == 0) stamp = impl.core.take_stamps(1);
  HPKV_POINT("publish.before_pin");
  // Once it is visible it may be evicted; our pin keeps the place a descriptor until it is stamped.
  impl.pins.pin(ref.descriptor_offset);
  HPKV_POINT("publish.pinned");
  if (HPKV_BUG("touch_before_publish")) impl.stamp(block, stamp);
  if (HPKV_BUG("publish_before_checksum")) block.word.store(ready, std::memory_order_release);
  HPKV_POINT("publish.before_checksum");
  block.checksum.store(crc32c, std::memory_order_release);
  HPKV_POINT("publish.before_state");
  // Release, and the last of the block: whoever sees `ready` sees its key, bytes, checksum and
  // epoch.
  block.word.store(ready, std::memory_order_release);
  HPKV_POINT("publish.visible");
  impl.stamp(block, stamp);
  HPKV_POINT("publish.stamped");
  impl.pin_count.fetch_add(1, std::memory_order_relaxed);
  impl.finish_write(ref);
  impl.core.count(Counter::stored);
  impl.core.count(Counter::spilled_bytes, ref.payload_bytes);
  return true;
}

// Ours until it is out entirely: a free place is claimed by anybody, without this shard's lock.
void Pool::Impl::take_out_and_free(index::ShardGuard& guard, const index::Found& found,
                                   std::uint32_t generation) noexcept {
  guard.take_out(found, BlockWord::make(BlockState::claimed, core.slot, generation));
  HPKV_POINT("free.claimed");
  allocator.give_back({found.descriptor_offset, generation});
  HPKV_POINT("free.free");
}

void Pool::abandon(const BlockRef& ref) noexcept {
  Impl& impl = *impl_;
  if (impl.core.detached() || !impl.owns(ref)) return;
  const Key key = shm::load_key(impl.core.view.descriptor(ref.descriptor_offset));
  {
    index::ShardGuard guard(impl.core, shm::shard_of(key));
    const auto found = guard ? guard.find(key) : std::nullopt;
    // A lock held by a stopped process: the block stays ours, and returns when we leave.
    if (!found || found->descriptor_offset != ref.descriptor_offset) return;
    HPKV_POINT("abandon.found");
    impl.take_out_and_free(guard, *found, ref.generation);
  }
  impl.finish_write(ref);
}

std::uint64_t Pool::drop(std::span<const Key> keys) noexcept {
  shm::Core& core = impl_->core;
  std::uint64_t dropped = 0;
  for (const Key& key : keys) {
    if (core.off() || core.options.read_only) break;
    index::ShardGuard guard(core, shm::shard_of(key));
    const auto found = guard ? guard.find(key) : std::nullopt;
    if (!found || BlockWord::state(found->word) != BlockState::ready) continue;
    // Pins are taken under this lock, so none comes while we look.
    if (shm::any_pin(core.view.descriptor(found->descriptor_offset))) continue;
    const std::uint32_t generation = BlockWord::generation(found->word);
    impl_->take_out_and_free(guard, *found, generation + 1);
    ++dropped;
  }
  return dropped;
}

}  // namespace hpkv
