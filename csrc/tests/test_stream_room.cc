// Loads whose parts are read where they lie in the pool, and loads that ask for room first: whoever
// waits for a layer of those waits for no copy.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/stream_rig.h"

namespace hpkv {

using std::chrono::milliseconds;
using stream::StagingShare;
using stream::StreamLoad;
using stream::StreamOptions;
using stream::Streams;
using test::few_slots;
using test::random_keys;
using test::StreamRig;

namespace {

constexpr std::size_t kSlots = 3;   // of few_slots(), for loads
constexpr std::size_t kTables = 7;  // a chunk of parts needs three

StreamOptions registering(std::uint64_t piece_bytes = std::uint64_t{1} << 30) {
  StreamOptions options = few_slots();
  options.registered_piece_bytes = piece_bytes;
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
      : StreamRig(options, seed), theirs(pool->add_namespace(test::identity(2), {}, kPartBytes)) {
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
    for (const Key& key : keys) CHECK(test::put_one(*pool, theirs, key) == PutStatus::stored);
  }
  // Whether a page is what these two blocks say, byte by byte.
  [[nodiscard]] bool is_joined(std::int64_t page, const Key& first, const Key& second) const {
    const std::vector<std::byte> blocks[2] = {test::payload_of(first, kPartBytes),
                                              test::payload_of(second, kPartBytes)};
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
    const std::size_t count = keys.size() / (source ? 2 : 1);
    Pages pages(count);
    std::iota(pages.begin(), pages.end(), 0);
    CHECK(comes([&] {
      const std::uint64_t before = engine->stats().loaded_in_place;
      CHECK(engine->load(lease(keys), pages, {}, source)->wait());
      return engine->stats().loaded_in_place == before + count;
    }));
    engine->quiesce();
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

Pages first_pages(std::size_t count) {
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

}  // namespace

// ---- parts in place ----

TEST(parts_in_registered_memory_are_read_where_they_lie_whatever_their_number) {
  PartsRig rig;
  const auto keys = random_keys(2 * StreamRig::kPages);
  rig.store_parts(keys);
  rig.await_registered(keys, rig.parts);
  for (const std::size_t count : {1, 24, 256, 257, 512}) {
    const Repeated what(keys, 2, count);
    const std::uint64_t before = rig.engine->stats().loaded_in_place;
    rig.device->hold(rig.forward);
    rig.device->launch(rig.forward, [&] {
      for (const std::int64_t page : what.pages) rig.wipe_page(page);
    });
    const auto load = rig.submit(rig.lease(what.keys), what.pages, rig.parts);
    const bool enqueued = rig.is_enqueued(*load);
    rig.device->release(rig.forward);
    CHECK(load->ticket.wait() && rig.are_joined(what.pages, what.keys));
    CHECK(enqueued && rig.engine->stats().loaded_in_place - before == count);
  }
  rig.engine->quiesce();
  CHECK(rig.engine->check().empty() && rig.pool->stats().pinned == 0);
}

TEST(parts_that_are_read_in_place_are_pinned_until_they_have_landed) {
  PartsRig rig;
  const auto keys = random_keys(4);
  rig.store_parts(keys);
  rig.await_registered(keys, rig.parts);
  rig.device->hold(rig.to_device());
  const auto load = rig.engine->load_on_streams(rig.lease(keys), {3, 4}, {}, rig.parts);
  CHECK(rig.is_enqueued(*load) && rig.pool->stats().pinned == 4);
  rig.device->release(rig.to_device());
  CHECK(load->ticket.wait() && rig.pool->stats().pinned == 0);
}

TEST(the_regions_of_two_sources_are_kept_apart) {
  PartsRig rig;
  const auto keys = random_keys(2);
  rig.store_parts(keys);
  rig.await_registered(keys, rig.parts);
  const auto swapped = std::make_shared<BlockSource>(
      rig.layout(), PartsRig::kPartBytes,
      std::vector<std::vector<Region>>{rig.regions(1), rig.regions(0)});
  for (int round = 0; round < 4; ++round) {
    const bool swap = round % 2 == 0;
    const std::uint64_t before = rig.engine->stats().loaded_in_place;
    rig.wipe_page(5);
    const auto load = rig.engine->load(rig.lease({keys[swap ? 1 : 0], keys[swap ? 0 : 1]}), {5}, {},
                                       swap ? swapped : rig.parts);
    CHECK(load->wait() && rig.is_joined(5, keys[0], keys[1]));
    CHECK(rig.engine->stats().loaded_in_place == before + 1);
  }
}

TEST(a_source_that_has_no_place_for_its_regions_or_tables_is_put_together) {
  for (const bool no_tables : {false, true}) {
    StreamOptions options = registering();
    if (no_tables) {
      options.load_tables = 2;
    } else {
      options.part_region_bytes = 2 * StreamRig::kLayers * sizeof(stream::PageRegion) - 1;
    }
    PartsRig rig(options);
    const auto own = random_keys(1, 5);
    const auto keys = random_keys(10);
    rig.store(own);
    rig.store_parts(keys);
    rig.await_registered(own, nullptr);
    const std::uint64_t before = rig.engine->stats().loaded_in_place;
    for (int round = 0; round < 3; ++round) {
      const Pages pages = {4, 0, 9, 8, 23};
      for (const std::int64_t page : pages) rig.wipe_page(page);
      CHECK(rig.engine->load(rig.lease(keys), pages, {}, rig.parts)->wait());
      CHECK(rig.are_joined(pages, keys));
    }
    CHECK(rig.engine->stats().loaded_in_place == before);
  }
}

// Only the first registrations are granted. Some pages have both parts in them, some one or none.
TEST(loads_of_parts_in_place_and_of_pages_that_are_put_together_bring_every_byte) {
  int mixtures = 0;
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    std::mt19937_64 random(seed);
    PartsRig rig(few_slots(), seed);
    rig.engine.reset();
    auto keys = random_keys(2 * StreamRig::kPages, seed);
    rig.store_parts(keys);
    rig.device->refuse_registrations_after(3 + random() % 6);
    rig.engine = std::make_unique<stream::StreamEngine>(rig.device, rig.pool, rig.index,
                                                        rig.layout(), registering(32 << 10));
    CHECK(comes([&] {
      CHECK(rig.engine->load(rig.lease({keys[0], keys[1]}), {0}, {}, rig.parts)->wait());
      return !rig.engine->notice().empty();
    }));
    rig.device->set_delay_us(10);
    const auto before = rig.engine->stats();
    for (int round = 0; round < 6; ++round) {
      std::ranges::shuffle(keys, random);
      const Repeated what(keys, 2, 1 + random() % (round == 0 ? 300 : 40));
      for (const std::int64_t page : what.pages) rig.wipe_page(page);
      CHECK(rig.engine->load(rig.lease(what.keys), what.pages, {}, rig.parts)->wait());
      CHECK(rig.are_joined(what.pages, what.keys));
    }
    rig.engine->quiesce();
    CHECK(rig.engine->check().empty());
    const auto after = rig.engine->stats();
    const std::uint64_t in_place = after.loaded_in_place - before.loaded_in_place;
    mixtures += in_place != 0 && 2 * in_place < after.loaded_blocks - before.loaded_blocks ? 1 : 0;
  }
  CHECK(mixtures >= 5);
}

TEST(pages_in_place_of_any_number_are_one_launch_a_layer_and_format) {
  PartsRig rig;
  const auto keys = random_keys(2 * StreamRig::kPages);
  const auto own = random_keys(StreamRig::kPages, 7);
  rig.store_parts(keys);
  rig.store(own);
  rig.await_registered(keys, rig.parts);
  rig.await_registered(own, nullptr);
  for (const bool sourced : {false, true}) {
    const Repeated what(sourced ? keys : own, sourced ? 2 : 1, sourced ? 512 : 1500);
    const std::size_t before = rig.device->run_count();
    CHECK(
        rig.submit(rig.lease(what.keys), what.pages, sourced ? rig.parts : nullptr)->ticket.wait());
    CHECK(rig.device->run_count() - before == StreamRig::kLayers * (sourced ? 2 : 1));
    rig.engine->quiesce();
  }
}

TEST(tables_with_others_between_them_are_launches_of_their_own_until_all_are_free) {
  PartsRig rig;
  const auto keys = random_keys(StreamRig::kPages);
  rig.store(keys);
  rig.await_registered(keys, nullptr);
  const auto launches = [&](std::size_t pages) {
    const Repeated what(keys, 1, pages);
    for (const std::int64_t page : what.pages) rig.wipe_page(page);
    const std::size_t before = rig.device->run_count();
    const auto load = rig.engine->load_on_streams(rig.lease(what.keys), what.pages, {});
    CHECK(rig.is_enqueued(*load));
    const std::size_t count = rig.device->run_count() - before;
    rig.device->release(rig.forward);
    CHECK(load->ticket.wait());
    for (std::size_t i = 0; i < pages; ++i) CHECK(rig.page_is(what.pages[i], what.keys[i]));
    return count / StreamRig::kLayers;
  };
  rig.device->hold(rig.to_device());
  const auto first = rig.engine->load_on_streams(rig.lease({keys[0]}), {0}, {});
  rig.device->hold(rig.forward);
  const auto second = rig.submit(rig.lease({keys[1]}), {1}, nullptr);
  CHECK(rig.is_enqueued(*first) && rig.is_enqueued(*second));  // each has its table
  rig.device->release(rig.to_device());
  CHECK(comes([&] { return rig.engine->load_room().tables == kTables - 1; }));
  CHECK(launches(512) == 2);  // on either side of the second's
  rig.engine->quiesce();
  CHECK(launches(kTables * 256) == 1);
}

// ---- room ----

TEST(room_is_less_what_was_submitted_until_that_has_landed) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(4);
  rig.store(keys);
  const auto room = [&] { return rig.engine->load_room().slots; };
  const auto fitting = [&](std::size_t first) {
    StagingShare left = rig.engine->load_room();
    return rig.engine->fit(rig.lease({keys.begin() + static_cast<int>(first), keys.end()}), nullptr,
                           left);
  };
  CHECK(room() == kSlots && fitting(0) == kSlots);
  rig.device->hold(rig.to_device());
  rig.engine->hold_loads();
  const auto first = rig.submit(rig.lease({keys[0], keys[1]}), {1, 2}, nullptr);
  CHECK(room() == 1 && fitting(2) == 1);  // nobody has taken it up
  const auto second = rig.submit(rig.lease({keys[2]}), {3}, nullptr);
  CHECK(room() == 0 && fitting(3) == 0);
  rig.engine->release_loads();
  CHECK(rig.is_enqueued(*first) && rig.is_enqueued(*second));
  CHECK(comes([&] { return fitting(3) == 0; }) && room() == 0);  // they have taken it
  rig.device->release(rig.to_device());
  CHECK(first->ticket.wait() && second->ticket.wait());
  CHECK(comes([&] { return room() == kSlots; }));
}

TEST(tables_are_promised_as_slots_are) {
  PartsRig rig;
  const auto keys = random_keys(2);
  rig.store_parts(keys);
  rig.await_registered(keys, rig.parts);
  CHECK(comes([&] { return rig.engine->load_room().tables == kTables; }));
  rig.engine->hold_loads();
  const auto load = rig.submit(rig.lease(keys), {1}, rig.parts);
  CHECK(rig.engine->load_room().tables == kTables - 3);
  rig.engine->release_loads();
  CHECK(load->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().tables == kTables; }));
}

