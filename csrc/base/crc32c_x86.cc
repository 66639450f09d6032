// Three registers at a time, because the crc32 instruction answers after three cycles and starts
// every cycle. A chunk is three adjacent lanes; the registers meet again by a carry-less multiply:
//
//   | lane 0 | lane 1 | lane 2 |      register = r0 * x^(16 L) + r1 * x^(8 L) + r2
//
// with L the bytes of a lane. All three start at zero and the running register is folded in apart,
// so consecutive chunks overlap in the pipeline. Lanes are short: streams a page or so apart made
// the non-temporal copy three times slower (loads falsely depend on stores with the same low bits).
#include "base/crc32c_x86.h"

#ifdef HPKV_CRC32C_X86

#include <immintrin.h>

#include <cstring>

#include "base/crc32c_polynomial.h"

// Functions carry their instruction set themselves, so no special compiler flags are needed and a
// CPU without it never enters them.
#define HPKV_X86 __attribute__((target("sse4.2,pclmul,avx2")))

namespace hpkv::x86 {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kLane = 2 * kLine;
constexpr std::size_t kChunk = 3 * kLane;
constexpr std::size_t kChecksumAhead = 2048;
constexpr std::size_t kCopyAhead = 512;

// crc32_u64(0, a *carry-less* b) is a * b * x^33 modulo the polynomial: 32 from the instruction,
// one because a 63-bit product sits in a 64-bit word. So the constant lacks these 33.
consteval std::uint32_t shift_constant(std::size_t bytes) {
  return polynomial::x_to_the(8 * bytes - 33);
}

HPKV_X86 inline std::uint64_t load(const std::byte* bytes) noexcept {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

template <std::size_t Bytes>
HPKV_X86 inline std::uint64_t shifted(std::uint64_t state) noexcept {
  constexpr std::uint32_t kConstant = shift_constant(Bytes);
  const __m128i wide = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)),
                                            _mm_cvtsi32_si128(static_cast<int>(kConstant)), 0);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(wide)));
}

// One register per lane of the chunk.
struct Lanes {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
};

HPKV_X86 inline std::uint64_t joined(std::uint64_t state, const Lanes& lanes) noexcept {
  return shifted<3 * kLane>(state) ^ shifted<2 * kLane>(lanes.first) ^
         shifted<kLane>(lanes.second) ^ lanes.third;
}

HPKV_X86 inline void take_line(Lanes& lanes, const std::byte* line) noexcept {
  for (std::size_t at = 0; at < kLine; at += 8) {
    lanes.first = _mm_crc32_u64(lanes.first, load(line + at));
    lanes.second = _mm_crc32_u64(lanes.second, load(line + kLane + at));
    lanes.third = _mm_crc32_u64(lanes.third, load(line + 2 * kLane + at));
  }
}

HPKV_X86 std::uint64_t take_short(std::uint64_t state, const std::byte* bytes,
                                  std::size_t count) noexcept {
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) state = _mm_crc32_u64(state, load(bytes + at));
  for (; at < count; ++at) {
    state = _mm_crc32_u8(static_cast<std::uint32_t>(state), static_cast<unsigned char>(bytes[at]));
  }
  return state;
}

// `target` is aligned to 32 bytes, `source` need not be.
HPKV_X86 inline void stream_line(std::byte* target, const std::byte* source) noexcept {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), high);
}

HPKV_X86 inline void prefetch(const std::byte* line) noexcept {
  // Past the end of the source this asks for a line nobody needs; a prefetch never faults.
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_NTA);
}

// For one line of each lane, the same line some chunks later.
HPKV_X86 inline void prefetch_chunk(const std::byte* line) noexcept {
  for (std::size_t lane = 0; lane < kChunk; lane += kLane) prefetch(line + lane + kChecksumAhead);
}

// Bytes before `target` reaches a whole cache line, at most `count`.
std::size_t head_bytes(const std::byte* target, std::size_t count) noexcept {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = past == 0 ? 0 : kLine - past;
  return head < count ? head : count;
}

}  // namespace

bool available() noexcept {
  static const bool yes = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") &&
                          __builtin_cpu_supports("avx2");
  return yes;
}

HPKV_X86 std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  std::uint64_t state = static_cast<std::uint32_t>(~crc);
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kChunk; at += kChunk, left -= kChunk) {
    Lanes lanes;
    for (std::size_t line = 0; line < kLane; line += kLine) {
      prefetch_chunk(at + line);
      take_line(lanes, at + line);
    }
    state = joined(state, lanes);
  }
  return ~static_cast<std::uint32_t>(take_short(state, at, left));
}

HPKV_X86 std::uint32_t copy_nt_crc32c(std::byte* target, const std::byte* source, std::size_t count,
                                      std::uint32_t crc) noexcept {
  std::uint64_t state = static_cast<std::uint32_t>(~crc);
  const std::size_t head = head_bytes(target, count);
  if (head != 0) {
    state = take_short(state, source, head);
    std::memcpy(target, source, head);
  }
  std::size_t at = head;
  for (; count - at >= kChunk; at += kChunk) {
    Lanes lanes;
    for (std::size_t line = 0; line < kLane; line += kLine) {
      const std::byte* from = source + at + line;
      std::byte* to = target + at + line;
      prefetch_chunk(from);
      take_line(lanes, from);
      for (std::size_t lane = 0; lane < kChunk; lane += kLane) {
        stream_line(to + lane, from + lane);
      }
    }
    state = joined(state, lanes);
  }
  for (; count - at >= kLine; at += kLine) {
    state = take_short(state, source + at, kLine);
    stream_line(target + at, source + at);
  }
  if (count != at) {
    state = take_short(state, source + at, count - at);
    std::memcpy(target + at, source + at, count - at);
  }
  return ~static_cast<std::uint32_t>(state);
}

HPKV_X86 void copy_nt(std::byte* target, const std::byte* source, std::size_t count) noexcept {
  std::size_t at = head_bytes(target, count);
  if (at != 0) std::memcpy(target, source, at);
  for (; count - at >= kLine; at += kLine) {
    prefetch(source + at + kCopyAhead);
    stream_line(target + at, source + at);
  }
  if (count != at) std::memcpy(target + at, source + at, count - at);
}

void fence() noexcept { _mm_sfence(); }

}  // namespace hpkv::x86

#endif
