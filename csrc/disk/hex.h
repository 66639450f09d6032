// Bytes as lower-case hexadecimal digits, for names and messages.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace hpkv::disk {

[[nodiscard]] inline std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes) {
    text.push_back(digits[std::to_integer<unsigned>(byte) >> 4U]);
    text.push_back(digits[std::to_integer<unsigned>(byte) & 15U]);
  }
  return text;
}

}  // namespace hpkv::disk
