// Fault injection of a copy engine, in the product build: a test of the real server makes a copy
// slow or lets it fail. Untouched it costs one relaxed load a page or layer.
//
// Threads: set from any thread, read by engine threads; a change is seen by copies started later.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hpkv {

enum class CopyKind : std::uint8_t { spill, load, verify };
inline constexpr std::size_t kCopyKinds = 3;

class Faults {
 public:
  static constexpr int kEveryLayer = -1;

  explicit Faults(std::uint32_t layer_count) : layer_count_(layer_count) {
    for (Kind& kind : kinds_) kind.delay_us = std::vector<std::atomic<std::int64_t>>(slots());
  }

  // `layer` is kEveryLayer or a layer; zero microseconds switch a delay off.
  void set_delay(CopyKind kind, int layer, std::chrono::microseconds delay) noexcept {
    of(kind).delay_us[slot(layer)].store(delay.count(), std::memory_order_relaxed);
  }

  [[nodiscard]] std::chrono::microseconds delay(CopyKind kind, int layer) const noexcept {
    return std::chrono::microseconds(
        kinds_[static_cast<std::size_t>(kind)].delay_us[slot(layer)].load(
            std::memory_order_relaxed));
  }

  void fail_next(CopyKind kind, std::uint32_t count) noexcept { of(kind).failures.store(count); }

  // Whether the ticket being submitted is to fail; counts it.
  [[nodiscard]] bool take_failure(CopyKind kind) noexcept {
    std::atomic<std::uint32_t>& failures = of(kind).failures;
    std::uint32_t left = failures.load(std::memory_order_relaxed);
    while (left != 0 && !failures.compare_exchange_weak(left, left - 1)) {
    }
    return left != 0;
  }

 private:
  struct Kind {
    std::vector<std::atomic<std::int64_t>> delay_us;  // every layer, then layer 0, 1, ...
    std::atomic<std::uint32_t> failures{0};
  };

  [[nodiscard]] std::size_t slots() const noexcept { return std::size_t{layer_count_} + 1; }
  [[nodiscard]] static std::size_t slot(int layer) noexcept {
    return static_cast<std::size_t>(layer + 1);
  }
  [[nodiscard]] Kind& of(CopyKind kind) noexcept { return kinds_[static_cast<std::size_t>(kind)]; }

  std::uint32_t layer_count_;
  Kind kinds_[kCopyKinds];
};

}  // namespace hpkv
