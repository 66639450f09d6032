// Pools in fresh folders, keys, and payloads that can be told from their key.
#pragma once

#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/transfer.h"
#include "tests/check.h"

namespace hpkv::test {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;

// A fresh directory for pools, removed at the end; every pool opened through it is checked before
// it goes.
class Folder {
 public:
  Folder() {
    const char* base = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
    std::string path = std::string(base) + "/hpkv-test-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp " + path);
    path_ = path;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  [[nodiscard]] PoolOptions options(std::uint64_t pool_bytes = 16 * kMiB) const {
    PoolOptions options;
    options.directory = path_ + "/pool";
    options.pool_bytes = pool_bytes;
    options.maintenance = false;
    return options;
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline NamespaceId identity(int n) {
  NamespaceId id{};
  id[0] = static_cast<std::byte>(n);
  return id;
}

inline std::vector<Key> random_keys(std::size_t count, std::uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<Key> keys(count);
  for (Key& key : keys) {
    for (std::uint64_t& word : key.words) word = random();
  }
  return keys;
}

inline std::vector<std::byte> payload_of(const Key& key, std::uint64_t bytes) {
  std::vector<std::byte> payload(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) {
    payload[i] = static_cast<std::byte>(key.words[i % 4] >> (8 * (i % 7)));
  }
  return payload;
}

inline PutStatus put_one(Pool& pool, std::uint32_t index, const Key& key) {
  return put(pool, index, key, payload_of(key, pool.block_bytes(index)));
}

// A lock whose holder is off the cores for milliseconds makes a miss, or a refusal: on a busy
// machine, again. True once `attempt` is; false when it was not, and no lock timed out meanwhile.
template <typename Attempt>
bool despite_timeouts(const Pool& pool, Attempt&& attempt) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (;;) {
    const std::uint64_t timeouts = pool.stats().lock_timeouts;
    if (attempt()) return true;
    if (pool.stats().lock_timeouts == timeouts) return false;
    if (std::chrono::steady_clock::now() > give_up) return false;
  }
}

inline bool holds(Pool& pool, const Key& key, std::uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  return despite_timeouts(pool, [&] { return get(pool, key, out); }) &&
         out == payload_of(key, bytes);
}

inline void require_sound(const Pool& pool) {
  const auto findings = pool.check();
  check(findings.empty(), findings.empty() ? "" : findings[0].c_str(), __FILE__, __LINE__);
}

}  // namespace hpkv::test
