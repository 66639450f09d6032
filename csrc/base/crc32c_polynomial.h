// Arithmetic on polynomials over GF(2) modulo the Castagnoli polynomial, at compile time where the
// operands are constants. Internal to the checksum: it derives every folding constant, so none is
// typed in by hand.
//
// A value is reflected as CRC registers are: bit 31 is the coefficient of x^0, bit 0 that of x^31.
#pragma once

#include <cstdint>

namespace hpkv::polynomial {

inline constexpr std::uint32_t kCastagnoli = 0x82f63b78;
inline constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t value) noexcept {
  return (value >> 1) ^ ((value & 1) != 0 ? kCastagnoli : 0);
}

constexpr std::uint32_t product(std::uint32_t left, std::uint32_t right) noexcept {
  std::uint32_t sum = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if (((left >> bit) & 1) != 0) sum ^= right;
    right = times_x(right);
  }
  return sum;
}

// x^exponent, by squaring.
constexpr std::uint32_t x_to_the(std::uint64_t exponent) noexcept {
  std::uint32_t result = kOne;
  for (std::uint32_t square = times_x(kOne); exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

// x^(8 * bytes): by how much a register moves when `bytes` zero bytes follow. `bytes` may be any
// 64-bit number: the factor 8 is applied to the base, not to the exponent.
constexpr std::uint32_t x_to_the_bytes(std::uint64_t bytes) noexcept {
  std::uint32_t result = kOne;
  for (std::uint32_t square = x_to_the(8); bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

}  // namespace hpkv::polynomial
