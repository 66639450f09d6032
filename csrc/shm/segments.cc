#include "shm/segments.h"

#include <algorithm>

#include "base/points.h"
#include "shm/limits.h"

namespace hpkv::shm {
namespace {

constexpr std::int64_t kRefusalNs = kSecond;
// Room left below a memory limit for everything else this process does.
constexpr std::uint64_t kLimitMarginBytes = std::uint64_t{64} << 20U;

// Atomic stores, because a lookup with an old index entry may still look at these bytes (and will
// discard them).
void zero(std::byte* begin, std::uint64_t bytes) noexcept {
  auto* words = reinterpret_cast<AtomicU64*>(begin);
  for (std::uint64_t i = 0; i < bytes / sizeof(std::uint64_t); ++i)
    words[i].store(0, std::memory_order_relaxed);
}

std::uint32_t next_generation(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word >> 32U) + 1;
}

}  // namespace

std::uint64_t Segments::run_length(std::uint64_t stride) const noexcept {
  return run_length_for(stride, core_.super().segment_bytes, core_.super().segment_count);
}

bool Segments::usable(std::uint64_t segment, std::uint64_t word) const noexcept {
  if (SegmentWord::kind(word) != SegmentKind::free) return false;
  return now_ns() >= refused_until_.load(std::memory_order_relaxed) ||
         core_.view.segment(segment).backed_bytes.load(std::memory_order_acquire) >=
             core_.super().segment_bytes;
}

std::optional<std::uint64_t> Segments::find_free(std::uint64_t length) const noexcept {
  const std::uint64_t count = core_.super().segment_count;
  std::uint64_t free_run = 0;
  for (std::uint64_t i = 0; i < count;) {
    const std::uint64_t word = core_.view.segment(i).word.load(std::memory_order_acquire);
    if (usable(i, word)) {
      ++free_run;
      ++i;
      if (free_run == length) return i - length;
    } else {
      free_run = 0;
      i += View::run_step(word, count - i);
    }
  }
  return std::nullopt;
}

bool Segments::limits_allow(std::uint64_t bytes) const noexcept {
  for (const MemoryLimit& limit :
       memory_limits(core_.options.proc_root, core_.options.cgroup_root)) {
    const std::uint64_t margin = std::min(kLimitMarginBytes, limit.max_bytes / 16);
    if (limit.used_bytes + bytes + margin > limit.max_bytes) return false;
  }
  return true;
}

// Backs the first `bytes` of a stretch that starts at a segment.
bool Segments::back(std::uint64_t segment, std::uint64_t bytes) noexcept {
  const std::uint64_t segment_bytes = core_.super().segment_bytes;
  for (; bytes > 0; ++segment) {
    const std::uint64_t wanted = std::min(bytes, segment_bytes);
    AtomicU64& backed = core_.view.segment(segment).backed_bytes;
    std::uint64_t have = backed.load(std::memory_order_acquire);
    if (have < wanted) {
      if (now_ns() < refused_until_.load(std::memory_order_relaxed)) return false;
      if (!limits_allow(wanted - have) ||
          !reserve_memory(core_.fd(), core_.view.segment_offset(segment) + have, wanted - have)) {
        refused_until_.store(now_ns() + kRefusalNs, std::memory_order_relaxed);
        return false;
      }
      // Somebody else may have backed more meanwhile: never shrink it.
      while (have < wanted &&
             !backed.compare_exchange_weak(have, wanted, std::memory_order_release)) {
      }
    }
    bytes -= wanted;
  }
  return true;
}

void Segments::fill_descriptors(const Run& run, std::uint64_t claim_count) noexcept {
  const View& view = core_.view;
  zero(view.at(run.offset), run.geometry.payload_offset);
  for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
    Descriptor& block = view.descriptor(view.descriptor_offset(run, i));
    block.segment.store(static_cast<std::uint32_t>(run.segment), std::memory_order_relaxed);
    block.payload_offset.store(view.payload_offset(run, i), std::memory_order_relaxed);
    block.mark_offset.store(run.offset + run.geometry.marks_offset + i, std::memory_order_relaxed);
    const std::uint64_t word = i < claim_count ? BlockWord::make(BlockState::claimed, core_.slot, 1)
                                               : BlockWord::make(BlockState::free, 0, 1);
    block.word.store(word, std::memory_order_release);
  }
}

