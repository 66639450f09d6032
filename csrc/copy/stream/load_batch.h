// How a load is cut into batches, and what a batch has of the staging area while the device reads.
//
//   chunk of 256 pages:  [ in place | slot | in place ... ]  table: behind its first slot
//                        [ in place | in place ...        ]  table: one of the arena
//
// A page in place takes nothing but a row of a table, so a load whose pages all are is one batch,
// and nobody waits for slots. A load that does not fit is cut: the taker waits for what earlier
// batches have.
//
// Threads: the one that enqueues loads takes, any gives.
#pragma once

#include <cstddef>
#include <vector>

#include "copy/stream/core.h"

namespace hpkv::stream {

// The pages [first, first + blocks.size()) of a load.
struct LoadBatch {
  std::size_t first = 0;
  bool last = false;
  bool by_kernel = false;          // its chunks have tables
  std::vector<std::byte*> blocks;  // where the device reads each page; null: in a slot to be taken
  std::vector<KernelTable> tables;
  // What is held until the device is done.
  std::vector<Slot> slots;
  std::vector<Slot> own_tables;  // of the arena
};

// `blocks` as those of a batch. The batches have taken nothing yet, and each can.
[[nodiscard]] std::vector<LoadBatch> cut_load(const Core& core,
                                              const std::vector<std::byte*>& blocks,
                                              bool by_kernel);
// Whether take() would not wait.
[[nodiscard]] bool has_room(Core& core, const LoadBatch& batch);
// Slots and tables, waiting for them; false once the engine closes.
[[nodiscard]] bool take(Core& core, LoadBatch& batch);
void give(Core& core, const LoadBatch& batch);

}  // namespace hpkv::stream
