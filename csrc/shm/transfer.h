// One block in, one block out, in the caller's thread: for tests, tools and benchmarks. The copy
// engine does the same in its own threads, many at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "shm/pool.h"

namespace hpkv {

enum class PutStatus { stored, present, full, busy, off };

// payload.size() must be the namespace's block_bytes: Error{argument}.
[[nodiscard]] PutStatus put(Pool& pool, std::uint32_t namespace_index, const Key& key,
                            std::span<const std::byte> payload);

// Copies a block whose checksum holds; false is a miss (also when `out` has another size than the
// block).
[[nodiscard]] bool get(Pool& pool, const Key& key, std::span<std::byte> out) noexcept;

// Whether a pinned block's bytes match its checksum; remembers the answer for this epoch, condemns
// a bad block.
[[nodiscard]] bool verify(Pool& pool, const BlockRef& ref) noexcept;

}  // namespace hpkv
