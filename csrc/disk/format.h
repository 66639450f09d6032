// The bytes of a store's files, exactly. docs/formats/store.md describes the same in words; the
// assertions below keep the two, and two builds, in step. A change moves the page, kStoreVersion
// and the power-loss test together.
//
// Rules: little-endian; everything lies on 4 KiB; a page that describes something ends in the
// CRC32C of the 4,092 bytes before; reserved bytes are zero. Nothing read from a file is used
// before its page's checksum holds and its numbers were checked against the store's.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/crc32c.h"
#include "disk/catalog.h"
#include "shm/format.h"

namespace hpkv::disk {

static_assert(std::endian::native == std::endian::little, "the store's format is little-endian");

inline constexpr std::uint32_t kStoreVersion = 1;
inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint64_t kRegionBytesMax = std::uint64_t{256} << 20U;
inline constexpr std::uint64_t kStoreRegions = 32;  // a store has at least about this many
// Part of the size that is kept for what is not a region: lock, header, namespaces, directories.
inline constexpr std::uint64_t kStoreHeadBytes = std::uint64_t{1} << 20U;

using Magic = std::array<char, 8>;
inline constexpr Magic kStoreMagic = {'H', 'P', 'K', 'V', 'S', 'T', 'O', 'R'};
inline constexpr Magic kRegionMagic = {'H', 'P', 'K', 'V', 'R', 'E', 'G', 'N'};
inline constexpr Magic kRecordMagic = {'H', 'P', 'K', 'V', 'B', 'L', 'C', 'K'};
inline constexpr Magic kSummaryMagic = {'H', 'P', 'K', 'V', 'S', 'U', 'M', 'M'};

// store.hpkv
struct StoreHeader {
  Magic magic = kStoreMagic;
  std::uint32_t version = kStoreVersion;
  std::uint32_t region_count = 0;
  StoreId id{};
  std::uint64_t storage_bytes = 0;
  std::uint64_t region_bytes = 0;
  std::uint64_t created_unix_ns = 0;  // for display
  std::array<std::byte, 4036> reserved{};
  std::uint32_t checksum = 0;
};

// A region file begins with two of these; the valid one of the higher generation counts. A new
// generation is written over the other one, so a torn write leaves the old.
struct RegionHeader {
  Magic magic = kRegionMagic;
  std::uint32_t version = kStoreVersion;
  std::uint32_t region = 0;  // number of the file
  StoreId store{};
  std::uint32_t generation = 0;
  std::uint32_t capacity = 0;         // records
  std::uint64_t stride = 0;           // of a payload, a multiple of 4 KiB
  std::uint64_t written_unix_ns = 0;  // for display
  std::array<std::byte, 4036> reserved{};
  std::uint32_t checksum = 0;
};

// Before each payload.
struct RecordHeader {
  Magic magic = kRecordMagic;
  std::uint32_t version = kStoreVersion;
  std::uint32_t region = 0;
  StoreId store{};
  std::uint32_t generation = 0;
  std::uint32_t number = 0;
  std::uint64_t payload_bytes = 0;
  std::array<std::byte, 32> key{};
  NamespaceId name_space{};
  std::uint32_t payload_checksum = 0;  // CRC32C of payload_bytes bytes
  std::array<std::byte, 3976> reserved{};
  std::uint32_t checksum = 0;
};

// At the end of a sealed region: this page, kSummaryNamespaces identities, a row for each block.
struct SummaryHeader {
  Magic magic = kSummaryMagic;
  std::uint32_t version = kStoreVersion;
  std::uint32_t region = 0;
  StoreId store{};
  std::uint32_t generation = 0;
  std::uint32_t rows = 0;
  std::uint32_t namespaces = 0;
  std::uint32_t body_checksum = 0;  // CRC32C of everything after this page
  std::uint64_t sequence = 0;       // order of sealing in the store
  std::array<std::byte, 4036> reserved{};
  std::uint32_t checksum = 0;
};

struct SummaryRow {
  std::array<std::byte, 32> key{};
  std::uint32_t number = 0;
  std::uint32_t payload_checksum = 0;
  std::uint64_t payload_bytes = 0;
  std::uint32_t name_space = 0;  // which of the identities
  std::array<std::byte, 12> reserved{};
};

inline constexpr std::uint64_t kRegionHeadBytes = 2 * kPage;
inline constexpr std::uint64_t kSummaryNamespaces = shm::kNamespaceCount;
inline constexpr std::uint64_t kSummaryHeadBytes =
    sizeof(SummaryHeader) + kSummaryNamespaces * sizeof(NamespaceId);

[[nodiscard]] constexpr std::uint64_t round_up_page(std::uint64_t bytes) noexcept {
  return (bytes + kPage - 1) / kPage * kPage;
}
[[nodiscard]] constexpr std::uint64_t record_bytes(std::uint64_t stride) noexcept {
  return sizeof(RecordHeader) + stride;
}
[[nodiscard]] constexpr std::uint64_t record_offset(std::uint64_t stride,
                                                    std::uint32_t number) noexcept {
  return kRegionHeadBytes + number * record_bytes(stride);
}
[[nodiscard]] constexpr std::uint64_t summary_bytes(std::uint64_t capacity) noexcept {
  return kSummaryHeadBytes + round_up_page(capacity * sizeof(SummaryRow));
}
// Bytes of a region that holds this many records.
[[nodiscard]] constexpr std::uint64_t region_bytes_for(std::uint64_t capacity,
                                                       std::uint64_t stride) noexcept {
  return kRegionHeadBytes + capacity * record_bytes(stride) + summary_bytes(capacity);
}
// Records that fit into a region; 0 when not one does.
[[nodiscard]] constexpr std::uint32_t region_capacity(std::uint64_t region_bytes,
                                                      std::uint64_t stride) noexcept {
  const std::uint64_t fixed = kRegionHeadBytes + kSummaryHeadBytes + kPage;
  if (region_bytes <= fixed) return 0;
  std::uint64_t capacity = (region_bytes - fixed) / (record_bytes(stride) + sizeof(SummaryRow));
  while (region_bytes_for(capacity + 1, stride) <= region_bytes) ++capacity;
  return static_cast<std::uint32_t>(capacity);
}
// The summary's place depends on the size of a region alone, given the capacity.
[[nodiscard]] constexpr std::uint64_t summary_offset(std::uint64_t region_bytes,
                                                     std::uint64_t capacity) noexcept {
  return region_bytes - summary_bytes(capacity);
}

// Closes a page with its checksum, and asks whether it holds.
template <typename Page>
void seal_page(Page& page) noexcept {
  static_assert(sizeof(Page) == kPage && offsetof(Page, checksum) == kPage - 4);
  page.checksum = crc32c(std::as_bytes(std::span(&page, 1)).first(kPage - 4));
}
template <typename Page>
[[nodiscard]] bool page_holds(const Page& page) noexcept {
  static_assert(sizeof(Page) == kPage && offsetof(Page, checksum) == kPage - 4);
  return page.checksum == crc32c(std::as_bytes(std::span(&page, 1)).first(kPage - 4));
}

static_assert(sizeof(StoreHeader) == kPage && sizeof(RegionHeader) == kPage);
static_assert(sizeof(RecordHeader) == kPage && sizeof(SummaryHeader) == kPage);
static_assert(sizeof(SummaryRow) == 64);
static_assert(offsetof(StoreHeader, version) == 8 && offsetof(StoreHeader, region_count) == 12);
static_assert(offsetof(StoreHeader, id) == 16 && offsetof(StoreHeader, storage_bytes) == 32);
static_assert(offsetof(StoreHeader, region_bytes) == 40 && offsetof(StoreHeader, checksum) == 4092);
static_assert(offsetof(RegionHeader, region) == 12 && offsetof(RegionHeader, store) == 16);
static_assert(offsetof(RegionHeader, generation) == 32 && offsetof(RegionHeader, capacity) == 36);
static_assert(offsetof(RegionHeader, stride) == 40 && offsetof(RegionHeader, checksum) == 4092);
static_assert(offsetof(RecordHeader, region) == 12 && offsetof(RecordHeader, store) == 16);
static_assert(offsetof(RecordHeader, generation) == 32 && offsetof(RecordHeader, number) == 36);
static_assert(offsetof(RecordHeader, payload_bytes) == 40 && offsetof(RecordHeader, key) == 48);
static_assert(offsetof(RecordHeader, name_space) == 80);
static_assert(offsetof(RecordHeader, payload_checksum) == 112);
static_assert(offsetof(RecordHeader, checksum) == 4092);
static_assert(offsetof(SummaryHeader, generation) == 32 && offsetof(SummaryHeader, rows) == 36);
static_assert(offsetof(SummaryHeader, namespaces) == 40);
static_assert(offsetof(SummaryHeader, body_checksum) == 44);
static_assert(offsetof(SummaryHeader, sequence) == 48 && offsetof(SummaryHeader, checksum) == 4092);
static_assert(offsetof(SummaryRow, number) == 32 && offsetof(SummaryRow, payload_checksum) == 36);
static_assert(offsetof(SummaryRow, payload_bytes) == 40 && offsetof(SummaryRow, name_space) == 48);

}  // namespace hpkv::disk
