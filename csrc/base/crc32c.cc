#include "base/crc32c.h"

#include <array>
#include <cstring>

#include "base/crc32c_polynomial.h"
#include "base/crc32c_x86.h"

namespace hpkv {
namespace {

// kSlices[k][b]: the register left by byte b followed by k zero bytes. Eight of them let one step
// take eight bytes with eight independent look-ups.
using Slices = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Slices make_slices() {
  Slices slices{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = polynomial::times_x(value);
    slices[0][byte] = value;
  }
  for (std::size_t k = 1; k < slices.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = slices[k - 1][byte];
      slices[k][byte] = (before >> 8) ^ slices[0][before & 0xff];
    }
  }
  return slices;
}

constexpr Slices kSlices = make_slices();

std::uint32_t take_byte(std::uint32_t state, std::byte byte) noexcept {
  return (state >> 8) ^ kSlices[0][(state ^ static_cast<std::uint32_t>(byte)) & 0xff];
}

std::uint32_t take_eight(std::uint32_t state, const std::byte* bytes) noexcept {
  // Byte by byte instead of one load: the order of bytes in memory is what counts, so this is
  // right on either endianness, and compilers turn it into one load where they can.
  std::uint32_t value = 0;
  for (std::size_t k = 0; k < 4; ++k) {
    value ^= kSlices[7 - k][((state >> (8 * k)) ^ static_cast<std::uint32_t>(bytes[k])) & 0xff];
    value ^= kSlices[3 - k][static_cast<std::size_t>(bytes[4 + k])];
  }
  return value;
}

}  // namespace

namespace portable {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  std::uint32_t state = ~crc;
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) state = take_eight(state, bytes.data() + at);
  for (; at < bytes.size(); ++at) state = take_byte(state, bytes[at]);
  return ~state;
}

std::uint32_t copy_crc32c(std::byte* target, const std::byte* source, std::size_t count,
                          std::uint32_t crc) noexcept {
  // In pieces that stay in the first-level cache between the checksum and the copy.
  constexpr std::size_t kPiece = 4096;
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t length = count - at < kPiece ? count - at : kPiece;
    crc = crc32c({source + at, length}, crc);
    std::memcpy(target + at, source + at, length);
  }
  return crc;
}

}  // namespace portable

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                             std::uint64_t second_bytes) noexcept {
  // The two inversions cancel out, so finished checksums combine like bare registers.
  return polynomial::product(first, polynomial::x_to_the_bytes(second_bytes)) ^ second;
}

#ifdef HPKV_CRC32C_X86

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  return x86::available() ? x86::crc32c(bytes, crc) : portable::crc32c(bytes, crc);
}

std::uint32_t copy_nt_crc32c_unfenced(std::byte* target, const std::byte* source, std::size_t count,
                                      std::uint32_t crc) noexcept {
  if (x86::available()) return x86::copy_nt_crc32c(target, source, count, crc);
  return portable::copy_crc32c(target, source, count, crc);
}

void copy_nt_unfenced(std::byte* target, const std::byte* source, std::size_t count) noexcept {
  if (x86::available()) {
    x86::copy_nt(target, source, count);
  } else if (count != 0) {
    std::memcpy(target, source, count);
  }
}

void nt_fence() noexcept {
  if (x86::available()) x86::fence();
}

const char* crc32c_implementation() noexcept {
  return x86::available() ? "x86 crc32+pclmul+avx2" : "portable";
}

#else

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  return portable::crc32c(bytes, crc);
}

std::uint32_t copy_nt_crc32c_unfenced(std::byte* target, const std::byte* source, std::size_t count,
                                      std::uint32_t crc) noexcept {
  return portable::copy_crc32c(target, source, count, crc);
}

void copy_nt_unfenced(std::byte* target, const std::byte* source, std::size_t count) noexcept {
  if (count != 0) std::memcpy(target, source, count);
}

// Plain stores are ordered by the release store that publishes them.
void nt_fence() noexcept {}

const char* crc32c_implementation() noexcept { return "portable"; }

#endif

std::uint32_t copy_nt_crc32c(std::byte* target, const std::byte* source, std::size_t count,
                             std::uint32_t crc) noexcept {
  const std::uint32_t result = copy_nt_crc32c_unfenced(target, source, count, crc);
  nt_fence();
  return result;
}

void copy_nt(std::byte* target, const std::byte* source, std::size_t count) noexcept {
  copy_nt_unfenced(target, source, count);
  nt_fence();
}

}  // namespace hpkv
