// Host pool to disk, in the background: keeps enough of the pool free, or droppable because it is
// on disk too, that nobody who stores a block has to wait. It starts when less than a quarter of
// the pool is so and stops at a half; the coldest blocks go first, each prefix in one piece,
// head to tail in the file. Nobody waits for it: a block that must go before its turn is dropped.
// When nothing was stored or loaded for a second it writes the rest too, a little at a time, so
// that a reboot nobody announced finds a warm disk.
//
// Processes share the work without a lock: a block that another is writing is skipped. Owns: one
// thread, unless it is only asked by hand (round). Threads: safe; one round at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "disk/crew.h"
#include "disk/tier.h"

namespace hpkv::disk {

struct DemoteResult {
  std::uint64_t written = 0;
  std::uint64_t present = 0;  // on disk before, or written by another process
  std::uint64_t refused = 0;
};

// Writes blocks of one namespace that are in the pool, in this order; skips those that are not. May
// block as long as the disk does.
DemoteResult demote(Tier& tier, std::uint32_t namespace_index, std::span<const Key> keys);

class Demoter {
 public:
  struct Watermarks {
    std::uint32_t start_sixteenths = 4;  // of the pool: below, it begins
    std::uint32_t stop_sixteenths = 8;   // there it ends
  };

  explicit Demoter(std::shared_ptr<Tier> tier);
  ~Demoter();
  Demoter(const Demoter&) = delete;
  Demoter& operator=(const Demoter&) = delete;

  void start();
  // One look, and a few batches if they are due. True: there is more to do.
  bool round();

  void stop() noexcept;
  [[nodiscard]] bool join_within(std::chrono::nanoseconds timeout);

 private:
  class Desk;
  std::shared_ptr<Desk> desk_;
  Crew crew_;
};

}  // namespace hpkv::disk
