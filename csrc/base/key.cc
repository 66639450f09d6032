#include "base/key.h"

namespace hpkv {
namespace {

constexpr std::uint8_t kBad = 0x80;

constexpr std::array<std::uint8_t, 256> make_nibbles() {
  std::array<std::uint8_t, 256> table{};
  table.fill(kBad);
  for (int i = 0; i < 10; ++i)
    table[static_cast<std::size_t>('0' + i)] = static_cast<std::uint8_t>(i);
  for (int i = 0; i < 6; ++i) {
    table[static_cast<std::size_t>('a' + i)] = static_cast<std::uint8_t>(10 + i);
    table[static_cast<std::size_t>('A' + i)] = static_cast<std::uint8_t>(10 + i);
  }
  return table;
}

constexpr std::array<std::uint8_t, 256> kNibbles = make_nibbles();

}  // namespace

std::optional<Key> parse_hex_key(std::string_view text) noexcept {
  if (text.size() != 64) return std::nullopt;
  std::array<std::byte, 32> raw;
  // One test at the end instead of one per digit: kBad survives the OR.
  unsigned seen = 0;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const unsigned high = kNibbles[static_cast<unsigned char>(text[2 * i])];
    const unsigned low = kNibbles[static_cast<unsigned char>(text[2 * i + 1])];
    seen |= high | low;
    raw[i] = static_cast<std::byte>(((high << 4U) | low) & 0xFFU);
  }
  if ((seen & kBad) != 0) return std::nullopt;
  return Key::from_bytes(raw);
}

}  // namespace hpkv
