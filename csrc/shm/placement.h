// On which NUMA nodes the pool's memory lies. Every process of the machine reads the pool, so it is
// spread over all nodes that have memory, page by page, instead of filling the one whose process
// happened to write first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hpkv::shm {

inline constexpr const char* kMemoryNodesFile = "/sys/devices/system/node/has_memory";

// Numbers of the nodes a list such as "0-1,4" names, ascending; empty when it cannot be read.
[[nodiscard]] std::vector<unsigned> memory_nodes(const std::string& file);

// Asks for the memory of a shared mapping in turns from these nodes; fewer than two ask for
// nothing. The policy belongs to the file, so it holds for every process. Returns 0 or an errno:
// advice, a refusal costs bandwidth and nothing else.
int interleave(std::byte* base, std::uint64_t bytes, const std::vector<unsigned>& nodes) noexcept;

}  // namespace hpkv::shm
