#include "shm/pool_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>

#include "base/clock.h"
#include "shm/limits.h"
#include "shm/placement.h"
#include "shm/superblock.h"

namespace hpkv::shm {
namespace {

constexpr const char* kNewFileName = "pool.hpkv.new";
constexpr std::uint64_t kDefaultPoolBytes = std::uint64_t{8} << 30U;
constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 20U;
constexpr std::int64_t kDirectoryLockNs = 10 * kSecond;
constexpr int kAttachTries = 16;

[[noreturn]] void refuse(ErrorKind kind, const std::string& path, const std::string& seen,
                         const std::string& remedy) {
  throw Error(kind, "attach pool " + path + ": " + seen + "; " + remedy);
}

// Creates the last component only: a mistyped parent should not become a tree of directories.
UniqueFd open_directory(const PoolOptions& options) {
  const std::string& path = options.directory;
  if (options.create && !options.read_only && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    if (errno == ENOENT) {
      refuse(ErrorKind::missing, path, "the directory that it should be made in does not exist",
             "make that one, or choose another (--hpkv-share-mem-path)");
    }
    throw_system("create directory", path, errno);
  }
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) {
    const int code = errno;
    if (code == ENOENT)
      refuse(ErrorKind::missing, path, "the directory does not exist", "start a server first");
    if (code == ENOTDIR || code == ELOOP) {
      refuse(ErrorKind::owner, path, "it is a symbolic link or not a directory",
             "choose a directory of your own (--hpkv-share-mem-path)");
    }
    throw_system("open directory", path, code);
  }
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) throw_system("stat directory", path, errno);
  if (status.st_uid != ::geteuid()) {
    refuse(ErrorKind::owner, path, "the directory belongs to user " + std::to_string(status.st_uid),
           "choose a directory of your own (--hpkv-share-mem-path)");
  }
  if ((status.st_mode & 022U) != 0) {
    refuse(ErrorKind::owner, path, "others may write to the directory", "run: chmod 700 " + path);
  }
  return fd;
}

// flock, because an OFD write lock needs a descriptor open for writing, which a directory does not
// give. Same life: it ends with the open file description.
void lock_directory(int fd, const std::string& path) {
  const std::int64_t deadline = now_ns() + kDirectoryLockNs;
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) throw_system("lock directory", path, errno);
    if (now_ns() > deadline) {
      refuse(ErrorKind::system, path, "another process has held the lock on the directory for 10 s",
             "look for a stopped process that is starting (fuser " + path + ")");
    }
    const timespec pause{0, 2 * kMillisecond};
    ::nanosleep(&pause, nullptr);
  }
}

bool on_memory_file_system(int fd, std::uint64_t& unit) {
  struct statfs stats{};
  if (::fstatfs(fd, &stats) != 0) return false;
  const auto type = static_cast<std::uint64_t>(stats.f_type);
  const bool huge = type == HUGETLBFS_MAGIC;
  unit = huge ? static_cast<std::uint64_t>(stats.f_bsize) : kPageBytes;
  return huge || type == TMPFS_MAGIC;
}

