// Disk to host pool, for requests that wait. Tickets are served first come, first served, each from
// head to tail: what the pool has is pinned as it is, the rest is read in large reads, verified,
// published and pinned. What cannot be had (no place, no budget, a failed read) ends a ticket's
// run: the request uses the prefix it has. Nothing waits for a place, so a full pool cannot
// deadlock.
//
// Owns: the queue (bounded) and the reading threads. Threads: safe; promote() is scheduler-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "disk/crew.h"
#include "disk/promote_ticket.h"
#include "disk/tier.h"

namespace hpkv::disk {

class Promoter {
 public:
  Promoter(std::shared_ptr<Tier> tier, std::uint32_t thread_count);
  ~Promoter();
  Promoter(const Promoter&) = delete;
  Promoter& operator=(const Promoter&) = delete;

  // Returns at once; a ticket that is done with nothing when the disk rests or hangs, or too many
  // wait.
  [[nodiscard]] std::shared_ptr<PromoteTicket> promote(std::uint32_t namespace_index,
                                                       std::vector<Key> keys);
  [[nodiscard]] std::size_t queued_count() const;
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept;

  // Ends every ticket; the threads return as soon as the disk lets them.
  void stop() noexcept;
  [[nodiscard]] bool join_within(std::chrono::nanoseconds timeout);

 private:
  class Desk;
  std::shared_ptr<Tier> tier_;
  std::shared_ptr<PinBudget> budget_ = std::make_shared<PinBudget>();
  std::shared_ptr<Desk> desk_;
  Crew crew_;
};

}  // namespace hpkv::disk
