// Files that ask a hook before every call: it may answer an error in the call's place, wait as long
// as it likes (a slow disk, a hanging one), or only look (the order of calls).
//
// Owns: a share of the files below. Threads: safe; the hook is called without a lock and may be
// called by several threads at once.
#pragma once

#include <cerrno>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "disk/files.h"

namespace hpkv::test {

enum class FileCall {
  open,
  read,
  write,
  sync,
  reserve,
  truncate,
  status,
  lock,
  status_of,
  rename,
  unlink,
  make_directory,
  sync_directory,
  list,
  space,
};

class FaultyFiles final : public disk::Files {
 public:
  // 0: go on; -errno: that is the answer, and nothing happens.
  using Hook = std::function<int(FileCall call, const std::string& path)>;

  explicit FaultyFiles(std::shared_ptr<disk::Files> below) : below_(std::move(below)) {}

  void set_hook(Hook hook) {
    const std::lock_guard guard(mutex_);
    hook_ = std::move(hook);
  }
  // Fails every call of this kind on paths that contain `part`, until set_hook({}).
  void fail(FileCall failing, int code, const std::string& part = "") {
    set_hook([=](FileCall call, const std::string& path) {
      return call == failing && path.find(part) != std::string::npos ? -code : 0;
    });
  }
  // What space() answers from now on.
  void set_available(std::uint64_t bytes) {
    const std::lock_guard guard(mutex_);
    available_ = bytes;
    space_is_set_ = true;
  }

  int open(const std::string& path, disk::OpenMode mode) noexcept override {
    if (const int code = ask(FileCall::open, path)) return code;
    const int handle = below_->open(path, mode);
    const std::lock_guard guard(mutex_);
    if (handle >= 0) paths_[handle] = path;
    return handle;
  }
  void close(int handle) noexcept override { below_->close(handle); }
  std::int64_t read(int handle, std::span<const iovec> parts,
                    std::uint64_t offset) noexcept override {
    if (const int code = ask(FileCall::read, handle)) return code;
    return below_->read(handle, parts, offset);
  }
  std::int64_t write(int handle, std::span<const iovec> parts,
                     std::uint64_t offset) noexcept override {
    if (const int code = ask(FileCall::write, handle)) return code;
    return below_->write(handle, parts, offset);
  }
  int sync(int handle) noexcept override {
    if (const int code = ask(FileCall::sync, handle)) return code;
    return below_->sync(handle);
  }
  int reserve(int handle, std::uint64_t bytes) noexcept override {
    if (const int code = ask(FileCall::reserve, handle)) return code;
    return below_->reserve(handle, bytes);
  }
  void expect(int handle, std::uint64_t offset, std::uint64_t bytes) noexcept override {
    below_->expect(handle, offset, bytes);
  }
  void forget(int handle) noexcept override { below_->forget(handle); }
  int truncate(int handle, std::uint64_t bytes) noexcept override {
    if (const int code = ask(FileCall::truncate, handle)) return code;
    return below_->truncate(handle, bytes);
  }
  int status(int handle, disk::FileStatus& out) noexcept override {
    if (const int code = ask(FileCall::status, handle)) return code;
    return below_->status(handle, out);
  }
  int lock(int handle, disk::FileLock kind, std::uint64_t byte) noexcept override {
    if (const int code = ask(FileCall::lock, handle)) return code;
    return below_->lock(handle, kind, byte);
  }
  int status_of(const std::string& path, disk::FileStatus& out) noexcept override {
    if (const int code = ask(FileCall::status_of, path)) return code;
    return below_->status_of(path, out);
  }
  int rename(const std::string& from, const std::string& to) noexcept override {
    if (const int code = ask(FileCall::rename, to)) return code;
    return below_->rename(from, to);
  }
  int unlink(const std::string& path) noexcept override {
    if (const int code = ask(FileCall::unlink, path)) return code;
    return below_->unlink(path);
  }
  int make_directory(const std::string& path) noexcept override {
    if (const int code = ask(FileCall::make_directory, path)) return code;
    return below_->make_directory(path);
  }
  int sync_directory(const std::string& path) noexcept override {
    if (const int code = ask(FileCall::sync_directory, path)) return code;
    return below_->sync_directory(path);
  }
  int list(const std::string& path, std::vector<std::string>& names) noexcept override {
    if (const int code = ask(FileCall::list, path)) return code;
    return below_->list(path, names);
  }
  int space(const std::string& path, disk::FileSystemSpace& out) noexcept override {
    if (const int code = ask(FileCall::space, path)) return code;
    const int code = below_->space(path, out);
    const std::lock_guard guard(mutex_);
    if (space_is_set_) out.available_bytes = available_;
    return code;
  }

 private:
  int ask(FileCall call, const std::string& path) {
    Hook hook;
    {
      const std::lock_guard guard(mutex_);
      hook = hook_;
    }
    return hook ? hook(call, path) : 0;
  }
  int ask(FileCall call, int handle) {
    std::string path;
    {
      const std::lock_guard guard(mutex_);
      path = paths_[handle];
    }
    return ask(call, path);
  }

  std::shared_ptr<disk::Files> below_;
  std::mutex mutex_;
  Hook hook_;
  std::map<int, std::string> paths_;
  bool space_is_set_ = false;
  std::uint64_t available_ = 0;
};

// A disk that fails the sync of a file that was written to since: of a summary, and not of the
// records before it.
inline FaultyFiles::Hook no_sync_after_a_write() {
  return [written = std::make_shared<std::set<std::string>>()](FileCall call,
                                                               const std::string& path) {
    if (call == FileCall::write) written->insert(path);
    return call == FileCall::sync && written->contains(path) ? -EIO : 0;
  };
}

}  // namespace hpkv::test
