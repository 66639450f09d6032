// Which memory of the pool the device may use where it lies: it is registered in the background, as
// it becomes live, so that loads read blocks in place instead of through slots.
//
// The thread looks again once a second, because others reserve memory too, and at once when a block
// was not registered: that goes through staging. A refusal (a limit on pinned memory, a driver) is
// the end of registering and of nothing else: what is registered stays, the rest goes through
// staging, and notice() says so once.
//
// What lies end to end and became live together is one range, up to the most of one call. A range
// is the device library's own notion: the addresses behind it go on, so kernels read across two.
//
// Invariant: ranges do not overlap, and stay until release(), which comes after the last copy.
// Threads: any; one of its own waits for the device library, never with the mutex held.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "copy/stream/device.h"
#include "shm/pool.h"

namespace hpkv::stream {

// Ranges that some bytes may be in. Copies take only bytes of one; kernels know nothing of ranges.
enum class Cover : std::uint8_t { one, adjacent };

class RegisteredPool {
 public:
  // Registers nothing when `piece_bytes` (of one call at most) is 0.
  RegisteredPool(std::shared_ptr<Device> device, std::shared_ptr<Pool> pool,
                 std::uint64_t piece_bytes, std::chrono::milliseconds look_every);
  ~RegisteredPool();
  RegisteredPool(const RegisteredPool&) = delete;
  RegisteredPool& operator=(const RegisteredPool&) = delete;

  // Looks up many spans; keeps the mutex, so it is for one loop. What was not registered makes the
  // thread look again.
  class Lookup {
   public:
    Lookup(RegisteredPool& registered, Cover cover);
    ~Lookup();
    Lookup(const Lookup&) = delete;
    Lookup& operator=(const Lookup&) = delete;

    // Whether all these bytes are registered.
    [[nodiscard]] bool holds(std::span<const std::byte> bytes);

   private:
    RegisteredPool& registered_;
    const Cover cover_;
    const std::lock_guard<std::mutex> lock_;
    // Registered, where the last one was found: blocks of a load lie near each other.
    const std::byte* begin_ = nullptr;
    const std::byte* end_ = nullptr;
    bool missed_ = false;
  };

  // Of one span.
  [[nodiscard]] bool holds(std::span<const std::byte> bytes, Cover cover) {
    return Lookup(*this, cover).holds(bytes);
  }
  // Why not everything is registered, to be logged once; usually empty.
  [[nodiscard]] std::string notice();
  // Ends the thread, after the call it is in.
  void stop();
  // Unregisters everything; after stop(), when no copy is on its way.
  void release();

 private:
  void run();
  // Registers what is reserved and not registered; false once it is refused or stopped.
  [[nodiscard]] bool register_more();
  [[nodiscard]] bool add(std::byte* begin, std::uint64_t bytes);
  // This is the end of registering. With the mutex held.
  void refuse(const Status& status);
  // What is reserved and not registered; what lies end to end is one.
  [[nodiscard]] std::vector<std::span<std::byte>> missing();
  // Where the registered part of this segment ends, or a later address. With the mutex held.
  [[nodiscard]] std::byte* registered_end(std::span<std::byte> segment) const;

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Pool> pool_;
  const std::uint64_t piece_bytes_;
  const std::chrono::milliseconds look_every_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::byte*, std::uint64_t> ranges_;  // begin, bytes; mutex_
  std::string notice_;                          // mutex_
  bool asked_ = true;                           // to look for more; mutex_
  bool stopping_ = false;                       // mutex_
  std::thread thread_;
};

}  // namespace hpkv::stream
