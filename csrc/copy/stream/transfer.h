// Enqueues what copies pages between blocks, in slots or in the pool, and the device, by the kernel
// or by batches of spans, and fills slots from blocks. Threads: one per direction; none of it waits
// for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/stream/assembly.h"
#include "copy/stream/core.h"

namespace hpkv::stream {

// Pages and where the block of each is, one each. The pages are `pages`; or `resident`, when it
// has any; or, of a gather, those of `resident` whose rows are `pages`. The spans are the caller's
// and outlive the enqueued work's call, not the work.
struct PageBlocks {
  std::span<const std::int64_t> pages;
  DevicePages resident;
  std::span<std::byte* const> blocks;   // a slot's page, or, of a load, in the pool; null: no copy
  std::span<const KernelTable> tables;  // of each chunk of kTableRows pages, without addresses
                                        // where it has no block; none for spans

  [[nodiscard]] PageBlocks sub(std::size_t first, std::size_t count) const;
};

// Writes the tables of all chunks. Before the first call below; the device reads them until it is
// done.
void fill_tables(const PageBlocks& batch);

// Device pages to blocks, all layers.
Status enqueue_gather(const Core& core, const PageBlocks& batch);
// Whether page i of a gather by rows was one. Before the tables are given back.
[[nodiscard]] bool was_page(std::span<const KernelTable> tables, std::size_t i);

// Whether a load of these goes by the kernel.
[[nodiscard]] bool scatters_by_kernel(const Core& core, const DevicePages& resident);
// One layer of blocks to device pages, by the kernel: what it is to do. With other regions than the
// layout's, blocks of another format.
void add_scatter(const Core& core, std::uint32_t layer, const PageBlocks& batch,
                 std::vector<PageJob>& jobs);
void add_scatter(const Core& core, RegionSpan regions, const PageBlocks& batch,
                 std::vector<PageJob>& jobs);
Status run_scatters(const Core& core, std::span<const PageJob> jobs);
// The same by copies of spans.
Status enqueue_scatter(const Core& core, std::uint32_t layer, const PageBlocks& batch);

// A layer of each page's blocks into its slot, but for pages that are read in the pool. `refs` are
// those of the batch, as many a page for each: one, or the parts that `assembly` puts together.
void fill_slots(const Core& core, std::uint32_t layer, const PageBlocks& batch,
                std::span<const BlockRef> refs, const Assembly* assembly);

}  // namespace hpkv::stream
