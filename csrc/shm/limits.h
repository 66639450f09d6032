// What a pool may take from this machine: the file system it lies on and every memory limit above
// this process. tmpfs is charged to the cgroup of whoever allocates, so a pool larger than the
// container ends in an OOM kill and not in an error; it is refused before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hpkv::shm {

struct MemoryLimit {
  std::string file;  // that said so
  std::uint64_t max_bytes = 0;
  std::uint64_t used_bytes = 0;  // without file cache, which is given up before the limit is hit
};

// Limits of this process' cgroup and of all its ancestors (both cgroup versions); unlimited ones
// are left out. Reads
// `<proc_root>/self/cgroup` and below `cgroup_root`. What cannot be read is no limit.
[[nodiscard]] std::vector<MemoryLimit> memory_limits(const std::string& proc_root,
                                                     const std::string& cgroup_root);

// Throws Error{space} naming the remedy when a new pool of this size does not fit the file system
// or a limit.
void require_space(int directory_fd, const std::string& directory, std::uint64_t pool_bytes,
                   const std::vector<MemoryLimit>& limits);

}  // namespace hpkv::shm
