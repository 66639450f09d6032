// Lines for the log: one when the tier changes its state, never one a failure.
//
// Owns: a short queue; when nobody reads it, the oldest lines go. Threads: safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace hpkv::disk {

class Notices {
 public:
  void say(std::string line) {
    {
      const std::lock_guard guard(mutex_);
      constexpr std::size_t kMost = 32;
      if (lines_.size() == kMost) lines_.pop_front();
      last_ = line;
      lines_.push_back(std::move(line));
    }
    changed_.notify_all();
  }

  // The next line; empty after the timeout; nullopt once closed and read to the end.
  [[nodiscard]] std::optional<std::string> wait(std::chrono::nanoseconds timeout) {
    std::unique_lock guard(mutex_);
    changed_.wait_for(guard, timeout, [this] { return closed_ || !lines_.empty(); });
    if (lines_.empty()) return closed_ ? std::nullopt : std::optional<std::string>("");
    std::string line = std::move(lines_.front());
    lines_.pop_front();
    return line;
  }

  [[nodiscard]] std::string last() const {
    const std::lock_guard guard(mutex_);
    return last_;
  }

  void close() {
    {
      const std::lock_guard guard(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> lines_;
  std::string last_;
  bool closed_ = false;
};

}  // namespace hpkv::disk
