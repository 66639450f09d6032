// What the tier does about a disk that fails or hangs: after a failure it rests (1 s, doubling to
// 30 s) and the next call afterwards is the test; while a call takes longer than `hang_ns` nothing
// new is asked of the disk.
//
//   working ──failure──▶ resting ──rest over──▶ testing ──success──▶ working
//                           ▲                      │ failure: twice the rest
//                           └──────────────────────┘
//
// Owns: the times of calls under way. One breaker for reading and one for writing, because a disk
// that is full or read-only still reads. Threads: safe; accepts() takes no lock and is
// scheduler-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "disk/notices.h"

namespace hpkv::disk {

class Breaker {
 public:
  using Clock = std::function<std::int64_t()>;

  // `what` names the direction in log lines: "reading", "writing".
  Breaker(std::string what, std::shared_ptr<Notices> notices, Clock clock,
          std::int64_t hang_ns = kSecond);

  // Whether the disk may be asked for something new.
  [[nodiscard]] bool accepts() const noexcept { return !resting() && !hanging(); }
  [[nodiscard]] bool resting() const noexcept;
  [[nodiscard]] bool hanging() const noexcept;
  // Says once that a call hangs; true when it said so now. For a thread that never calls the disk
  // itself.
  [[nodiscard]] bool look();

  // How something went that was asked of the disk. What is neither needs not be said.
  void succeeded();
  void failed(const std::string& why);

  // A call under way: its time is taken.
  class Call {
   public:
    explicit Call(Breaker& breaker) noexcept;
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    std::atomic<std::int64_t>* place_ = nullptr;
  };

 private:
  static constexpr std::size_t kCallsSeen = 64;  // more at once are not timed

  const std::string what_;
  const std::shared_ptr<Notices> notices_;
  const Clock clock_;
  const std::int64_t hang_ns_;
  std::array<std::atomic<std::int64_t>, kCallsSeen> started_{};  // 0: no call
  std::atomic<std::int64_t> rest_until_{0};
  std::mutex mutex_;          // the rest; never held while a call is under way
  std::int64_t rest_ns_ = 0;  // of the last rest; 0: working
  bool hang_said_ = false;
};

}  // namespace hpkv::disk
