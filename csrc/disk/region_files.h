// The region files of a store: opening, making, giving back; and the handles of those in use.
//
// Owns: at most kHandles open handles; a reader keeps its own for as long as it reads.
// Invariants: a file that holds a new generation has that generation's header, synced, before
// anything else of it is written; a file is emptied before it is unlinked, so that handles of other
// processes hold no space. Only the owner of a region in the catalog starts or removes its file.
// Threads: safe; calls may block on the disk, the mutex is not held meanwhile.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "disk/directory.h"

namespace hpkv::disk {

class RegionFiles {
 public:
  using Handle = std::shared_ptr<const FileHandle>;

  RegionFiles(std::shared_ptr<Files> files, const StoreDirectory& directory) noexcept
      : files_(std::move(files)), directory_(directory) {}

  // The file for reading and writing, or -errno in `code`.
  [[nodiscard]] Handle open(std::uint32_t region, int& code);
  // Forgets the handle: the file under the name may be another one by now.
  void drop(std::uint32_t region);

  // The header that counts, if the file has a sound one of this store and region.
  [[nodiscard]] std::optional<RegionHeader> header(std::uint32_t region, int& code);
  // Makes the file ready for new contents, with a generation above every earlier one: its whole
  // length reserved, its header written and synced. `may_grow`: whether a file may be made.
  // -ENOSPC also when there is none and it may not.
  [[nodiscard]] int start(RegionHeader& header, bool may_grow);
  // Empties and removes the file; one that is not there is fine.
  [[nodiscard]] int remove(std::uint32_t region);
  [[nodiscard]] bool exists(std::uint32_t region) noexcept;

  [[nodiscard]] Files& files() const noexcept { return *files_; }
  [[nodiscard]] const StoreDirectory& directory() const noexcept { return directory_; }

 private:
  struct Entry {
    std::uint32_t region = 0;
    Handle handle;
  };
  [[nodiscard]] std::optional<RegionHeader> read_header(const FileHandle& file,
                                                        std::uint32_t region, int& code);
  [[nodiscard]] int prepare(const FileHandle& file, RegionHeader& header);

  static constexpr std::size_t kHandles = 128;

  std::shared_ptr<Files> files_;
  const StoreDirectory& directory_;
  std::mutex mutex_;
  std::list<Entry> recent_;  // first: used last
  std::unordered_map<std::uint32_t, std::list<Entry>::iterator> by_region_;
};

}  // namespace hpkv::disk
