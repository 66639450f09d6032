// How a load is cut into batches, and what a batch has of the staging area while the device reads.
//
//   chunk of 256 pages:  [ in place | slot | in place ... ]  table: behind its first slot
//                        [ in place | in place ...        ]  table: one of the arena
//
// A page in place takes nothing but a row of a table, so a load whose pages all are is one batch,
// and nobody waits for slots. One whose parts are read where they lie has a row in the table of
// each part; those are the arena's. A load that does not fit is cut: the taker waits for what
// earlier batches have.
//
// Threads: the one that enqueues loads takes, any gives.
#pragma once

#include <cstddef>
#include <vector>

#include "copy/stream/core.h"
#include "copy/stream/load_blocks.h"

namespace hpkv::stream {

// Of what loads take.
struct StagingShare {
  std::size_t slots = 0;
  std::size_t tables = 0;  // of the arena

  StagingShare& operator+=(const StagingShare& other) noexcept {
    slots += other.slots;
    tables += other.tables;
    return *this;
  }
  StagingShare& operator-=(const StagingShare& other) noexcept {
    slots -= other.slots;
    tables -= other.tables;
    return *this;
  }
};

// How many pages from `first` on fit, and takes off what they need at most: a chunk counts as one
// table of each format, wherever that is.
[[nodiscard]] std::size_t fit(const LoadBlocks& blocks, std::size_t first, bool by_kernel,
                              StagingShare& room);
// What all pages need at most, as one batch.
[[nodiscard]] StagingShare need_of(const LoadBlocks& blocks, bool by_kernel);

// The pages [first, first + blocks.count()) of a load.
struct LoadBatch {
  std::size_t first = 0;
  bool last = false;
  bool by_kernel = false;  // its chunks have tables
  // Once it was taken, `own` has the slots of pages that are staged.
  LoadBlocks blocks;
  // Of each chunk; without addresses where the chunk has no page of that format.
  std::vector<KernelTable> tables;
  std::vector<std::vector<KernelTable>> part_tables;  // by part
  // What is held until the device is done.
  std::vector<Slot> slots;
  std::vector<Slot> own_tables;  // of the arena
};

// The batches have taken nothing yet, and each can.
[[nodiscard]] std::vector<LoadBatch> cut_load(const Core& core, const LoadBlocks& blocks,
                                              bool by_kernel);
// Whether take() would not wait.
[[nodiscard]] bool has_room(Core& core, const LoadBatch& batch);
// Slots and tables, waiting for them; false once the engine closes.
[[nodiscard]] bool take(Core& core, LoadBatch& batch);
void give(Core& core, const LoadBatch& batch);

}  // namespace hpkv::stream
