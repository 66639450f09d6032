#include "disk/region_files.h"

#include <cerrno>
#include <ctime>

#include "disk/aligned.h"

namespace hpkv::disk {
namespace {

std::uint64_t unix_time_ns() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(t.tv_nsec);
}

}  // namespace

RegionFiles::Handle RegionFiles::open(std::uint32_t region, int& code) {
  code = 0;
  {
    const std::lock_guard guard(mutex_);
    const auto found = by_region_.find(region);
    if (found != by_region_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      return found->second->handle;
    }
  }
  const int handle =
      files_->open(directory_.region_path(region), {.write = true, .direct = directory_.direct()});
  if (handle < 0) {
    code = handle;
    return nullptr;
  }
  auto file = std::make_shared<const FileHandle>(files_, handle);
  const std::lock_guard guard(mutex_);
  const auto found = by_region_.find(region);
  if (found != by_region_.end()) return found->second->handle;  // another thread was faster
  recent_.push_front({region, file});
  by_region_[region] = recent_.begin();
  if (recent_.size() > kHandles) {
    by_region_.erase(recent_.back().region);
    recent_.pop_back();
  }
  return file;
}

void RegionFiles::drop(std::uint32_t region) {
  const std::lock_guard guard(mutex_);
  const auto found = by_region_.find(region);
  if (found == by_region_.end()) return;
  recent_.erase(found->second);
  by_region_.erase(found);
}

std::optional<RegionHeader> RegionFiles::read_header(const FileHandle& file, std::uint32_t region,
                                                     int& code) {
  const AlignedBytes pages(kRegionHeadBytes);
  const iovec part{pages.data(), pages.size()};
  const std::int64_t bytes = files_->read(file.get(), std::span(&part, 1), 0);
  code = bytes < 0 ? static_cast<int>(bytes) : 0;
  std::optional<RegionHeader> best;
  for (std::uint64_t i = 0; i < 2; ++i) {
    const auto& page = pages.page<RegionHeader>(i);
    if (bytes < static_cast<std::int64_t>((i + 1) * kPage) || !page_holds(page)) continue;
    const StoreHeader& store = directory_.header();
    const bool ours = page.magic == kRegionMagic && page.version == kStoreVersion &&
                      page.store == store.id && page.region == region;
    const bool sane = page.stride != 0 && page.stride % kPage == 0 &&
                      page.stride <= store.region_bytes && page.capacity != 0 &&
                      page.capacity <= region_capacity(store.region_bytes, page.stride);
    if (ours && sane && (!best || best->generation < page.generation)) best = page;
  }
  return best;
}

std::optional<RegionHeader> RegionFiles::header(std::uint32_t region, int& code) {
  const Handle file = open(region, code);
  if (!file) return std::nullopt;
  return read_header(*file, region, code);
}

int RegionFiles::start(RegionHeader& header, bool may_grow) {
  const std::string path = directory_.region_path(header.region);
  drop(header.region);
  int code = 0;
  Handle file = open(header.region, code);
  const bool fresh = code == -ENOENT;
  if (fresh) {
    if (!may_grow) return -ENOSPC;
    const int handle = files_->open(path, {.write = true, .create = true, .fresh = true});
    if (handle < 0) return handle;
    files_->close(handle);
    file = open(header.region, code);
  }
  if (!file) return code;
  code = prepare(*file, header);
  if (code == 0 && fresh) code = files_->sync_directory(directory_.regions_path());
  if (code < 0) {
    drop(header.region);
    if (fresh) static_cast<void>(files_->unlink(path));
  }
  return code;
}

int RegionFiles::prepare(const FileHandle& file, RegionHeader& header) {
  int code = 0;
  const auto last = read_header(file, header.region, code);
  if (code < 0) return code;
  // A file that nobody can read any more is emptied: what it held could otherwise pass for blocks
  // of a later generation, because its own is not known.
  if (!last) code = files_->truncate(file.get(), 0);
  if (code == 0) code = files_->reserve(file.get(), directory_.header().region_bytes);
  if (code < 0) return code;
  header.generation = std::max(header.generation, last ? last->generation + 1 : 1);
  header.store = directory_.header().id;
  header.written_unix_ns = unix_time_ns();
  seal_page(header);
  const AlignedBytes page(kPage);
  page.page<RegionHeader>(0) = header;
  const iovec part{page.data(), page.size()};
  const std::int64_t written =
      files_->write(file.get(), std::span(&part, 1), header.generation % 2 * kPage);
  return written < 0 ? static_cast<int>(written) : files_->sync(file.get());
}

int RegionFiles::remove(std::uint32_t region) {
  const std::string path = directory_.region_path(region);
  int code = 0;
  if (const Handle file = open(region, code)) {
    code = files_->truncate(file->get(), 0);
    drop(region);
  }
  if (code == 0) code = files_->unlink(path);
  return code == -ENOENT ? 0 : code;
}

bool RegionFiles::exists(std::uint32_t region) noexcept {
  FileStatus status;
  return files_->status_of(directory_.region_path(region), status) == 0;
}

}  // namespace hpkv::disk
