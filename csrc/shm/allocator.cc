#include "shm/allocator.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/points.h"
#include "index/disk_shard.h"

namespace hpkv::shm {
namespace {

constexpr std::uint64_t kStockBytes = std::uint64_t{8} << 20U;
constexpr std::uint64_t kStockShare = 16;  // of a run
constexpr std::size_t kCandidatesMin = 64;
constexpr std::uint64_t kCandidateShare = 64;  // of a class
constexpr int kRounds = 8;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

// How many blocks of a run are claimed at once: few enough that others are not starved, enough that
// the layout lock is taken rarely.
std::uint64_t stock_of(const Run& run) noexcept {
  const std::uint64_t by_bytes = kStockBytes / run.geometry.stride;
  return std::max<std::uint64_t>(1, std::min(by_bytes, run.geometry.block_count / kStockShare));
}

}  // namespace

Allocator::Class& Allocator::class_of(std::uint64_t stride) {
  const std::lock_guard guard(classes_mutex_);
  const auto [place, made] = classes_.try_emplace(stride);
  if (made) place->second.stride = stride;  // once: from then on it is read under other locks
  return place->second;
}

std::optional<Place> Allocator::claim(std::uint64_t stride) noexcept {
  Class& cls = class_of(stride);
  const std::lock_guard guard(cls.mutex);
  cls.used = true;
  // For all locks together: a stopped holder of one costs a claim this much once.
  WaitBudget budget(kEngineWaitNs);
  for (int round = 0; round < kRounds; ++round) {
    if (!cls.stock.empty()) {
      const Place place = cls.stock.back();
      cls.stock.pop_back();
      return place;
    }
    while (!cls.coldest.empty()) {
      const auto place = evict(cls.coldest.take_coldest(), false, budget);
      if (!place) continue;
      core_.count(Counter::evictions);
      return place;
    }
    claim_free(cls, budget);
    if (cls.stock.empty()) claim_new_run(cls, budget);
    if (!cls.stock.empty()) continue;
    gather_coldest(cls);
    release_stock_of_others(cls);
    const std::uint64_t own_coldest = cls.coldest.empty() ? kNever : cls.coldest.coldest_stamp();
    if (make_room(stride, segments_.run_length(stride), own_coldest, budget)) {
      cls.coldest.clear();
      continue;
    }
    if (cls.coldest.empty()) return std::nullopt;
  }
  return std::nullopt;
}

void Allocator::claim_free(Class& cls, WaitBudget& budget) noexcept {
  // First from where the last one was found to the end, then from the start: most walks end at
  // once.
  for (const bool wrapped : {false, true}) {
    core_.view.for_each_run([&](const Run& run) {
      if (run.geometry.stride != cls.stride || (run.segment < cls.next_segment) != wrapped)
        return true;
      if (!claim_free_in(cls, run, budget)) return true;
      cls.next_segment = run.segment;
      return false;
    });
    if (!cls.stock.empty()) return;
  }
}

bool Allocator::claim_free_in(Class& cls, const Run& run, WaitBudget& budget) noexcept {
  const View& view = core_.view;
  std::vector<std::uint64_t> found;
  const std::uint64_t limit = stock_of(run);
  for (std::uint64_t i = 0; i < run.geometry.block_count && found.size() < limit; ++i) {
    const std::uint64_t offset = view.descriptor_offset(run, i);
    const Descriptor& block = view.descriptor(offset);
    if (free_to_claim(block, block.word.load(std::memory_order_acquire))) found.push_back(offset);
  }
  if (found.empty()) return false;
  // A free block is nobody's, so only the layout lock keeps its run from ending under us.
  const LockGuard layout(core_, core_.super().layout_lock, budget);
  if (!layout) return false;
  if (view.segment(run.segment).word.load(std::memory_order_acquire) != run.word) return false;
  for (const std::uint64_t offset : found) {
    Descriptor& block = view.descriptor(offset);
    std::uint64_t word = block.word.load(std::memory_order_acquire);
    if (!free_to_claim(block, word)) continue;
    const std::uint32_t generation = BlockWord::generation(word) + 1;
    if (block.word.compare_exchange_strong(
            word, BlockWord::make(BlockState::claimed, core_.slot, generation),
            std::memory_order_acq_rel)) {
      cls.stock.push_back({offset, generation});
    }
  }
  HPKV_POINT("claim.taken");
  return !cls.stock.empty();
}

void Allocator::claim_new_run(Class& cls, WaitBudget& budget) noexcept {
  const auto run = segments_.make_run(cls.stride, stock_of, budget);
  if (!run) return;
  for (std::uint64_t i = stock_of(*run); i > 0; --i) {
    cls.stock.push_back({core_.view.descriptor_offset(*run, i - 1), 1});
  }
  cls.next_segment = run->segment;
  recent_stride_.store(cls.stride, std::memory_order_relaxed);
}

void Allocator::gather_coldest(Class& cls) noexcept {
  const View& view = core_.view;
  cls.coldest.clear();
  std::uint64_t blocks = 0;
  view.for_each_run([&](const Run& run) {
    if (run.geometry.stride == cls.stride) blocks += run.geometry.block_count;
    return true;
  });
  const std::size_t limit = std::max<std::size_t>(kCandidatesMin, blocks / kCandidateShare);
  std::vector<index::Candidate> unstamped;
  view.for_each_run([&](const Run& run) {
    if (run.geometry.stride != cls.stride) return true;
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
      const std::uint64_t offset = view.descriptor_offset(run, i);
      const Descriptor& block = view.descriptor(offset);
      const std::uint64_t word = block.word.load(std::memory_order_acquire);
      if (BlockWord::state(word) != BlockState::ready || any_pin(block)) continue;
      const index::Candidate candidate{block.stamp.load(std::memory_order_acquire), offset, word,
                                       load_key(block)};
      if (candidate.stamp == 0) {
        unstamped.push_back(candidate);
      } else {
        cls.coldest.offer(candidate, limit);
      }
    }
    return true;
  });
  cls.coldest.finish(limit);
  if (view.regions() != 0) {
    cls.coldest.prefer([&view](const index::Candidate& block) {
      index::DiskFound found;
      return index::find_on_disk(view, block.key, found);
    });
  }
  for (const index::Candidate& block : unstamped) stamp_unstamped(block);
}

