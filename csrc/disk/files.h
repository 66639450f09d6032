// What the disk tier asks of the operating system, behind one interface, so that tests can record,
// fail, delay and lose what the real one does.
//
// Owns: nothing; handles belong to whoever opened them (FileHandle closes its own).
// Results: 0 or a count when it worked, -errno when it did not; nothing throws, nothing is retried
// except EINTR and short transfers.
// Threads: every method may be called from any thread, and may block for as long as the disk does.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace hpkv::disk {

struct OpenMode {
  bool write = false;
  bool create = false;  // if absent, mode 0600
  bool fresh = false;   // with create: -EEXIST if it is there
  bool direct = false;  // O_DIRECT: offsets, lengths and addresses are multiples of 4 KiB
};

enum class FileKind { file, directory, link, other };

struct FileStatus {
  FileKind kind = FileKind::other;
  std::uint64_t bytes = 0;            // length
  std::uint64_t allocated_bytes = 0;  // on the disk
  std::uint64_t links = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint32_t user = 0;
  std::uint32_t mode = 0;  // permission bits
};

struct FileSystemSpace {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // to this user
};

enum class FileLock { none, shared, exclusive };

class Files {
 public:
  virtual ~Files() = default;

  // A handle >= 0. Never follows a symbolic link at the end of the path; closed on exec.
  [[nodiscard]] virtual int open(const std::string& path, OpenMode mode) noexcept = 0;
  virtual void close(int handle) noexcept = 0;

  // Bytes read: fewer than asked for only at the end of the file.
  [[nodiscard]] virtual std::int64_t read(int handle, std::span<const iovec> parts,
                                          std::uint64_t offset) noexcept = 0;
  // A hint: this range will be read soon, not through a direct handle. Returns at once.
  virtual void expect(int handle, std::uint64_t offset, std::uint64_t bytes) noexcept = 0;
  // A hint: what was read of this file is not needed again.
  virtual void forget(int handle) noexcept = 0;
  // Writes all of it, or fails.
  [[nodiscard]] virtual std::int64_t write(int handle, std::span<const iovec> parts,
                                           std::uint64_t offset) noexcept = 0;
  // The data of the file, and what it takes to find it (fdatasync).
  [[nodiscard]] virtual int sync(int handle) noexcept = 0;
  // Reserves [0, bytes) on the disk and makes the file that long; a file system that cannot reserve
  // makes it that long only.
  [[nodiscard]] virtual int reserve(int handle, std::uint64_t bytes) noexcept = 0;
  [[nodiscard]] virtual int truncate(int handle, std::uint64_t bytes) noexcept = 0;
  [[nodiscard]] virtual int status(int handle, FileStatus& out) noexcept = 0;
  // A lock on one byte, of the open file description; -EAGAIN when another one stands against it.
  // Replaces the lock that this handle has there in one step.
  [[nodiscard]] virtual int lock(int handle, FileLock kind, std::uint64_t byte) noexcept = 0;

  // Of the name itself, not of what a link points to.
  [[nodiscard]] virtual int status_of(const std::string& path, FileStatus& out) noexcept = 0;
  [[nodiscard]] virtual int rename(const std::string& from, const std::string& to) noexcept = 0;
  [[nodiscard]] virtual int unlink(const std::string& path) noexcept = 0;
  [[nodiscard]] virtual int make_directory(const std::string& path) noexcept = 0;  // mode 0700
  [[nodiscard]] virtual int sync_directory(const std::string& path) noexcept = 0;
  // Names without "." and "..", in no order.
  [[nodiscard]] virtual int list(const std::string& path,
                                 std::vector<std::string>& names) noexcept = 0;
  [[nodiscard]] virtual int space(const std::string& path, FileSystemSpace& out) noexcept = 0;
};

// The operating system's.
[[nodiscard]] std::shared_ptr<Files> system_files();

// An open file that closes itself. Movable, not copyable.
class FileHandle {
 public:
  FileHandle() = default;
  FileHandle(std::shared_ptr<Files> files, int handle) noexcept
      : files_(std::move(files)), handle_(handle) {}
  FileHandle(FileHandle&& other) noexcept
      : files_(std::move(other.files_)), handle_(std::exchange(other.handle_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    if (this != &other) {
      reset();
      files_ = std::move(other.files_);
      handle_ = std::exchange(other.handle_, -1);
    }
    return *this;
  }
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;
  ~FileHandle() { reset(); }

  [[nodiscard]] int get() const noexcept { return handle_; }
  [[nodiscard]] bool valid() const noexcept { return handle_ >= 0; }
  void reset() noexcept {
    if (handle_ >= 0) files_->close(handle_);
    handle_ = -1;
  }

 private:
  std::shared_ptr<Files> files_;
  int handle_ = -1;
};

}  // namespace hpkv::disk
