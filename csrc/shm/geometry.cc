#include "shm/geometry.h"

#include <algorithm>
#include <bit>

namespace hpkv::shm {
namespace {

constexpr std::uint64_t kSegmentBytesMin = std::uint64_t{1} << 20U;
constexpr std::uint64_t kWasteLimit = 16;  // less than one part in 16

}  // namespace

std::uint64_t segment_bytes_for(std::uint64_t pool_bytes) noexcept {
  return std::clamp(std::bit_floor(pool_bytes / 16), kSegmentBytesMin, kSegmentBytesMax);
}

RunGeometry run_geometry(std::uint64_t run_bytes, std::uint64_t stride) noexcept {
  RunGeometry run;
  run.stride = stride;
  const auto overhead = [](std::uint64_t count) {
    return round_up(count * sizeof(Descriptor) + round_up(count, sizeof(std::uint64_t)),
                    kPageBytes);
  };
  run.block_count = run_bytes / (stride + sizeof(Descriptor) + 1);
  while (run.block_count > 0 && overhead(run.block_count) + run.block_count * stride > run_bytes) {
    --run.block_count;
  }
  run.marks_offset = run.block_count * sizeof(Descriptor);
  run.payload_offset = overhead(run.block_count);
  return run;
}

std::uint64_t run_length_for(std::uint64_t stride, std::uint64_t segment_bytes,
                             std::uint64_t segment_count) noexcept {
  const std::uint64_t shortest = (stride + kPageBytes + segment_bytes - 1) / segment_bytes;
  const std::uint64_t longest =
      std::min(std::max(shortest, segment_count / 4), SegmentWord::kRunLengthMax);
  std::uint64_t best = shortest;
  double best_waste = 1.0;
  for (std::uint64_t length = shortest; length <= longest; ++length) {
    const std::uint64_t run_bytes = length * segment_bytes;
    const std::uint64_t used = run_geometry(run_bytes, stride).block_count * stride;
    const std::uint64_t wasted = run_bytes - used;
    if (wasted * kWasteLimit < run_bytes) return length;
    const double waste = static_cast<double>(wasted) / static_cast<double>(run_bytes);
    if (waste < best_waste) {
      best_waste = waste;
      best = length;
    }
  }
  return best;
}

HeadGeometry head_geometry(std::uint64_t pool_bytes, std::uint64_t unit) noexcept {
  HeadGeometry head;
  head.segment_bytes = segment_bytes_for(pool_bytes);
  head.clients_offset = kPageBytes;
  head.namespaces_offset = head.clients_offset + kClientCount * sizeof(ClientRecord);
  head.shards_offset = head.namespaces_offset + kNamespaceCount * sizeof(NamespaceRecord);
  head.segments_offset = head.shards_offset + kShardCount * sizeof(ShardRecord);
  const std::uint64_t most_segments = pool_bytes / head.segment_bytes;
  head.head_bytes = round_up(head.segments_offset + most_segments * sizeof(SegmentRecord),
                             std::max<std::uint64_t>(unit, kPageBytes));
  if (head.head_bytes + 2 * head.segment_bytes > pool_bytes) return HeadGeometry{};
  head.segment_count = (pool_bytes - head.head_bytes) / head.segment_bytes;
  return head;
}

}  // namespace hpkv::shm
