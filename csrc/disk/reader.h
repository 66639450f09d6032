// Blocks out of region files, each judged before it counts.
//
// Nothing keeps a block where it is while it is read: the record says whose it is, and when it is
// not the one that was meant, the index says whether it moved away (stale) or the bytes are wrong
// (bad). Owns nothing. Threads: safe; may block on the disk, never waits for writes.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "disk/context.h"
#include "disk/record_io.h"

namespace hpkv::disk {

class Reader {
 public:
  explicit Reader(Context& context) noexcept : context_(context) {}

  // As RegionStore::read. `forget_bad`: take bad blocks out of the index.
  void read(std::span<const DiskRef> refs, std::span<std::byte* const> targets,
            std::span<ReadOutcome> outcomes, bool forget_bad = true);
  VerifyReport verify(const std::function<bool(const VerifyReport&)>& progress, bool fix);

 private:
  struct Run {
    std::span<const DiskRef> refs;
    std::span<std::byte* const> targets;
    std::span<ReadOutcome> outcomes;
    std::span<RecordHeader> headers;

    [[nodiscard]] Run one(std::size_t i) const {
      return {refs.subspan(i, 1), targets.subspan(i, 1), outcomes.subspan(i, 1),
              headers.subspan(i, 1)};
    }
  };
  // 0, or -errno: nothing was read.
  [[nodiscard]] int read_run(const Run& run);
  [[nodiscard]] std::vector<std::size_t> read_singly(const Run& run);
  static void give_up(const Run& run, std::span<const std::size_t> unreadable);
  void second_look(const Run& run);
  void settle_outcome(const DiskRef& ref, ReadOutcome& outcome, bool forget_bad);
  [[nodiscard]] bool matches(const DiskRef& ref, const RecordHeader& header,
                             const std::byte* payload);

  Context& context_;
};

}  // namespace hpkv::disk
