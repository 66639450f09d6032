// One ticket being served: the work of a reading thread between taking the ticket and ending it.
//
// Threads: one.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "disk/promote_ticket.h"
#include "disk/tier.h"

namespace hpkv::disk {

class Promotion {
 public:
  Promotion(Tier& tier, PromoteTicket& ticket, const std::atomic<bool>& stopping) noexcept;

  // Until the last key, or the first that cannot be had. Blocks as long as the disk does.
  void run();

 private:
  // Blocks reserved in the pool and not yet published, in order of the keys.
  struct Batch {
    std::vector<DiskRef> refs;
    std::vector<BlockRef> blocks;
  };
  // Gives back what was not published, whatever happened.
  struct Reserved;
  enum class Next { go_on, wait, end };

  [[nodiscard]] bool wanted() const noexcept {
    return !stopping_.load(std::memory_order_relaxed) && !ticket_.done();
  }
  [[nodiscard]] std::span<const Key> rest() const noexcept {
    return std::span(ticket_.keys()).subspan(position_);
  }
  [[nodiscard]] Next pin_resident();
  [[nodiscard]] Next gather(Batch& batch);
  [[nodiscard]] bool read(Reserved& reserved);
  void ask_disk(const Batch& batch, std::vector<ReadOutcome>& outcomes);

  Tier& tier_;
  PromoteTicket& ticket_;
  const std::atomic<bool>& stopping_;
  const std::uint64_t block_bytes_;
  const std::uint64_t stride_;
  const std::uint64_t pin_limit_;
  const std::uint64_t first_stamp_;
  std::size_t position_ = 0;  // the first key that is not in the ticket yet
};

}  // namespace hpkv::disk