// Its writer died, or is stopped, between making it visible and stamping it: it is as recent as can
// be.
void Allocator::stamp_unstamped(const index::Candidate& candidate) noexcept {
  const index::ShardGuard guard(core_, shard_of(candidate.key));
  if (!guard) return;
  const auto found = guard.find(candidate.key);
  if (!found || found->word != candidate.word) return;
  std::uint64_t none = 0;
  core_.view.descriptor(found->descriptor_offset)
      .stamp.compare_exchange_strong(none, core_.take_stamps(1));
}

std::optional<Place> Allocator::evict(const index::Candidate& candidate, bool any_stamp,
                                      WaitBudget& budget) noexcept {
  index::ShardGuard guard(core_, shard_of(candidate.key), budget, TakeOver::yes);
  if (!guard) return std::nullopt;
  const auto found = guard.find(candidate.key);
  if (!found || found->descriptor_offset != candidate.descriptor_offset ||
      found->word != candidate.word) {
    return std::nullopt;
  }
  const Descriptor& block = core_.view.descriptor(found->descriptor_offset);
  if (BlockWord::state(found->word) != BlockState::ready || any_pin(block)) return std::nullopt;
  if (!any_stamp && block.stamp.load(std::memory_order_relaxed) != candidate.stamp)
    return std::nullopt;
  const std::uint32_t generation = BlockWord::generation(found->word) + 1;
  guard.take_out(*found, BlockWord::make(BlockState::claimed, core_.slot, generation));
  return Place{found->descriptor_offset, generation};
}

void Allocator::give_back(const Place& place) noexcept {
  Descriptor& block = core_.view.descriptor(place.descriptor_offset);
  std::uint64_t ours = BlockWord::make(BlockState::claimed, core_.slot, place.generation);
  if (!block.word.compare_exchange_strong(ours,
                                          BlockWord::make(BlockState::free, 0, place.generation),
                                          std::memory_order_acq_rel)) {
    core_.poison("a claimed block changed under its owner");
  }
}

template <typename Matches>
std::uint64_t Allocator::drop_if(Matches&& matches) {
  std::uint64_t dropped = 0;
  const View& view = core_.view;
  // Shards whose lock was not free in time: its holder is stopped, and costs a wait only once.
  std::array<bool, kShardCount> stuck{};
  view.for_each_run([&](const Run& run) {
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
      const std::uint64_t offset = view.descriptor_offset(run, i);
      const Descriptor& block = view.descriptor(offset);
      const std::uint64_t word = block.word.load(std::memory_order_acquire);
      if (BlockWord::state(word) != BlockState::ready || !matches(block)) continue;
      const Key key = load_key(block);
      if (stuck[shard_of(key)]) continue;
      WaitBudget budget(kEngineWaitNs);
      if (const auto place = evict({0, offset, word, key}, true, budget)) {
        give_back(*place);
        ++dropped;
      } else {
        stuck[shard_of(key)] = budget.left_ns() <= 0;
      }
    }
    return true;
  });
  const std::lock_guard classes(classes_mutex_);
  for (auto& [stride, cls] : classes_) {
    const std::lock_guard guard(cls.mutex);
    cls.coldest.clear();
  }
  return dropped;
}

std::uint64_t Allocator::drop_all() {
  return drop_if([](const Descriptor&) { return true; });
}

std::uint64_t Allocator::drop_namespace(std::uint32_t namespace_index) {
  return drop_if([namespace_index](const Descriptor& block) {
    return block.namespace_index.load(std::memory_order_relaxed) == namespace_index;
  });
}

void Allocator::give_back_stock(Class& cls) noexcept {
  for (const Place& place : cls.stock) give_back(place);
  cls.stock.clear();
}

void Allocator::release_stock() noexcept {
  const std::lock_guard classes(classes_mutex_);
  for (auto& [stride, cls] : classes_) {
    const std::lock_guard guard(cls.mutex);
    give_back_stock(cls);
  }
}

void Allocator::release_idle_stock() noexcept {
  const std::lock_guard classes(classes_mutex_);
  for (auto& [stride, cls] : classes_) {
    const std::unique_lock guard(cls.mutex, std::try_to_lock);
    if (!guard) continue;
    if (!cls.used) give_back_stock(cls);
    cls.used = false;
  }
}

// Called with the mutex of `cls` held, so the others are only tried: somebody may be doing the same
// the other way.
void Allocator::release_stock_of_others(const Class& cls) noexcept {
  const std::unique_lock classes(classes_mutex_, std::try_to_lock);
  if (!classes) return;
  for (auto& [stride, other] : classes_) {
    if (&other == &cls) continue;
    const std::unique_lock guard(other.mutex, std::try_to_lock);
    if (guard) give_back_stock(other);
  }
}

}  // namespace hpkv::shm
