#include "shm/limits.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.h"

namespace hpkv::shm {
namespace {

// Version 1 says "unlimited" by a number near 2^63.
constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60U;

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;  // "max"
  return value;
}

// Pages of files on disk; tmpfs, our pool included, is not among them.
std::uint64_t file_cache(const std::string& stat_path, const std::string& prefix) {
  std::ifstream file(stat_path);
  std::uint64_t bytes = 0;
  std::string name;
  for (std::uint64_t value = 0; file >> name >> value;) {
    if (name == prefix + "active_file" || name == prefix + "inactive_file") bytes += value;
  }
  return bytes;
}

struct Hierarchy {
  std::string root;  // where it is mounted
  std::string path;  // of our group in it
  const char* max_name;
  const char* used_name;
  const char* stat_prefix;  // of what includes the groups below
};

// Whether a list of version 1 controllers ("cpu,memory") has the one that limits us.
bool names_memory(const std::string& controllers) {
  std::istringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');) {
    if (name == "memory") return true;
  }
  return false;
}

std::vector<Hierarchy> hierarchies(const std::string& proc_root, const std::string& cgroup_root) {
  std::vector<Hierarchy> found;
  std::ifstream file(proc_root + "/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      found.push_back({cgroup_root, path, "memory.max", "memory.current", ""});
    } else if (names_memory(controllers)) {
      found.push_back({cgroup_root + "/memory", path, "memory.limit_in_bytes",
                       "memory.usage_in_bytes", "total_"});
    }
  }
  return found;
}

}  // namespace

std::vector<MemoryLimit> memory_limits(const std::string& proc_root,
                                       const std::string& cgroup_root) {
  std::vector<MemoryLimit> limits;
  for (const Hierarchy& hierarchy : hierarchies(proc_root, cgroup_root)) {
    std::string path = hierarchy.path == "/" ? "" : hierarchy.path;
    // Inside a container the path may name groups that are not mounted here: those are skipped, the
    // root is not.
    for (;;) {
      const std::string folder = hierarchy.root + path + "/";
      const auto max_bytes = read_number(folder + hierarchy.max_name);
      if (max_bytes && *max_bytes < kUnlimited) {
        const std::uint64_t used = read_number(folder + hierarchy.used_name).value_or(0);
        const std::uint64_t cache = file_cache(folder + "memory.stat", hierarchy.stat_prefix);
        limits.push_back({folder + hierarchy.max_name, *max_bytes, used - std::min(used, cache)});
      }
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limits;
}

void require_space(int directory_fd, const std::string& directory, std::uint64_t pool_bytes,
                   const std::vector<MemoryLimit>& limits) {
  struct statvfs stats{};
  if (::fstatvfs(directory_fd, &stats) != 0) throw_system("statvfs", directory, errno);
  const std::uint64_t free_bytes = std::uint64_t{stats.f_bavail} * stats.f_frsize;
  if (free_bytes < pool_bytes) {
    throw Error(ErrorKind::space,
                "create pool in " + directory + ": " + std::to_string(pool_bytes) +
                    " bytes wanted, the file system has " + std::to_string(free_bytes) +
                    " free; ask for a smaller pool (--hpkv-mem-pool-size), or give the container "
                    "more shared memory (docker --shm-size, Kubernetes emptyDir sizeLimit)");
  }
  for (const MemoryLimit& limit : limits) {
    if (limit.max_bytes >= pool_bytes) continue;
    throw Error(ErrorKind::space,
                "create pool in " + directory + ": " + std::to_string(pool_bytes) +
                    " bytes wanted, " + limit.file + " allows " + std::to_string(limit.max_bytes) +
                    " and shared memory counts against it; ask for a smaller pool "
                    "(--hpkv-mem-pool-size) or raise the container's memory limit (and, for the "
                    "file system, docker --shm-size or Kubernetes emptyDir sizeLimit)");
  }
}

}  // namespace hpkv::shm
