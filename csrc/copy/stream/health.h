// Whether the device still works, for everybody who uses one: the first call that fails ends
// copying for good, because what is on its way then is not known. Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "copy/stream/device.h"

namespace hpkv::stream {

class Health {
 public:
  // Whether the call succeeded; the engine is poisoned otherwise.
  bool check(const Status& status) {
    if (status.ok()) return true;
    const std::lock_guard lock(mutex_);
    if (first_error_.empty()) first_error_ = status.text();
    error_count_.fetch_add(1, std::memory_order_relaxed);
    // Release: whoever sees the flag may read the text without waiting for it.
    poisoned_.store(true, std::memory_order_release);
    return false;
  }

  [[nodiscard]] bool poisoned() const noexcept { return poisoned_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t error_count() const noexcept {
    return error_count_.load(std::memory_order_relaxed);
  }
  // Of the first call that failed: file, line, call and reason; empty without one.
  [[nodiscard]] std::string first_error() const {
    const std::lock_guard lock(mutex_);
    return first_error_;
  }

 private:
  mutable std::mutex mutex_;
  std::string first_error_;  // mutex_
  std::atomic<std::uint64_t> error_count_{0};
  std::atomic<bool> poisoned_{false};
};

}  // namespace hpkv::stream
