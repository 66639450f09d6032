// Which pages of a load the device reads where they lie in the pool, and where that is.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "copy/source.h"
#include "copy/stream/core.h"
#include "shm/pool.h"

namespace hpkv::stream {

// Blocks of one format, one a page; null: the device reads none of this format for the page.
using BlockColumn = std::vector<std::byte*>;

// A page that has none here is staged.
struct LoadBlocks {
  BlockColumn own;                 // blocks of the layout's format
  std::vector<BlockColumn> parts;  // of a source's: of a page all or none; or no columns at all
  const PartRegions::Table* regions = nullptr;  // of those parts

  [[nodiscard]] std::size_t count() const noexcept { return own.size(); }
  [[nodiscard]] std::size_t count_in_place() const noexcept {
    std::size_t found = 0;
    for (std::size_t page = 0; page < count(); ++page) found += is_staged(page) ? 0 : 1;
    return found;
  }
  [[nodiscard]] bool is_staged(std::size_t page) const noexcept {
    return own[page] == nullptr && (parts.empty() || parts.front()[page] == nullptr);
  }
};

// Of pinned blocks, page by page. Some hundred nanoseconds a load and some ten a block; never waits
// for the device.
[[nodiscard]] LoadBlocks blocks_in_place(Core& core, std::span<const BlockRef> refs,
                                         const std::shared_ptr<const BlockSource>& source,
                                         bool by_kernel);

}  // namespace hpkv::stream
