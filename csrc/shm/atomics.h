// The atomics that the pool's records are made of: lock-free, so they work between processes.
#pragma once

#include <atomic>
#include <cstdint>

namespace hpkv::shm {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

using AtomicU64 = std::atomic<std::uint64_t>;
using AtomicU32 = std::atomic<std::uint32_t>;
using AtomicU8 = std::atomic<std::uint8_t>;

}  // namespace hpkv::shm
