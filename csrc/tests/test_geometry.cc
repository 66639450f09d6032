// The arithmetic of the pool, without a pool.
#include "shm/geometry.h"
#include "tests/check.h"

namespace hpkv::test {

TEST(runs_waste_less_than_a_sixteenth_in_pools_of_ordinary_size) {
  for (const std::uint64_t pool_bytes :
       {std::uint64_t{2} << 30U, std::uint64_t{8} << 30U, std::uint64_t{64} << 30U}) {
    const auto head = shm::head_geometry(pool_bytes, 4096);
    for (std::uint64_t block = 4096; block <= std::uint64_t{16} << 20U;
         block = block * 5 / 4 + 777) {
      const std::uint64_t stride = shm::stride_for(block);
      const std::uint64_t length =
          shm::run_length_for(stride, head.segment_bytes, head.segment_count);
      const std::uint64_t run_bytes = length * head.segment_bytes;
      const std::uint64_t used = shm::run_geometry(run_bytes, stride).block_count * stride;
      CHECK((run_bytes - used) * 16 < run_bytes);
    }
  }
}

}  // namespace hpkv::test

TEST_MAIN
