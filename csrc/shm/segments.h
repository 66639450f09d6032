// Segments: who uses which part of the pool, and the memory behind it. A run is a stretch of
// segments that holds blocks of one size; index segments hold hash tables. Every byte is reserved
// with fallocate before anybody may touch it, so a full file system or memory limit is an answer
// here and never a signal.
//
// Invariants: runs do not overlap; a run of blocks is backed whole; a segment's backed bytes only
// grow. Threads: safe; the layout lock guards the table. Memory is reserved outside it, under the
// word `reserving`.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "shm/lock.h"

namespace hpkv::shm {

class Segments {
 public:
  explicit Segments(Core& core) noexcept : core_(core) {}

  // Makes a run for this class out of free segments; its first `claim_count(run)` blocks belong to
  // this client (`claimed`), the others are free. nullopt when there is no stretch of free
  // segments, or no memory. Tens of ms a segment.
  [[nodiscard]] std::optional<Run> make_run(std::uint64_t stride,
                                            std::uint64_t (*claim_count)(const Run&),
                                            WaitBudget& budget) noexcept;

  // Zeroed memory for a hash table; offset in the file. Never returned.
  [[nodiscard]] std::optional<std::uint64_t> take_index_memory(std::uint64_t bytes) noexcept;

  // Reserves the memory of the next run of this class ahead of need, so that make_run is quick.
  // Background thread.
  void reserve_ahead(std::uint64_t stride) noexcept;

  [[nodiscard]] std::uint64_t reserved_bytes() const noexcept;
  [[nodiscard]] std::uint64_t run_length(std::uint64_t stride) const noexcept;
  // Whether a segment with this word is free, and is backed or may be: while memory is refused only
  // what is backed already is of use.
  [[nodiscard]] bool usable(std::uint64_t segment, std::uint64_t word) const noexcept;

 private:
  [[nodiscard]] std::optional<std::uint64_t> find_free(std::uint64_t length) const noexcept;
  [[nodiscard]] bool back(std::uint64_t segment, std::uint64_t bytes) noexcept;
  [[nodiscard]] bool limits_allow(std::uint64_t bytes) const noexcept;
  void fill_descriptors(const Run& run, std::uint64_t claim_count) noexcept;

  Core& core_;
  // After a refusal, nobody asks again for a while: each question costs system calls.
  std::atomic<std::int64_t> refused_until_{0};
};

}  // namespace hpkv::shm
