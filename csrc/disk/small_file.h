// Whole small files: read at once, replaced so that a power loss leaves the old or the new one.
// Owns nothing; may block on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "disk/files.h"

namespace hpkv::disk {

// What a name that replace_file() works under has after the real one, before a random number:
// several processes may replace a file at once. Leftovers are removed by whoever opens the store
// alone.
inline constexpr const char* kTemporarySuffix = ".new-";

// At most `bytes_max` bytes of the file; 0 or -errno.
[[nodiscard]] int read_file(const std::shared_ptr<Files>& files, const std::string& path,
                            std::uint64_t bytes_max, std::vector<std::byte>& out);

// Written beside it, synced, renamed over it, directory synced. `directory` holds `name`; 0 or
// -errno, and then the file is the old one, or the new one that a power loss may take back.
[[nodiscard]] int replace_file(const std::shared_ptr<Files>& files, const std::string& directory,
                               const std::string& name, std::span<const std::byte> bytes);

}  // namespace hpkv::disk
