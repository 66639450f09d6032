// How a thread of the disk tier sleeps between two looks, and is told to stop.
//
// Threads: safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace hpkv::disk {

class Pause {
 public:
  // False: it is time to stop.
  [[nodiscard]] bool sleep(std::chrono::nanoseconds length) {
    std::unique_lock guard(mutex_);
    return !changed_.wait_for(guard, length, [this] { return stopping_; });
  }
  [[nodiscard]] bool stopping() const {
    const std::lock_guard guard(mutex_);
    return stopping_;
  }
  void stop() noexcept {
    {
      const std::lock_guard guard(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
};

}  // namespace hpkv::disk
