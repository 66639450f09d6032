#include "shm/liveness.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "base/error.h"

namespace hpkv::shm {
namespace {

// Every Liveness of this process, for the fork handlers. The mutex is held across fork(), so the
// child sees a whole list.
struct ForkRegistry {
  std::mutex mutex;
  std::vector<Liveness*> members;
};

ForkRegistry& fork_registry() {
  static ForkRegistry registry;
  return registry;
}

void before_fork() { fork_registry().mutex.lock(); }
void after_fork_in_parent() { fork_registry().mutex.unlock(); }
void after_fork_in_child() {
  for (Liveness* member : fork_registry().members) member->abandon_in_child();
  fork_registry().mutex.unlock();
}

void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int code = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (code != 0) throw_system("pthread_atfork", "for the pool's liveness lock", code);
  });
}

constexpr rlim_t kHighNumber =
    16384;  // above what servers open, below what a table of descriptors makes costly

int move_high(int fd) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return fd;
  const rlim_t ceiling = std::min(limit.rlim_cur, kHighNumber);
  for (rlim_t room : {rlim_t{64}, rlim_t{256}}) {
    if (ceiling <= room) break;
    const int high = ::fcntl(fd, F_DUPFD_CLOEXEC, static_cast<int>(ceiling - room));
    if (high >= 0) {
      ::close(fd);
      return high;
    }
  }
  return fd;
}

struct flock lock_of(short type, std::int64_t start, std::int64_t length) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

}  // namespace

Liveness::Liveness(int fd) : fd_(move_high(fd)) {
  register_fork_handlers();
  const std::lock_guard guard(fork_registry().mutex);
  fork_registry().members.push_back(this);
}

Liveness::~Liveness() {
  {
    const std::lock_guard guard(fork_registry().mutex);
    std::erase(fork_registry().members, this);
  }
  if (fd_ >= 0) ::close(fd_);
}

void Liveness::abandon_in_child() noexcept {
  forked_.store(true, std::memory_order_relaxed);
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Liveness::try_hold(std::uint32_t slot) const noexcept {
  struct flock lock = lock_of(F_WRLCK, slot, 1);
  return ::fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

void Liveness::drop(std::uint32_t slot) const noexcept {
  struct flock lock = lock_of(F_UNLCK, slot, 1);
  ::fcntl(fd_, F_OFD_SETLK, &lock);
}

bool Liveness::held_by_other(std::uint32_t slot) const noexcept {
  struct flock lock = lock_of(F_WRLCK, slot, 1);
  if (::fcntl(fd_, F_OFD_GETLK, &lock) != 0) return true;
  return lock.l_type != F_UNLCK;
}

bool Liveness::any_other() const noexcept {
  // The locks of every version lie in the first page.
  struct flock lock = lock_of(F_WRLCK, 0, 4096);
  if (::fcntl(fd_, F_OFD_GETLK, &lock) != 0) return true;
  return lock.l_type != F_UNLCK;
}

}  // namespace hpkv::shm
