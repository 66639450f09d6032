#include "copy/stream/load_batch.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace hpkv::stream {
namespace {

// Some pages of a batch that follow each other.
struct Chunk {
  std::size_t staged = 0;
  bool has_own = false;    // in slots or in place
  bool has_parts = false;  // in place
};

std::vector<Chunk> chunks_of(const LoadBlocks& blocks) {
  std::vector<Chunk> chunks;
  for (std::size_t at = 0; at < blocks.count(); at += kTableRows) {
    Chunk chunk;
    for (std::size_t page = at; page < std::min(at + kTableRows, blocks.count()); ++page) {
      const bool staged = blocks.is_staged(page);
      const bool own = staged || blocks.own[page] != nullptr;
      chunk.staged += staged ? 1 : 0;
      chunk.has_own = chunk.has_own || own;
      chunk.has_parts = chunk.has_parts || !own;
    }
    chunks.push_back(chunk);
  }
  return chunks;
}

StagingShare need_of(const LoadBatch& batch) {
  StagingShare need;
  for (const Chunk& chunk : chunks_of(batch.blocks)) {
    need.slots += chunk.staged;
    if (!batch.by_kernel) continue;
    need.tables += chunk.has_own && chunk.staged == 0 ? 1 : 0;
    need.tables += chunk.has_parts ? batch.blocks.parts.size() : 0;
  }
  return need;
}

LoadBlocks sub(const LoadBlocks& blocks, std::size_t first, std::size_t count) {
  const auto cut = [first, count](const BlockColumn& column) {
    const auto begin = column.begin() + static_cast<std::ptrdiff_t>(first);
    return BlockColumn(begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  LoadBlocks part{cut(blocks.own), {}, blocks.regions};
  for (const BlockColumn& column : blocks.parts) part.parts.push_back(cut(column));
  return part;
}

// Hands out what a batch has taken, in order.
struct Taken {
  Core& core;
  std::vector<Slot>::const_iterator slot;
  std::vector<Slot>::const_iterator table;

  [[nodiscard]] std::byte* next_page() { return core.staging.page(*slot++); }
  [[nodiscard]] KernelTable next_table() { return core.load_tables.table(*table++); }
};

// Those of one format are taken one after the other, so that they may be one table.
std::vector<KernelTable> own_tables(const std::vector<Chunk>& chunks, Taken& taken) {
  std::vector<KernelTable> tables;
  auto slot = taken.slot;
  for (const Chunk& chunk : chunks) {
    const bool in_slot = chunk.staged != 0;
    tables.push_back(in_slot         ? taken.core.staging.table(*slot)
                     : chunk.has_own ? taken.next_table()
                                     : KernelTable{});
    slot += static_cast<std::ptrdiff_t>(chunk.staged);
  }
  return tables;
}

std::vector<KernelTable> part_tables(const std::vector<Chunk>& chunks, Taken& taken) {
  std::vector<KernelTable> tables;
  for (const Chunk& chunk : chunks) {
    tables.push_back(chunk.has_parts ? taken.next_table() : KernelTable{});
  }
  return tables;
}

void lay_out(LoadBatch& batch, Taken taken) {
  if (batch.by_kernel) {
    const std::vector<Chunk> chunks = chunks_of(batch.blocks);
    batch.tables = own_tables(chunks, taken);
    for (std::size_t part = 0; part < batch.blocks.parts.size(); ++part) {
      batch.part_tables.push_back(part_tables(chunks, taken));
    }
  }
  for (std::size_t page = 0; page < batch.blocks.count(); ++page) {
    if (batch.blocks.is_staged(page)) batch.blocks.own[page] = taken.next_page();
  }
}

}  // namespace

std::size_t fit(const LoadBlocks& blocks, std::size_t first, bool by_kernel, StagingShare& room) {
  const std::size_t per_chunk = by_kernel ? 1 + blocks.parts.size() : 0;
  std::size_t page = first;
  for (; page < blocks.count(); ++page) {
    const std::size_t tables = (page - first) % kTableRows == 0 ? per_chunk : 0;
    const std::size_t slots = blocks.is_staged(page) ? 1 : 0;
    if (tables > room.tables || slots > room.slots) break;
    room.tables -= tables;
    room.slots -= slots;
  }
  return page - first;
}

StagingShare need_of(const LoadBlocks& blocks, bool by_kernel) {
  constexpr std::size_t kMuch = std::numeric_limits<std::size_t>::max();
  StagingShare left{kMuch, kMuch};
  static_cast<void>(fit(blocks, 0, by_kernel, left));
  return {kMuch - left.slots, kMuch - left.tables};
}

// In halves of what there is, so that one is filled while another is on its way.
std::vector<LoadBatch> cut_load(const Core& core, const LoadBlocks& blocks, bool by_kernel) {
  StagingShare most{core.load_slots.count(), core.load_tables.lane.count()};
  StagingShare room = most;
  if (fit(blocks, 0, by_kernel, room) < blocks.count()) {
    most = {std::max<std::size_t>(most.slots / 2, 1),
            std::max<std::size_t>(most.tables / 2, 1 + blocks.parts.size())};
  }
  std::vector<LoadBatch> batches;
  for (std::size_t first = 0; first < blocks.count();) {
    room = most;
    const std::size_t count = fit(blocks, first, by_kernel, room);
    batches.push_back({.first = first,
                       .last = first + count == blocks.count(),
                       .by_kernel = by_kernel,
                       .blocks = sub(blocks, first, count),
                       .tables = {},
                       .part_tables = {},
                       .slots = {},
                       .own_tables = {}});
    first += count;
  }
  return batches;
}

bool has_room(Core& core, const LoadBatch& batch) {
  const StagingShare need = need_of(batch);
  return core.load_slots.free_count() >= need.slots &&
         core.load_tables.lane.free_count() >= need.tables;
}

bool take(Core& core, LoadBatch& batch) {
  const StagingShare need = need_of(batch);
  std::optional<std::vector<Slot>> slots = core.load_slots.take(need.slots);
  if (!slots) return false;
  std::optional<std::vector<Slot>> tables = core.load_tables.lane.take(need.tables);
  if (!tables) {
    core.load_slots.give(*slots);
    return false;
  }
  batch.slots = std::move(*slots);
  batch.own_tables = std::move(*tables);
  lay_out(batch, {core, batch.slots.begin(), batch.own_tables.begin()});
  return true;
}

void give(Core& core, const LoadBatch& batch) {
  core.load_slots.give(batch.slots);
  core.load_tables.lane.give(batch.own_tables);
}

}  // namespace hpkv::stream
