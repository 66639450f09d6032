// A block key: 256 bits that already are a hash, so the index takes its bits as they are. Keys
// compare as values and have no order. The all-zero key is valid and not special.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

namespace hpkv {

struct Key {
  std::array<std::uint64_t, 4> words{};

  friend bool operator==(const Key&, const Key&) = default;

  // Bytes in the order the hash printed them; words are filled in host order (little-endian
  // machines only, asserted in shm/format.h).
  [[nodiscard]] static Key from_bytes(std::span<const std::byte, 32> raw) noexcept {
    Key key;
    std::memcpy(key.words.data(), raw.data(), raw.size());
    return key;
  }

  void to_bytes(std::span<std::byte, 32> raw) const noexcept {
    std::memcpy(raw.data(), words.data(), raw.size());
  }

  // Keys of another scope never meet: the mask is a hash of the scope.
  [[nodiscard]] Key masked(const Key& mask) const noexcept {
    Key out;
    for (std::size_t i = 0; i < words.size(); ++i) out.words[i] = words[i] ^ mask.words[i];
    return out;
  }
};

static_assert(sizeof(Key) == 32);

// Parses exactly 64 hexadecimal digits (either case); anything else is nullopt.
[[nodiscard]] std::optional<Key> parse_hex_key(std::string_view text) noexcept;

}  // namespace hpkv
