// Who is alive. A client holds an OFD write lock on byte `slot` of the pool file for as long as it
// lives; the kernel drops it after the process has let go of its files. pid and start time are for
// display: containers that share a pool have PID namespaces of their own, so equal numbers there
// mean nothing.
//
// Owns: one descriptor of the pool file: close-on-exec, closed in a forked child (else the child
// would keep a dead parent alive), and moved to a high number, because an exiting process closes
// its files in ascending order and the device's must be gone first. Threads: safe; all state after
// construction is the kernel's, or atomic.
#pragma once

#include <atomic>
#include <cstdint>

namespace hpkv::shm {

class Liveness {
 public:
  // Takes the descriptor over (read-write, of the pool file, an open file description of its own).
  explicit Liveness(int fd);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Takes the lock of a slot; false when another client holds it.
  [[nodiscard]] bool try_hold(std::uint32_t slot) const noexcept;
  void drop(std::uint32_t slot) const noexcept;
  // Whether another client holds it. Never ask for the own slot: a lock does not conflict with
  // itself. Unknown counts as held: nobody is buried because a system call failed.
  [[nodiscard]] bool held_by_other(std::uint32_t slot) const noexcept;
  // Whether any client of any version is attached.
  [[nodiscard]] bool any_other() const noexcept;

  // True in a child of fork(): the descriptor is closed there and nothing may be touched.
  [[nodiscard]] bool forked() const noexcept { return forked_.load(std::memory_order_relaxed); }
  [[nodiscard]] int fd() const noexcept { return fd_; }

  // For the fork handler only.
  void abandon_in_child() noexcept;

 private:
  int fd_ = -1;
  std::atomic<bool> forked_{false};
};

}  // namespace hpkv::shm
