// StreamRig: a pool, a stream engine on a device of threads, a forward stream, and pages whose
// bytes are a function of the key they stand for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/stream/engine.h"
#include "tests/async_device.h"
#include "tests/check.h"
#include "tests/pool_rig.h"

namespace hpkv::test {

// Few slots, so that they are used again soon.
inline stream::StreamOptions few_slots(stream::CopyPath path = stream::CopyPath::kernel) {
  stream::StreamOptions options;
  options.staging_slots = 6;
  options.spill_path = path;
  options.load_path = path;
  options.registered_piece_bytes = 0;  // everything through staging
  return options;
}

class StreamRig {
 public:
  static constexpr std::uint64_t kPages = 24;
  static constexpr std::uint32_t kLayers = 3;
  static constexpr std::uint64_t kTokens = 16;  // a page
  static constexpr std::uint64_t kRow = 72;     // bytes of a token in one of the two buffers
  static constexpr std::uint64_t kPageBytes = kTokens * kRow;
  static constexpr std::uint64_t kBlockBytes = 2 * kLayers * kPageBytes;

  explicit StreamRig(stream::StreamOptions options = few_slots(), std::uint64_t seed = 1)
      : device(std::make_shared<AsyncDevice>(seed)),
        pool(Pool::open(folder.options())),
        memory(kPages * kBlockBytes) {
    index = pool->add_namespace(identity(1), {}, kBlockBytes);
    CHECK(device->make_stream(false, forward).ok());
    engine = std::make_unique<stream::StreamEngine>(device, pool, index, layout(), options);
  }
  ~StreamRig() {
    device->release_all();  // a test that failed may have left one held
    engine.reset();
    if (device->pageable_copies() != 0 || device->calls_from_outside() != 0 ||
        !device->registrations().empty()) {
      std::abort();
    }
    // Work of the tests on this stream uses our members.
    static_cast<void>(device->synchronize_stream(forward));
    pool->close();
  }
  StreamRig(const StreamRig&) = delete;
  StreamRig& operator=(const StreamRig&) = delete;

  [[nodiscard]] BlockLayout layout() const {
    std::vector<Region> regions;
    for (std::uint64_t buffer = 0; buffer < 2 * kLayers; ++buffer) {
      regions.push_back({.layer = static_cast<std::uint32_t>(buffer / 2),
                         .base = reinterpret_cast<std::uint64_t>(at(0, buffer)),
                         .page_stride = kPageBytes,
                         .piece_count = kTokens,
                         .piece_stride = kRow,
                         .piece_bytes = kRow,
                         .block_offset = buffer * kPageBytes});
    }
    return BlockLayout(kBlockBytes, kLayers, kPages, std::move(regions));
  }

  // Blocks of the layout's own format, in the words of a source.
  [[nodiscard]] std::shared_ptr<const BlockSource> source(
      std::uint64_t block_bytes = kBlockBytes) const {
    const BlockLayout own = layout();
    const std::vector<Region> regions(own.regions().begin(), own.regions().end());
    return std::make_shared<BlockSource>(own, block_bytes,
                                         std::vector<std::vector<Region>>{regions});
  }

  // Device memory: [buffer, page, token, row].
  [[nodiscard]] std::byte* at(std::int64_t page, std::uint64_t buffer) const {
    const auto offset = (buffer * kPages + static_cast<std::uint64_t>(page)) * kPageBytes;
    return const_cast<std::byte*>(memory.data()) + offset;
  }

  static std::vector<std::byte> block_for(const Key& key) { return payload_of(key, kBlockBytes); }

  void fill_page(std::int64_t page, const Key& key) const {
    const auto block = block_for(key);
    for (std::uint64_t buffer = 0; buffer < 2 * kLayers; ++buffer) {
      std::memcpy(at(page, buffer), block.data() + buffer * kPageBytes, kPageBytes);
    }
  }
  void wipe_page(std::int64_t page, int byte = 0x5A) const {
    for (std::uint64_t buffer = 0; buffer < 2 * kLayers; ++buffer) {
      std::memset(at(page, buffer), byte, kPageBytes);
    }
  }
  [[nodiscard]] bool layer_is(std::int64_t page, std::uint32_t layer, const Key& key) const {
    const auto block = block_for(key);
    const std::size_t offset = std::size_t{2} * layer * kPageBytes;
    return std::memcmp(at(page, 2 * layer), block.data() + offset, kPageBytes) == 0 &&
           std::memcmp(at(page, 2 * layer + 1), block.data() + offset + kPageBytes, kPageBytes) ==
               0;
  }
  [[nodiscard]] bool page_is(std::int64_t page, const Key& key) const {
    bool right = true;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      right = right && layer_is(page, layer, key);
    }
    return right;
  }
  [[nodiscard]] bool block_is(const Key& key) const { return holds(*pool, key, kBlockBytes); }

  // Blocks in the pool, without the engine.
  void store(const std::vector<Key>& keys) const {
    for (const Key& key : keys) CHECK(put_one(*pool, index, key) == PutStatus::stored);
  }
  [[nodiscard]] Lease lease(const std::vector<Key>& keys) const { return Lease(pool, keys); }

  // Streams of the engine, in the order of their making; 0 is `forward`.
  [[nodiscard]] stream::StreamHandle to_device() const { return device->made_stream(1); }
  [[nodiscard]] stream::StreamHandle to_host() const { return device->made_stream(3); }

  Folder folder;  // first to come, last to go
  std::shared_ptr<AsyncDevice> device;
  std::shared_ptr<Pool> pool;
  std::vector<std::byte> memory;
  std::uint32_t index = 0;
  stream::StreamHandle forward = nullptr;
  std::unique_ptr<stream::StreamEngine> engine;
};

// An event of the test's own, behind what is on a stream now.
class RecordedEvent {
 public:
  RecordedEvent(AsyncDevice& device, stream::StreamHandle stream) : device_(device) {
    // Either may be the call that is to fail.
    if (!device.make_event(event_).ok()) return;
    if (!device.record(stream, event_).ok()) clear();
  }
  ~RecordedEvent() { clear(); }
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  [[nodiscard]] DeviceEvent get() const { return {event_}; }
  [[nodiscard]] stream::EventHandle handle() const { return event_; }

 private:
  void clear() {
    if (event_ != nullptr) device_.destroy_event(event_);
    event_ = nullptr;
  }

  AsyncDevice& device_;
  stream::EventHandle event_ = nullptr;
};

}  // namespace hpkv::test
