// What the engine's threads hand to each other, and how somebody waits until nothing is left.
// Bounds are the submitter's: queues hold what was admitted. Threads: any.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace hpkv::stream {

template <typename Item>
class WorkQueue {
 public:
  void push(Item item) {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_one();
  }

  // The oldest item, waiting for one; nothing once the queue is closed and empty.
  [[nodiscard]] std::optional<Item> pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    std::optional<Item> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  // No push comes after this.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;  // mutex_
  bool closed_ = false;     // mutex_
};

// Tickets that are not done.
class Outstanding {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  void finish() {
    const std::lock_guard lock(mutex_);
    if (--count_ == 0) idle_.notify_all();
  }
  void wait_idle() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::size_t count_ = 0;  // mutex_
};

}  // namespace hpkv::stream
