#include "tests/memory_disk.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hpkv::test {
namespace {

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

}  // namespace

void FileImage::set_page(std::uint64_t page, PageOf data) { pages[page] = std::move(data); }

void FileImage::set_bytes(std::uint64_t length) {
  if (length < bytes) {
    pages.erase(pages.lower_bound((length + kDiskPage - 1) / kDiskPage), pages.end());
  }
  bytes = length;
}

// ---- MemoryDisk ----

void MemoryDisk::set_observer(std::function<void(const DiskChange&)> observer) {
  const std::lock_guard guard(mutex_);
  observer_ = std::move(observer);
}

std::size_t MemoryDisk::change_count() const {
  const std::lock_guard guard(mutex_);
  return changes_.size();
}

std::vector<DiskChange> MemoryDisk::changes() const {
  const std::lock_guard guard(mutex_);
  return changes_;
}

void MemoryDisk::set_available(std::uint64_t bytes) {
  const std::lock_guard guard(mutex_);
  available_ = bytes;
}

void MemoryDisk::note(DiskChange change) {
  std::function<void(const DiskChange&)> observer;
  {
    const std::lock_guard guard(mutex_);
    observer = observer_;
  }
  if (observer) observer(change);
  const std::lock_guard guard(mutex_);
  changes_.push_back(std::move(change));
}

int MemoryDisk::find_locked(const std::string& path) const {
  const auto found = image_.names.find(path);
  return found == image_.names.end() ? 0 : found->second;
}

int MemoryDisk::open(const std::string& path, disk::OpenMode mode) noexcept {
  int file = 0;
  {
    const std::lock_guard guard(mutex_);
    file = find_locked(path);
    if (file != 0 && mode.fresh) return -EEXIST;
    if (file == 0 && (!mode.create || find_locked(parent_of(path)) == 0)) return -ENOENT;
    if (file != 0 && image_.files[file].directory) return -EISDIR;
  }
  if (file == 0) {
    DiskChange change;
    change.kind = DiskChange::Kind::name;
    change.path = path;
    {
      const std::lock_guard guard(mutex_);
      file = change.file = next_file_++;
    }
    note(change);
    const std::lock_guard guard(mutex_);
    image_.names[path] = file;
    image_.files[file] = {};
  }
  const std::lock_guard guard(mutex_);
  open_[next_handle_] = {file, path, mode.direct};
  return next_handle_++;
}

void MemoryDisk::close(int handle) noexcept {
  const std::lock_guard guard(mutex_);
  open_.erase(handle);
  std::erase_if(locks_, [&](const Lock& lock) { return lock.handle == handle; });
}

std::int64_t MemoryDisk::read(int handle, std::span<const iovec> parts,
                              std::uint64_t offset) noexcept {
  const std::lock_guard guard(mutex_);
  const FileImage& file = image_.files[open_.at(handle).file];
  std::int64_t moved = 0;
  for (const iovec& part : parts) {
    auto* target = static_cast<std::byte*>(part.iov_base);
    std::uint64_t left = part.iov_len;
    while (left > 0) {
      if (offset >= file.bytes) return moved;
      const std::uint64_t within = offset % kDiskPage;
      const std::uint64_t count = std::min({left, kDiskPage - within, file.bytes - offset});
      const auto page = file.pages.find(offset / kDiskPage);
      if (page == file.pages.end() || !page->second) {
        std::memset(target, 0, count);
      } else {
        std::memcpy(target, page->second->data() + within, count);
      }
      target += count;
      offset += count;
      left -= count;
      moved += static_cast<std::int64_t>(count);
    }
  }
  return moved;
}

std::int64_t MemoryDisk::write(int handle, std::span<const iovec> parts,
                               std::uint64_t offset) noexcept {
  std::vector<std::byte> bytes;
  for (const iovec& part : parts) {
    const auto* from = static_cast<const std::byte*>(part.iov_base);
    bytes.insert(bytes.end(), from, from + part.iov_len);
  }
  DiskChange change;
  {
    const std::lock_guard guard(mutex_);
    const Open& open = open_.at(handle);
    if (open.direct && (offset % kDiskPage != 0 || bytes.size() % kDiskPage != 0)) return -EINVAL;
    const FileImage& file = image_.files[open.file];
    change.file = open.file;
    change.path = open.path;
    change.bytes = std::max(file.bytes, offset + bytes.size());
    for (std::uint64_t at = 0; at < bytes.size();) {
      const std::uint64_t page = (offset + at) / kDiskPage;
      const std::uint64_t within = (offset + at) % kDiskPage;
      const std::uint64_t count = std::min(bytes.size() - at, kDiskPage - within);
      auto data = std::make_shared<PageBytes>();
      const auto old = file.pages.find(page);
      if (old != file.pages.end() && old->second) *data = *old->second;
      std::memcpy(data->data() + within, bytes.data() + at, count);
      change.pages.emplace_back(page, std::move(data));
      at += count;
    }
  }
  note(change);
  const std::lock_guard guard(mutex_);
  FileImage& file = image_.files[change.file];
  for (const auto& [page, data] : change.pages) file.set_page(page, data);
  file.bytes = change.bytes;
  return static_cast<std::int64_t>(bytes.size());
}

