// What the catalog answers by walking: the state of the host pool for the demoter, and totals.
#include "disk/catalog.h"
#include "index/disk_shard.h"
#include "shm/pool_impl.h"

namespace hpkv::disk {

using shm::BlockState;
using shm::BlockWord;
using shm::Descriptor;
using shm::DiskEntry;
using shm::DiskState;
using shm::DiskWord;
using shm::RegionWord;
using shm::SegmentKind;
using shm::SegmentWord;
using shm::View;

namespace {

std::uint64_t free_segment_bytes(const View& view) noexcept {
  const std::uint64_t count = view.superblock().segment_count;
  std::uint64_t bytes = 0;
  for (std::uint64_t i = 0; i < count;) {
    const std::uint64_t word = view.segment(i).word.load(std::memory_order_acquire);
    if (SegmentWord::kind(word) == SegmentKind::free) bytes += view.superblock().segment_bytes;
    i += View::run_step(word, count - i);
  }
  return bytes;
}

// Adds one block to what the survey knows; offers it as a candidate when it is not on disk.
void survey_block(const View& view, const shm::Run& run, std::uint64_t number,
                  const SurveyLimits& limits, Survey& survey, index::LeastRecent& coldest) {
  const std::uint64_t offset = view.descriptor_offset(run, number);
  const Descriptor& block = view.descriptor(offset);
  const std::uint64_t word = block.word.load(std::memory_order_acquire);
  survey.pool_bytes += run.geometry.stride;
  if (shm::free_to_claim(block, word)) {
    survey.free_bytes += run.geometry.stride;
    return;
  }
  if (BlockWord::state(word) != BlockState::ready || shm::any_pin(block)) {
    ++survey.busy_blocks;
    return;
  }
  const index::Candidate candidate{block.stamp.load(std::memory_order_acquire), offset, word,
                                   shm::load_key(block)};
  index::DiskFound found;
  if (index::find_on_disk(view, candidate.key, found)) {
    survey.clean_bytes += run.geometry.stride;
  } else if (candidate.stamp != 0 && limits.blocks != 0 &&
             run.geometry.stride <= limits.stride_max &&
             block.uses.load(std::memory_order_relaxed) >= limits.min_uses) {
    coldest.offer(candidate, limits.blocks);
  }
}

}  // namespace

std::uint64_t Catalog::activity() const noexcept {
  const shm::Core& core = pool_->impl_->core;
  if (core.detached()) return 0;
  // A spill takes its stamps when it is submitted: only its end tells that a block is there.
  std::uint64_t sum = core.super().stamp_clock.load(std::memory_order_relaxed);
  for (std::size_t slot = 0; slot < shm::kClientCount; ++slot)
    sum += core.view.client(slot).counters[static_cast<std::size_t>(shm::Counter::stored)].load(
        std::memory_order_relaxed);
  return sum;
}

Survey Catalog::survey(const SurveyLimits& limits) const {
  Survey survey;
  const shm::Core& core = pool_->impl_->core;
  if (core.off()) return survey;
  const View& view = core.view;
  survey.free_bytes = survey.pool_bytes = free_segment_bytes(view);
  index::LeastRecent coldest;
  view.for_each_run([&](const shm::Run& run) {
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i)
      survey_block(view, run, i, limits, survey, coldest);
    return true;
  });
  coldest.finish(limits.blocks);
  while (!coldest.empty()) {
    const index::Candidate block = coldest.take_coldest();
    const Descriptor& descriptor = view.descriptor(block.descriptor_offset);
    const std::uint32_t index = descriptor.namespace_index.load(std::memory_order_acquire);
    if (descriptor.word.load(std::memory_order_acquire) == block.word)
      survey.coldest.push_back(
          {block.key, index, block.stamp, descriptor.uses.load(std::memory_order_relaxed) != 0});
  }
  return survey;
}

std::uint64_t Catalog::pending_blocks() const {
  const shm::Core& core = pool_->impl_->core;
  std::uint64_t pending = 0;
  if (core.off() || region_count() == 0) return pending;
  const View& view = core.view;
  view.for_each_run([&](const shm::Run& run) {
    for (std::uint64_t i = 0; i < run.geometry.block_count; ++i) {
      const Descriptor& block = view.descriptor(view.descriptor_offset(run, i));
      const std::uint64_t word = block.word.load(std::memory_order_acquire);
      index::DiskFound found;
      if (BlockWord::state(word) == BlockState::ready &&
          !index::find_on_disk(view, shm::load_key(block), found)) {
        ++pending;
      }
    }
    return true;
  });
  return pending;
}

std::uint64_t Catalog::drop_namespace(std::uint32_t namespace_index) noexcept {
  shm::Core& core = pool_->impl_->core;
  if (core.off()) return 0;
  std::uint64_t dropped = 0;
  for (std::uint32_t region = 0; region < region_count(); ++region) {
    core.view.for_each_disk_entry(region, [&](std::uint64_t offset, const DiskEntry& entry) {
      const std::uint64_t word = entry.word.load(std::memory_order_acquire);
      if (DiskWord::state(word) != DiskState::ready ||
          entry.namespace_index.load(std::memory_order_acquire) != namespace_index)
        return;
      if (shm::take_out_disk_entry(core, offset, word)) ++dropped;
    });
  }
  return dropped;
}

DiskStats Catalog::stats() const {
  DiskStats stats;
  const Pool::Impl& impl = *pool_->impl_;
  for (std::uint32_t region = 0; region < region_count(); ++region) {
    const std::uint64_t region_word =
        impl.core.view.region(region).word.load(std::memory_order_acquire);
    const RegionState state = RegionWord::state(region_word);
    if (state == RegionState::unknown) ++stats.regions_unknown;
    if (state != RegionState::unknown && state != RegionState::free) ++stats.regions_in_use;
    impl.core.view.for_each_disk_entry(region, [&](std::uint64_t, const DiskEntry& entry) {
      const std::uint64_t word = entry.word.load(std::memory_order_acquire);
      if (DiskWord::state(word) == DiskState::writing) ++stats.writing;
      if (DiskWord::state(word) != DiskState::ready) return;
      const std::uint32_t index = entry.namespace_index.load(std::memory_order_relaxed);
      if (index >= shm::kNamespaceCount) return;
      const std::uint64_t bytes = impl.namespaces.block_bytes(index);
      ++stats.entries;
      ++stats.entries_by_namespace[index];
      stats.bytes += bytes;
      stats.bytes_by_namespace[index] += bytes;
    });
  }
  return stats;
}

}  // namespace hpkv::disk
