#include "disk/catalog.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/points.h"
#include "index/disk_shard.h"
#include "shm/pool_impl.h"

namespace hpkv::disk {

using shm::DiskEntry;
using shm::DiskStamp;
using shm::DiskState;
using shm::DiskWord;
using shm::RegionRecord;
using shm::RegionWord;
using shm::TakeOver;
using shm::WaitBudget;

namespace {

std::string hex(const std::array<std::uint64_t, 2>& id) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const std::byte b : std::bit_cast<StoreId>(id)) {
    out += kDigits[std::to_integer<unsigned>(b) >> 4U];
    out += kDigits[std::to_integer<unsigned>(b) & 15U];
  }
  return out;
}

bool has_owner(RegionState state) noexcept {
  return state == RegionState::recovering || state == RegionState::open ||
         state == RegionState::sealing || state == RegionState::dropping;
}

// The entry as a reference, if it still is what `word` says.
bool read_ref(const shm::Core& core, const shm::Namespaces& namespaces,
              const index::DiskFound& found, DiskRef& out) noexcept {
  const DiskEntry& entry = core.view.disk_entry(found.entry_offset);
  out.key = shm::load_key(entry);
  out.region = entry.region.load(std::memory_order_acquire);
  out.number = entry.number.load(std::memory_order_acquire);
  out.checksum = entry.checksum.load(std::memory_order_acquire);
  out.namespace_index = entry.namespace_index.load(std::memory_order_acquire);
  // A region begins anew, and a namespace record is reused, only when no entry says so any more.
  out.file_generation =
      core.view.region(out.region).file_generation.load(std::memory_order_acquire);
  out.payload_bytes = namespaces.block_bytes(out.namespace_index);
  out.entry_generation = DiskWord::generation(found.word);
  out.entry_offset = found.entry_offset;
  return entry.word.load(std::memory_order_acquire) == found.word;
}

}  // namespace

Catalog::Catalog(std::shared_ptr<Pool> pool) noexcept : pool_(std::move(pool)) {}

void Catalog::attach(const StoreId& id, std::uint32_t region_count, std::uint64_t region_bytes) {
  Pool::Impl& impl = *pool_->impl_;
  if (impl.core.detached())
    throw Error(ErrorKind::argument, "attach store: the pool is closed, or this is a forked child");
  const auto words = std::bit_cast<std::array<std::uint64_t, 2>>(id);
  switch (impl.regions.attach({words, region_count, region_bytes})) {
    case shm::Regions::Attached::yes:
      return;
    case shm::Regions::Attached::other_store: {
      const shm::Superblock& super = impl.core.super();
      throw Error(
          ErrorKind::store,
          "attach store " + hex(words) + " (" + std::to_string(region_count) + " regions of " +
              std::to_string(region_bytes) + " bytes): pool " + pool_->info().path +
              " belongs to store " + hex({super.store_id[0].load(), super.store_id[1].load()}) +
              " (" + std::to_string(super.region_count.load()) + " regions of " +
              std::to_string(super.region_bytes.load()) +
              " bytes): give both servers one --hpkv-storage-path, or each its own pool; if "
              "that store was deleted, stop the servers and delete the pool too");
    }
    case shm::Regions::Attached::no_memory:
      throw Error(ErrorKind::space, "attach store " + hex(words) + ": pool " + pool_->info().path +
                                        " has no room for the records of " +
                                        std::to_string(region_count) +
                                        " regions: use a larger --hpkv-mem-pool-size");
    case shm::Regions::Attached::no_lock:
      throw Error(ErrorKind::system,
                  "attach store " + hex(words) +
                      ": the pool's layout lock was not free in time; look for a "
                      "stopped client (hpkv stat)");
  }
}

bool Catalog::forget_all() {
  Pool::Impl& impl = *pool_->impl_;
  if (impl.core.off()) return false;
  bool all = true;
  for (std::uint32_t region = 0; region < region_count(); ++region) {
    if (!impl.regions.empty(region)) {
      all = false;
      continue;
    }
    shm::AtomicU64& word = impl.core.view.region(region).word;
    std::uint64_t now = word.load(std::memory_order_acquire);
    while (!word.compare_exchange_weak(
        now, RegionWord::make(RegionState::unknown, 0, RegionWord::generation(now) + 1),
        std::memory_order_acq_rel)) {
    }
  }
  return all;
}

std::uint32_t Catalog::region_count() const noexcept {
  return pool_->impl_->core.detached() ? 0 : pool_->impl_->core.view.regions();
}

