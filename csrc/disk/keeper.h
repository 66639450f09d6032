// The thread that keeps a store in order: finds out what the files hold, and meanwhile and ever
// after syncs what was written a while ago, takes care of regions without an owner, and gives space
// back when the disk is short of it.
//
// Owns: that thread. Threads: safe.
#pragma once

#include <memory>

#include "disk/crew.h"
#include "disk/tier.h"

namespace hpkv::disk {

class Keeper {
 public:
  explicit Keeper(std::shared_ptr<Tier> tier);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  void start();
  void stop() noexcept;
  [[nodiscard]] bool join_within(std::chrono::nanoseconds timeout);

 private:
  class Desk;
  std::shared_ptr<Desk> desk_;
  Crew crew_;
};

}  // namespace hpkv::disk