int MemoryDisk::sync(int handle) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::sync;
  {
    const std::lock_guard guard(mutex_);
    change.file = open_.at(handle).file;
    change.path = open_.at(handle).path;
  }
  note(change);
  return 0;
}

int MemoryDisk::set_length(int handle, std::uint64_t bytes, bool may_shrink) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::length;
  change.bytes = bytes;
  {
    const std::lock_guard guard(mutex_);
    change.file = open_.at(handle).file;
    change.path = open_.at(handle).path;
    if (!may_shrink && image_.files[change.file].bytes >= bytes) return 0;
  }
  note(change);
  const std::lock_guard guard(mutex_);
  image_.files[change.file].set_bytes(bytes);
  return 0;
}

int MemoryDisk::reserve(int handle, std::uint64_t bytes) noexcept {
  return set_length(handle, bytes, false);
}

int MemoryDisk::truncate(int handle, std::uint64_t bytes) noexcept {
  return set_length(handle, bytes, true);
}

disk::FileStatus MemoryDisk::status_locked(int file) const {
  const FileImage& image = image_.files.at(file);
  disk::FileStatus out;
  out.kind = image.directory ? disk::FileKind::directory : disk::FileKind::file;
  out.bytes = image.bytes;
  out.allocated_bytes = image.bytes;
  out.inode = static_cast<std::uint64_t>(file);
  out.user = ::geteuid();
  out.mode = image.directory ? 0700 : 0600;
  for (const auto& [name, number] : image_.names) out.links += number == file ? 1 : 0;
  return out;
}

int MemoryDisk::status(int handle, disk::FileStatus& out) noexcept {
  const std::lock_guard guard(mutex_);
  out = status_locked(open_.at(handle).file);
  return 0;
}

int MemoryDisk::status_of(const std::string& path, disk::FileStatus& out) noexcept {
  const std::lock_guard guard(mutex_);
  const int file = find_locked(path);
  if (file == 0) return -ENOENT;
  out = status_locked(file);
  return 0;
}

int MemoryDisk::lock(int handle, disk::FileLock kind, std::uint64_t byte) noexcept {
  const std::lock_guard guard(mutex_);
  const int file = open_.at(handle).file;
  for (const Lock& other : locks_) {
    const bool conflicts =
        kind == disk::FileLock::exclusive ||
        (kind == disk::FileLock::shared && other.kind == disk::FileLock::exclusive);
    if (other.handle != handle && other.file == file && other.byte == byte && conflicts) {
      return -EAGAIN;
    }
  }
  std::erase_if(locks_,
                [&](const Lock& lock) { return lock.handle == handle && lock.byte == byte; });
  if (kind != disk::FileLock::none) locks_.push_back({handle, file, byte, kind});
  return 0;
}

int MemoryDisk::rename(const std::string& from, const std::string& to) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::rename;
  change.path = from;
  change.to = to;
  {
    const std::lock_guard guard(mutex_);
    change.file = find_locked(from);
    if (change.file == 0) return -ENOENT;
  }
  note(change);
  const std::lock_guard guard(mutex_);
  image_.names.erase(from);
  image_.names[to] = change.file;
  return 0;
}

int MemoryDisk::unlink(const std::string& path) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::unlink;
  change.path = path;
  {
    const std::lock_guard guard(mutex_);
    change.file = find_locked(path);
    if (change.file == 0) return -ENOENT;
  }
  note(change);
  const std::lock_guard guard(mutex_);
  image_.names.erase(path);
  return 0;
}

int MemoryDisk::make_directory(const std::string& path) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::name;
  change.directory = true;
  change.path = path;
  {
    const std::lock_guard guard(mutex_);
    if (find_locked(path) != 0) return -EEXIST;
    change.file = next_file_++;
  }
  note(change);
  const std::lock_guard guard(mutex_);
  image_.names[path] = change.file;
  image_.files[change.file].directory = true;
  return 0;
}

int MemoryDisk::sync_directory(const std::string& path) noexcept {
  DiskChange change;
  change.kind = DiskChange::Kind::sync_directory;
  change.path = path;
  note(change);
  return 0;
}

int MemoryDisk::list(const std::string& path, std::vector<std::string>& names) noexcept {
  const std::lock_guard guard(mutex_);
  names.clear();
  if (find_locked(path) == 0) return -ENOENT;
  for (const auto& [name, file] : image_.names) {
    if (name != path && parent_of(name) == path) names.push_back(name.substr(path.size() + 1));
  }
  return 0;
}