std::uint64_t Catalog::region_bytes() const noexcept {
  return region_count() == 0 ? 0 : pool_->impl_->core.super().region_bytes.load();
}

RegionInfo Catalog::region(std::uint32_t region) const noexcept {
  RegionInfo info;
  info.region = region;
  if (region >= region_count()) return info;
  const RegionRecord& record = pool_->impl_->core.view.region(region);
  constexpr int kTries = 4;  // a region changes rarely; the last answer may mix two moments
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const std::uint64_t word = record.word.load(std::memory_order_acquire);
    info.state = RegionWord::state(word);
    info.owned = RegionWord::owner(word) != 0;
    info.ours = RegionWord::owner(word) == pool_->impl_->regions.self();
    info.owner_slot = info.owned ? RegionWord::owner(word) - 1 : 0;
    info.file_generation = record.file_generation.load(std::memory_order_acquire);
    info.stride = record.stride.load(std::memory_order_acquire);
    info.sequence = record.sequence.load(std::memory_order_acquire);
    info.capacity = record.capacity.load(std::memory_order_acquire);
    info.used = record.used.load(std::memory_order_acquire);
    info.live = record.live.load(std::memory_order_acquire);
    info.places = record.entries_capacity.load(std::memory_order_acquire);
    if (record.word.load(std::memory_order_acquire) == word) break;
  }
  return info;
}

bool Catalog::claim(std::uint32_t region, RegionState from, RegionState to) noexcept {
  if (pool_->impl_->core.off() || region >= region_count() || !has_owner(to)) return false;
  shm::Regions& regions = pool_->impl_->regions;
  return regions.move(region, from, to, false, true) || regions.move(region, from, to, true, true);
}

bool Catalog::settle(std::uint32_t region, RegionState from, RegionState to) noexcept {
  if (pool_->impl_->core.off() || region >= region_count()) return false;
  return pool_->impl_->regions.move(region, from, to, true, false);
}

bool Catalog::begin_region(std::uint32_t region, std::uint32_t file_generation,
                           std::uint64_t stride, std::uint32_t capacity) {
  if (pool_->impl_->core.off() || region >= region_count()) return false;
  return pool_->impl_->regions.begin(region, file_generation, stride, capacity);
}

void Catalog::set_sequence(std::uint32_t region, std::uint64_t sequence) noexcept {
  if (pool_->impl_->core.off() || region >= region_count()) return;
  pool_->impl_->core.view.region(region).sequence.store(sequence, std::memory_order_release);
}

ReserveStatus Catalog::reserve(std::uint32_t region, std::uint32_t number,
                               std::uint32_t namespace_index, const Key& key, DiskRef& out) {
  Pool::Impl& impl = *pool_->impl_;
  shm::Core& core = impl.core;
  if (core.off() || core.options.read_only || region >= region_count()) return ReserveStatus::off;
  RegionRecord& record = core.view.region(region);
  const std::uint64_t offset =
      record.entries_offset.load(std::memory_order_acquire) + number * sizeof(DiskEntry);
  if (number >= record.capacity.load(std::memory_order_relaxed)) return ReserveStatus::full;
  if (shm::on_disk(core.view.disk_entry(offset).word.load(std::memory_order_acquire)))
    return ReserveStatus::full;  // the number is taken: the caller's mistake, and not to be
                                 // repeated
  // Before the entry can be seen, so that every walk meets it. Only rises, and only we raise it.
  if (number >= record.used.load(std::memory_order_relaxed))
    record.used.store(number + 1, std::memory_order_release);
  HPKV_POINT("disk_reserve.used");
  constexpr int kTries = 5;  // as the table is, then after it grew
  for (int attempt = 0; attempt < kTries; ++attempt) {
    bool entered = false;
    bool crowded = false;
    {
      const index::ShardGuard guard(core, shm::shard_of(key));
      if (!guard) return ReserveStatus::busy;
      index::DiskShard shard(core, shm::shard_of(key));
      if (const auto found = shard.find(key)) {
        return DiskWord::state(found->word) == DiskState::ready ? ReserveStatus::present
                                                                : ReserveStatus::busy;
      }
      entered = shard.enter(key, offset, namespace_index);
      crowded = shard.wants_growth();
    }
    if (!entered || crowded) impl.regions.grow(shm::shard_of(key));
    if (!entered) continue;
    const std::uint64_t word = core.view.disk_entry(offset).word.load(std::memory_order_acquire);
    static_cast<void>(read_ref(core, impl.namespaces, {offset, word}, out));
    return ReserveStatus::ok;
  }
  return ReserveStatus::full;
}

