// The table of namespaces: which identity an index stands for, and how large its blocks are.
//
// Invariant: while a record is known, its identity, size and text do not change. A record is given
// to another identity only when no live client has registered it and no block, here or on disk,
// carries its index. Threads: safe; the layout lock guards changes, reading takes no lock.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "shm/lock.h"

namespace hpkv::shm {

class Namespaces {
 public:
  explicit Namespaces(Core& core) noexcept : core_(core) {}

  [[nodiscard]] std::uint32_t add(const NamespaceId& id, std::span<const std::byte> text,
                                  std::uint64_t block_bytes);
  // We put and load no block of it any more: its record may go to another once its blocks are gone.
  void leave(std::uint32_t index) noexcept;
  [[nodiscard]] std::optional<std::uint32_t> find(const NamespaceId& id) const noexcept;
  // 0 for an index that is not known.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t index) const noexcept;
  [[nodiscard]] std::vector<NamespaceInfo> list() const;
  // One record without counting its blocks (`blocks` is 0); nullopt for an index that is not known.
  [[nodiscard]] std::optional<NamespaceInfo> get(std::uint32_t index) const;

 private:
  [[nodiscard]] std::optional<std::uint32_t> find_place() const;

  Core& core_;
};

}  // namespace hpkv::shm
