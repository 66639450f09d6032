#include "shm/placement.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <fstream>

namespace hpkv::shm {
namespace {

constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of the system's interface
constexpr unsigned kNodesMax = 1024;
constexpr unsigned kWordBits = 8 * sizeof(unsigned long);

}  // namespace

std::vector<unsigned> memory_nodes(const std::string& file) {
  std::ifstream stream(file);
  std::string text;
  std::getline(stream, text);
  std::vector<unsigned> nodes;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    unsigned first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc{}) return {};
    unsigned last = first;
    if (parsed.ptr < end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc{}) return {};
    }
    if (last >= kNodesMax) return {};
    for (unsigned node = first; node <= last; ++node) nodes.push_back(node);
    if (parsed.ptr < end && *parsed.ptr != ',') return {};
    at = parsed.ptr + 1;
  }
  return nodes;
}

int interleave(std::byte* base, std::uint64_t bytes, const std::vector<unsigned>& nodes) noexcept {
  if (nodes.size() < 2) return 0;
  std::array<unsigned long, kNodesMax / kWordBits> mask{};
  for (const unsigned node : nodes) mask[node / kWordBits] |= 1UL << (node % kWordBits);
  // The kernel reads one bit less than it is told.
  const long done =
      ::syscall(SYS_mbind, base, bytes, kInterleave, mask.data(), kNodesMax + 1UL, 0U);
  return done == 0 ? 0 : errno;
}

}  // namespace hpkv::shm