void Catalog::publish(const DiskRef& ref, std::uint32_t checksum, std::uint64_t stamp) noexcept {
  shm::Core& core = pool_->impl_->core;
  if (core.detached()) return;
  DiskEntry& entry = core.view.disk_entry(ref.entry_offset);
  std::uint64_t writing = DiskWord::make(DiskState::writing, core.slot, ref.entry_generation);
  const std::uint64_t ready = DiskWord::make(DiskState::ready, 0, ref.entry_generation);
  if (HPKV_BUG("disk_ready_before_checksum")) entry.word.store(ready, std::memory_order_release);
  HPKV_POINT("disk_publish.before_checksum");
  entry.checksum.store(checksum, std::memory_order_release);
  entry.stamp.store((stamp == 0 ? core.take_stamps(1) : stamp) & ~DiskStamp::kTouched,
                    std::memory_order_release);
  HPKV_POINT("disk_publish.before_state");
  // Release, and the last of the entry. It fails only when forget_all() took the entry away.
  static_cast<void>(entry.word.compare_exchange_strong(writing, ready, std::memory_order_acq_rel));
  HPKV_POINT("disk_publish.visible");
}

void Catalog::abandon(const DiskRef& ref) noexcept {
  shm::Core& core = pool_->impl_->core;
  if (core.detached()) return;
  // When the lock is not free in time the entry stays ours, and returns when we leave.
  static_cast<void>(shm::take_out_disk_entry(
      core, ref.entry_offset, DiskWord::make(DiskState::writing, core.slot, ref.entry_generation)));
}

void Catalog::forget(const DiskRef& ref) noexcept {
  shm::Core& core = pool_->impl_->core;
  if (core.off()) return;
  static_cast<void>(shm::take_out_disk_entry(
      core, ref.entry_offset, DiskWord::make(DiskState::ready, 0, ref.entry_generation)));
}

bool Catalog::forget_region(std::uint32_t region) noexcept {
  if (pool_->impl_->core.off() || region >= region_count()) return false;
  return pool_->impl_->regions.empty(region);
}

void Catalog::entries(std::uint32_t region, std::vector<DiskRef>& out) const {
  out.clear();
  const Pool::Impl& impl = *pool_->impl_;
  if (region >= region_count()) return;
  impl.core.view.for_each_disk_entry(region, [&](std::uint64_t offset, const DiskEntry& entry) {
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    DiskRef ref;
    if (DiskWord::state(word) == DiskState::ready &&
        read_ref(impl.core, impl.namespaces, {offset, word}, ref))
      out.push_back(ref);
  });
}

std::size_t Catalog::lookup(std::span<const Key> keys) const noexcept {
  if (pool_->impl_->core.off()) return 0;
  return index::leading_anywhere(pool_->impl_->core.view, keys);
}

bool Catalog::find(const Key& key, DiskRef& out) const noexcept {
  const Pool::Impl& impl = *pool_->impl_;
  index::DiskFound found;
  return !impl.core.off() && index::find_on_disk(impl.core.view, key, found) &&
         read_ref(impl.core, impl.namespaces, found, out);
}

void Catalog::touch(std::span<const DiskRef> refs) noexcept {
  shm::Core& core = pool_->impl_->core;
  if (core.off() || core.options.read_only || refs.empty()) return;
  const std::uint64_t first = core.take_stamps(refs.size());
  for (std::size_t i = 0; i < refs.size(); ++i) {
    DiskEntry& entry = core.view.disk_entry(refs[i].entry_offset);
    const std::uint64_t ready = DiskWord::make(DiskState::ready, 0, refs[i].entry_generation);
    if (entry.word.load(std::memory_order_acquire) != ready) continue;
    // Should the entry change hands right here, another block counts as touched: no harm.
    const std::uint64_t stamp = (first + refs.size() - 1 - i) | DiskStamp::kTouched;
    std::uint64_t now = entry.stamp.load(std::memory_order_relaxed);
    while (now < stamp &&
           !entry.stamp.compare_exchange_weak(now, stamp, std::memory_order_release)) {
    }
  }
}

bool Catalog::touched(const DiskRef& ref) const noexcept {
  const shm::Core& core = pool_->impl_->core;
  if (core.detached()) return false;
  return (core.view.disk_entry(ref.entry_offset).stamp.load(std::memory_order_acquire) &
          DiskStamp::kTouched) != 0;
}

}  // namespace hpkv::disk
