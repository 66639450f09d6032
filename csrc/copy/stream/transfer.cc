#include "copy/stream/transfer.h"

#include <algorithm>
#include <vector>

#include "base/crc32c.h"

namespace hpkv::stream {
namespace {

std::byte* at_address(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

// Calls visit(device address, offset in the slot, bytes) for the pieces of the layers [layer, end).
template <typename Visit>
void walk_layout(const Core& core, std::uint32_t layer, std::uint32_t end, std::uint64_t page,
                 Visit&& visit) {
  for (; layer < end; ++layer) {
    for (const Region& one : core.layout.regions(layer)) {
      const PageRegion region = page_region(one);
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        visit(at_address(region.base + page * region.page_stride + piece * region.piece_stride),
              region.block_offset + piece * region.block_step, region.piece_bytes);
      }
    }
  }
}

// The layout's, of the layers [layer, end).
RegionSpan own_regions(const Core& core, std::uint32_t layer, std::uint32_t end) {
  return {core.regions.begin(layer), core.regions.count(layer, end)};
}

// How many chunks from this one on have their tables side by side.
std::size_t joined(std::span<const KernelTable> tables) {
  std::size_t count = 1;
  while (count < tables.size() && tables[count].blocks == tables[0].blocks + count * kTableRows) {
    ++count;
  }
  return count;
}

// A job for each chunk of at most kTableRows pages, or for several at once whose tables are one.
void add_jobs(const Core& core, RegionSpan regions, const PageBlocks& batch, bool to_block,
              std::vector<PageJob>& jobs) {
  if (regions.count == 0) return;
  for (std::size_t chunk = 0, chunks = 1; chunk < batch.tables.size(); chunk += chunks) {
    const KernelTable& table = batch.tables[chunk];
    chunks = table.blocks == nullptr ? 1 : joined(batch.tables.subspan(chunk));
    if (table.blocks == nullptr) continue;
    const std::size_t first = chunk * kTableRows;
    const bool resident = batch.resident.count != 0;
    const bool by_rows = resident && !batch.pages.empty();
    const std::int64_t* const in_order =
        resident ? batch.resident.first_slots + first : table.pages;
    jobs.push_back({.regions = regions.begin,
                    .pages = by_rows ? batch.resident.first_slots : in_order,
                    .blocks = table.blocks,
                    .rows = by_rows ? table.pages : nullptr,
                    .region_count = regions.count,
                    .count = std::min(chunks * kTableRows, batch.blocks.size() - first),
                    .page_count = core.layout.page_count(),
                    .tokens_per_page = resident ? batch.resident.page_size : 1,
                    .to_block = to_block});
  }
}

Status run(const Core& core, StreamHandle stream, std::span<const PageJob> jobs) {
  for (; !jobs.empty(); jobs = jobs.subspan(std::min(kJobsMax, jobs.size()))) {
    Status status = core.device->run(stream, jobs.first(std::min(kJobsMax, jobs.size())));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

PageBlocks PageBlocks::sub(std::size_t first, std::size_t count) const {
  PageBlocks part = *this;
  if (resident.count != 0) {
    part.resident.first_slots += first;
    part.resident.count = count;
  } else {
    part.pages = pages.subspan(first, count);
  }
  return part;
}

void fill_tables(const PageBlocks& batch) {
  if (batch.tables.empty()) return;
  for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
    const KernelTable& table = batch.tables[i / kTableRows];
    if (table.blocks == nullptr) continue;
    const std::size_t row = i % kTableRows;
    table.blocks[row] = reinterpret_cast<std::uint64_t>(batch.blocks[i]);
    if (!batch.pages.empty()) table.pages[row] = batch.pages[i];
  }
}

bool was_page(std::span<const KernelTable> tables, std::size_t i) {
  return tables[i / kTableRows].pages[i % kTableRows] >= 0;
}

bool scatters_by_kernel(const Core& core, const DevicePages& resident) {
  return core.options.load_path == CopyPath::kernel || resident.count != 0;
}

Status enqueue_gather(const Core& core, const PageBlocks& batch) {
  const std::uint32_t layers = core.layout.layer_count();
  if (core.options.spill_path == CopyPath::kernel) {
    std::vector<PageJob> jobs;
    add_jobs(core, own_regions(core, 0, layers), batch, true, jobs);
    return run(core, core.to_host.handle(), jobs);
  }
  std::vector<Span> spans;
  for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
    std::byte* const slot = batch.blocks[i];
    walk_layout(core, 0, layers, static_cast<std::uint64_t>(batch.pages[i]),
                [&](const std::byte* device, std::uint64_t offset, std::uint64_t bytes) {
                  spans.push_back({slot + offset, device, bytes});
                });
  }
  return core.device->copy(core.to_host.handle(), Direction::to_host, spans);
}

void add_scatter(const Core& core, std::uint32_t layer, const PageBlocks& batch,
                 std::vector<PageJob>& jobs) {
  add_jobs(core, own_regions(core, layer, layer + 1), batch, false, jobs);
}

void add_scatter(const Core& core, RegionSpan regions, const PageBlocks& batch,
                 std::vector<PageJob>& jobs) {
  add_jobs(core, regions, batch, false, jobs);
}

Status run_scatters(const Core& core, std::span<const PageJob> jobs) {
  return run(core, core.to_device.handle(), jobs);
}

Status enqueue_scatter(const Core& core, std::uint32_t layer, const PageBlocks& batch) {
  std::vector<Span> spans;
  for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
    walk_layout(core, layer, layer + 1, static_cast<std::uint64_t>(batch.pages[i]),
                [&](std::byte* device, std::uint64_t offset, std::uint64_t bytes) {
                  spans.push_back({device, batch.blocks[i] + offset, bytes});
                });
  }
  if (spans.empty()) return {};
  return core.device->copy(core.to_device.handle(), Direction::to_device, spans);
}

void fill_slots(const Core& core, std::uint32_t layer, const PageBlocks& batch,
                std::span<const BlockRef> refs, const Assembly* assembly) {
  const std::uint64_t begin = core.layer_offsets[layer];
  const std::uint64_t bytes = core.layer_offsets[layer + 1] - begin;
  std::vector<const std::byte*> payloads(refs.size() / batch.blocks.size());
  for (std::size_t i = 0; i < batch.blocks.size(); ++i) {
    std::byte* const slot = batch.blocks[i];
    if (slot == nullptr) continue;
    const auto own = refs.subspan(i * payloads.size(), payloads.size());
    std::ranges::transform(own, payloads.begin(),
                           [&core](const BlockRef& ref) { return core.pool->payload(ref); });
    if (assembly != nullptr) {
      assembly->fill(layer, payloads, slot);
    } else if (slot != payloads.front()) {
      copy_nt_unfenced(slot + begin, payloads.front() + begin, bytes);
    }
  }
  // The device reads what the call that starts it finds in memory.
  nt_fence();
}

}  // namespace hpkv::stream
