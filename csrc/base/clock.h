// Monotonic time of this process, in nanoseconds. Never stored in the pool: time namespaces give
// processes different clocks, so every deadline and quarantine is measured by the process that
// waits for it.
#pragma once

#include <cstdint>
#include <ctime>

namespace hpkv {

[[nodiscard]] inline std::int64_t now_ns() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

inline constexpr std::int64_t kMicrosecond = 1'000;
inline constexpr std::int64_t kMillisecond = 1'000'000;
inline constexpr std::int64_t kSecond = 1'000'000'000;

}  // namespace hpkv
