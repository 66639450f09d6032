#include "shm/view.h"

namespace hpkv::shm {

bool View::block_run(std::uint64_t segment_index, Run& out) const noexcept {
  const Superblock& super = superblock();
  const SegmentRecord& record = segment(segment_index);
  out.segment = segment_index;
  out.word = record.word.load(std::memory_order_acquire);
  const std::uint64_t length = SegmentWord::run_length(out.word);
  const std::uint64_t stride = record.stride.load(std::memory_order_acquire);
  // The stride is only stored while the word says `reserving`, so an unchanged word vouches for it.
  if (record.word.load(std::memory_order_acquire) != out.word) return false;
  if (SegmentWord::kind(out.word) != SegmentKind::blocks) return false;
  if (length == 0 || length > super.segment_count - segment_index) return false;
  if (stride == 0 || stride % kPageBytes != 0 || stride > length * super.segment_bytes)
    return false;
  out.offset = segment_offset(segment_index);
  out.geometry = run_geometry(length * super.segment_bytes, stride);
  return out.geometry.block_count > 0;
}

}  // namespace hpkv::shm
