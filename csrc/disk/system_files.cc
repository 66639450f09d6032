// The operating system's side of files.h.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <memory>

#include "disk/files.h"

namespace hpkv::disk {
namespace {

int result(int code) noexcept { return code < 0 ? -errno : code; }

template <typename Call>
int restarted(Call&& call) noexcept {
  int code = 0;
  do {
    code = call();
  } while (code < 0 && errno == EINTR);
  return result(code);
}

FileStatus translate(const struct stat& from) noexcept {
  FileStatus out;
  if (S_ISREG(from.st_mode)) out.kind = FileKind::file;
  if (S_ISDIR(from.st_mode)) out.kind = FileKind::directory;
  if (S_ISLNK(from.st_mode)) out.kind = FileKind::link;
  out.bytes = static_cast<std::uint64_t>(from.st_size);
  out.allocated_bytes = static_cast<std::uint64_t>(from.st_blocks) * 512;
  out.links = from.st_nlink;
  out.device = from.st_dev;
  out.inode = from.st_ino;
  out.user = from.st_uid;
  out.mode = from.st_mode & 07777U;
  return out;
}

// A list of parts that shrinks as bytes go over.
class Remaining {
 public:
  explicit Remaining(std::span<const iovec> parts) : parts_(parts.begin(), parts.end()) {}

  [[nodiscard]] bool done() const noexcept { return at_ == parts_.size(); }
  [[nodiscard]] const iovec* data() const noexcept { return parts_.data() + at_; }
  [[nodiscard]] int count() const noexcept {
    return static_cast<int>(std::min<std::size_t>(parts_.size() - at_, IOV_MAX));
  }
  void advance(std::size_t bytes) noexcept {
    while (at_ < parts_.size() && bytes >= parts_[at_].iov_len) bytes -= parts_[at_++].iov_len;
    if (bytes == 0) return;
    parts_[at_].iov_base = static_cast<std::byte*>(parts_[at_].iov_base) + bytes;
    parts_[at_].iov_len -= bytes;
  }

 private:
  std::vector<iovec> parts_;
  std::size_t at_ = 0;
};

template <typename Transfer>
std::int64_t transfer_all(std::span<const iovec> parts, std::uint64_t offset, Transfer&& transfer) {
  Remaining remaining(parts);
  std::int64_t moved = 0;
  while (!remaining.done()) {
    const ssize_t bytes = transfer(remaining.data(), remaining.count(),
                                   static_cast<off_t>(offset + static_cast<std::uint64_t>(moved)));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return -errno;
    if (bytes == 0) break;  // end of the file
    moved += bytes;
    remaining.advance(static_cast<std::size_t>(bytes));
  }
  return moved;
}

class SystemFiles final : public Files {
 public:
  int open(const std::string& path, OpenMode mode) noexcept override {
    int flags = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (mode.write ? O_RDWR : O_RDONLY);
    if (mode.create) flags |= O_CREAT;
    if (mode.fresh) flags |= O_EXCL;
    if (mode.direct) flags |= O_DIRECT;
    return restarted([&] { return ::open(path.c_str(), flags, 0600); });
  }
  void close(int handle) noexcept override { ::close(handle); }

  std::int64_t read(int handle, std::span<const iovec> parts,
                    std::uint64_t offset) noexcept override {
    return transfer_all(parts, offset, [&](const iovec* part, int count, off_t at) {
      return ::preadv(handle, part, count, at);
    });
  }
  std::int64_t write(int handle, std::span<const iovec> parts,
                     std::uint64_t offset) noexcept override {
    std::int64_t wanted = 0;
    for (const iovec& part : parts) wanted += static_cast<std::int64_t>(part.iov_len);
    const std::int64_t moved = transfer_all(
        parts, offset,
        [&](const iovec* part, int count, off_t at) { return ::pwritev(handle, part, count, at); });
    return moved >= 0 && moved != wanted ? -EIO : moved;
  }
  void expect(int handle, std::uint64_t offset, std::uint64_t bytes) noexcept override {
    static_cast<void>(::posix_fadvise(handle, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                                      POSIX_FADV_WILLNEED));
  }
  void forget(int handle) noexcept override {
    static_cast<void>(::posix_fadvise(handle, 0, 0, POSIX_FADV_DONTNEED));
  }
  int sync(int handle) noexcept override {
    return restarted([&] { return ::fdatasync(handle); });
  }
  int reserve(int handle, std::uint64_t bytes) noexcept override {
    const int code =
        restarted([&] { return ::fallocate(handle, 0, 0, static_cast<off_t>(bytes)); });
    if (code != -EOPNOTSUPP) return code;
    struct stat status{};
    if (::fstat(handle, &status) != 0) return -errno;
    if (static_cast<std::uint64_t>(status.st_size) >= bytes) return 0;
    return truncate(handle, bytes);
  }
  int truncate(int handle, std::uint64_t bytes) noexcept override {
    return restarted([&] { return ::ftruncate(handle, static_cast<off_t>(bytes)); });
  }
  int status(int handle, FileStatus& out) noexcept override {
    struct stat status{};
    if (::fstat(handle, &status) != 0) return -errno;
    out = translate(status);
    return 0;
  }
  int lock(int handle, FileLock kind, std::uint64_t byte) noexcept override {
    struct flock lock{};
    lock.l_type = F_UNLCK;
    if (kind == FileLock::shared) lock.l_type = F_RDLCK;
    if (kind == FileLock::exclusive) lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(byte);
    lock.l_len = 1;
    const int code = restarted([&] { return ::fcntl(handle, F_OFD_SETLK, &lock); });
    return code == -EACCES ? -EAGAIN : code;
  }

  int status_of(const std::string& path, FileStatus& out) noexcept override {
    struct stat status{};
    if (::lstat(path.c_str(), &status) != 0) return -errno;
    out = translate(status);
    return 0;
  }
  int rename(const std::string& from, const std::string& to) noexcept override {
    return result(::rename(from.c_str(), to.c_str()));
  }
  int unlink(const std::string& path) noexcept override { return result(::unlink(path.c_str())); }
  int make_directory(const std::string& path) noexcept override {
    return result(::mkdir(path.c_str(), 0700));
  }
  int sync_directory(const std::string& path) noexcept override {
    const int handle = restarted(
        [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
    if (handle < 0) return handle;
    const int code = restarted([&] { return ::fsync(handle); });
    ::close(handle);
    return code;
  }
  int list(const std::string& path, std::vector<std::string>& names) noexcept override {
    names.clear();
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), &::closedir);
    if (!directory) return -errno;
    errno = 0;
    while (const dirent* entry = ::readdir(directory.get())) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    return errno == 0 ? 0 : -errno;
  }
  int space(const std::string& path, FileSystemSpace& out) noexcept override {
    struct statvfs stats{};
    if (restarted([&] { return ::statvfs(path.c_str(), &stats); }) < 0) return -errno;
    out.total_bytes = std::uint64_t{stats.f_blocks} * stats.f_frsize;
    out.available_bytes = std::uint64_t{stats.f_bavail} * stats.f_frsize;
    return 0;
  }
};

}  // namespace

std::shared_ptr<Files> system_files() { return std::make_shared<SystemFiles>(); }

}  // namespace hpkv::disk
