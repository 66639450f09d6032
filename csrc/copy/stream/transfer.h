// Enqueues what copies pages between slots and the device, by the kernel or by batches of spans,
// and fills slots from blocks. Threads: one per direction; none of it waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "copy/source.h"
#include "copy/stream/core.h"

namespace hpkv::stream {

// Pages and the slots that stand for them, one each. The pages are `pages`; or `resident`, when it
// has any; or, of a gather, those of `resident` whose rows are `pages`. The spans are the caller's
// and outlive the enqueued work's call, not the work.
struct PageSlots {
  std::span<const std::int64_t> pages;
  DevicePages resident;
  std::span<const Slot> slots;
  // Where each page's block is; of a load. Its slot's page, or in the pool.
  std::span<std::byte* const> blocks;

  [[nodiscard]] PageSlots sub(std::size_t first, std::size_t count) const;
};

// Writes the tables of all chunks, for the calls below on the kernel path. Before the first one;
// the tables are read by the device until the slots are given back.
void fill_tables(const Core& core, const PageSlots& batch);

// Device pages to slots, all layers.
Status enqueue_gather(const Core& core, const PageSlots& batch);
// Whether page i of a gather by rows was one. Before the first slot of the batch is given back.
[[nodiscard]] bool was_page(const Core& core, std::span<const Slot> slots, std::size_t i);
// One layer of slots to device pages.
Status enqueue_scatter(const Core& core, std::uint32_t layer, const PageSlots& batch);
// The same for slots that were filled through a source; by spans.
Status enqueue_scatter(const Core& core, std::uint32_t layer, const PageSlots& batch,
                       const BlockSource& source);

// A layer of each page's blocks into its slot, but for pages whose block is elsewhere. `refs` are
// those of the batch: one per page, or as many as the source says.
void fill_slots(const Core& core, std::uint32_t layer, const PageSlots& batch,
                std::span<const BlockRef> refs, const BlockSource* source);

}  // namespace hpkv::stream
