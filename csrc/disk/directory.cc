#include "disk/directory.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string_view>

#include "disk/aligned.h"
#include "disk/small_file.h"

namespace hpkv::disk {
namespace {

constexpr const char* kHeaderName = "store.hpkv";
constexpr std::uint32_t kRegionsMin = 4;

[[noreturn]] void refuse(ErrorKind kind, const std::string& path, const std::string& seen,
                         const std::string& remedy) {
  throw Error(kind, "open store " + path + ": " + seen + "; " + remedy);
}

std::uint64_t unix_time_ns() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(t.tv_nsec);
}

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// The number in "00012.hpkv"; nullopt for any other name.
std::optional<std::uint64_t> region_number(const std::string& name) {
  const std::size_t dot = name.find(".hpkv");
  if (dot == std::string::npos || dot < 5 || dot > 9 || dot + 5 != name.size()) return std::nullopt;
  std::uint64_t number = 0;
  for (const char c : std::string_view(name).substr(0, dot)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + static_cast<std::uint64_t>(c - '0');
  }
  return number;
}

// Creates the last component only: a mistyped parent should not become a tree of directories.
void require_directory(Files& files, const std::string& path, bool create) {
  FileStatus status;
  int code = files.status_of(path, status);
  if (code == -ENOENT && create) {
    const int made = files.make_directory(path);
    if (made == -ENOENT) {
      refuse(ErrorKind::missing, path, "the directory that it should be made in does not exist",
             "make that one, or choose another (--hpkv-storage-path)");
    }
    if (made < 0 && made != -EEXIST) throw_system("create directory", path, -made);
    // Else a power loss could take the directory and leave nothing of what was synced in it. Of a
    // parent that may not be opened, the creator has to take care.
    static_cast<void>(files.sync_directory(parent_of(path)));
    code = files.status_of(path, status);
  }
  if (code == -ENOENT) {
    refuse(ErrorKind::missing, path, "the directory does not exist",
           "start a server with --hpkv-storage-path first");
  }
  if (code < 0) throw_system("stat directory", path, -code);
  constexpr const char* remedy = "choose a directory of your own (--hpkv-storage-path)";
  if (status.kind != FileKind::directory) {
    refuse(ErrorKind::owner, path, "it is a symbolic link or not a directory", remedy);
  }
  if (status.user != ::geteuid()) {
    refuse(ErrorKind::owner, path, "it belongs to user " + std::to_string(status.user), remedy);
  }
  if ((status.mode & 022U) != 0) {
    refuse(ErrorKind::owner, path, "others may write to it", "run: chmod 700 " + path);
  }
}

// Nothing when there is no store.
std::optional<StoreHeader> read_header(const std::shared_ptr<Files>& files,
                                       const std::string& directory) {
  const std::string path = directory + "/" + kHeaderName;
  std::vector<std::byte> bytes;
  const int code = read_file(files, path, kPage, bytes);
  if (code == -ENOENT) return std::nullopt;
  if (code < 0) throw_system("read store header", path, -code);
  StoreHeader header;
  constexpr const char* remedy =
      "remove the directory if nothing needs it, or choose another (--hpkv-storage-path)";
  if (bytes.size() < kPage) refuse(ErrorKind::garbage, path, "it is truncated", remedy);
  std::memcpy(&header, bytes.data(), kPage);
  if (header.magic != kStoreMagic) refuse(ErrorKind::garbage, path, "this is not a store", remedy);
  if (header.version > kStoreVersion) {
    refuse(ErrorKind::version, path,
           "it is of version " + std::to_string(header.version) + ", this hpkv knows version " +
               std::to_string(kStoreVersion),
           "use the newer hpkv, or choose another directory (--hpkv-storage-path)");
  }
  const bool sane = page_holds(header) && header.region_count >= 1 &&
                    header.region_bytes % kPage == 0 && header.region_bytes <= header.storage_bytes;
  if (!sane) refuse(ErrorKind::garbage, path, "its checksum does not match", remedy);
  return header;
}

void require_size(const StoreHeader& header, const RegionStoreOptions& options) {
  if (!options.storage_bytes || *options.storage_bytes == header.storage_bytes) return;
  refuse(
      ErrorKind::size, options.directory,
      "it has " + std::to_string(header.storage_bytes) + " bytes and " +
          std::to_string(*options.storage_bytes) + " were asked for",
      "give no size (or this one), or stop its servers and remove the directory and their pool's");
}

StoreHeader new_header(Files& files, const RegionStoreOptions& options) {
  FileSystemSpace space;
  const int code = files.space(options.directory, space);
  if (code < 0) throw_system("ask for the free space of", options.directory, -code);
  const std::uint64_t stride = round_up_page(std::max<std::uint64_t>(options.block_bytes_hint, 1));
  StoreHeader header;
  header.storage_bytes = options.storage_bytes.value_or(space.available_bytes / 2);
  header.region_bytes =
      std::max(std::min(kRegionBytesMax, header.storage_bytes / kStoreRegions / kPage * kPage),
               region_bytes_for(2, stride));
  const std::uint64_t least = kStoreHeadBytes + kRegionsMin * header.region_bytes;
  if (header.storage_bytes < least) {
    refuse(ErrorKind::size, options.directory,
           "a new store would have " + std::to_string(header.storage_bytes) +
               " bytes, and with blocks of " + std::to_string(stride) + " bytes it has at least " +
               std::to_string(least),
           "give it more (--hpkv-storage-size)");
  }
  header.region_count = static_cast<std::uint32_t>(std::min<std::uint64_t>(
      (header.storage_bytes - kStoreHeadBytes) / header.region_bytes, 0xFFFFFFU));
  header.created_unix_ns = unix_time_ns();
  if (::getrandom(header.id.data(), header.id.size(), 0) !=
      static_cast<ssize_t>(header.id.size())) {
    throw_system("getrandom", "for the store's id", errno);
  }
  seal_page(header);
  return header;
}

}  // namespace

