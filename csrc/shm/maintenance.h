// The background thread of one process: buries the dead, keeps memory ready ahead of need, and
// fills this process's page tables for segments in use. It never holds a lock while it waits, and
// Python's interpreter lock not at all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/allocator.h"
#include "shm/recovery.h"

namespace hpkv::shm {

class Maintenance {
 public:
  Maintenance(Core& core, Segments& segments, Allocator& allocator) noexcept
      : core_(core), segments_(segments), allocator_(allocator), recovery_(core) {}
  ~Maintenance() { stop(); }
  Maintenance(const Maintenance&) = delete;
  Maintenance& operator=(const Maintenance&) = delete;

  void start();
  void stop() noexcept;
  // One round, in the caller's thread.
  void round() noexcept;
  [[nodiscard]] Recovery& recovery() noexcept { return recovery_; }

 private:
  void run() noexcept;
  void populate() noexcept;

  Core& core_;
  Segments& segments_;
  Allocator& allocator_;
  Recovery recovery_;
  std::mutex round_mutex_;           // one round at a time
  std::vector<std::uint64_t> seen_;  // per segment: the word for which page tables were filled
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopping_{false};  // set under wake_mutex_, so that no wait misses it
  std::thread thread_;
};

}  // namespace hpkv::shm
