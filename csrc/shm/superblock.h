// Making and judging superblocks. No I/O beyond the given descriptor or mapping.
#pragma once

#include <cstdint>
#include <string>

#include "shm/view.h"

namespace hpkv::shm {

enum class Verdict {
  usable,
  poisoned,       // ours, and a broken invariant was met
  other_version,  // a pool, but not of this version or layout
  garbage,        // not a pool, or one whose fixed part does not match its checksum
};

struct Judgement {
  Verdict verdict = Verdict::garbage;
  std::string why;  // values seen, for the message
  std::uint64_t pool_bytes = 0;
};

// Reads the first page of a file of `file_bytes` bytes.
[[nodiscard]] Judgement judge(int fd, std::uint64_t file_bytes);

// Fills the superblock, the shard table with empty hash tables, and the first index segment of a
// zeroed, reserved head. `index_bytes_needed` is what initialize() will touch after the head.
[[nodiscard]] std::uint64_t initial_index_bytes() noexcept;
void initialize(View view, std::uint64_t pool_bytes, const HeadGeometry& head);

}  // namespace hpkv::shm