UniqueFd open_file(int directory, const std::string& path) {
  UniqueFd fd(::openat(directory, kPoolFileName, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (fd.valid()) return fd;
  const int code = errno;
  if (code == ENOENT) return fd;
  if (code == ELOOP || code == EISDIR || code == ENXIO) {
    refuse(ErrorKind::garbage, path, "it is not a regular file",
           "remove it, or choose another directory");
  }
  if (code == EACCES || code == EPERM) {
    refuse(ErrorKind::owner, path, "it may not be opened",
           "choose a directory of your own (--hpkv-share-mem-path)");
  }
  throw_system("open pool", path, code);
}

struct stat require_own_file(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_system("stat pool", path, errno);
  if (!S_ISREG(status.st_mode)) {
    refuse(ErrorKind::garbage, path, "it is not a regular file",
           "remove it, or choose another directory");
  }
  if (status.st_uid != ::geteuid()) {
    refuse(ErrorKind::owner, path, "it belongs to user " + std::to_string(status.st_uid),
           "choose a directory of your own (--hpkv-share-mem-path)");
  }
  if ((status.st_mode & 077U) != 0) {
    refuse(ErrorKind::owner, path, "others may read or write it", "run: chmod 600 " + path);
  }
  return status;
}

// The file under its name is the one we hold, and it has no second name.
bool still_the_file(int directory, int fd) {
  struct stat ours{};
  struct stat named{};
  return ::fstat(fd, &ours) == 0 && ours.st_nlink == 1 &&
         ::fstatat(directory, kPoolFileName, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
}

std::uint64_t wanted_bytes(const PoolOptions& options, std::uint64_t unit) {
  const std::uint64_t bytes = options.pool_bytes.value_or(kDefaultPoolBytes) / unit * unit;
  if (bytes < kPoolBytesMin) {
    throw Error(ErrorKind::size, "create pool in " + options.directory + ": " +
                                     std::to_string(bytes) + " bytes wanted, a pool has at least " +
                                     std::to_string(kPoolBytesMin) +
                                     "; ask for a larger one (--hpkv-mem-pool-size)");
  }
  return bytes;
}

UniqueFd create_file(int directory, const PoolOptions& options, std::uint64_t unit) {
  const std::uint64_t bytes = wanted_bytes(options, unit);
  require_space(directory, options.directory, bytes,
                memory_limits(options.proc_root, options.cgroup_root));
  const HeadGeometry head = head_geometry(bytes, unit);
  const std::string path = options.directory + "/" + kNewFileName;
  UniqueFd fd(
      ::openat(directory, kNewFileName, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) throw_system("create", path, errno);
  if (::fchmod(fd.get(), 0600) != 0) throw_system("chmod", path, errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_system("size", path, errno);
  if (!reserve_memory(fd.get(), 0, round_up(head.head_bytes + initial_index_bytes(), unit))) {
    ::unlinkat(directory, kNewFileName, 0);
    throw Error(ErrorKind::space,
                "create pool " + path + ": the file system is full; free some shared memory");
  }
  initialize(Mapping(fd.get(), bytes, path).view(), bytes, head);
  if (::linkat(directory, kNewFileName, directory, kPoolFileName, 0) != 0)
    throw_system("link", path, errno);
  if (::unlinkat(directory, kNewFileName, 0) != 0) throw_system("unlink", path, errno);
  return fd;
}

// What to do with the file that is there: use it, or replace it (answers an invalid descriptor and
// says why), or throw.
UniqueFd judge_existing(UniqueFd fd, const PoolOptions& options, const std::string& path,
                        std::uint64_t unit, std::string& notice) {
  const struct stat status = require_own_file(fd.get(), path);
  const Judgement judgement = judge(fd.get(), static_cast<std::uint64_t>(status.st_size));
  if (judgement.verdict == Verdict::garbage) {
    refuse(
        ErrorKind::garbage, path, "this is not a pool: " + judgement.why,
        "remove the file if nothing needs it, or choose another directory (--hpkv-share-mem-path)");
  }
  if (judgement.verdict != Verdict::usable) {
    const Liveness probe(::dup(fd.get()));
    const bool other_version = judgement.verdict == Verdict::other_version;
    const ErrorKind kind = other_version ? ErrorKind::version : ErrorKind::poisoned;
    if (probe.any_other()) {
      refuse(kind, path, judgement.why + ", and clients are attached to it",
             "stop them first, then the pool is made anew; or choose another directory "
             "(--hpkv-share-mem-path)");
    }
    if (!options.create || options.read_only) {
      refuse(kind, path, judgement.why, "the next server that starts makes it anew");
    }
    notice = "replaced the pool " + path + ": " + judgement.why;
    return UniqueFd();
  }
  if (options.pool_bytes && *options.pool_bytes / unit * unit != judgement.pool_bytes) {
    refuse(ErrorKind::size, path,
           "it has " + std::to_string(judgement.pool_bytes) + " bytes and " +
               std::to_string(*options.pool_bytes) + " were asked for",
           "give no size (or this one) to share it, or stop its clients and remove the file");
  }
  return fd;
}

std::uint64_t own_start_ticks() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text,
               ')');  // the name may contain anything but is closed by the last parenthesis
  std::string word;
  for (int i = 0; i < 20; ++i) file >> word;
  return word.empty() ? 0 : std::strtoull(word.c_str(), nullptr, 10);
}

void introduce(ClientRecord& client) {
  client.pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
  client.start_ticks.store(own_start_ticks(), std::memory_order_relaxed);
  client.command = {};
  std::ifstream file("/proc/self/comm");
  file.read(client.command.data(), static_cast<std::streamsize>(client.command.size() - 1));
  for (AtomicU64& counter : client.counters) counter.store(0, std::memory_order_relaxed);
}

// Takes the first free slot. A dead client's slot is not free until it is reaped.
void take_slot(PoolFile& file, const std::string& path) {
  const View view = file.mapping->view();
  for (std::uint32_t slot = 0; slot < kClientCount; ++slot) {
    ClientRecord& client = view.client(slot);
    if (ClientWord::state(client.word.load(std::memory_order_acquire)) != ClientState::free)
      continue;
    if (!file.liveness->try_hold(slot)) continue;
    const std::uint64_t word = client.word.load(std::memory_order_acquire);
    if (ClientWord::state(word) != ClientState::free) {
      file.liveness->drop(slot);
      continue;
    }
    introduce(client);
    file.generation = ClientWord::generation(word) + 1;
    file.info.slot = slot;
    client.word.store(ClientWord::make(ClientState::live, file.generation),
                      std::memory_order_release);
    return;
  }
  refuse(ErrorKind::slots, path, "all " + std::to_string(kClientCount) + " client slots are taken",
         "stop a client (slots of dead ones return after about a second)");
}

}  // namespace

Mapping::Mapping(int fd, std::uint64_t bytes, const std::string& path) : bytes_(bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) throw_system("map pool", path, errno);
  base_ = static_cast<std::byte*>(base);
  // A forked child has no business here, and copying page tables of a large pool would make fork
  // slow.
  ::madvise(base_, bytes_, MADV_DONTFORK);
  ::madvise(base_, bytes_, MADV_DONTDUMP);
  ::madvise(base_, bytes_, MADV_HUGEPAGE);  // advice: refused where shared memory has no huge pages
  static_cast<void>(interleave(base_, bytes_, memory_nodes(kMemoryNodesFile)));
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

bool reserve_memory(int fd, std::uint64_t offset, std::uint64_t bytes) noexcept {
  const std::uint64_t end = offset + bytes;
  while (offset < end) {
    const std::uint64_t piece = std::min(kPieceBytes, end - offset);
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) == 0) {
      offset += piece;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void check_place(const PoolOptions& options) {
  const UniqueFd directory = open_directory(options);
  const std::string path = options.directory + "/" + kPoolFileName;
  lock_directory(directory.get(), options.directory);
  std::uint64_t unit = kPageBytes;
  static_cast<void>(on_memory_file_system(directory.get(), unit));
  UniqueFd fd = open_file(directory.get(), path);
  std::string notice;
  if (fd.valid()) fd = judge_existing(std::move(fd), options, path, unit, notice);
  if (fd.valid()) return;
  require_space(directory.get(), options.directory, wanted_bytes(options, unit),
                memory_limits(options.proc_root, options.cgroup_root));
}

PoolFile attach(const PoolOptions& options) {
  const UniqueFd directory = open_directory(options);
  const std::string path = options.directory + "/" + kPoolFileName;
  lock_directory(directory.get(), options.directory);
  // We hold the directory's lock, so whoever left this name is gone; it may be the pool's second
  // one.
  ::unlinkat(directory.get(), kNewFileName, 0);
  PoolFile file;
  std::uint64_t unit = kPageBytes;
  file.info.in_memory = on_memory_file_system(directory.get(), unit);
  file.info.path = path;
  for (int attempt = 0; attempt < kAttachTries; ++attempt) {
    UniqueFd fd = open_file(directory.get(), path);
    file.info.adopted = fd.valid();
    if (fd.valid()) {
      fd = judge_existing(std::move(fd), options, path, unit, file.info.notice);
      if (!fd.valid()) {
        ::unlinkat(directory.get(), kPoolFileName, 0);
        continue;
      }
    } else {
      if (!options.create || options.read_only) {
        refuse(ErrorKind::missing, path, "there is no pool",
               "start a server with --enable-hpkv first");
      }
      fd = create_file(directory.get(), options, unit);
    }
    struct stat status{};
    if (::fstat(fd.get(), &status) != 0) throw_system("stat pool", path, errno);
    file.info.pool_bytes = static_cast<std::uint64_t>(status.st_size);
    file.mapping = std::make_unique<Mapping>(fd.get(), file.info.pool_bytes, path);
    file.liveness = std::make_unique<Liveness>(fd.release());
    Superblock& super = file.mapping->view().superblock();
    file.info.uuid = super.uuid;
    const bool first = !file.liveness->any_other();
    take_slot(file, path);
    if (!still_the_file(directory.get(), file.liveness->fd()))
      continue;  // removed under us: its lock goes with it
    if (file.info.adopted && first) super.epoch.fetch_add(1, std::memory_order_acq_rel);
    return file;
  }
  refuse(ErrorKind::system, path,
         "the file was removed " + std::to_string(kAttachTries) + " times while attaching",
         "find out who removes it");
}

}  // namespace hpkv::shm
