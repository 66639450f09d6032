// CRC32C (Castagnoli) of bytes in memory, and copies that checksum what they copy in the same pass.
//
// Values are the usual ones (initial and final inversion, crc32c("123456789") == 0xe3069283), so a
// checksum can be continued by passing it back in, and parts computed apart can be combined.
//
// Invariant: every implementation returns the same value for the same bytes, whatever their
// address. Threads: pure functions; no state beyond constants. The implementation is chosen once
// per process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hpkv {

// The checksum of `bytes`, continuing from `crc`, the checksum of what came before them.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t crc = 0) noexcept;

// The checksum of a part with checksum `first` followed by `second_bytes` bytes with checksum
// `second`. Takes below a microsecond for any length.
[[nodiscard]] std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                                           std::uint64_t second_bytes) noexcept;

// Copies `count` bytes past the cache and returns their checksum, continuing from `crc`. The ranges
// may not overlap; any alignment and length. On return the stores are ordered before every later
// store of this thread, so a block may be published right after.
[[nodiscard]] std::uint32_t copy_nt_crc32c(std::byte* target, const std::byte* source,
                                           std::size_t count, std::uint32_t crc = 0) noexcept;

// The same copy without a checksum.
void copy_nt(std::byte* target, const std::byte* source, std::size_t count) noexcept;

// For copies made of many pieces: the same without the final fence. Nothing that says the bytes are
// there may be stored before `nt_fence()`.
[[nodiscard]] std::uint32_t copy_nt_crc32c_unfenced(std::byte* target, const std::byte* source,
                                                    std::size_t count, std::uint32_t crc) noexcept;
void copy_nt_unfenced(std::byte* target, const std::byte* source, std::size_t count) noexcept;
void nt_fence() noexcept;

// "x86 crc32+pclmul+avx2" or "portable": what this process uses.
[[nodiscard]] const char* crc32c_implementation() noexcept;

// The fallback, reachable on every machine so that tests compare it with the dispatched one.
namespace portable {
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t crc = 0) noexcept;
[[nodiscard]] std::uint32_t copy_crc32c(std::byte* target, const std::byte* source,
                                        std::size_t count, std::uint32_t crc) noexcept;
}  // namespace portable

}  // namespace hpkv