int MemoryDisk::space(const std::string&, disk::FileSystemSpace& out) noexcept {
  const std::lock_guard guard(mutex_);
  out = {std::uint64_t{1} << 40U, available_};
  return 0;
}

// ---- PowerLoss ----

void PowerLoss::apply(const DiskChange& change) {
  switch (change.kind) {
    case DiskChange::Kind::write:
      for (const auto& [page, data] : change.pages) {
        lengths_[change.file] = std::max(lengths_[change.file], change.bytes);
        units_.push_back({change.file, true, page, data, lengths_[change.file]});
      }
      break;
    case DiskChange::Kind::length:
      lengths_[change.file] = change.bytes;
      units_.push_back({change.file, false, 0, nullptr, change.bytes});
      break;
    case DiskChange::Kind::sync:
      for (const Unit& unit : units_) {
        if (unit.file == change.file) land(durable_, unit, Landing::whole);
      }
      std::erase_if(units_, [&](const Unit& unit) { return unit.file == change.file; });
      break;
    case DiskChange::Kind::name:
      durable_.files[change.file].directory = change.directory;  // reachable once its name is
      name_changes_.push_back(change);
      break;
    case DiskChange::Kind::rename:
    case DiskChange::Kind::unlink:
      name_changes_.push_back(change);
      break;
    case DiskChange::Kind::sync_directory:
      for (const DiskChange& earlier : name_changes_) {
        if (parent_of(earlier.path) == change.path) apply_name(durable_, earlier);
      }
      std::erase_if(name_changes_, [&](const DiskChange& earlier) {
        return parent_of(earlier.path) == change.path;
      });
      break;
  }
}

void PowerLoss::apply_name(DiskImage& image, const DiskChange& change) const {
  if (change.kind == DiskChange::Kind::name) image.names[change.path] = change.file;
  if (change.kind == DiskChange::Kind::unlink) image.names.erase(change.path);
  if (change.kind == DiskChange::Kind::rename) {
    image.names.erase(change.path);
    image.names[change.to] = change.file;
  }
}

void PowerLoss::land(DiskImage& image, const Unit& unit, Landing landing) const {
  if (landing == Landing::lost) return;
  FileImage& file = image.files[unit.file];
  if (!unit.page_write) {
    file.set_bytes(unit.bytes);
    return;
  }
  PageOf data = unit.data;
  if (landing == Landing::torn) {
    auto torn = std::make_shared<PageBytes>(*unit.data);
    const auto old = file.pages.find(unit.page);
    const bool zero = old == file.pages.end() || !old->second;
    for (std::size_t i = kDiskPage / 2; i < kDiskPage; ++i) {
      (*torn)[i] = zero ? std::byte{0} : (*old->second)[i];
    }
    data = std::move(torn);
  }
  file.set_page(unit.page, std::move(data));
  file.bytes =
      std::max(file.bytes, (unit.page + 1) * kDiskPage <= unit.bytes ? (unit.page + 1) * kDiskPage
                                                                     : unit.bytes);
}

DiskImage PowerLoss::with_names(std::size_t count) const {
  DiskImage image = durable_;
  for (std::size_t i = 0; i < count; ++i) apply_name(image, name_changes_[i]);
  return image;
}

void PowerLoss::visit_sound(DiskImage image,
                            const std::function<void(const DiskImage&)>& visit) const {
  // A name below a directory that was lost is lost too.
  for (auto at = image.names.begin(); at != image.names.end();) {
    const std::string parent = parent_of(at->first);
    at = parent.empty() || image.names.contains(parent) ? std::next(at) : image.names.erase(at);
  }
  visit(image);
}

void PowerLoss::each_image(const std::function<void(const DiskImage&)>& visit) const {
  const std::size_t names = name_changes_.size();
  for (std::size_t i = 0; i <= names; ++i) {
    DiskImage none = with_names(i);
    DiskImage all = none;
    for (const Unit& unit : units_) land(all, unit, Landing::whole);
    visit_sound(std::move(none), visit);
    if (!units_.empty()) visit_sound(std::move(all), visit);
  }
  for (std::size_t chosen = 0; chosen < units_.size(); ++chosen) {
    for (const Landing landing : {Landing::lost, Landing::torn}) {
      if (landing == Landing::torn && !units_[chosen].page_write) continue;
      DiskImage image = with_names(names);
      for (std::size_t i = 0; i < units_.size(); ++i) {
        land(image, units_[i], i == chosen ? landing : Landing::whole);
      }
      visit_sound(std::move(image), visit);
    }
    DiskImage alone = with_names(names);
    land(alone, units_[chosen], Landing::whole);
    visit_sound(std::move(alone), visit);
  }
}

}  // namespace hpkv::test