void check_place(const RegionStoreOptions& options, const std::shared_ptr<Files>& files) {
  require_directory(*files, options.directory, options.create);
  static_cast<void>(open_lock_file(files, options.directory));
  if (const auto header = read_header(files, options.directory)) {
    require_size(*header, options);
  } else {
    static_cast<void>(new_header(*files, options));
  }
}

StoreDirectory::StoreDirectory(const RegionStoreOptions& options, const PoolInfo& pool,
                               std::shared_ptr<Files> files)
    : files_(std::move(files)),
      path_(options.directory),
      namespaces_(files_, options.directory + "/namespaces") {
  require_directory(*files_, path_, options.create);
  lock_.emplace(files_, path_, pool, options.takeover_wait_ns);
  load_or_create(options);
  require_directory(*files_, regions_path(), true);
  require_directory(*files_, namespaces_.directory(), true);
  if (lock_->alone()) remove_strays();
  direct_ = probe_direct();
}

std::string StoreDirectory::region_path(std::uint32_t region) const {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "/%05u.hpkv", region);
  return regions_path() + name.data();
}

void StoreDirectory::load_or_create(const RegionStoreOptions& options) {
  if (const auto header = read_header(files_, path_)) {
    require_size(*header, options);
    header_ = *header;
    return;
  }
  if (!lock_->alone()) {
    refuse(ErrorKind::garbage, path_, "its file store.hpkv was removed while servers use it",
           "stop them, then start again");
  }
  if (!options.create) {
    refuse(ErrorKind::missing, path_, "there is no store",
           "start a server with --hpkv-storage-path first");
  }
  create(options);
}

void StoreDirectory::create(const RegionStoreOptions& options) {
  header_ = new_header(*files_, options);
  created_ = true;
  // Region files without a header are of a store that is gone: nothing can tell what they hold, and
  // they would come on top of the size.
  require_directory(*files_, regions_path(), true);
  std::vector<std::string> names;
  if (files_->list(regions_path(), names) == 0) {
    for (const std::string& name : names) {
      if (region_number(name)) static_cast<void>(files_->unlink(regions_path() + "/" + name));
    }
  }
  const int code = replace_file(files_, path_, kHeaderName, std::as_bytes(std::span(&header_, 1)));
  if (code < 0) throw_system("create store in", path_, -code);
}

// Files that no store of this shape has: they would come on top of its size. Failing to remove one
// is no reason not to serve.
void StoreDirectory::remove_strays() {
  std::vector<std::string> names;
  for (const std::string& directory : {path_, namespaces_.directory(), regions_path()}) {
    if (files_->list(directory, names) < 0) continue;
    for (const std::string& name : names) {
      const bool temporary = name.find(kTemporarySuffix) != std::string::npos;
      const auto region = directory == regions_path() ? region_number(name) : std::nullopt;
      if (temporary || (region && *region >= header_.region_count)) {
        static_cast<void>(files_->unlink(directory + "/" + name));
      }
    }
  }
}

// Whether the file system takes aligned direct transfers: asked by doing one.
bool StoreDirectory::probe_direct() {
  const std::string path = path_ + "/probe" + kTemporarySuffix +
                           std::to_string(header_.created_unix_ns ^ unix_time_ns());
  const FileHandle file(
      files_, files_->open(path, {.write = true, .create = true, .fresh = true, .direct = true}));
  bool works = false;
  if (file.valid()) {
    const AlignedBytes page(kPage);
    const iovec part{page.data(), page.size()};
    const std::int64_t written = files_->write(file.get(), std::span(&part, 1), 0);
    works = written == static_cast<std::int64_t>(kPage) || written == -ENOSPC;
  }
  // Some file systems make the file before they refuse the flag.
  static_cast<void>(files_->unlink(path));
  return works;
}

}  // namespace hpkv::disk
