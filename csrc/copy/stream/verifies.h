// Verifications of a stream engine: checksums of pinned blocks, on a thread of their own.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "copy/cpu/jobs.h"
#include "copy/stream/core.h"
#include "copy/stream/queue.h"

namespace hpkv::stream {

class Verifies {
 public:
  explicit Verifies(Core& core) : core_(core), thread_([this] { run_all(); }) {}
  ~Verifies() {
    stop();
    join();
  }
  Verifies(const Verifies&) = delete;
  Verifies& operator=(const Verifies&) = delete;

  std::shared_ptr<VerifyTicket> submit(Lease lease);
  // Fails what is not over; later submissions fail.
  void stop();
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  using JobRef = std::shared_ptr<cpu::VerifyJob>;

  void run_all();
  void run(cpu::VerifyJob& job);

  Core& core_;
  std::mutex mutex_;
  std::set<JobRef> open_;  // mutex_
  bool stopping_ = false;  // mutex_
  WorkQueue<JobRef> queue_;
  std::thread thread_;
};

}  // namespace hpkv::stream
