// Which block goes first. The policy sees one class of blocks at a time and is asked only when
// nothing is free.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/key.h"

namespace hpkv::index {

struct Candidate {
  std::uint64_t stamp = 0;
  std::uint64_t descriptor_offset = 0;
  std::uint64_t word = 0;  // BlockWord when it was seen
  Key key;
};

// Least recently used first, exactly: stamps only rise, so among the blocks whose stamp has not
// changed since they were gathered, those gathered as the coldest are still the coldest of all. One
// walk over a class thus serves many evictions. The deepest page of a prefix is stamped first, so a
// tail goes before its head.
class LeastRecent {
 public:
  static constexpr const char* kName = "lru";

  // Offers a block; those that are kept are the coldest `limit`.
  void offer(const Candidate& candidate, std::size_t limit) {
    gathered_.push_back(candidate);
    // Amortised: trims at twice the limit, so a walk costs linear time and bounded memory.
    if (gathered_.size() >= 2 * limit) trim(limit);
  }

  // Ends a walk.
  void finish(std::size_t limit) {
    trim(limit);
    std::sort(gathered_.begin(), gathered_.end(),
              [](const Candidate& a, const Candidate& b) { return a.stamp > b.stamp; });
  }

  [[nodiscard]] bool empty() const noexcept { return gathered_.empty(); }
  // After finish(): those that match go before the others, each in their order. For blocks that are
  // on disk too, which cost nothing to drop.
  template <typename Matches>
  void prefer(Matches&& matches) {
    std::stable_partition(gathered_.begin(), gathered_.end(),
                          [&](const Candidate& block) { return !matches(block); });
  }

  [[nodiscard]] std::uint64_t coldest_stamp() const noexcept {
    return std::min_element(
               gathered_.begin(), gathered_.end(),
               [](const Candidate& a, const Candidate& b) { return a.stamp < b.stamp; })
        ->stamp;
  }
  [[nodiscard]] Candidate take_coldest() {
    const Candidate coldest = gathered_.back();
    gathered_.pop_back();
    return coldest;
  }
  void clear() noexcept { gathered_.clear(); }

 private:
  void trim(std::size_t limit) {
    if (gathered_.size() <= limit) return;
    const auto cut = gathered_.begin() + static_cast<std::ptrdiff_t>(limit);
    std::nth_element(gathered_.begin(), cut, gathered_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.stamp < b.stamp; });
    gathered_.erase(cut, gathered_.end());
  }

  std::vector<Candidate> gathered_;  // between walks: the next to go is the last
};

}  // namespace hpkv::index
