#include "copy/stream/load_batch.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace hpkv::stream {
namespace {

using Blocks = std::span<std::byte* const>;

struct Need {
  std::size_t slots = 0;
  std::size_t tables = 0;  // of the arena
};

std::size_t staged(Blocks blocks) {
  return static_cast<std::size_t>(std::ranges::count(blocks, nullptr));
}

template <typename Visit>
void each_chunk(Blocks blocks, Visit&& visit) {
  for (std::size_t at = 0; at < blocks.size(); at += kTableRows) {
    visit(blocks.subspan(at, std::min(kTableRows, blocks.size() - at)));
  }
}

Need need_of(const LoadBatch& batch) {
  Need need{staged(batch.blocks), 0};
  if (!batch.by_kernel) return need;
  each_chunk(batch.blocks, [&need](Blocks chunk) { need.tables += staged(chunk) == 0 ? 1 : 0; });
  return need;
}

// How many pages from the first of these on are within the bounds; one at least. A chunk counts as
// one table, wherever that is.
std::size_t fitting(Blocks blocks, Need bounds, bool by_kernel) {
  const std::size_t most = by_kernel ? bounds.tables * kTableRows : blocks.size();
  std::size_t slots = 0;
  std::size_t count = 0;
  for (; count < std::min(blocks.size(), most); ++count) {
    if (blocks[count] == nullptr && ++slots > bounds.slots) break;
  }
  return count;
}

}  // namespace

// In halves of what there is, so that one is filled while another is on its way.
std::vector<LoadBatch> cut_load(const Core& core, const std::vector<std::byte*>& blocks,
                                bool by_kernel) {
  Need bounds{core.load_slots.count(), core.load_tables.lane.count()};
  if (fitting(blocks, bounds, by_kernel) < blocks.size()) {
    bounds = {std::max<std::size_t>(bounds.slots / 2, 1),
              std::max<std::size_t>(bounds.tables / 2, 1)};
  }
  std::vector<LoadBatch> batches;
  for (std::size_t first = 0; first < blocks.size();) {
    const Blocks rest = Blocks(blocks).subspan(first);
    const std::size_t count = fitting(rest, bounds, by_kernel);
    batches.push_back({.first = first,
                       .last = count == rest.size(),
                       .by_kernel = by_kernel,
                       .blocks = {rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(count)},
                       .tables = {},
                       .slots = {},
                       .own_tables = {}});
    first += count;
  }
  return batches;
}

bool has_room(Core& core, const LoadBatch& batch) {
  const Need need = need_of(batch);
  return core.load_slots.has_free(need.slots) && core.load_tables.lane.has_free(need.tables);
}

bool take(Core& core, LoadBatch& batch) {
  const Need need = need_of(batch);
  std::optional<std::vector<Slot>> slots = core.load_slots.take(need.slots);
  if (!slots) return false;
  std::optional<std::vector<Slot>> tables = core.load_tables.lane.take(need.tables);
  if (!tables) {
    core.load_slots.give(*slots);
    return false;
  }
  batch.slots = std::move(*slots);
  batch.own_tables = std::move(*tables);
  auto slot = batch.slots.begin();
  auto own = batch.own_tables.begin();
  each_chunk(batch.blocks, [&](Blocks chunk) {
    const auto in_slots = static_cast<std::ptrdiff_t>(staged(chunk));
    if (batch.by_kernel) {
      batch.tables.push_back(in_slots != 0 ? core.staging.table(*slot)
                                           : core.load_tables.table(*own++));
    }
    slot += in_slots;
  });
  slot = batch.slots.begin();
  for (std::byte*& block : batch.blocks) {
    if (block == nullptr) block = core.staging.page(*slot++);
  }
  return true;
}

void give(Core& core, const LoadBatch& batch) {
  core.load_slots.give(batch.slots);
  core.load_tables.lane.give(batch.own_tables);
}

}  // namespace hpkv::stream
