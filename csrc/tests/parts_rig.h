// PartsRig: a rig whose pool has blocks of another server too, some of the layout's pages each, and
// whose pool is registered.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv::test {

using stream::StreamLoad;
using stream::StreamOptions;
using stream::Streams;

inline constexpr std::size_t kSlots = 3;   // of few_slots(), for loads
inline constexpr std::size_t kTables = 7;  // a chunk of parts needs three

inline StreamOptions registering(std::uint64_t piece_bytes = std::uint64_t{1} << 30) {
  StreamOptions options = few_slots();
  options.registered_piece_bytes = piece_bytes;
  options.registered_look_every = std::chrono::hours(1);
  options.load_tables = kTables;
  return options;
}

// Until it holds, or too long.
template <typename Condition>
bool comes(Condition&& condition, std::chrono::seconds limit = std::chrono::seconds(20)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

using Pages = std::vector<std::int64_t>;
using Source = std::shared_ptr<const BlockSource>;

// A rig whose pool has blocks of another server too, two a page: the first has one buffer of each
// layer, the second the other, token by token.
class PartsRig : public StreamRig {
 public:
  static constexpr std::uint64_t kUnread = 24;
  static constexpr std::uint64_t kPartBytes = kUnread + kLayers * kPageBytes;

  explicit PartsRig(const StreamOptions& options = registering(), std::uint64_t seed = 1)
      : StreamRig(options, seed), theirs(pool->add_namespace(identity(2), {}, kPartBytes)) {
    parts = std::make_shared<BlockSource>(layout(), kPartBytes,
                                          std::vector<std::vector<Region>>{regions(0), regions(1)});
  }

  [[nodiscard]] std::vector<Region> regions(std::uint64_t part) const {
    std::vector<Region> out;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::uint64_t offset = part == 0 ? layer * kPageBytes : layer * kRow;
      out.push_back({.layer = layer,
                     .base = reinterpret_cast<std::uint64_t>(at(0, 2 * layer + part)),
                     .page_stride = kPageBytes,
                     .piece_count = kTokens,
                     .piece_stride = kRow,
                     .piece_bytes = kRow,
                     .block_offset = kUnread + offset,
                     .block_stride = part == 0 ? kRow : kLayers * kRow});
    }
    return out;
  }
  void store_parts(const std::vector<Key>& keys) const {
    for (const Key& key : keys) CHECK(put_one(*pool, theirs, key) == PutStatus::stored);
  }
  // Whether a page is what these two blocks say, byte by byte.
  [[nodiscard]] bool is_joined(std::int64_t page, const Key& first, const Key& second) const {
    const std::vector<std::byte> blocks[2] = {payload_of(first, kPartBytes),
                                              payload_of(second, kPartBytes)};
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::uint64_t i = 0; i < kPageBytes; ++i) {
        const std::uint64_t dense = kUnread + layer * kPageBytes + i;
        const std::uint64_t by_token = kUnread + (i / kRow * kLayers + layer) * kRow + i % kRow;
        if (at(page, 2 * layer)[i] != blocks[0][dense]) return false;
        if (at(page, 2 * layer + 1)[i] != blocks[1][by_token]) return false;
      }
    }
    return true;
  }
  [[nodiscard]] bool are_joined(const Pages& pages, const std::vector<Key>& keys) const {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (!is_joined(pages[i], keys[2 * i], keys[2 * i + 1])) return false;
    }
    return true;
  }
  // Loads pages of these until all were read in place.
  void await_registered(const std::vector<Key>& keys, const Source& source) const {
    Pages pages(keys.size() / (source ? 2 : 1));
    std::iota(pages.begin(), pages.end(), 0);
    CHECK(comes([&] {
      const std::uint64_t before = engine->stats().loaded_in_place;
      CHECK(engine->load(lease(keys), pages, {}, source)->wait());
      return engine->stats().loaded_in_place == before + keys.size();
    }));
    engine->quiesce();
  }
  [[nodiscard]] bool all_is_registered() const {
    std::uint64_t left = 0;
    for (const std::span<std::byte> segment : pool->reserved()) left += segment.size();
    for (const std::uint64_t bytes : device->registrations()) left -= bytes;
    return left == 0;
  }
  // Known to nobody on the host while the forward stream is held.
  [[nodiscard]] std::shared_ptr<StreamLoad> submit(Lease lease, const Pages& pages,
                                                   const Source& source) {
    slots_.push_back(std::make_unique<Pages>(pages));
    for (std::int64_t& slot : *slots_.back()) slot *= static_cast<std::int64_t>(kTokens);
    return engine->load_resident(std::move(lease), {slots_.back()->data(), pages.size(), kTokens},
                                 Streams{forward}, source);
  }
  [[nodiscard]] bool is_enqueued(StreamLoad& load) const {
    return comes([&] { return load.try_wait_layer_on(forward, kLayers - 1).has_value(); });
  }

  const std::uint32_t theirs;
  Source parts;

 private:
  std::vector<std::unique_ptr<Pages>> slots_;
};

inline Pages first_pages(std::size_t count) {
  Pages pages(count);
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
}

// As many of these as there are pages in the rig, again and again.
struct Repeated {
  std::vector<Key> keys;
  Pages pages;

  Repeated(const std::vector<Key>& some, std::size_t per_page, std::size_t count) {
    const std::size_t distinct = some.size() / per_page;
    for (std::size_t i = 0; i < count; ++i) {
      pages.push_back(static_cast<std::int64_t>(i % distinct));
      for (std::size_t k = 0; k < per_page; ++k) {
        keys.push_back(some[i % distinct * per_page + k]);
      }
    }
  }
};

}  // namespace hpkv::test
