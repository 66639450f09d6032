// The stream engine on a GPU, tiny shapes, no torch: what compute-sanitizer looks at. No ctest runs
// it, because it needs a GPU; scripts/device_check.sh does.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "copy/cuda/device.h"
#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/pool_rig.h"

namespace hpkv {

using stream::CopyPath;
using test::Folder;
using test::payload_of;
using test::random_keys;

namespace {

constexpr std::uint64_t kPages = 24;  // the first half is spilled, the other half loaded into
constexpr std::uint32_t kLayers = 2;

void require(const stream::Status& status) {
  test::check(status.ok(), status.text().c_str(), __FILE__, __LINE__);
}

// Pages of `tokens` rows of `row` bytes, layer after layer; page p of the first half holds the
// payload of key p.
struct Gpu {
  Gpu(std::uint64_t tokens, std::uint64_t row, CopyPath path)
      : page_bytes(tokens * row), block_bytes(kLayers * page_bytes), keys(random_keys(kPages / 2)) {
    std::vector<std::byte> pages(kPages * block_bytes);
    for (std::uint64_t page = 0; page < keys.size(); ++page) {
      const auto block = payload_of(keys[page], block_bytes);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        std::memcpy(pages.data() + (layer * kPages + page) * page_bytes,
                    block.data() + layer * page_bytes, page_bytes);
      }
    }
    require(device->upload(pages, memory));
    std::vector<Region> regions;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      regions.push_back(
          {.layer = layer,
           .base = reinterpret_cast<std::uint64_t>(memory) + layer * kPages * page_bytes,
           .page_stride = page_bytes,
           .piece_count = tokens,
           .piece_stride = row,
           .piece_bytes = row,
           .block_offset = layer * page_bytes});
    }
    index = pool->add_namespace(test::identity(1), {}, block_bytes);
    stream::StreamOptions options;
    options.staging_slots = 8;  // fewer than pages: slots are used again
    options.spill_path = options.load_path = path;
    engine = std::make_unique<stream::StreamEngine>(
        device, pool, index, BlockLayout(block_bytes, kLayers, kPages, regions), options);
  }
  ~Gpu() {
    engine.reset();
    device->free_uploaded(memory);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // All of the device's pages, as they are now.
  [[nodiscard]] std::vector<std::byte> read() const {
    const std::uint64_t bytes = kPages * block_bytes;
    std::byte* pinned = nullptr;
    stream::StreamHandle own = nullptr;
    require(device->make_stream(false, own));
    require(device->allocate_pinned(bytes, pinned));
    const stream::Span span{pinned, static_cast<const std::byte*>(memory), bytes};
    require(device->copy(own, stream::Direction::to_host, {&span, 1}));
    require(device->synchronize_stream(own));
    std::vector<std::byte> out(pinned, pinned + bytes);
    device->free_pinned(pinned);
    device->destroy_stream(own);
    return out;
  }

  // Whether this page and its counterpart of the other half hold the same bytes.
  [[nodiscard]] bool twins(std::uint64_t page) const {
    const auto pages = read();
    bool same = true;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::byte* const whole = pages.data() + layer * kPages * page_bytes;
      same = same && std::memcmp(whole + page * page_bytes,
                                 whole + (kPages - 1 - page) * page_bytes, page_bytes) == 0;
    }
    return same;
  }

  const std::uint64_t page_bytes;
  const std::uint64_t block_bytes;
  const std::vector<Key> keys;
  Folder folder;
  std::shared_ptr<stream::Device> device = cuda::make_device(0);
  std::shared_ptr<Pool> pool = Pool::open(folder.options());
  void* memory = nullptr;
  std::uint32_t index = 0;
  std::unique_ptr<stream::StreamEngine> engine;
};

void there_and_back(std::uint64_t tokens, std::uint64_t row, CopyPath path) {
  Gpu gpu(tokens, row, path);
  std::vector<std::int64_t> from;
  std::vector<std::int64_t> to;
  for (std::uint64_t page = 0; page < gpu.keys.size(); ++page) {
    from.push_back(static_cast<std::int64_t>(page));
    to.push_back(static_cast<std::int64_t>(kPages - 1 - page));
  }
  const auto spill = gpu.engine->spill(gpu.keys, from, {});
  spill->wait();
  test::check(gpu.engine->error_count() == 0, gpu.engine->first_error().c_str(), __FILE__,
              __LINE__);
  CHECK(spill->stored() == gpu.keys.size());
  for (const Key& key : gpu.keys) CHECK(test::holds(*gpu.pool, key, gpu.block_bytes));
  CHECK(gpu.engine->load(Lease(gpu.pool, gpu.keys), to, {})->wait());
  gpu.engine->quiesce();
  for (std::uint64_t page = 0; page < gpu.keys.size(); ++page) CHECK(gpu.twins(page));
  CHECK(gpu.engine->check().empty());
}

}  // namespace

TEST(pages_come_back_by_the_kernel) {
  there_and_back(16, 256, CopyPath::kernel);
  there_and_back(1, 1152, CopyPath::kernel);
  there_and_back(4, 37, CopyPath::kernel);  // words of one byte
}

TEST(pages_come_back_by_indices_that_only_the_gpu_has) {
  constexpr std::uint64_t kTokens = 16;
  Gpu gpu(kTokens, 256, CopyPath::kernel);
  const std::uint64_t count = gpu.keys.size();
  std::vector<std::int64_t> slots;
  for (std::uint64_t i = 0; i < 2 * count; ++i) {
    const std::uint64_t page = i < count ? i : kPages - 1 - (i - count);
    slots.push_back(static_cast<std::int64_t>(page * kTokens));
  }
  slots[2] = static_cast<std::int64_t>(kPages * kTokens);  // no page: dropped
  void* memory = nullptr;
  require(gpu.device->upload(std::as_bytes(std::span(slots)), memory));
  const auto* const first_slots = static_cast<const std::int64_t*>(memory);
  const auto spill = gpu.engine->spill_resident(gpu.keys, {first_slots, count, kTokens}, {});
  spill->ticket.wait();
  CHECK(spill->ticket.stored() == count - 1);
  CHECK(gpu.engine->stats().spill_dropped_outside == 1);
  for (std::uint64_t i = 0; i < count; ++i) {
    CHECK(test::holds(*gpu.pool, gpu.keys[i], gpu.block_bytes) == (i != 2));
  }
  const std::vector<Key> rest(gpu.keys.begin() + 3, gpu.keys.end());
  const auto load = gpu.engine->load_resident(Lease(gpu.pool, rest),
                                              {first_slots + count + 3, count - 3, kTokens}, {});
  CHECK(load->ticket.wait());
  gpu.engine->quiesce();
  gpu.device->free_uploaded(memory);
  for (std::uint64_t i = 3; i < count; ++i) CHECK(gpu.twins(i));
}

TEST(pages_come_back_by_batches) {
  there_and_back(16, 256, CopyPath::batch);
  there_and_back(4, 37, CopyPath::batch);
}

}  // namespace hpkv

TEST_MAIN
