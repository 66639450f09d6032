#include "shm/superblock.h"

#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <span>

#include "base/crc32c.h"
#include "base/error.h"

namespace hpkv::shm {
namespace {

constexpr unsigned kFirstTableLog2 =
    1;  // two buckets: sixteen entries a shard before it first grows

std::uint32_t fixed_part_checksum(const std::byte* superblock) {
  return crc32c(std::span(superblock, offsetof(Superblock, checksum)));
}

template <typename T>
T field(const std::array<std::byte, kPageBytes>& page, std::size_t offset) {
  T value;
  std::memcpy(&value, page.data() + offset, sizeof(T));
  return value;
}

bool geometry_holds(const std::array<std::byte, kPageBytes>& page, std::uint64_t file_bytes) {
  const auto pool_bytes = field<std::uint64_t>(page, offsetof(Superblock, pool_bytes));
  const auto segment_bytes = field<std::uint64_t>(page, offsetof(Superblock, segment_bytes));
  const auto segment_count = field<std::uint64_t>(page, offsetof(Superblock, segment_count));
  const auto head_bytes = field<std::uint64_t>(page, offsetof(Superblock, head_bytes));
  if (pool_bytes != file_bytes || segment_bytes == 0 || segment_count == 0) return false;
  return segment_bytes <= kSegmentBytesMax && head_bytes < pool_bytes &&
         segment_count <= (pool_bytes - head_bytes) / segment_bytes;
}

}  // namespace

Judgement judge(int fd, std::uint64_t file_bytes) {
  alignas(64) std::array<std::byte, kPageBytes> page{};
  Judgement out;
  if (file_bytes < kPageBytes ||
      ::pread(fd, page.data(), page.size(), 0) != static_cast<ssize_t>(page.size())) {
    out.why = "it has only " + std::to_string(file_bytes) + " bytes";
    return out;
  }
  if (std::memcmp(page.data(), kMagic.data(), kMagic.size()) != 0) {
    out.why = "it does not start with the pool's magic";
    return out;
  }
  const auto version = field<std::uint32_t>(page, offsetof(Superblock, version));
  const auto hash = field<std::uint64_t>(page, offsetof(Superblock, layout_hash));
  out.pool_bytes = field<std::uint64_t>(page, offsetof(Superblock, pool_bytes));
  if (version != kVersion || hash != layout_hash()) {
    out.verdict = Verdict::other_version;
    out.why = "its format is version " + std::to_string(version) +
              ", this program writes version " + std::to_string(kVersion) +
              (version == kVersion ? " with another layout" : "");
    return out;
  }
  if (field<std::uint32_t>(page, offsetof(Superblock, checksum)) !=
      fixed_part_checksum(page.data())) {
    out.why = "its superblock does not match its checksum";
    return out;
  }
  if (!geometry_holds(page, file_bytes)) {
    out.why = "it has " + std::to_string(file_bytes) + " bytes where its superblock says " +
              std::to_string(out.pool_bytes);
    return out;
  }
  out.verdict = Verdict::usable;
  if (field<std::uint32_t>(page, offsetof(Superblock, poisoned)) != 0) {
    out.verdict = Verdict::poisoned;
    const char* reason =
        reinterpret_cast<const char*>(page.data()) + offsetof(Superblock, poison_reason);
    out.why = "a broken invariant was met: " +
              std::string(reason, ::strnlen(reason, sizeof(Superblock::poison_reason)));
  }
  return out;
}

std::uint64_t initial_index_bytes() noexcept {
  return round_up(kShardCount * (std::uint64_t{1} << kFirstTableLog2) * sizeof(Bucket), kPageBytes);
}

void initialize(View view, std::uint64_t pool_bytes, const HeadGeometry& head) {
  Superblock& super = view.superblock();
  super.magic = kMagic;
  super.version = kVersion;
  super.superblock_bytes = sizeof(Superblock);
  super.layout_hash = layout_hash();
  super.pool_bytes = pool_bytes;
  super.segment_bytes = head.segment_bytes;
  super.segment_count = head.segment_count;
  super.head_bytes = head.head_bytes;
  super.clients_offset = head.clients_offset;
  super.namespaces_offset = head.namespaces_offset;
  super.shards_offset = head.shards_offset;
  super.segments_offset = head.segments_offset;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  super.created_unix_ns = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
                          static_cast<std::uint64_t>(now.tv_nsec);
  if (::getrandom(super.uuid.data(), super.uuid.size(), 0) !=
      static_cast<ssize_t>(super.uuid.size())) {
    throw_system("getrandom", "for the pool's uuid", errno);
  }
  super.checksum = fixed_part_checksum(view.at(0));

  super.epoch.store(1);
  super.stamp_clock.store(0);
  super.index_segment.store(0);
  const std::uint64_t tables = view.segment_offset(0);
  const std::uint64_t table_bytes = (std::uint64_t{1} << kFirstTableLog2) * sizeof(Bucket);
  for (std::size_t i = 0; i < kShardCount; ++i) {
    view.shard(i).table.store(TableWord::make(tables + i * table_bytes, kFirstTableLog2));
  }
  super.index_cursor.store(kShardCount * table_bytes);
  view.segment(0).backed_bytes.store(initial_index_bytes());
  view.segment(0).word.store(SegmentWord::make(SegmentKind::index, 0, 1, 1));
}

}  // namespace hpkv::shm
