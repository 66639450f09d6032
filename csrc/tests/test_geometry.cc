// The arithmetic of the pool, without a pool.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>

#include "shm/geometry.h"
#include "shm/placement.h"
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

class NodesFile {
 public:
  explicit NodesFile(const std::string& text) { std::ofstream(path_) << text; }
  ~NodesFile() { std::remove(path_.c_str()); }
  NodesFile(const NodesFile&) = delete;
  NodesFile& operator=(const NodesFile&) = delete;
  [[nodiscard]] std::vector<unsigned> nodes() const { return shm::memory_nodes(path_); }

 private:
  std::string path_ = "/tmp/hpkv-nodes-" + std::to_string(::getpid());
};

TEST(memory_nodes_are_read_from_the_systems_list) {
  using Nodes = std::vector<unsigned>;
  CHECK(NodesFile("0\n").nodes() == Nodes({0}));
  CHECK(NodesFile("0-1,4\n").nodes() == Nodes({0, 1, 4}));
  CHECK(NodesFile("").nodes().empty());
  CHECK(NodesFile("0-x").nodes().empty());
  CHECK(NodesFile("99999999").nodes().empty());
  CHECK(shm::memory_nodes("/nowhere").empty());
}

TEST(the_system_takes_the_interleaving_that_is_asked_for) {
  const std::uint64_t bytes = std::uint64_t{1} << 20U;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(base != MAP_FAILED);
  auto* memory = static_cast<std::byte*>(base);
  CHECK(shm::interleave(memory, bytes, {0}) == 0);  // nothing is asked for
  // Node 0 twice: the call that several nodes take, on a machine that has one.
  const int answer = shm::interleave(memory, bytes, {0, 0});
  CHECK(answer == 0 || answer == ENOSYS || answer == EPERM);  // some sandboxes forbid it
  ::munmap(base, bytes);
}

}  // namespace hpkv::test

TEST_MAIN
