// Rebuilds the index of a region from its file: by the summary of a sealed one, by the headers of
// its records otherwise.
//
// Promises: a block that was synced is entered. What was not synced may be entered and turn out bad
// when it is read. Where two regions have a block, the one with a summary wins: its bytes were
// synced. A block whose namespace has no descriptor is left out. Where the disk failed, or the pool
// could not answer, the region stays unknown and is looked at again later: what was found of it is
// served meanwhile, and nothing is written to it.
// Owns: which namespaces were found so far. Threads: safe, several may recover regions at once.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "disk/summary.h"

namespace hpkv::disk {

class Recovery {
 public:
  explicit Recovery(Context& context);

  // As RegionStore::recover_one.
  std::optional<int> recover_one();
  // Whether this process could not look at an unknown region, and leaves it alone for a while.
  [[nodiscard]] bool resting(std::uint32_t region);
  // Namespaces were cleared: what was found about them no longer holds.
  void forget_namespaces();

 private:
  struct Found {
    Key key;
    NamespaceId name_space{};
    std::uint32_t number = 0;
    std::uint32_t checksum = 0;
    std::uint64_t payload_bytes = 0;
    bool synced = false;
  };
  // The state that the region is in from now on; `code`: -errno where the disk failed.
  [[nodiscard]] RegionState recover(std::uint32_t region, int& code);
  // These three: 0, or -errno when not everything could be looked at.
  [[nodiscard]] int enter_rows(const RegionHeader& header, const Summary& summary,
                               std::uint64_t& entered);
  [[nodiscard]] int scan(const RegionHeader& header, std::uint64_t& entered);
  [[nodiscard]] int enter(std::uint32_t region, const Found& found, std::uint64_t& entered);
  // nullopt with `code` 0: blocks of this namespace are nobody's; with -errno: not known now.
  [[nodiscard]] std::optional<std::uint32_t> namespace_index(const NamespaceId& id,
                                                             std::uint64_t block_bytes, int& code);
  void forget_reused_namespaces();
  [[nodiscard]] std::optional<std::uint32_t> learn(const NamespaceId& id, int& code);

  Context& context_;
  std::atomic<std::uint32_t> next_{0};
  std::mutex mutex_;
  std::map<NamespaceId, std::optional<std::uint32_t>> namespaces_;  // only what will stay true
  std::vector<std::int64_t> try_again_ns_;                          // by region; 0: at once
};

}  // namespace hpkv::disk
