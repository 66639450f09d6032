// CopyRig: a small pool, a piece of "device" memory with a layout that is awkward on purpose, and
// an engine between them.
//
//   layer 0: two dense buffers    layer 1: one buffer of 7 strided pieces    layer 2: one dense
//   buffer
//
// Server: device memory of any layout and an engine on a pool that others use too.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "copy/engine.h"
#include "shm/lease.h"
#include "tests/check.h"

namespace hpkv::test {

class CopyRig {
 public:
  static constexpr std::uint64_t kPages = 32;

  explicit CopyRig(PoolOptions pool_options = {}, const EngineOptions& options = {})
      : directory_(make_directory()), device_(kDeviceBytes) {
    pool_options.directory = directory_ + "/pool";
    pool_options.pool_bytes = std::uint64_t{16} << 20;
    pool = Pool::open(pool_options);
    fill_device(1);
    layout_ = std::make_unique<BlockLayout>(make_layout());
    NamespaceId id{};
    id[0] = std::byte{1};
    const std::uint32_t index = pool->add_namespace(id, {}, layout_->block_bytes());
    engine = make_cpu_engine(pool, index, *layout_, options);
  }

  ~CopyRig() {
    engine.reset();
    const auto problems = pool->check();
    for (const std::string& problem : problems) std::printf("pool: %s\n", problem.c_str());
    pool.reset();
    std::filesystem::remove_all(directory_);
    if (!problems.empty()) std::abort();
  }

  CopyRig(const CopyRig&) = delete;
  CopyRig& operator=(const CopyRig&) = delete;

  [[nodiscard]] const BlockLayout& layout() const { return *layout_; }
  [[nodiscard]] std::uint64_t block_bytes() const { return layout_->block_bytes(); }
  [[nodiscard]] std::uint32_t layer_count() const { return layout_->layer_count(); }

  // `count` distinct keys; the same for the same `first`.
  [[nodiscard]] static std::vector<Key> keys(std::uint64_t first, std::size_t count) {
    std::vector<Key> keys(count);
    for (std::size_t i = 0; i < count; ++i) {
      std::mt19937_64 random(first + i);
      for (std::uint64_t& word : keys[i].words) word = random();
    }
    return keys;
  }

  [[nodiscard]] static std::vector<std::int64_t> pages(std::int64_t first, std::size_t count) {
    std::vector<std::int64_t> pages;
    for (std::size_t i = 0; i < count; ++i) pages.push_back(first + static_cast<std::int64_t>(i));
    return pages;
  }

  [[nodiscard]] Lease lease(const std::vector<Key>& keys) const { return Lease(pool, keys); }

  void fill_device(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : device_) byte = static_cast<std::byte>(random());
  }

  [[nodiscard]] std::vector<std::byte> device_copy() const { return device_; }

  // Calls visit(offset into the device memory) for every byte of a page, in block order.
  template <typename Visit>
  void each_byte(std::int64_t page, Visit visit, int layer = -1) const {
    for (const Region& region : layout_->regions()) {
      if (layer >= 0 && region.layer != static_cast<std::uint32_t>(layer)) continue;
      for (std::uint64_t piece = 0; piece < region.piece_count; ++piece) {
        const std::byte* at = region.piece(static_cast<std::uint64_t>(page), piece);
        for (std::uint64_t i = 0; i < region.piece_bytes; ++i) {
          visit(static_cast<std::size_t>(at + i - device_.data()));
        }
      }
    }
  }

  // The bytes of a page (of one layer, or all) in a copy of the device memory, or now.
  [[nodiscard]] std::vector<std::byte> page_of(const std::vector<std::byte>& device,
                                               std::int64_t page, int layer = -1) const {
    std::vector<std::byte> bytes;
    each_byte(page, [&](std::size_t at) { bytes.push_back(device[at]); }, layer);
    return bytes;
  }
  [[nodiscard]] std::vector<std::byte> page_bytes(std::int64_t page, int layer = -1) const {
    return page_of(device_, page, layer);
  }

  std::shared_ptr<Pool> pool;
  std::unique_ptr<CopyEngine> engine;

 private:
  static constexpr std::size_t kDeviceBytes = 2 << 20;

  static std::string make_directory() {
    std::string path = "/dev/shm/hpkv-copy-test-XXXXXX";
    CHECK(::mkdtemp(path.data()) != nullptr);
    return path;
  }

  BlockLayout make_layout() {
    const auto base = reinterpret_cast<std::uint64_t>(device_.data());
    std::vector<Region> regions;
    std::uint64_t offset = 0;
    std::uint64_t address = base + 3;  // nothing is aligned
    const auto append = [&](std::uint32_t layer, std::uint64_t pieces, std::uint64_t bytes,
                            std::uint64_t stride) {
      regions.push_back({.layer = layer,
                         .base = address,
                         .page_stride = pieces * stride + 13,
                         .piece_count = pieces,
                         .piece_stride = stride,
                         .piece_bytes = bytes,
                         .block_offset = offset});
      offset += pieces * bytes;
      address += kPages * (pieces * stride + 13) + 100;
    };
    append(0, 1, 6000, 6000);
    append(0, 1, 4096, 4096);
    append(1, 7, 1001, 1500);
    append(2, 1, 10000, 10000);
    CHECK(address <= base + device_.size());
    return BlockLayout(offset, 3, kPages, std::move(regions));
  }

  std::string directory_;
  std::vector<std::byte> device_;
  std::unique_ptr<BlockLayout> layout_;
};

class Server {
 public:
  using MakeLayout = std::function<BlockLayout(std::uint64_t base)>;

  static constexpr std::size_t kDeviceBytes = 1 << 20;

  // `make` places the layout's regions from an address on. Servers of one `name` share blocks.
  Server(std::shared_ptr<Pool> the_pool, int name, const MakeLayout& make,
         const EngineOptions& options = {})
      : device(kDeviceBytes),
        pool(std::move(the_pool)),
        layout(make(reinterpret_cast<std::uint64_t>(device.data()))) {
    NamespaceId id{};
    id[0] = static_cast<std::byte>(name);
    namespace_index = pool->add_namespace(id, {}, layout.block_bytes());
    engine = make_cpu_engine(pool, namespace_index, layout, options);
  }

  void fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : device) byte = static_cast<std::byte>(random());
  }

  [[nodiscard]] std::uint64_t base() const {
    return reinterpret_cast<std::uint64_t>(device.data());
  }
  [[nodiscard]] Lease lease(const std::vector<Key>& keys) const { return Lease(pool, keys); }

  std::vector<std::byte> device;  // outlives the engine
  std::shared_ptr<Pool> pool;
  BlockLayout layout;
  std::uint32_t namespace_index = 0;
  std::unique_ptr<CopyEngine> engine;
};

// The bytes of a block that is there.
inline std::vector<std::byte> block_of(const std::shared_ptr<Pool>& pool, const Key& key) {
  const Lease pinned(pool, std::vector<Key>{key});
  CHECK(pinned.count() == 1);
  const std::byte* payload = pool->payload(pinned.refs()[0]);
  return {payload, payload + pinned.refs()[0].payload_bytes};
}

inline void flip_byte_of(const std::shared_ptr<Pool>& pool, const Key& key, std::uint64_t at) {
  const Lease pinned(pool, std::vector<Key>{key});
  CHECK(pinned.count() == 1);
  pool->payload(pinned.refs()[0])[at] ^= std::byte{0x10};
}

}  // namespace hpkv::test
