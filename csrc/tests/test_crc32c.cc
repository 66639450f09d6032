#include <algorithm>
#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "tests/check.h"

namespace hpkv {
namespace {

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The definition, bit by bit.
std::uint32_t slow_crc32c(std::span<const std::byte> bytes) {
  std::uint32_t state = 0xffffffff;
  for (const std::byte byte : bytes) {
    state ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? 0x82f63b78U : 0U);
  }
  return ~state;
}

// Lengths around every boundary of the implementation: words, lines, chunks.
std::vector<std::size_t> interesting_lengths() {
  std::vector<std::size_t> lengths;
  for (const std::size_t unit : {1U, 8U, 64U, 384U, 4096U}) {
    for (const std::size_t count : {0U, 1U, 2U, 3U, 5U}) {
      for (const std::size_t extra : {0U, 1U, 7U, 63U}) {
        lengths.push_back(unit * count + extra);
      }
    }
  }
  return lengths;
}

}  // namespace

TEST(known_values_of_the_standard) {
  CHECK(crc32c(bytes_of("123456789")) == 0xe3069283);
  CHECK(crc32c({}) == 0);
  const std::vector<std::byte> zeros(32, std::byte{0});
  CHECK(crc32c(zeros) == 0x8a9136aa);
  const std::vector<std::byte> ones(32, std::byte{0xff});
  CHECK(crc32c(ones) == 0x62a8ab43);
}

TEST(both_implementations_equal_the_definition_at_every_alignment) {
  std::mt19937_64 random(1);
  const auto bytes = random_bytes(random, 21000);
  for (const std::size_t length : interesting_lengths()) {
    for (const std::size_t offset : {0U, 1U, 5U, 8U, 31U}) {
      const std::span<const std::byte> part(bytes.data() + offset, length);
      const std::uint32_t expected = slow_crc32c(part);
      CHECK(crc32c(part) == expected);
      CHECK(portable::crc32c(part) == expected);
    }
  }
}

TEST(continuing_and_combining_equal_the_whole) {
  std::mt19937_64 random(2);
  const auto bytes = random_bytes(random, 21000);
  for (const std::size_t length : interesting_lengths()) {
    const std::span<const std::byte> whole(bytes.data() + 3, length);
    const std::size_t cut = length == 0 ? 0 : random() % length;
    const std::uint32_t first = crc32c(whole.first(cut));
    CHECK(crc32c(whole.subspan(cut), first) == crc32c(whole));
    CHECK(portable::crc32c(whole.subspan(cut), first) == crc32c(whole));
    const std::uint32_t second = crc32c(whole.subspan(cut));
    CHECK(crc32c_combine(first, second, length - cut) == crc32c(whole));
  }
}

TEST(combine_takes_lengths_no_memory_has) {
  // 2^61 bytes are 2^64 bits: an exponent that is multiplied by eight would wrap to zero.
  const std::uint64_t huge = std::uint64_t{1} << 61;
  CHECK(crc32c_combine(1, 0, huge) != 1);
  // Zeros that follow in two steps are zeros that follow in one.
  CHECK(crc32c_combine(crc32c_combine(1, 0, huge), 0, huge) == crc32c_combine(1, 0, 2 * huge));
}

TEST(fused_copy_copies_exactly_the_bytes_it_checksums) {
  std::mt19937_64 random(3);
  const auto source = random_bytes(random, 21000);
  for (const std::size_t length : interesting_lengths()) {
    for (const std::size_t to : {0U, 1U, 16U, 63U}) {
      const std::size_t from = random() % 64;
      const std::uint32_t before = static_cast<std::uint32_t>(random());
      std::vector<std::byte> target(length + 256, std::byte{0xa5});
      const std::uint32_t crc =
          copy_nt_crc32c(target.data() + 64 + to, source.data() + from, length, before);
      CHECK(crc == portable::crc32c({source.data() + from, length}, before));
      CHECK(std::equal(source.begin() + static_cast<std::ptrdiff_t>(from),
                       source.begin() + static_cast<std::ptrdiff_t>(from + length),
                       target.begin() + static_cast<std::ptrdiff_t>(64 + to)));
      const auto untouched = [](std::byte byte) { return byte == std::byte{0xa5}; };
      CHECK(std::all_of(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(64 + to),
                        untouched));
      CHECK(std::all_of(target.begin() + static_cast<std::ptrdiff_t>(64 + to + length),
                        target.end(), untouched));
    }
  }
}

TEST(plain_and_portable_copies_write_the_same_bytes) {
  std::mt19937_64 random(4);
  const auto source = random_bytes(random, 21000);
  for (const std::size_t length : interesting_lengths()) {
    std::vector<std::byte> plain(length + 64, std::byte{0xa5});
    std::vector<std::byte> fallback = plain;
    copy_nt(plain.data() + 7, source.data() + 5, length);
    CHECK(portable::copy_crc32c(fallback.data() + 7, source.data() + 5, length, 0) ==
          crc32c({source.data() + 5, length}));
    CHECK(plain == fallback);
    CHECK(std::equal(plain.begin() + 7, plain.begin() + 7 + static_cast<std::ptrdiff_t>(length),
                     source.begin() + 5));
  }
}

TEST(every_flipped_bit_changes_the_checksum) {
  std::mt19937_64 random(5);
  auto bytes = random_bytes(random, 1000);
  const std::uint32_t before = crc32c(bytes);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1U << (bit % 8));
    bytes[bit / 8] ^= mask;
    CHECK(crc32c(bytes) != before);
    bytes[bit / 8] ^= mask;
  }
}

}  // namespace hpkv

TEST_MAIN