std::optional<Run> Segments::make_run(std::uint64_t stride,
                                      std::uint64_t (*claim_count)(const Run&),
                                      WaitBudget& budget) noexcept {
  std::uint64_t length = run_length(stride);
  Run run;
  {
    const LockGuard layout(core_, core_.super().layout_lock, budget);
    if (!layout) return std::nullopt;
    auto found = find_free(length);
    // Segments left over beside the long runs: a shorter run wastes more of itself, no run wastes
    // all.
    while (!found && length > 1 &&
           run_geometry((length - 1) * core_.super().segment_bytes, stride).block_count > 0) {
      found = find_free(--length);
    }
    if (!found) return std::nullopt;
    run.segment = *found;
    SegmentRecord& head = core_.view.segment(run.segment);
    const std::uint32_t generation = next_generation(head.word.load(std::memory_order_relaxed));
    run.word = SegmentWord::make(SegmentKind::blocks, 0, length, generation);
    head.word.store(SegmentWord::make(SegmentKind::reserving, core_.slot, length, generation),
                    std::memory_order_release);
    head.stride.store(stride, std::memory_order_release);
  }
  HPKV_POINT("run.reserving");
  run.offset = core_.view.segment_offset(run.segment);
  const std::uint64_t run_bytes = length * core_.super().segment_bytes;
  run.geometry = run_geometry(run_bytes, stride);
  SegmentRecord& head = core_.view.segment(run.segment);
  if (!back(run.segment, run_bytes)) {
    // While it says `reserving` with our slot, the word is ours to change.
    head.word.store(SegmentWord::make(SegmentKind::free, 0, 0, next_generation(run.word)),
                    std::memory_order_release);
    return std::nullopt;
  }
  HPKV_POINT("run.backed");
  fill_descriptors(run, claim_count(run));
  HPKV_POINT("run.before_publish");
  // Release: partner of the acquire in for_each_run; the descriptors come first.
  head.word.store(run.word, std::memory_order_release);
  HPKV_POINT("run.published");
  return run;
}

std::optional<std::uint64_t> Segments::take_index_memory(std::uint64_t bytes) noexcept {
  Superblock& super = core_.super();
  bytes = round_up(bytes, sizeof(Bucket));
  if (bytes > super.segment_bytes) return std::nullopt;
  const LockGuard layout(core_, super.layout_lock, kEngineWaitNs);
  if (!layout) return std::nullopt;
  std::uint64_t segment = super.index_segment.load(std::memory_order_relaxed);
  std::uint64_t cursor = super.index_cursor.load(std::memory_order_relaxed);
  if (cursor + bytes > super.segment_bytes) {
    const auto found = find_free(1);
    if (!found || !back(*found, bytes)) return std::nullopt;
    segment = *found;
    cursor = 0;
    AtomicU64& word = core_.view.segment(segment).word;
    word.store(SegmentWord::make(SegmentKind::index, 0, 1,
                                 next_generation(word.load(std::memory_order_relaxed))),
               std::memory_order_release);
    HPKV_POINT("index_memory.segment");
    // A death between these two leaves the rest of the old segment, or the new one, unused: never
    // used twice.
    super.index_cursor.store(super.segment_bytes, std::memory_order_release);
    super.index_segment.store(segment, std::memory_order_release);
  }
  const std::uint64_t unit = std::max<std::uint64_t>(kPageBytes, bytes);
  if (!back(segment, std::min(round_up(cursor + bytes, unit), super.segment_bytes)))
    return std::nullopt;
  HPKV_POINT("index_memory.before_cursor");
  super.index_cursor.store(cursor + bytes, std::memory_order_release);
  HPKV_POINT("index_memory.taken");
  const std::uint64_t offset = core_.view.segment_offset(segment) + cursor;
  zero(core_.view.at(offset), bytes);
  return offset;
}

void Segments::reserve_ahead(std::uint64_t stride) noexcept {
  const std::uint64_t length = run_length(stride);
  // A guess without the lock is enough: memory behind a segment that somebody else takes is not
  // lost.
  const auto found = find_free(length);
  if (found) static_cast<void>(back(*found, length * core_.super().segment_bytes));
}

std::uint64_t Segments::reserved_bytes() const noexcept {
  std::uint64_t bytes = core_.super().head_bytes;
  for (std::uint64_t i = 0; i < core_.super().segment_count; ++i) {
    bytes += core_.view.segment(i).backed_bytes.load(std::memory_order_relaxed);
  }
  return bytes;
}

}  // namespace hpkv::shm
