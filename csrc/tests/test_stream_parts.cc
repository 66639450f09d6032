// Loads whose parts are read where they lie in the pool: every byte, whatever is registered and
// whatever has room; and how many launches that is.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "copy/stream/engine.h"
#include "tests/check.h"
#include "tests/parts_rig.h"

namespace hpkv {

using stream::StreamLoad;
using stream::StreamOptions;
using test::comes;
using test::few_slots;
using test::kTables;
using test::Pages;
using test::PartsRig;
using test::random_keys;
using test::registering;
using test::Repeated;
using test::Source;
using test::StreamRig;

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
    CHECK(enqueued && rig.engine->stats().loaded_in_place - before == 2 * count);
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
    CHECK(rig.engine->stats().loaded_in_place == before + 2);
  }
}

TEST(a_source_that_has_no_place_for_its_regions_or_tables_is_put_together) {
  for (const bool no_tables : {false, true}) {
    StreamOptions options = registering();
    options.registered_look_every = std::chrono::milliseconds(1);
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
    CHECK(comes([&] { return rig.all_is_registered(); }));
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
    mixtures += in_place != 0 && in_place < after.loaded_blocks - before.loaded_blocks ? 1 : 0;
  }
  CHECK(mixtures >= 5);
}

TEST(pages_in_place_of_any_number_are_one_job_a_layer_and_format) {
  PartsRig rig;
  const auto keys = random_keys(2 * StreamRig::kPages);
  const auto own = random_keys(StreamRig::kPages, 7);
  rig.store_parts(keys);
  rig.store(own);
  rig.await_registered(keys, rig.parts);
  rig.await_registered(own, nullptr);
  for (const bool sourced : {false, true}) {
    const Repeated what(sourced ? keys : own, sourced ? 2 : 1, sourced ? 512 : 1500);
    const std::size_t before = rig.device->job_count();
    CHECK(
        rig.submit(rig.lease(what.keys), what.pages, sourced ? rig.parts : nullptr)->ticket.wait());
    CHECK(rig.device->job_count() - before == StreamRig::kLayers * (sourced ? 2 : 1));
    rig.engine->quiesce();
  }
}

TEST(tables_with_others_between_them_are_jobs_of_their_own_until_all_are_free) {
  PartsRig rig;
  const auto keys = random_keys(StreamRig::kPages);
  rig.store(keys);
  rig.await_registered(keys, nullptr);
  const auto jobs = [&](std::size_t pages) {
    const Repeated what(keys, 1, pages);
    for (const std::int64_t page : what.pages) rig.wipe_page(page);
    const std::size_t before = rig.device->job_count();
    const auto load = rig.engine->load_on_streams(rig.lease(what.keys), what.pages, {});
    CHECK(rig.is_enqueued(*load));
    const std::size_t count = rig.device->job_count() - before;
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
  CHECK(jobs(512) == 2);  // on either side of the second's
  rig.engine->quiesce();
  CHECK(jobs(kTables * 256) == 1);
}

TEST(a_layer_of_all_loads_that_begin_together_is_one_launch) {
  StreamOptions options = registering();
  options.load_tables = 100;
  PartsRig rig(options);
  const auto keys = random_keys(StreamRig::kPages);
  const auto two = random_keys(2, 9);
  rig.store(keys);
  rig.store_parts(two);
  rig.await_registered(keys, nullptr);
  rig.await_registered(two, rig.parts);
  for (const std::size_t count : {1, 2, 20}) {
    const std::size_t launches = rig.device->run_count();
    std::vector<std::shared_ptr<StreamLoad>> loads;
    rig.engine->hold_loads();
    for (std::size_t i = 0; i < count; ++i) {
      rig.wipe_page(static_cast<std::int64_t>(i));
      loads.push_back(rig.submit(rig.lease({keys[i]}), {static_cast<std::int64_t>(i)}, nullptr));
    }
    rig.wipe_page(23);
    loads.push_back(rig.submit(rig.lease(two), {23}, rig.parts));
    rig.engine->release_loads();
    for (const auto& load : loads) CHECK(load->ticket.wait());
    CHECK(rig.device->run_count() - launches == StreamRig::kLayers);
    for (std::size_t i = 0; i < count; ++i)
      CHECK(rig.page_is(static_cast<std::int64_t>(i), keys[i]));
    CHECK(rig.is_joined(23, two[0], two[1]));
  }
}

TEST(more_jobs_than_one_launch_has_room_for_are_several) {
  StreamOptions options = registering();
  options.load_tables = 200;
  PartsRig rig(options);
  const auto keys = random_keys(StreamRig::kPages);
  rig.store(keys);
  rig.await_registered(keys, nullptr);
  for (const std::size_t count : {stream::kJobsMax, stream::kJobsMax + 1, 3 * stream::kJobsMax}) {
    const std::size_t launches = rig.device->run_count();
    std::vector<std::shared_ptr<StreamLoad>> loads;
    for (std::size_t page = 0; page < keys.size(); ++page)
      rig.wipe_page(static_cast<std::int64_t>(page));
    rig.engine->hold_loads();
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t page = i % keys.size();
      loads.push_back(
          rig.submit(rig.lease({keys[page]}), {static_cast<std::int64_t>(page)}, nullptr));
    }
    rig.engine->release_loads();
    for (const auto& load : loads) CHECK(load->ticket.wait());
    const std::size_t each = (count + stream::kJobsMax - 1) / stream::kJobsMax;
    CHECK(rig.device->run_count() - launches == StreamRig::kLayers * each);
    for (std::size_t page = 0; page < keys.size(); ++page)
      CHECK(rig.page_is(static_cast<std::int64_t>(page), keys[page]));
  }
}

}  // namespace hpkv

TEST_MAIN