TEST(a_load_that_fails_or_is_refused_gives_its_room_back) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(2);
  rig.store(keys);
  rig.engine->faults().fail_next(CopyKind::load, 1);
  CHECK(!rig.submit(rig.lease(keys), {1, 2}, nullptr)->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().slots == kSlots; }));
  CHECK(!rig.submit(Lease(), {1, 2}, nullptr)->ticket.wait());
  CHECK(rig.engine->load_room().slots == kSlots);
}

TEST(a_load_that_is_larger_than_all_room_leaves_none_until_it_is_over) {
  PartsRig rig(few_slots());
  const auto keys = random_keys(5);
  rig.store(keys);
  rig.device->hold(rig.to_device());
  const auto load = rig.submit(rig.lease(keys), first_pages(5), nullptr);
  for (int i = 0; i < 20; ++i) {
    CHECK(rig.engine->load_room().slots == 0);
    std::this_thread::sleep_for(milliseconds(1));
  }
  rig.device->release(rig.to_device());
  CHECK(load->ticket.wait());
  CHECK(comes([&] { return rig.engine->load_room().slots == kSlots; }));
}

TEST(room_is_taken_off_by_slots_for_what_is_staged_and_by_tables_for_every_format_of_a_chunk) {
  PartsRig rig;
  const auto keys = random_keys(2 * StreamRig::kPages);
  rig.store_parts(keys);
  StagingShare room{2, kTables};
  const Lease some = rig.lease(keys);
  rig.engine->close();  // nothing is registered any more
  CHECK(rig.engine->fit(some, rig.parts, room) == 2);
  CHECK(room.slots == 0 && room.tables == kTables - 3);

  PartsRig other;
  other.store_parts(keys);
  other.await_registered(keys, other.parts);
  const Repeated what(keys, 2, 700);
  room = {0, kTables};
  CHECK(other.engine->fit(other.lease(what.keys), other.parts, room) == 512);
  CHECK(room.slots == 0 && room.tables == 1);
  CHECK(other.engine->fit(other.lease(what.keys), other.parts, room) == 0 && room.tables == 1);
  CHECK(other.engine->fit(Lease(), nullptr, room) == 0);
  CHECK_THROWS(other.engine->fit(other.lease({keys[0]}), other.parts, room));
}

