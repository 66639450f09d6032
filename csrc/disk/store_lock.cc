#include "disk/store_lock.h"

#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <string_view>

#include "base/clock.h"
#include "disk/aligned.h"
#include "disk/format.h"
#include "disk/hex.h"

namespace hpkv::disk {
namespace {

constexpr const char* kLockName = "/LOCK";
constexpr std::uint64_t kAttachedByte = 0;
constexpr std::uint64_t kEntryByte = 1;
constexpr std::int64_t kEntryWaitNs = 10 * kSecond;
constexpr std::string_view kTitle = "hpkv store, used by\n";

std::string line_after(const std::string& text, std::string_view word) {
  const std::size_t at = text.find(word);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + word.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

void pause_briefly() noexcept {
  const timespec pause{0, 2 * kMillisecond};
  ::nanosleep(&pause, nullptr);
}

}  // namespace

FileHandle open_lock_file(const std::shared_ptr<Files>& files, const std::string& directory) {
  const std::string path = directory + kLockName;
  FileHandle file(files, files->open(path, {.write = true, .create = true}));
  if (!file.valid()) {
    if (file.get() == -ELOOP) {
      throw Error(ErrorKind::owner, "open store " + path + ": it is a symbolic link; remove it");
    }
    throw_system("open store lock", path, -file.get());
  }
  FileStatus status;
  const int code = files->status(file.get(), status);
  if (code < 0) throw_system("stat store lock", path, -code);
  if (status.kind != FileKind::file || status.user != ::geteuid() || (status.mode & 077U) != 0) {
    throw Error(ErrorKind::owner, "open store " + directory +
                                      ": its file LOCK is not a file of this user alone (user " +
                                      std::to_string(status.user) +
                                      "); choose a directory of your own (--hpkv-storage-path)");
  }
  return file;
}

StoreLock::StoreLock(std::shared_ptr<Files> files, const std::string& directory,
                     const PoolInfo& pool, std::int64_t takeover_wait_ns)
    : files_(std::move(files)),
      path_(directory + kLockName),
      uuid_(pool.uuid),
      pool_path_(pool.path),
      file_(open_lock_file(files_, directory)) {
  wait_for_entry();
  take_attachment(takeover_wait_ns);
}

void StoreLock::wait_for_entry() {
  const std::int64_t deadline = now_ns() + kEntryWaitNs;
  for (;;) {
    const int code = files_->lock(file_.get(), FileLock::exclusive, kEntryByte);
    if (code == 0) return;
    if (code != -EAGAIN) throw_system("lock store", path_, -code);
    if (now_ns() > deadline) {
      throw Error(ErrorKind::system, "open store " + path_ +
                                         ": another process has been opening it for 10 s; look for "
                                         "a stopped process (fuser " +
                                         path_ + ")");
    }
    pause_briefly();
  }
}

void StoreLock::take_attachment(std::int64_t takeover_wait_ns) {
  const std::int64_t deadline = now_ns() + takeover_wait_ns;
  for (;;) {
    const int code = files_->lock(file_.get(), FileLock::exclusive, kAttachedByte);
    if (code < 0 && code != -EAGAIN) throw_system("lock store", path_, -code);
    const std::string text = read_text();
    stranger_ = line_after(text, "pool ") != hex(uuid_);
    alone_ = code == 0;
    if (alone_) return;
    if (!stranger_) {
      const int shared = files_->lock(file_.get(), FileLock::shared, kAttachedByte);
      if (shared == 0) return;
      throw_system("lock store", path_, -shared);
    }
    if (now_ns() >= deadline) {
      throw Error(ErrorKind::store,
                  "open store " + path_ + " for the pool " + pool_path_ + ": the pool " +
                      line_after(text, "path ") +
                      " is using it; give this server the same pool (--hpkv-share-mem-path) or "
                      "another directory (--hpkv-storage-path)");
    }
    pause_briefly();
  }
}

void StoreLock::settle() {
  if (alone_ && stranger_) {
    const AlignedBytes page(kPage);
    const std::string text = own_text();
    text.copy(reinterpret_cast<char*>(page.data()), page.size());
    const iovec part{page.data(), page.size()};
    const std::int64_t written = files_->write(file_.get(), std::span(&part, 1), 0);
    const int code = written < 0 ? static_cast<int>(written) : files_->sync(file_.get());
    if (code < 0) throw_system("write store lock", path_, -code);
  }
  int code = files_->lock(file_.get(), FileLock::shared, kAttachedByte);
  if (code == 0) code = files_->lock(file_.get(), FileLock::none, kEntryByte);
  if (code < 0) throw_system("lock store", path_, -code);
}

bool StoreLock::in_place() const noexcept {
  FileStatus ours;
  FileStatus named;
  return file_.valid() && files_->status(file_.get(), ours) == 0 &&
         files_->status_of(path_, named) == 0 && ours.inode == named.inode &&
         ours.device == named.device;
}

std::string StoreLock::read_text() {
  std::string text(kPage, '\0');
  const iovec part{text.data(), text.size()};
  const std::int64_t bytes = files_->read(file_.get(), std::span(&part, 1), 0);
  if (bytes < 0) throw_system("read store lock", path_, static_cast<int>(-bytes));
  text.resize(static_cast<std::size_t>(bytes));
  return text;
}

std::string StoreLock::own_text() const {
  std::string text(kTitle);
  text += "pool " + hex(uuid_) + "\npath " + pool_path_.substr(0, kPage / 2) + "\n";
  text.resize(kPage - 1, ' ');  // fixed size: a shorter name leaves nothing of a longer one
  text += '\n';
  return text;
}

}  // namespace hpkv::disk
