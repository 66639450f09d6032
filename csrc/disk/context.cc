#include "disk/context.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace hpkv::disk {

void Tally::failed(std::atomic<std::uint64_t>& kind, std::string what, int code) {
  const bool space = code == -ENOSPC || code == -EDQUOT;
  (space ? space_errors : kind).fetch_add(1, std::memory_order_relaxed);
  std::string text = std::move(what) + ": " + std::generic_category().message(-code);
  const std::lock_guard guard(mutex_);
  last_error_ = std::move(text);
}

StoreCounters Tally::snapshot() const {
  StoreCounters out;
  out.read_blocks = read_blocks;
  out.read_bytes = read_bytes;
  out.written_blocks = written_blocks;
  out.written_bytes = written_bytes;
  out.carried_blocks = carried_blocks;
  out.recovered_blocks = recovered_blocks;
  out.regions_sealed = regions_sealed;
  out.regions_evicted = regions_evicted;
  out.regions_removed = regions_removed;
  out.refused_blocks = refused_blocks;
  out.bad_blocks = bad_blocks;
  out.stale_reads = stale_reads;
  out.read_errors = read_errors;
  out.write_errors = write_errors;
  out.sync_errors = sync_errors;
  out.space_errors = space_errors;
  const std::lock_guard guard(mutex_);
  out.last_error = last_error_;
  return out;
}

bool Context::recovered() const noexcept {
  for (std::uint32_t i = 0; i < region_count(); ++i) {
    const RegionState state = catalog->region(i).state;
    if (state == RegionState::unknown || state == RegionState::recovering) return false;
  }
  return true;
}

int Context::available_bytes(std::uint64_t& bytes) {
  FileSystemSpace space;
  const int code = files.files().space(directory.path(), space);
  if (code < 0) tally.failed(tally.read_errors, "ask how much space is left", code);
  bytes = space.available_bytes;
  return code;
}

}  // namespace hpkv::disk
