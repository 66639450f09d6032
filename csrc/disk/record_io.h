// Reading and writing runs of neighbouring records of one region file, and judging what was read.
//
// Owns nothing. Threads: safe; may block on the disk.
#pragma once

#include <cstdint>
#include <span>

#include "disk/region_files.h"

namespace hpkv::disk {

// The most that one transfer moves, and the most records in it (three parts each, and IOV_MAX).
inline constexpr std::uint64_t kTransferBytes = std::uint64_t{8} << 20U;
inline constexpr std::size_t kTransferRecords = 256;

// What a record must say to be the one that is meant.
struct RecordIdentity {
  StoreId store{};
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint32_t number = 0;
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_checksum = 0;
  Key key;
  NamespaceId name_space{};
};

void fill_header(RecordHeader& header, const RecordIdentity& identity) noexcept;
[[nodiscard]] bool header_says(const RecordHeader& header, const RecordIdentity& identity) noexcept;

// How many of the first refs lie side by side in one file, ascending or descending, and may be read
// in one transfer; at least 1. `descending` is set when they do so downwards.
[[nodiscard]] std::size_t neighbours(std::span<const DiskRef> refs, bool& descending) noexcept;

// Reads the records of `refs` (as neighbours() found them) in one transfer: headers into `headers`,
// one page each, in the order of refs; payloads, rounded up to 4 KiB, to the targets. Bytes, or
// -errno; where a short read ended, headers say nothing.
[[nodiscard]] std::int64_t read_records(Files& files, const FileHandle& file,
                                        std::span<const DiskRef> refs,
                                        std::span<std::byte* const> targets,
                                        std::span<RecordHeader> headers);

// A payload to be written, with its header filled in. The bytes between payload_bytes and the next
// 4 KiB are written as zeroes.
struct WritePart {
  const RecordHeader* header = nullptr;
  const std::byte* payload = nullptr;  // 4 KiB-aligned
};
// Writes records first, first + 1, ...; at most kTransferRecords. Bytes or -errno.
[[nodiscard]] std::int64_t write_records(Files& files, const FileHandle& file, std::uint32_t first,
                                         std::span<const WritePart> parts);

}  // namespace hpkv::disk
