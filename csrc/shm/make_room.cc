// A segment changing class: the part of the allocator that ends runs of other classes. What it
// leaves of their prefixes are orphans, which are never promised (a lookup stops at the gap) and
// age out.
#include <algorithm>
#include <limits>
#include <vector>

#include "base/points.h"
#include "shm/allocator.h"

namespace hpkv::shm {
namespace {

constexpr std::uint64_t kBlocked = std::numeric_limits<std::uint64_t>::max();

// The stamp of the most recent block of a run; 0 when it holds none; kBlocked when one may not go.
std::uint64_t warmth(const View& view, const Run& run) noexcept {
  std::uint64_t warmest = 0;
  for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
    const Descriptor& block = view.descriptor(view.descriptor_offset(run, i));
    switch (BlockWord::state(block.word.load(std::memory_order_acquire))) {
      case BlockState::free:
        continue;
      case BlockState::ready:
        if (any_pin(block)) return kBlocked;
        warmest = std::max(warmest, block.stamp.load(std::memory_order_relaxed));
        continue;
      case BlockState::draining:
        if (any_pin(block)) return kBlocked;
        continue;
      case BlockState::claimed:
      case BlockState::writing:
        return kBlocked;
    }
    return kBlocked;
  }
  return warmest;
}

// What each segment costs: the warmth of its run, 0 when it is free and can be used as it is.
struct Plan {
  std::vector<std::uint64_t> warmth_of_segment;
  std::vector<Run> runs;
};

Plan survey(const View& view, const Segments& segments, std::uint64_t own_stride) {
  Plan plan;
  const std::uint64_t count = view.superblock().segment_count;
  plan.warmth_of_segment.assign(count, kBlocked);
  for (std::uint64_t i = 0; i < count;) {
    const std::uint64_t word = view.segment(i).word.load(std::memory_order_acquire);
    const std::uint64_t length = View::run_step(word, count - i);
    std::uint64_t cost = segments.usable(i, word) ? 0 : kBlocked;
    Run run;
    if (view.block_run(i, run) && run.geometry.stride != own_stride) {
      cost = warmth(view, run);
      plan.runs.push_back(run);
    }
    std::fill_n(plan.warmth_of_segment.begin() + static_cast<std::ptrdiff_t>(i), length, cost);
    i += length;
  }
  return plan;
}

}  // namespace

bool Allocator::free_segment() noexcept {
  release_stock();  // a claimed place keeps its run from ending
  WaitBudget budget(kEngineWaitNs);
  constexpr std::uint64_t kNoClass = 0;
  return make_room(kNoClass, 1, kBlocked, budget);
}

bool Allocator::make_room(std::uint64_t stride, std::uint64_t length, std::uint64_t limit_stamp,
                          WaitBudget& budget) noexcept {
  const LockGuard layout(core_, core_.super().layout_lock, budget);
  if (!layout) return false;
  const Plan plan = survey(core_.view, segments_, stride);
  std::uint64_t best = kBlocked;
  std::uint64_t best_start = 0;
  for (std::uint64_t start = 0; start + length <= plan.warmth_of_segment.size(); ++start) {
    const auto first = plan.warmth_of_segment.begin() + static_cast<std::ptrdiff_t>(start);
    const std::uint64_t warmest =
        *std::max_element(first, first + static_cast<std::ptrdiff_t>(length));
    if (warmest < best) {
      best = warmest;
      best_start = start;
    }
  }
  if (best == kBlocked || best >= limit_stamp) return false;
  bool ended = false;
  for (const Run& run : plan.runs) {
    const std::uint64_t end = run.segment + SegmentWord::run_length(run.word);
    if (end <= best_start || run.segment >= best_start + length) continue;
    if (!empty_run(run, budget)) return false;
    HPKV_POINT("make_room.emptied");
    // Every block is claimed by us, so none is in the index and nobody has a reference: the run may
    // end.
    core_.view.segment(run.segment)
        .word.store(
            SegmentWord::make(SegmentKind::free, 0, 0, static_cast<std::uint32_t>(run.word >> 32U)),
            std::memory_order_release);
    HPKV_POINT("make_room.ended");
    ended = true;
  }
  return ended;
}

// Claims every block of the run, or gives all back. Under the layout lock.
bool Allocator::empty_run(const Run& run, WaitBudget& budget) noexcept {
  const View& view = core_.view;
  std::vector<Place> claimed;
  for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
    const std::uint64_t offset = view.descriptor_offset(run, i);
    Descriptor& block = view.descriptor(offset);
    std::uint64_t word = block.word.load(std::memory_order_acquire);
    if (free_to_claim(block, word)) {
      const std::uint32_t generation = BlockWord::generation(word) + 1;
      if (block.word.compare_exchange_strong(
              word, BlockWord::make(BlockState::claimed, core_.slot, generation),
              std::memory_order_acq_rel)) {
        claimed.push_back({offset, generation});
        continue;
      }
    } else if (BlockWord::state(word) == BlockState::ready) {
      if (const auto place = evict({0, offset, word, load_key(block)}, true, budget)) {
        claimed.push_back(*place);
        core_.count(Counter::evictions);
        continue;
      }
    }
    for (const Place& place : claimed) give_back(place);
    return false;
  }
  return true;
}

}  // namespace hpkv::shm
