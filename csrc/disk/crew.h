// Threads that may be stuck in the disk when they should end: they are waited for up to a deadline
// and then left alone. So each body holds a share of everything it touches.
//
// Threads: start and join from one thread at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hpkv::disk {

class Crew {
 public:
  Crew() = default;
  ~Crew() { static_cast<void>(join_within(std::chrono::nanoseconds(0))); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // `body` returns soon after it was told to, by means of its own. Signals are blocked in it.
  void start(std::size_t count, const std::function<void()>& body);
  // True: all have returned and are joined. False: some have not; they are detached. Idempotent.
  [[nodiscard]] bool join_within(std::chrono::nanoseconds timeout);

 private:
  struct Attendance {
    std::mutex mutex;
    std::condition_variable left;
    std::size_t working = 0;
  };

  std::shared_ptr<Attendance> attendance_ = std::make_shared<Attendance>();
  std::vector<std::thread> threads_;
  int process_ = 0;  // that started them: a forked child has none
  bool all_left_ = true;
};

}  // namespace hpkv::disk