// While the forward stream is held nothing lands, so only what fits without waiting can be there.
TEST(loads_that_fit_are_enqueued_at_once_whatever_they_are) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    PartsRig rig(few_slots(), seed);
    rig.engine.reset();
    const auto own = random_keys(StreamRig::kPages, seed);
    const auto theirs = random_keys(2 * StreamRig::kPages, seed + 100);
    for (std::size_t i = 0; i < own.size(); ++i) {  // side by side, so both in part registered
      rig.store({own[i]});
      rig.store_parts({theirs[2 * i], theirs[2 * i + 1]});
    }
    rig.device->refuse_registrations_after(random() % 12);
    rig.engine = std::make_unique<stream::StreamEngine>(rig.device, rig.pool, rig.index,
                                                        rig.layout(), registering(32 << 10));
    for (int round = 0; round < 4; ++round) {
      const bool grouped = random() % 2 == 0;
      std::vector<std::shared_ptr<StreamLoad>> loads;
      rig.device->hold(rig.forward);
      if (grouped) rig.engine->hold_loads();
      for (int i = 0; i < 5; ++i) {
        const bool sourced = random() % 2 == 0;
        const Repeated what(sourced ? theirs : own, sourced ? 2 : 1,
                            1 + random() % (random() % 3 == 0 ? 600 : 8));
        const Source source = sourced ? rig.parts : nullptr;
        Lease lease = rig.lease(what.keys);
        StagingShare room = rig.engine->load_room();
        const std::size_t fits = rig.engine->fit(lease, source, room);
        if (fits == 0) continue;
        lease.keep(fits * (sourced ? 2 : 1));
        loads.push_back(rig.submit(
            std::move(lease),
            {what.pages.begin(), what.pages.begin() + static_cast<std::ptrdiff_t>(fits)}, source));
      }
      if (grouped) rig.engine->release_loads();
      CHECK(!loads.empty());
      bool enqueued = true;
      for (const auto& load : loads) enqueued = enqueued && rig.is_enqueued(*load);
      rig.device->release(rig.forward);
      CHECK(enqueued);
      for (const auto& load : loads) CHECK(load->ticket.wait());
      rig.engine->quiesce();
      CHECK(comes([&] {
        const StagingShare room = rig.engine->load_room();
        return room.slots == kSlots && room.tables == kTables;
      }));
    }
  }
}

}  // namespace hpkv

TEST_MAIN
