#include "disk/crew.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>

namespace hpkv::disk {

void Crew::start(std::size_t count, const std::function<void()>& body) {
  process_ = ::getpid();
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  for (std::size_t i = 0; i < count; ++i) {
    {
      const std::lock_guard guard(attendance_->mutex);
      ++attendance_->working;
    }
    threads_.emplace_back([attendance = attendance_, body = body]() mutable {
      body();
      body = nullptr;  // what it holds goes before it counts as gone
      const std::lock_guard guard(attendance->mutex);
      --attendance->working;
      attendance->left.notify_all();
    });
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool Crew::join_within(std::chrono::nanoseconds timeout) {
  if (threads_.empty()) return all_left_;
  bool left = false;
  if (::getpid() == process_) {
    std::unique_lock guard(attendance_->mutex);
    left = attendance_->left.wait_for(guard, timeout, [this] { return attendance_->working == 0; });
  }
  for (std::thread& thread : threads_) {
    if (left) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  threads_.clear();
  all_left_ = left;
  return left;
}

}  // namespace hpkv::disk
