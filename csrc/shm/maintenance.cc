#include "shm/maintenance.h"

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <csignal>

namespace hpkv::shm {
namespace {

constexpr std::chrono::milliseconds kTick{100};
// The address space is locked while one piece is filled, and others in this process may want to map
// memory.
constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 20U;

}  // namespace

void Maintenance::start() {
  // Signals are for the threads of the host program.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Maintenance::stop() noexcept {
  if (!thread_.joinable()) return;
  if (core_.file.liveness->forked()) {
    thread_.detach();  // it exists in the parent only
    return;
  }
  {
    const std::lock_guard guard(wake_mutex_);
    stopping_.store(true, std::memory_order_relaxed);
  }
  wake_.notify_all();
  thread_.join();
}

void Maintenance::run() noexcept {
  for (;;) {
    round();
    std::unique_lock guard(wake_mutex_);
    if (wake_.wait_for(guard, kTick, [this] { return stopping_.load(std::memory_order_relaxed); }))
      return;
  }
}

void Maintenance::round() noexcept {
  const std::lock_guard guard(round_mutex_);
  if (core_.detached()) return;
  recovery_.round();
  allocator_.release_idle_stock();
  if (const std::uint64_t stride = allocator_.take_recent_stride(); stride != 0)
    segments_.reserve_ahead(stride);
  populate();
}

// Page tables are per process: without this, the first touch of each page in each process is a
// fault.
void Maintenance::populate() noexcept {
#ifdef MADV_POPULATE_READ
  const std::uint64_t count = core_.super().segment_count;
  seen_.resize(count);
  for (std::uint64_t i = 0; i < count;) {
    const std::uint64_t word = core_.view.segment(i).word.load(std::memory_order_acquire);
    const std::uint64_t length = View::run_step(word, count - i);
    if (SegmentWord::kind(word) == SegmentKind::blocks && seen_[i] != word) {
      std::byte* begin = core_.view.at(core_.view.segment_offset(i));
      for (std::uint64_t done = 0; done < length * core_.super().segment_bytes;
           done += kPieceBytes) {
        if (stopping_.load(std::memory_order_relaxed)) return;
        // Advice: a refusal costs page faults later and nothing else.
        ::madvise(begin + done, kPieceBytes, MADV_POPULATE_READ);
      }
      seen_[i] = word;
    }
    i += length;
  }
#endif
}

}  // namespace hpkv::shm
