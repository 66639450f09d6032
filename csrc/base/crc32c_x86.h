// The checksum by the CPU's own instructions on x86-64. Internal: callers use base/crc32c.h.
#pragma once

#if defined(__x86_64__)
#define HPKV_CRC32C_X86 1

#include <cstddef>
#include <cstdint>
#include <span>

namespace hpkv::x86 {

// Whether this CPU has SSE4.2, PCLMULQDQ and AVX2; asked once.
[[nodiscard]] bool available() noexcept;

[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept;
[[nodiscard]] std::uint32_t copy_nt_crc32c(std::byte* target, const std::byte* source,
                                           std::size_t count, std::uint32_t crc) noexcept;
void copy_nt(std::byte* target, const std::byte* source, std::size_t count) noexcept;
void fence() noexcept;

}  // namespace hpkv::x86

#endif
