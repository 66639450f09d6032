// A file system in memory that remembers every change in order, and what of them a power loss may
// take: everything of a file since its last sync, page by page, whole or torn; every name made,
// moved or removed since its directory was synced.
//
// Owns: the files. Threads: MemoryDisk is safe; the rest is for one thread.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "disk/files.h"

namespace hpkv::test {

inline constexpr std::uint64_t kDiskPage = 4096;
using PageBytes = std::array<std::byte, kDiskPage>;
using PageOf = std::shared_ptr<const PageBytes>;  // null: zeroes

struct FileImage {
  std::map<std::uint64_t, PageOf> pages;
  std::uint64_t bytes = 0;
  bool directory = false;

  void set_page(std::uint64_t page, PageOf data);
  void set_bytes(std::uint64_t length);
};

// What is on a disk: names, and files by number.
struct DiskImage {
  std::map<std::string, int> names;
  std::map<int, FileImage> files;
};

// One change, as it was asked for.
struct DiskChange {
  enum class Kind { write, length, sync, name, rename, unlink, sync_directory };
  Kind kind = Kind::write;
  int file = 0;
  bool directory = false;  // name: of a directory
  std::string path;        // of the file, or the name that changes
  std::string to;          // rename
  std::uint64_t bytes = 0;
  std::vector<std::pair<std::uint64_t, PageOf>> pages;
};

class MemoryDisk final : public disk::Files {
 public:
  MemoryDisk() = default;
  explicit MemoryDisk(DiskImage image) : image_(std::move(image)) {}

  // Called before each change, without a lock.
  void set_observer(std::function<void(const DiskChange&)> observer);
  [[nodiscard]] std::size_t change_count() const;
  [[nodiscard]] std::vector<DiskChange> changes() const;
  void set_available(std::uint64_t bytes);

  int open(const std::string& path, disk::OpenMode mode) noexcept override;
  void close(int handle) noexcept override;
  std::int64_t read(int handle, std::span<const iovec> parts,
                    std::uint64_t offset) noexcept override;
  std::int64_t write(int handle, std::span<const iovec> parts,
                     std::uint64_t offset) noexcept override;
  void expect(int, std::uint64_t, std::uint64_t) noexcept override {}
  void forget(int) noexcept override {}
  int sync(int handle) noexcept override;
  int reserve(int handle, std::uint64_t bytes) noexcept override;
  int truncate(int handle, std::uint64_t bytes) noexcept override;
  int status(int handle, disk::FileStatus& out) noexcept override;
  int lock(int handle, disk::FileLock kind, std::uint64_t byte) noexcept override;
  int status_of(const std::string& path, disk::FileStatus& out) noexcept override;
  int rename(const std::string& from, const std::string& to) noexcept override;
  int unlink(const std::string& path) noexcept override;
  int make_directory(const std::string& path) noexcept override;
  int sync_directory(const std::string& path) noexcept override;
  int list(const std::string& path, std::vector<std::string>& names) noexcept override;
  int space(const std::string& path, disk::FileSystemSpace& out) noexcept override;

 private:
  struct Open {
    int file = 0;
    std::string path;
    bool direct = false;
  };
  struct Lock {
    int handle = 0;
    int file = 0;
    std::uint64_t byte = 0;
    disk::FileLock kind = disk::FileLock::none;
  };
  void note(DiskChange change);  // mutex_ not held
  [[nodiscard]] int set_length(int handle, std::uint64_t bytes, bool may_shrink) noexcept;
  [[nodiscard]] disk::FileStatus status_locked(int file) const;
  [[nodiscard]] int find_locked(const std::string& path) const;  // 0: no such name

  mutable std::mutex mutex_;
  DiskImage image_;
  std::map<int, Open> open_;
  std::vector<Lock> locks_;
  std::vector<DiskChange> changes_;
  std::function<void(const DiskChange&)> observer_;
  int next_file_ = 1'000'000;  // above those of any image
  int next_handle_ = 1;
  std::uint64_t available_ = std::uint64_t{1} << 40U;
};

// The disk as changes reach it, and what a power loss at this moment may leave of it.
class PowerLoss {
 public:
  void apply(const DiskChange& change);
  // Each image that is tried: nothing or all of what was not synced; all but one page, or one
  // length; all with one page torn; nothing but one page.
  void each_image(const std::function<void(const DiskImage&)>& visit) const;

 private:
  struct Unit {
    int file = 0;
    bool page_write = false;
    std::uint64_t page = 0;
    PageOf data;
    std::uint64_t bytes = 0;  // length of the file with it
  };
  enum class Landing { whole, torn, lost };
  void apply_name(DiskImage& image, const DiskChange& change) const;
  void land(DiskImage& image, const Unit& unit, Landing landing) const;
  [[nodiscard]] DiskImage with_names(std::size_t count) const;
  void visit_sound(DiskImage image, const std::function<void(const DiskImage&)>& visit) const;

  DiskImage durable_;
  std::vector<Unit> units_;               // in order
  std::vector<DiskChange> name_changes_;  // in order
  std::map<int, std::uint64_t> lengths_;  // of files, as asked for
};

}  // namespace hpkv::test
