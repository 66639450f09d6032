#include "shm/local_pins.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/error.h"

namespace hpkv::shm {

LocalPins::LocalPins(View view, std::uint32_t slot, std::uint64_t pool_bytes)
    : view_(view), slot_(slot), bytes_(pool_bytes / sizeof(Descriptor) * sizeof(std::uint32_t)) {
  void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw_system("reserve address space for", "pin counts", errno);
  // Sparse by design: a huge page here would be memory for nothing.
  ::madvise(base, bytes_, MADV_NOHUGEPAGE);
  counts_ = static_cast<std::uint32_t*>(base);
}

LocalPins::~LocalPins() { ::munmap(counts_, bytes_); }

void LocalPins::pin(std::uint64_t descriptor_offset) noexcept {
  const std::lock_guard guard(stripe(descriptor_offset));
  if (count(descriptor_offset)++ != 0) return;
  // Release is enough: whoever evicts looks at the bits under the shard's lock, which we hold or
  // which orders us.
  view_.descriptor(descriptor_offset)
      .pins[slot_ / 64]
      .fetch_or(std::uint64_t{1} << (slot_ % 64), std::memory_order_acq_rel);
}

bool LocalPins::unpin(std::uint64_t descriptor_offset) noexcept {
  const std::lock_guard guard(stripe(descriptor_offset));
  std::uint32_t& pins = count(descriptor_offset);
  if (pins == 0) return false;
  if (--pins != 0) return true;
  // Release: partner of the acquire in any_pin; our reads of the payload are over before the block
  // may be taken.
  view_.descriptor(descriptor_offset)
      .pins[slot_ / 64]
      .fetch_and(~(std::uint64_t{1} << (slot_ % 64)), std::memory_order_release);
  return true;
}

bool LocalPins::pinned(std::uint64_t descriptor_offset) noexcept {
  const std::lock_guard guard(stripe(descriptor_offset));
  return count(descriptor_offset) != 0;
}

}  // namespace hpkv::shm
